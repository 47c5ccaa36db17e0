"""A decoder from its name in the registry, for the command line."""

from __future__ import annotations

import importlib
from typing import Any

from pario.decode.registry import WRAPPERS, find
from pario.errors import OptionError

__all__ = ["named"]


def named(name: str, /, *inner: Any, **options: Any) -> Any:
    """The decoder of this name, constructed; "zlib+json" is Zlib(Json()). Raises OptionError.

    inner : of a wrapper, the decoder inside
    options : of the innermost decoder
    """
    first, plus, rest = name.partition("+")
    entry = find(first)
    if plus:
        if first not in WRAPPERS:
            raise OptionError(f"{first} has no decoder inside, got {name!r}; {', '.join(WRAPPERS)} have one")
        return named(first, named(rest, *inner, **options))
    make = getattr(importlib.import_module("pario.decode"), entry.cls)  # which knows the modules
    try:
        return make(*inner, **options)
    except TypeError as error:
        raise OptionError(f"{entry.cls}() needs arguments that a name cannot give: {error}") from error
