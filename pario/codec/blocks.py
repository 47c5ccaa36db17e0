"""Which record of a packed database lies in which of its entries, where some are blocks of several records.

kernels/coded.py draws a block, and cuts single values out of it; here all of it becomes Python objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pario.errors import CorruptedError, DecodeError
from pario.kernels import coded


class Entries(ABC):
    """Of one packed database.

    counts : i64[entries], how many records each entry has, in key order: more than one are a block. None: one each
    """

    counts: np.ndarray | None = None

    @property
    @abstractmethod
    def n(self) -> int:
        """Records of the database, without the reserved entry."""

    @abstractmethod
    def unpack_one(self, value: Any, most: int = coded.MOST) -> bytes:
        """The raw value, which has `most` bytes at most. Raises DecodeError."""

    @property
    def entries(self) -> int:
        """Entries of the database, without the reserved one: records, or blocks of them."""
        return self.n if self.counts is None else len(self.counts)

    @cached_property
    def firsts(self) -> np.ndarray:
        """i64[entries], the first record of each."""
        return np.arange(self.n) if self.counts is None else np.cumsum(self.counts) - self.counts

    def ordinals(self, records: np.ndarray) -> np.ndarray | None:
        """i64[m], which one of its block each of these records is; -1: it is in none. None: there are no blocks."""
        if self.counts is None:
            return None
        entries = np.searchsorted(self.firsts, records, side="right") - 1
        return np.where(self.counts[entries] > 1, records - self.firsts[entries], -1)

    def is_block(self, value: bytes | bytearray) -> bool:
        """Whether several records were packed to this value."""
        return self.counts is not None and value[:1] >= bytes([coded.BLOCK])

    def block(self, value: Any, key: bytes | None = None) -> tuple[list[bytes], list[bytes]]:
        """(keys, values) of the block that was packed to `value`. Raises DecodeError.

        key : under which it lies, which is to be its last one; None: nobody asks
        """
        data = bytearray(value)
        if not data or data[0] < coded.BLOCK:
            raise DecodeError(f"a packed block of {len(data):,} bytes does not begin as one")
        data[0] -= coded.BLOCK
        block = _parted(self.unpack_one(data, coded.MOST_BLOCK))
        if key is not None and block[0][-1] != key:
            raise DecodeError(f"its block ends with the key {block[0][-1][:40]!r}, not with that of its entry")
        return block

    def value(self, stored: Any, ordinal: int) -> bytes:
        """A raw value, as it was packed, by itself (ordinal -1) or in a block. Raises DecodeError."""
        if ordinal < 0:
            return self.unpack_one(stored)
        _, values = self.block(stored)
        if ordinal >= len(values):
            raise DecodeError(coded.WRONG[coded.TABLE])
        return values[ordinal]

    def refuse_blocks(self, path: str) -> None:
        """Of records beside named databases, which no pario puts into blocks. Raises CorruptedError."""
        if self.counts is not None:
            raise CorruptedError("blocks of records lie beside named databases", path=path)


def _parted(block: bytes) -> tuple[list[bytes], list[bytes]]:
    """(keys, values) of a block. Raises DecodeError."""
    n = int.from_bytes(block[: coded.BLOCK_HEAD], "little")
    at = coded.BLOCK_HEAD + 6 * n
    if not n or at > len(block):
        raise DecodeError(coded.WRONG[coded.TABLE])
    table = np.frombuffer(block, np.uint8, 6 * n, coded.BLOCK_HEAD).reshape(2, 3, n).astype(np.int64)
    numbers = table[0] << 8 | table[1]
    if numbers[:2].sum() > coded.MOST_BLOCK:  # a few bytes can say that keys share 4 GiB
        raise DecodeError(coded.WRONG[coded.TABLE])
    shared, rest, sizes = numbers.tolist()
    keys, key = list[bytes](), b""
    for same, more in zip(shared, rest, strict=True):
        if same > len(key):
            raise DecodeError(coded.WRONG[coded.TABLE])
        key = key[:same] + block[at : at + more]
        at += more
        keys.append(key)
    ends = list(accumulate(sizes, initial=at))
    if ends[-1] != len(block):
        raise DecodeError(coded.WRONG[coded.TABLE])
    return keys, [block[a:b] for a, b in pairwise(ends)]
