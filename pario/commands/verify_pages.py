"""Which pages of the file are used: each belongs to one tree or to one value, and none to two of them.

Every rank keeps one bit per page of the file for what it has seen itself; rank 0 puts the bits of all ranks together.
"""

from __future__ import annotations

import numpy as np

from pario.comm.base import AnyWorld
from pario.errors import CorruptedError
from pario.format.meta import Snapshot

__all__ = ["PageUse"]

#: Pages that are used twice and shown; all are counted.
SHOWN = 20
#: Pages of overflow runs that are marked at once.
PIECE = 1 << 20
#: Bytes of bits that rank 0 receives at once, from all ranks together.
GATHERED = 16 << 20


class PageUse:
    """Which pages are used, and which of them more than once. `mark` is this rank's own affair, `twice` is
    collective."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._page_size = snapshot.page_size
        self._n = min(snapshot.last_pgno + 1, -(-snapshot.file_bytes // snapshot.page_size))
        self._used = np.zeros(-(-self._n // 8), np.uint8)
        self._twice = np.zeros_like(self._used)

    def mark(self, pages: np.ndarray) -> np.ndarray:
        """Mark pages (i64[k]) as used; returns bool[k], False for those that this rank had marked before. Pages behind
        the end of the file are passed over: reading them is an error of its own."""
        new = np.zeros(len(pages), bool)
        new[np.unique(pages, return_index=True)[1]] = True
        inside = pages < self._n
        at, bit = pages[inside] >> 3, np.left_shift(1, pages[inside] & 7).astype(np.uint8)
        new[inside] &= self._used[at] & bit == 0
        new[~inside] = True
        again = ~new[inside]
        np.bitwise_or.at(self._twice, at[again], bit[again])
        np.bitwise_or.at(self._used, at, bit)
        return new

    def mark_runs(self, pages: np.ndarray, counts: np.ndarray) -> None:
        """Mark `counts[i]` pages from `pages[i]` on, for all i."""
        ends = np.cumsum(counts)
        at = 0
        while at < len(pages):
            done = int(ends[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(ends, done + PIECE, side="right")))
            first, many = pages[at:stop], counts[at:stop]
            starts = np.repeat(first - (np.cumsum(many) - many), many)
            self.mark(starts + np.arange(int(many.sum())))
            at = stop

    def twice(self, world: AnyWorld) -> tuple[int, list[CorruptedError]]:
        """(how many pages are used more than once, errors about the first of them). Collective."""
        step = max(1, GATHERED // world.size)
        for start in range(0, len(self._used), step):  # a page that two ranks have marked is used twice
            part = slice(start, start + step)
            used, twice = world.gather_array(self._used[part]), world.gather_array(self._twice[part])
            if used is not None and twice is not None:
                union, both = np.zeros_like(self._used[part]), self._twice[part]
                both |= np.bitwise_or.reduce(twice.reshape(world.size, -1), axis=0)
                for share in used.reshape(world.size, -1):
                    both |= union & share
                    union |= share
        where = np.flatnonzero(self._twice)
        pages = 8 * np.repeat(where, 8) + np.tile(np.arange(8), len(where))
        pages = pages[np.unpackbits(self._twice[where], bitorder="little") == 1]
        count, first = world.bcast((len(pages), pages[:SHOWN].tolist()))
        what = "it is used more than once: by two trees, by two values, or by one whose header claims too many pages"
        return count, [CorruptedError(what, page=page, offset=page * self._page_size) for page in first]
