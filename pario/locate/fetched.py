"""Pages that are already in memory: those read for one group of records, and those kept for later groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pario.format.meta import Snapshot
from pario.plan.coalesce import Reads

__all__ = ["Fetched", "Later", "Spare", "pages_in"]

#: Bytes of pages that are kept because a later group may want them.
_SPARE_BYTES = 4 << 20


class Spare:
    """Pages that were read and may still be needed. New pages replace the oldest ones."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._size = snapshot.page_size
        self._most = max(16, _SPARE_BYTES // snapshot.page_size)
        self._pages: OrderedDict[int, np.ndarray] = OrderedDict()

    def keep(self, pgnos: np.ndarray, data: np.ndarray, at: np.ndarray) -> None:
        """Copy the pages that begin at `at` in `data`."""
        for pgno, start in zip(pgnos[-self._most :].tolist(), at[-self._most :].tolist(), strict=True):
            self._pages[pgno] = data[start : start + self._size].copy()
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def holds(self, offsets: np.ndarray) -> np.ndarray:
        """bool[k]: whether it holds the pages of these file offsets."""
        if not self._pages:
            return np.zeros(len(offsets), bool)
        return np.isin(offsets // self._size, np.fromiter(self._pages, np.int64, len(self._pages)))

    def get(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes], the bytes from file offset `offset` on; None if some are missing."""
        first, last = offset // self._size, (offset + nbytes - 1) // self._size
        pages = [self._pages[pgno] for pgno in range(first, last + 1) if pgno in self._pages]
        if len(pages) <= last - first:
            return None
        whole = np.concatenate(pages) if len(pages) > 1 else pages[0]
        start = offset - first * self._size
        return whole[start : start + nbytes]


class Fetched:
    """Maps file offsets to a buffer.

    data : u8[k], the buffer; reads : the reads that filled it
    """

    def __init__(self, data: np.ndarray, reads: Reads, snapshot: Snapshot) -> None:
        self.data = data
        self._size = snapshot.page_size
        first, nbytes, start = reads.reads["offset"], reads.reads["nbytes"], reads.starts
        # Long runs were cut into several reads; what a last block has beyond the end of the file is not there.
        stop = np.minimum(first + nbytes, snapshot.file_bytes)
        new = np.ones(len(first), bool)
        new[1:] = (first[1:] != stop[:-1]) | (start[1:] - start[:-1] != nbytes[:-1])
        at = np.flatnonzero(new)
        self._first, self._start = first[at], start[at]
        self._stop = stop[np.append(at[1:], len(first)) - 1] if len(first) else stop

    def places(self, offset: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """i64[k]: where these ranges begin in the buffer; -1 for ranges that are not there completely."""
        if not len(self._first):
            return np.full(len(offset), -1, np.int64)
        run = np.searchsorted(self._first, offset, side="right") - 1
        there = (run >= 0) & (offset + nbytes <= self._stop[run])
        return np.where(there, self._start[run] + offset - self._first[run], -1)

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes], the bytes from file offset `offset` on; None if some are missing."""
        at = int(self.places(np.array([offset]), np.array([nbytes]))[0])
        return self.data[at : at + nbytes] if at >= 0 else None

    def copy(self, at: np.ndarray) -> np.ndarray:
        """u8[m * P]: copies of the pages that begin at `at`, one after the other."""
        return np.concatenate([self.data[start : start + self._size] for start in at.tolist()])

    def pages(self, pgnos: np.ndarray) -> np.ndarray:
        """i64[m]: where these pages begin in the buffer, or -1."""
        return self.places(pgnos * self._size, np.full(len(pgnos), self._size))


@dataclass(frozen=True, slots=True)
class Later:
    """Pages of the following group, for the case that a border between groups was guessed wrongly.

    found : where they will be; wait : returns when they have arrived, False if they will not
    """

    found: Fetched
    wait: Callable[[], bool]


def pages_in(found: Fetched | None, pgnos: np.ndarray) -> np.ndarray:
    """i64[m]: where these pages begin in the buffer of `found`, or -1."""
    return found.pages(pgnos) if found is not None else np.full(len(pgnos), -1, np.int64)
