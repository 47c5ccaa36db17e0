"""A decoder from its name in the registry, for the command line."""

from __future__ import annotations

import importlib
from typing import Any

from pario.decode.registry import WRAPPERS, find
from pario.errors import OptionError

__all__ = ["named"]

#: public name -> module; `pario.decode` shows the same ones
_HOMES = {
    "Datum": "pario.decode.datum",
    "Gzip": "pario.decode.compressed",
    "Image": "pario.decode.image",
    "Json": "pario.decode.json",
    "MsgPack": "pario.decode.msgpack",
    "Npy": "pario.decode.npy",
    "Npz": "pario.decode.npy",
    "Pickle": "pario.decode.pickle",
    "Raw": "pario.decode.raw",
    "Struct": "pario.decode.struct",
    "TensorProtos": "pario.decode.tensor_protos",
    "Text": "pario.decode.text",
    "Zlib": "pario.decode.compressed",
    "Zstd": "pario.decode.compressed",
}


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
    home = _HOMES[entry.cls]
    make = getattr(importlib.import_module(home), entry.cls)
    try:
        return make(*inner, **options)
    except TypeError as error:
        raise OptionError(f"{entry.cls}() needs arguments that a name cannot give: {error}") from error
