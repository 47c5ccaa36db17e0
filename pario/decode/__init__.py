"""Record bytes to arrays: one contract, small leaves.

    Raw           fixed-size records -> dtype[b, ...]; records of any size -> bytes and offsets
    Datum         Caffe's protobuf: pixels or floats or an encoded image, with its label
    TensorProtos  Caffe2's protobuf: one array per tensor
    Image         JPEG, PNG, WebP, ... -> u8[b, h, w, c], or cropped, flipped, normalised floats
    Npy, Npz      NumPy's files
    Struct        fields of a fixed binary layout
    Text          text, or tokens of one dtype
    Json, MsgPack, Pickle    documents, whole or field by field
    Zlib, Gzip, Zstd         compressed records, around another decoder
    Function      a plain Python function of one record
    kernel        a function of one record that Numba compiles
    preset        the decoder of a published dataset, by its name

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
    "Gzip": "pario.decode.compressed",
    "Image": "pario.decode.image",
    "Json": "pario.decode.json",
    "Kernel": "pario.decode.own_kernel",
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
    "as_decoder": "pario.decode.given",
    "kernel": "pario.decode.own_kernel",
    "preset": "pario.decode.presets",
}

__all__ = [
    "Datum", "Decoder", "Draw", "Function", "Gzip", "Image", "Json", "Kernel", "MsgPack", "Npy", "Npz", "Pickle", "Raw",
    "Struct", "TensorProtos", "Text", "Zlib", "Zstd", "as_decoder", "kernel", "preset",
]  # fmt: skip

if TYPE_CHECKING:
    from pario.decode.base import Decoder, Draw
    from pario.decode.compressed import Gzip, Zlib, Zstd
    from pario.decode.datum import Datum
    from pario.decode.function import Function
    from pario.decode.given import as_decoder
    from pario.decode.image import Image
    from pario.decode.json import Json
    from pario.decode.msgpack import MsgPack
    from pario.decode.npy import Npy, Npz
    from pario.decode.own_kernel import Kernel, kernel
    from pario.decode.pickle import Pickle
    from pario.decode.presets import preset
    from pario.decode.raw import Raw
    from pario.decode.struct import Struct
    from pario.decode.tensor_protos import TensorProtos
    from pario.decode.text import Text


if not TYPE_CHECKING:  # a name that is not there is a mistake

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'pario.decode' has no attribute {name!r}")
        value = getattr(importlib.import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
