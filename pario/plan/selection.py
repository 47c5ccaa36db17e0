"""Which records belong to an epoch, as numbers: the ordinals 0..n-1 of an order -> record ids.

The orders of `epoch.py` permute n ordinals and know of no record that is left out. A `Selection` says which record each
ordinal stands for, in one of two forms:

    runs    [first, stop) of ids that follow each other    16 bytes per run; a range, or all records but a few
    table   the ids, one after the other                   4 bytes per record (8 from 2^32 records on), once per node

    ids        0 1 2 3 4 5 6 7 8 9          runs  [2, 5) [7, 9)
    selected       x x x     x x            ordinals 0 1 2 3 4 -> ids 2 3 4 7 8
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import NamedTuple

import numpy as np

#: Shares of the records between the first and the last one: from the first share on, long reads with gaps cost less
#: than a read per run; from the second one on there are hardly any gaps.
_DENSE, _WHOLE = 0.4, 0.99
#: This many runs are always kept as runs: a search among them stays in a core's cache.
FEW_RUNS = 1024
#: More runs are kept if the table would take this many times their memory.
_TIMES = 64
#: Ids made at once out of runs.
_PIECE = 1 << 20


class Figures(NamedTuple):
    """Of the selected values, in bytes."""

    mean_bytes: float
    largest_bytes: int


class Selection:
    """n of the `total` records of a database, each once.

    total : records of the database
    runs : i64[r, 2], [first, stop) of ids, ascending and apart; or None
    table : u32[n] or u64[n], ascending ids; or None, if there are runs
    by_place : like `table`, the ids in file order; None: file order is id order
    digest : hex, of the ids
    width : records for each ordinal; more than 1 only of `Samples`
    figures : None if sizes are not known yet
    """

    width = 1

    def __init__(
        self,
        total: int,
        digest: str,
        *,
        runs: np.ndarray | None = None,
        table: np.ndarray | None = None,
        by_place: np.ndarray | None = None,
        figures: Figures | None = None,
    ) -> None:
        assert (runs is None) != (table is None)
        self.total = total
        self.digest = digest
        self.figures = figures
        self._table = table
        self._by_place = by_place
        if table is not None:
            self.n = len(table)
            self._first, self._last = int(table[0]), int(table[-1])
        else:
            assert runs is not None
            lengths = runs[:, 1] - runs[:, 0]
            self.n = int(lengths.sum())
            self._first, self._last = int(runs[0, 0]), int(runs[-1, 1]) - 1
            #: the ordinal at which each run begins, and what to add to an ordinal of it; this rank's own
            self._begins = np.cumsum(lengths) - lengths
            self._shifts = runs[:, 0] - self._begins

    @property
    def density(self) -> float:
        """Share of the records between the first and the last one that are selected, 0..1."""
        return self.n / (self._last - self._first + 1)

    @property
    def has_gaps(self) -> bool:
        """Whether it is dense, and still leaves out more than what is read along anyhow."""
        return _DENSE <= self.density < _WHOLE

    @property
    def nbytes(self) -> int:
        """Memory of the arrays; tables are shared by the ranks of a node."""
        arrays = [self._table, self._by_place] if self._table is not None else [self._begins, self._shifts]
        return sum(array.nbytes for array in arrays if array is not None)

    def ids(self, ordinals: np.ndarray) -> np.ndarray:
        """i64[k]: the records at these ordinals (i64[k], in 0..n-1) of id order."""
        if self._table is not None:
            return self._table[ordinals].astype(np.int64)
        if len(self._shifts) == 1:
            return ordinals + self._shifts[0]
        return ordinals + self._shifts[np.searchsorted(self._begins, ordinals, side="right") - 1]

    def below(self, record: int) -> int:
        """How many of the selected records have a smaller id than `record`."""
        if self._table is not None:
            return int(np.searchsorted(self._table, record))
        run = int(np.searchsorted(self._begins + self._shifts, record, side="right")) - 1
        if run < 0:
            return 0
        stop = self._begins[run + 1] if run + 1 < len(self._begins) else self.n
        return min(int(stop), record - int(self._shifts[run]))

    def ids_of(self, numbers: np.ndarray, space: str) -> np.ndarray:
        """i64[k]: the records of an order's numbers; space : what the numbers count, as `Order.space` says."""
        if space == "id" or self._by_place is None:
            return self.ids(numbers)
        return self._by_place[numbers].astype(np.int64)

    def records(self, ids: np.ndarray) -> np.ndarray:
        """i64[k]: the (first) records of what has these ids in a batch."""
        return ids

    def close(self) -> None:
        """Let go of memory that is shared; afterwards there are no ids. Idempotent."""
        if self._table is not None:
            self._table = self._table[:0].copy()
        self._by_place = None

    def pieces(self) -> list[tuple[int, int]]:
        """[start, stop) of ordinals to work on one after the other without a copy of all ids."""
        return [(start, min(start + _PIECE, self.n)) for start in range(0, self.n, _PIECE)]


