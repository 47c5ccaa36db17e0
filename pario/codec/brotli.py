"""Brotli."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec
from pario.codec.library import Library, find_package, open_library, required
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import BROTLI, FUNCTION, KIND, MOST_INT

_package = functools.partial(find_package, "brotli")

_PIP = how_to_install("codecs")


class Brotli(Codec):
    """Brotli: `level` 0 to 11, 9 by default. Packing is the Python package's work."""

    name = "brotli"
    levels = (0, 11)
    default_level = 9
    most = MOST_INT

    def __init__(self, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> None:
        super().__init__(level, dictionary, **options)
        self._library = required(_library(), self.name, "brotli", _PIP)

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        return self._calling({KIND: BROTLI, FUNCTION: self._library.address("BrotliDecoderDecompress")})

    def encode(self, value: Any) -> bytes:
        package = _package()
        if package is None:
            raise OptionError("packing with codec brotli needs the package brotli", hint=_PIP)
        return package.compress(bytes(value), quality=self.level)  # type: ignore[no-any-return]


@functools.cache
def _library() -> Library | None:
    """libbrotlidec: the one inside of the package brotli, else the system's."""
    return open_library(
        ("_brotli", "libbrotlidec.so.1"), ("BrotliDecoderVersion", "BrotliDecoderDecompress"), _version, (1, 0, 9)
    )


def _version(library: Library) -> tuple[int, int, int]:
    number: int = library.function("BrotliDecoderVersion", ctypes.c_uint32)()
    return number >> 24, number >> 12 & 0xFFF, number & 0xFFF
