"""DEFLATE, without the header and the checksum of zlib or gzip.

libdeflate does the work where there is one, in the package deflate or on the system, else Python's own zlib; each
reads what the other writes.
"""

from __future__ import annotations

import ctypes
import functools
import zlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec
from pario.codec.library import Contexts, Library, open_library
from pario.kernels.coded import DEFLATE, FUNCTION, KIND, MOST_INT

_FUNCTIONS = (
    "libdeflate_alloc_decompressor", "libdeflate_free_decompressor", "libdeflate_deflate_decompress",
    "libdeflate_alloc_compressor", "libdeflate_free_compressor", "libdeflate_deflate_compress",
)  # fmt: skip
#: DEFLATE without a header
_WINDOW = -15


class Deflate(Codec):
    """DEFLATE: `level` 1 to 9, 6 by default."""

    name = "deflate"
    levels = (1, 9)
    default_level = 6
    most = MOST_INT

    def __init__(self, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> None:
        super().__init__(level, dictionary, **options)
        self._library = _library()
        if self._library is not None:
            word, function = ctypes.c_void_p, self._library.function
            free = function("libdeflate_free_decompressor", None, word)
            self._decoders = Contexts(function("libdeflate_alloc_decompressor", word), free)
            make = functools.partial(function("libdeflate_alloc_compressor", word, ctypes.c_int), self.level)
            self._encoders = Contexts(make, function("libdeflate_free_compressor", None, word))

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        if self._library is None:
            return super().decoding()
        function = self._library.address("libdeflate_deflate_decompress")
        return self._calling({KIND: DEFLATE, FUNCTION: function}, self._decoders)

    def encoding(self) -> AbstractContextManager[np.ndarray]:
        if self._library is None:
            return super().encoding()
        function = self._library.address("libdeflate_deflate_compress")
        return self._calling({KIND: DEFLATE, FUNCTION: function}, self._encoders)

    def encode(self, value: Any) -> bytes:
        stream = zlib.compressobj(self.level or 6, zlib.DEFLATED, _WINDOW)
        return stream.compress(value) + stream.flush()

    def decoded(self, packed: bytes, nbytes: int) -> Any:
        stream = zlib.decompressobj(_WINDOW)
        value = stream.decompress(packed, nbytes + 1)
        if not stream.eof:
            raise ValueError("the end is missing, or more bytes come out")
        return value


@functools.cache
def _library() -> Library | None:
    return open_library(("deflate._deflate", "libdeflate.so.0"), _FUNCTIONS, lambda library: (1, 0, 0), (0, 0, 0))
