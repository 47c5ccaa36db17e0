"""The decoder that a user's argument stands for. Only the kind that is asked for is loaded."""

from __future__ import annotations

from typing import Any

from pario.decode.base import Decoder
from pario.errors import OptionError


def as_decoder(x: Any) -> Decoder:
    """The decoder for a user's argument: None -> Raw(), a Decoder -> itself, a callable -> Function."""
    if x is None:
        from pario.decode.raw import Raw

        return Raw()
    if isinstance(x, Decoder):
        return x
    if isinstance(x, type) and issubclass(x, Decoder):
        raise OptionError(f"decoder must be an object: {x.__name__}(), got the class {x.__name__}")
    if callable(x):
        from pario.decode.function import Function

        return Function(x)
    raise OptionError(f"decoder must be a pario.decode decoder, a function or None, got {x!r}")
