"""Several files as one space of addresses: a record may lie in any of them, and its extent stays at 16 bytes.

    file 0          file 1                  file 2
    |===========|   |===================|   |=====|
    bases[0] = 0    bases[1]                bases[2]        multiples of the largest page

An address is the offset in a file plus the file's base. Extents, the planning of reads and the ring work with addresses
and need not know of files; reads are divided here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pario.fetch.base import Fetcher, OpenFile
from pario.fetch.file import FileFetcher
from pario.records import EXTENT

__all__ = ["JoinedFetcher"]

#: Files begin at multiples of this, LMDB's largest page, so that pages and O_DIRECT's blocks begin where they would.
_UNIT = 64 << 10


class JoinedFetcher(Fetcher):
    """Reads from several files. Errors name the file, and the offset in it.

    files : at least one; they are closed with this

    Attributes
    ----------
    bases : i64[files], the address at which each begins
    """

    def __init__(self, files: Sequence[FileFetcher]) -> None:
        self._files = tuple(files)
        sizes = np.array([file.nbytes for file in self._files], np.int64)
        self.bases = np.zeros(len(sizes), np.int64)
        np.cumsum(-(-sizes[:-1] // _UNIT) * _UNIT, out=self.bases[1:])
        self.path = ", ".join(file.path for file in self._files)
        self.nbytes = int(self.bases[-1] + sizes[-1])
        self.align = max(file.align for file in self._files)
        self.read_ahead_bytes = min(file.read_ahead_bytes for file in self._files)
        self._ends = self.bases + -(-sizes // self.align) * self.align

    @property
    def files(self) -> tuple[OpenFile, ...]:
        return self._files

    def file_of(self, addresses: np.ndarray) -> np.ndarray:
        """i64[n], the number of the file in which each of these addresses (i64[n]) lies."""
        return np.maximum(np.searchsorted(self.bases, addresses, side="right") - 1, 0)

    def pread(self, offset: int, nbytes: int) -> bytes:
        number = int(self.file_of(np.array([offset]))[0])
        return self._files[number].pread(offset - int(self.bases[number]), nbytes)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        begins, ends = reads["offset"], reads["offset"] + reads["nbytes"]
        first, last = self.file_of(begins), self.file_of(ends - 1)
        for number in np.union1d(first, last) if (last - first <= 1).all() else range(len(self._files)):
            base = self.bases[number]
            begin = np.where(first < number, base, begins)
            stop = np.where(last > number, self._ends[number], ends)
            mine = np.flatnonzero((first <= number) & (number <= last) & (begin < stop))
            part = np.empty(len(mine), EXTENT)
            part["offset"], part["nbytes"] = begin[mine] - base, (stop - begin)[mine]
            self._files[number].read(part, out, (starts + begin - begins)[mine])

    def advise(self, begins: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        numbers = self.file_of(begins)
        for number in np.unique(numbers):
            mine = numbers == number
            self._files[number].advise(begins[mine] - self.bases[number], nbytes[mine], gap)

    def cached_share(self, offsets: np.ndarray, enough: float = 0.0) -> float | None:
        numbers, cached = self.file_of(offsets), 0.0
        for number in np.unique(numbers):
            mine = offsets[numbers == number] - self.bases[number]
            share = self._files[number].cached_share(mine)
            if share is None:
                return None
            cached += share * len(mine)
        return cached / len(offsets) if len(offsets) else None

    def close(self) -> None:
        for file in self._files:
            file.close()
