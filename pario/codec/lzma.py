"""LZMA2, of Python's own package: 40 MB/s or so, so that the interpreter's share does not matter."""

from __future__ import annotations

import lzma
from typing import Any

from pario.codec.base import Codec


class Lzma(Codec):
    """LZMA2 without the container of xz: `level` 0 to 9, 6 by default."""

    name = "lzma"
    levels = (0, 9)
    default_level = 6

    def encode(self, value: Any) -> bytes:
        data = bytes(value)
        return lzma.compress(data, format=lzma.FORMAT_RAW, filters=self._filters(len(data)))

    def decoded(self, packed: bytes, nbytes: int) -> Any:
        stream = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=self._filters(nbytes))
        value = stream.decompress(packed, nbytes)
        if not stream.eof:  # the mark at the end has no bytes of its own in `value`
            value += stream.decompress(b"", 1)
        if not stream.eof:
            raise ValueError("the end is missing, or more bytes come out")
        return value

    def _filters(self, nbytes: int) -> list[dict[str, int]]:
        """As much window as the value has bytes: both sides know them, and the decoder allocates no more."""
        window = min(max(1 << max(nbytes - 1, 0).bit_length(), 4096), 64 << 20)
        return [{"id": lzma.FILTER_LZMA2, "preset": self.level or 0, "dict_size": window}]
