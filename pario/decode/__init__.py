"""Record bytes to arrays: one contract, small leaves.

    Raw       fixed-size records -> dtype[b, ...]; records of any size -> bytes and offsets
    Datum     Caffe's protobuf: pixels or floats or an encoded image, with its label
    Image     JPEG, PNG, WebP, ... -> u8[b, h, w, c]
    Function  a plain Python function of one record

Names are loaded on first use: OpenCV, simplejpeg and Numba are imported by the decoder that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

#: public name -> module that defines it
_HOMES = {
    "Datum": "pario.decode.datum",
    "Decoder": "pario.decode.base",
    "Draw": "pario.decode.base",
    "Function": "pario.decode.function",
    "Image": "pario.decode.image",
    "Raw": "pario.decode.raw",
    "as_decoder": "pario.decode.function",
}

__all__ = ["Datum", "Decoder", "Draw", "Function", "Image", "Raw", "as_decoder"]

if TYPE_CHECKING:
    from pario.decode.base import Decoder, Draw
    from pario.decode.datum import Datum
    from pario.decode.function import Function, as_decoder
    from pario.decode.image import Image
    from pario.decode.raw import Raw


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pario.decode' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