def runs_of(ids: np.ndarray) -> np.ndarray:
    """i64[r, 2]: the runs of ascending, distinct ids."""
    if not len(ids):
        return np.empty((0, 2), np.int64)
    cuts = np.flatnonzero(np.diff(ids) != 1)
    first = np.concatenate([ids[:1], ids[cuts + 1]]).astype(np.int64)
    last = np.concatenate([ids[cuts], ids[-1:]]).astype(np.int64)
    return np.stack([first, last + 1], axis=1)


def expanded(runs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The ids of runs, ascending."""
    lengths = runs[:, 1] - runs[:, 0]
    out = np.empty(int(lengths.sum()), dtype)
    # Not in one go: this must not need several times the memory of its result.
    at = 0
    ends = np.cumsum(lengths)
    while at < len(out):
        stop = min(at + _PIECE, len(out))
        low, high = np.searchsorted(ends, [at, stop - 1], side="right")
        part = runs[low : high + 1]
        begins = ends[low : high + 1] - lengths[low : high + 1]
        counts = np.minimum(ends[low : high + 1], stop) - np.maximum(begins, at)
        out[at:stop] = np.arange(at, stop) + np.repeat(part[:, 0] - begins, counts)
        at = stop
    return out


def joined(runs: np.ndarray) -> np.ndarray:
    """Ascending runs, those that touch made one."""
    if len(runs) < 2:
        return runs
    heads = np.flatnonzero(np.concatenate([[True], runs[1:, 0] != runs[:-1, 1]]))
    lasts = np.append(heads[1:], len(runs)) - 1
    return np.stack([runs[heads, 0], runs[lasts, 1]], axis=1)


def common(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """i64[r, 2]: the runs of the ids that are in both."""
    edges = np.concatenate([one.reshape(-1), other.reshape(-1)])
    opens = np.resize([1, -1], len(edges))
    order = np.lexsort((opens, edges))  # at one id a run ends before the next one begins
    edges, inside = edges[order], np.cumsum(opens[order])
    both = np.flatnonzero((inside[:-1] == 2) & (edges[:-1] < edges[1:]))
    return joined(np.stack([edges[both], edges[both + 1]], axis=1))


def all_but(ids: list[int], total: int) -> np.ndarray:
    """i64[r, 2]: the runs of all records but these few."""
    edges = [-1, *sorted(ids), total]
    runs = [(before + 1, after) for before, after in pairwise(edges) if before + 1 < after]
    return np.array(runs, np.int64).reshape(-1, 2)


def digest_of(runs: np.ndarray, total: int) -> str:
    """Hex; the same ids of as many records give the same one, however they were chosen."""
    digest = hashlib.blake2b(f"pario selection 1 {total}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(runs, "<i8").reshape(-1).view(np.uint8))
    return digest.hexdigest()


def id_type(total: int) -> np.dtype:
    """The smallest of two types that holds all record ids."""
    return np.dtype(np.uint32 if total <= 1 << 32 else np.uint64)


def prefers_runs(runs: np.ndarray, total: int) -> bool:
    """Whether runs rather than a table of ids."""
    if len(runs) <= FEW_RUNS:
        return True
    n = int((runs[:, 1] - runs[:, 0]).sum())
    return _TIMES * runs.nbytes <= n * id_type(total).itemsize
