"""Brotli."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pario.codec.base import Codec
from pario.codec.library import Library, find_package, open_library
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import BROTLI, FUNCTION, HOW, KIND, MOST_INT

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
        self._library = _library()
        if self._library is None and _package() is None:
            raise OptionError("codec brotli needs the package brotli, which is not installed", hint=_PIP)

    @contextmanager
    def decoding(self) -> Iterator[np.ndarray]:
        how = np.zeros(HOW, np.int64)
        if self._library is not None:
            how[KIND], how[FUNCTION] = BROTLI, self._library.address("BrotliDecoderDecompress")
        yield how

    def encode(self, value: Any) -> bytes:
        package = _package()
        if package is None:
            raise OptionError("packing with codec brotli needs the package brotli", hint=_PIP)
        return package.compress(bytes(value), quality=self.level)  # type: ignore[no-any-return]

    def decoded(self, packed: bytes, nbytes: int) -> Any:
        stream = _package().Decompressor()
        try:
            value = stream.process(packed, output_buffer_limit=nbytes + 1)
        except TypeError:  # before 1.2: without a limit
            value = stream.process(packed)
        if not stream.is_finished():
            raise ValueError("the end is missing")
        return value


@functools.cache
def _library() -> Library | None:
    """libbrotlidec: the one inside of the package brotli, else the system's."""
    return open_library(
        ("_brotli", "libbrotlidec.so.1"), ("BrotliDecoderVersion", "BrotliDecoderDecompress"), _version, (1, 0, 9)
    )


def _version(library: Library) -> tuple[int, int, int]:
    number: int = library.function("BrotliDecoderVersion", ctypes.c_uint32)()
    return number >> 24, number >> 12 & 0xFFF, number & 0xFFF
