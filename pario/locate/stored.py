"""Arrays of a side-car, read without HDF5: no object of HDF5 lives longer than the function that opened the file.

HDF5 closes what is still open when the process ends. A file that it reads through a Python object cannot be closed
then, as there is no interpreter any more; and an h5py object that is freed then may wait for ever for h5py's lock, if a
background thread held it.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

from pario.errors import SnapshotError

#: Keys are stored in pieces (HDF5's chunks) of this many bytes at most, each with a checksum, so that a few can be read
#: without the others.
PIECE_BYTES = 64 << 10
_SUM_BYTES = 4
_WIDTH = 128


class StoredArray:
    """A dataset of one axis, in pieces or in one. It is sliced like an array; not thread-safe.

    dataset : of an open HDF5 file, which may be closed afterwards; raw : the file itself, which stays open
    Raises ValueError if it is stored in another way than pario writes it.
    """

    def __init__(self, dataset: Any, raw: Any) -> None:
        (self._n,), self._dtype, self._raw, self._name = dataset.shape, dataset.dtype, raw, dataset.name
        if self._dtype not in (np.uint8, np.dtype("<i8")):
            raise ValueError(f"{self._name} has elements of {self._dtype}")
        itemsize, chunks = self._dtype.itemsize, dataset.chunks
        rows = chunks[0] if chunks else PIECE_BYTES // itemsize
        firsts = np.arange(0, self._n, rows)
        self._piece_bytes = rows * itemsize
        stored = np.full(len(firsts), self._piece_bytes + (_SUM_BYTES if chunks else 0))
        if chunks:
            infos = [dataset.id.get_chunk_info_by_coord((int(first),)) for first in firsts]
            sound = dataset.fletcher32 and dataset.id.get_create_plist().get_nfilters() == 1
            sound = sound and self._piece_bytes <= PIECE_BYTES
            sound = sound and all((info.filter_mask, info.size) == (0, stored[0]) for info in infos)
            self._offsets = np.array([info.byte_offset for info in infos], np.int64)
        else:
            begin = dataset.id.get_offset() if self._n else 0
            sound, begin = begin is not None, begin or 0  # None: in another file
            self._offsets = begin + firsts * itemsize
            stored[-1:] = (self._n - firsts[-1:]) * itemsize
        self._stored = stored
        if not sound or (self._offsets < 0).any() or (stored > os.fstat(raw.fileno()).st_size - self._offsets).any():
            raise ValueError(f"{self._name} is not stored as pario stores it")
        self._is_checked = np.full(len(firsts), not chunks)

    def __getitem__(self, which: slice) -> np.ndarray:
        """Raises SnapshotError, OSError. Each piece is read as a whole once, to check it."""
        itemsize, nbytes = self._dtype.itemsize, self._piece_bytes
        first, last, _ = which.indices(self._n)
        begin, end = first * itemsize, max(first, last) * itemsize
        found = []
        for number in range(begin // nbytes, -(-end // nbytes)):
            if not self._is_checked[number]:
                self._check(number)
            at = number * nbytes
            low, high = max(begin, at), min(end, at + nbytes)
            found.append(self._read(number, low - at, high - low))
        return np.frombuffer(b"".join(found), self._dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:]

    def _read(self, number: int, begin: int, nbytes: int) -> bytes:
        data = os.pread(self._raw.fileno(), nbytes, int(self._offsets[number]) + begin)
        if len(data) != nbytes:
            raise self._damaged(number)
        return data

    def _check(self, number: int) -> None:
        data = self._read(number, 0, int(self._stored[number]))
        if _sums(data[:-_SUM_BYTES]) != tuple(each % 65535 for each in struct.unpack("<HH", data[-_SUM_BYTES:])):
            raise self._damaged(number)
        self._is_checked[number] = True

    def _damaged(self, number: int) -> SnapshotError:
        what = f"piece {number} of {self._name} of the saved index is damaged"
        return SnapshotError(what, path=self._raw.name, hint="Delete this file: it is made again.")


def _sums(piece: bytes) -> tuple[int, int]:
    """The two sums of HDF5's Fletcher-32, of which 0 and 65535 are the same: whole words of 16 bits, the last one
    filled up with a zero."""
    words = np.zeros(-(-len(piece) // (2 * _WIDTH)) * _WIDTH, ">u2")
    words.view(np.uint8)[: len(piece)] = np.frombuffer(piece, np.uint8)
    table = words.astype(np.int64).reshape(-1, _WIDTH)
    rows, columns, n = table.sum(axis=1), table.sum(axis=0), -(-len(piece) // 2)
    # A word counts in the second sum as often as there are words from it on.
    second = rows @ (n - _WIDTH * np.arange(len(rows))) - columns @ np.arange(_WIDTH)
    return int(rows.sum()) % 65535, int(second) % 65535
