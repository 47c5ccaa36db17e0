"""The file of a side-car: what it says, and arrays of which parts can be read without the others.

    b"pario side-car 1\\n"
    one line of JSON   what it says, with "arrays": [name, dtype, elements] of each
    u32[k]             CRC-32 of each piece of `PIECE_BYTES` of the arrays; each array begins with a piece of its own
    16 bytes           BLAKE2b of all that stands before
    the arrays         one after the other
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from typing import Any, BinaryIO

import numpy as np

from pario.errors import SnapshotError
from pario.text import read_json

PIECE_BYTES = 64 << 10

_MAGIC = b"pario side-car 1\n"
_DIGEST = 16
#: The line of JSON is shorter.
_MOST = 64 << 10
_DTYPES = ("|u1", "<i8", "<u8")
_SUM = np.dtype("<u4")


class StoredArray:
    """One of the arrays, which have one axis. It is sliced like an array in memory; not thread-safe.

    name, dtype, n : of the array; at : where it begins in the file `raw`, which stays open
    sums : u32[k], of its pieces
    """

    def __init__(self, raw: Any, name: str, dtype: np.dtype, n: int, at: int, sums: np.ndarray) -> None:
        self.dtype, self.n = dtype, n
        self._raw, self._name, self._at, self._sums = raw, name, at, sums
        self._is_checked = np.zeros(len(sums), bool)

    def __getitem__(self, which: slice) -> np.ndarray:
        """Raises SnapshotError, OSError. Each piece is read as a whole once, to check it."""
        itemsize = self.dtype.itemsize
        first, last, _ = which.indices(self.n)
        begin, end = first * itemsize, max(first, last) * itemsize
        low, high = begin // PIECE_BYTES, -(-end // PIECE_BYTES)
        if self._is_checked[low:high].all():
            return self._read(begin, end).view(self.dtype)
        at = low * PIECE_BYTES
        data = self._read(at, min(high * PIECE_BYTES, self.n * itemsize))
        for number in range(low, high):
            piece = data[number * PIECE_BYTES - at : (number + 1) * PIECE_BYTES - at]
            if zlib.crc32(piece) != self._sums[number]:
                raise self._damaged(number)
        self._is_checked[low:high] = True
        return data[begin - at : end - at].view(self.dtype)

    def _read(self, begin: int, end: int) -> np.ndarray:
        data, done = np.empty(end - begin, np.uint8), 0
        while done < len(data):
            got = os.preadv(self._raw.fileno(), [data[done:]], self._at + begin + done)
            if not got:
                raise self._damaged((begin + done) // PIECE_BYTES)
            done += got
        return data

    def _damaged(self, number: int) -> SnapshotError:
        what = f"piece {number} of {self._name} of this side-car is damaged"
        return SnapshotError(what, path=self._raw.name, hint="Delete this file: an index is made again by itself.")


def read_stored(raw: BinaryIO) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    """(what it says, its arrays by name), of a file that is open at its beginning. Raises ValueError, OSError."""
    head = raw.read(len(_MAGIC))
    if head != _MAGIC:
        raise ValueError("it is no side-car of this version of pario")
    line = raw.readline(_MOST)
    made, pieces = [], 0
    try:
        said = read_json(line)
        for name, kind, n in said["arrays"]:
            if kind not in _DTYPES or type(n) is not int or not 0 <= n < 1 << 56:
                raise ValueError(f"its array {name!r} is {n} times {kind!r}")
            dtype = np.dtype(kind)
            made.append((name, dtype, n, pieces))
            pieces += -(-n * dtype.itemsize // PIECE_BYTES)
    except (ValueError, LookupError, TypeError) as e:
        raise ValueError(f"it is damaged: its first lines make no sense ({e})") from e
    at = len(head) + len(line) + pieces * _SUM.itemsize + _DIGEST
    # Its size first: what somebody left there must not fill the memory.
    if os.fstat(raw.fileno()).st_size != at + sum(n * dtype.itemsize for _, dtype, n, _ in made):
        raise ValueError("it was cut short, or has more bytes than it says")
    table = raw.read(pieces * _SUM.itemsize)
    if hashlib.blake2b(head + line + table, digest_size=_DIGEST).digest() != raw.read(_DIGEST):
        raise ValueError("it is damaged: its beginning does not fit its checksum")
    sums, arrays = np.frombuffer(table, _SUM), {}
    for name, dtype, n, first in made:
        nbytes = n * dtype.itemsize
        arrays[name] = StoredArray(raw, name, dtype, n, at, sums[first : first - (-nbytes // PIECE_BYTES)])
        at += nbytes
    return said, arrays


def write_stored(fd: int, says: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write it, to the disk. arrays : u8, i64 or u64, of one axis. Raises OSError."""
    kinds = [(name, array.dtype.newbyteorder("<").str, len(array)) for name, array in arrays.items()]
    plain = [np.ascontiguousarray(arrays[name], kind).view(np.uint8) for name, kind, _ in kinds]
    sums = [zlib.crc32(one[at : at + PIECE_BYTES]) for one in plain for at in range(0, len(one), PIECE_BYTES)]
    head = _MAGIC + json.dumps({**says, "arrays": kinds}).encode() + b"\n" + np.array(sums, _SUM).tobytes()
    with open(fd, "wb", closefd=False) as file:
        file.write(head + hashlib.blake2b(head, digest_size=_DIGEST).digest())
        for one in plain:
            file.write(one.data)
    os.fsync(fd)
