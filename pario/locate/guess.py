"""Guesses which pages hold records whose extents are not known yet.

For records behind the frontier, `Speculator` predicts the page ranges that they fill. Leaf pages then come with the
data instead of one by one, and several groups of records are in flight before the extents of the first group are known:

    leaves     L0      L1      L2      L3   :      L4      L5
    file     --#=======#=======#=======#====:======#=======#=====-->        = values of the leaf before them
    known    |----------------------|       :
                          frontier  ^       : a later group of records: some leaves further, at some pages per leaf

A leaf precedes its values, unless a commit moved it; then the pages are counted from the leaf before it. What a guess
misses is read exactly after the leaves have been scanned, unless an earlier guess read it: LMDB puts short values into
pages that an earlier commit freed, and `Spare` keeps such pages. Every group is guessed, but a guess is used only if
the last two were good; otherwise the leaves are read first, and then exactly the records.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from pario.locate.frontier import Fetched, Growth, Later, Spare
from pario.stats.rank import RankStats

#: Number of records before the frontier from which the next ones are predicted.
_RECENT_RECORDS = 1024
#: The record that lies last in the file is looked for among this many records before the frontier.
_LAST_RECORDS = 64
#: Shares of a group's pages that a good guess may miss, and may read in vain.
_MOST_MISSED = 0.02
_MOST_EXTRA = 0.035
#: The widest margin at either end of a guess, as a share of the group's pages.
_WIDEST = 0.012
#: Number of good guesses in a row before a guess is used.
_PROOFS = 2
#: Share of the file's pages that may be read in vain before guessing stops.
_BUDGET = 0.03


@dataclass(frozen=True, slots=True)
class _Span:
    """A guess that the values of records [first, stop) lie in pages [low, high), `margins` included."""

    first: int
    stop: int
    low: int
    high: int
    margins: tuple[int, int]

    @property
    def pages(self) -> int:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to read for some records before all their extents are known.

    ids : i64[k], ascending
    offsets, nbytes : i64[m], byte ranges of the file
    known : number of leading ids whose extents are known
    spans : the guesses for the others; believed : whether the ranges include the guesses
    """

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    known: int
    spans: tuple[_Span, ...]
    believed: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """Where the records of a group lie.

    extents : EXTENT[k], exact
    places : i64[k], where each value begins in the buffer; -1 for values that are not in it
    spare : (i, bytes) for some of the latter, which were read earlier: the page from its beginning, or its header, then
        the value
    """

    extents: np.ndarray
    places: np.ndarray
    spare: list[tuple[int, np.ndarray]]


class Speculator:
    """Guesses for one writer of the ring, group after group in the order of the epoch.

    growth : what the node knows
    stats : counters of this rank: `guessed`, `missed`, `extra`, and the reads of leaf pages
    guess : False: always read leaves first, and then exactly the records
    """

    def __init__(self, growth: Growth, stats: RankStats, *, guess: bool = True) -> None:
        self._growth = growth
        self._size = growth.snapshot.page_size
        self._header = growth.snapshot.header
        self._guess = guess
        self._asked = 0  # leaves before this one are read or under way
        self._settled = 0
        self._streak = 0
        self._errors: deque[tuple[float, float]] = deque(maxlen=8)
        self._extra = 0
        self._stats = stats
        self._spare = growth.spare = Spare(growth.snapshot)

    @property
    def ahead(self) -> int:
        """How many groups may be in flight before the next one is settled: few until guesses have proved good."""
        if self._settled < _PROOFS:
            return 1
        return max(_PROOFS, self._streak) if self._streak >= _PROOFS else 1 << 30

    # -- before ------------------------------------------------------------------------------------------------------

    def foresee(self, ids: np.ndarray) -> Outlook:
        """What to read for these records (i64[k], ascending, behind those of the calls before)."""
        growth, size = self._growth, self._size
        leaf, known = growth.frontier()
        exact = int(np.searchsorted(ids, known))
        places = growth.extents[ids[:exact]]
        places = places[~self._spare.holds(places["offset"])]
        ranges = [(places["offset"] - self._header, places["nbytes"] + self._header)]
        spans: tuple[_Span, ...] = ()
        believed = False
        if exact < len(ids):
            chain = _Chain(growth, leaf, known, int(ids[-1]))
            rest = ids[exact:]
            cuts = np.flatnonzero(np.diff(rest) > 1) + 1
            runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(rest, cuts)]
            margins = self._margins(len(rest) * chain.pages_per_record / len(runs))
            spans = tuple(chain.span(first, stop, margins) for first, stop in runs)
            believed = self._believes(chain)
            if believed:
                low = np.array([span.low for span in spans], np.int64)
                high = np.array([span.high for span in spans], np.int64)
                ranges.append((low * size, (high - low) * size))
                self._stats.guessed += int((high - low).sum())
            wanted = growth.leaves[max(leaf, self._asked) : chain.stop]
            ranges.append((wanted * size, np.full(len(wanted), size)))
            self._asked = max(self._asked, chain.stop)
        offsets, nbytes = (np.concatenate(arrays) for arrays in zip(*ranges, strict=True))
        return Outlook(ids, offsets, nbytes, exact, spans, believed)

    def _believes(self, chain: _Chain) -> bool:
        return (
            self._guess
            and self._streak >= _PROOFS
            and self._extra <= _BUDGET * (self._growth.snapshot.last_pgno + 1)
            and chain.pages_per_record >= 0.2  # else the values lie in the leaves themselves
        )

    def _margins(self, pages: float) -> tuple[int, int]:
        """Pages before and behind a guess of this many: what the last ones would have needed."""
        widest = max(1, int(_WIDEST * pages))
        low = max((-begin for begin, _ in self._errors), default=0.0)
        high = max((end for _, end in self._errors), default=0.0)
        return min(widest, max(0, math.ceil(low))), min(widest, max(0, math.ceil(high)))

    # -- after -------------------------------------------------------------------------------------------------------

    def settle(self, outlook: Outlook, found: Fetched, later: Later | None = None) -> Settled:
        """Where the records of a group lie that was read; in the order of the groups. Raises as `Growth.grow` does."""
        growth, ids, lead = self._growth, outlook.ids, self._header
        reads, nbytes_read = growth.pages.reads, growth.pages.bytes_read
        missing = growth.grow(int(ids[-1]) + 1, found, later) if len(ids) else 0
        self._stats.count(growth.pages.reads - reads, growth.pages.bytes_read - nbytes_read)
        extents = growth.extents[ids]
        places = found.places(extents["offset"] - lead, extents["nbytes"] + lead)
        places = np.where(places >= 0, places + lead, -1)
        spare = []
        # Some that are not there were read with other groups: between theirs, or because they seemed to be theirs.
        wanted = np.flatnonzero(places < 0)
        offsets, nbytes = extents["offset"][wanted] - lead, extents["nbytes"][wanted] + lead
        known = self._spare.holds(offsets)
        if later is not None:
            known |= later.found.places(offsets, nbytes) >= 0
        for i, offset, size in zip(*(a[known].tolist() for a in (wanted, offsets, nbytes)), strict=True):
            held = self._spare.get(offset, size)
            if held is None and later is not None and later.wait():
                held = later.found.bytes_at(offset, size)
            if held is not None:
                spare.append((i, held))
        self._settled += 1
        if outlook.spans:
            self._judge(outlook, found, missing, {int(ids[i]) for i, _ in spare})
        return Settled(extents, places, spare)

    def _judge(self, outlook: Outlook, found: Fetched, missing: int, spare: set[int]) -> None:
        """Were these guesses good, believed or not? What they brought in vain may be wanted later."""
        need = missed = extra = 0
        for span in outlook.spans:
            extents = self._growth.extents[span.first : span.stop]
            begin = extents["offset"] // self._size
            pages = (self._header - 1 + extents["nbytes"]) // self._size + 1
            own = extents["offset"] % self._size == self._header  # not in a leaf
            again = sum(int(pages[i - span.first]) for i in spare if span.first <= i < span.stop)
            begin, pages = begin[own], pages[own]
            if not len(begin):
                continue
            inside = (begin >= span.low) & (begin + pages <= span.high)
            need += int(pages.sum())
            missed += int(pages[~inside].sum()) - again
            used = np.zeros(span.pages + 1, np.int64)
            np.add.at(used, begin[inside] - span.low, 1)
            np.add.at(used, begin[inside] + pages[inside] - span.low, -1)
            used = np.cumsum(used)[:-1]
            leaves = self._growth.leaves[self._leaves_of(span)]
            used[leaves[(leaves >= span.low) & (leaves < span.high)] - span.low] = 1
            vain = np.flatnonzero(used == 0) + span.low
            extra += len(vain)
            if outlook.believed:
                at = found.pages(vain)
                self._spare.keep(vain[at >= 0], found.data, at[at >= 0])
            low, high = span.low + span.margins[0], span.high - span.margins[1]
            errors = float(begin[0] - low), float(begin[-1] + pages[-1] - high)
            if max(map(abs, errors)) <= 16 + 0.1 * span.pages:  # else it stands apart, and a margin is no help
                self._errors.append(errors)
        good = missed <= _MOST_MISSED * need and extra <= _MOST_EXTRA * need
        self._streak = self._streak + 1 if good else 0
        if outlook.believed:
            self._stats.missed += max(0, missed) + missing
            self._stats.extra += extra
            self._extra += extra

    def _leaves_of(self, span: _Span) -> slice:
        leaf, _ = self._growth.frontier()
        first, stop = np.searchsorted(self._growth.first[: leaf + 1], [span.first, span.stop - 1], side="right")
        return slice(int(first) - 1, int(stop))


class _Chain:
    """Where the values of leaves behind the frontier probably begin, one leaf after the other up to that of a record.

    LMDB makes a leaf when a record does not fit into the one before: that record's value stands before the leaf then,
    and those of the following records behind it.

    pages_per_record : mean, of values on pages of their own; stop : the leaf after the last one
    """

    def __init__(self, growth: Growth, leaf: int, known: int, last: int) -> None:
        self._known = known
        self._per_leaf = growth.per_leaf(leaf)
        self._pages = growth.snapshot.last_pgno + 1
        m = len(growth.leaves)
        self.stop = min(m, leaf + 1 + int((last - known) / self._per_leaf))
        pages, spread, at = _recent_pages(growth, known)
        self.pages_per_record = pages
        length = self._per_leaf * pages
        # A leaf that stands where it is expected says where its values begin; a commit moves it far away mostly.
        near = 8 + 3 * spread * math.sqrt(self._per_leaf)
        begins: list[float] = []
        for pgno in growth.leaves[leaf : min(m, self.stop + 1)].tolist():
            at = float(pgno) if abs(pgno - at) <= near else at
            begins.append(at + 1 - pages)
            at += 1 + length
        begins.append(at + 1 - pages)
        self._begins = begins

    def span(self, first: int, stop: int, margins: tuple[int, int]) -> _Span:
        """Of records [first, stop)."""
        low = math.floor(self._page_of(first, 0) + 1e-6) - margins[0]
        high = math.ceil(self._page_of(stop - 1, 1) - 1e-6) + margins[1]
        low = min(max(2, low), self._pages - 1)
        return _Span(first, stop, low, min(max(high, low + 1), self._pages), margins)

    def _page_of(self, record: int, more: int) -> float:
        """Where its pages begin (more = 0) or end (1)."""
        behind, k = divmod(record - self._known, self._per_leaf)
        j = min(int(behind), len(self._begins) - 2)
        begin, end = self._begins[j], self._begins[j + 1] - 1
        before = 1 if k < 0.5 and not more else 0  # the leaf stands between
        return begin + (k + more) * (end - begin) / self._per_leaf - before


def _recent_pages(growth: Growth, known: int) -> tuple[float, float, float]:
    """(mean and standard deviation of pages per record, where the next leaf should stand), from records before `known`:
    the leaf stands behind its first value."""
    size, header = growth.snapshot.page_size, growth.snapshot.header
    if not known:
        return growth.record.md_overflow_pages / growth.n, 0.0, float(growth.leaves[0])
    recent = growth.extents[max(0, known - _RECENT_RECORDS) : known]
    pages = np.where(recent["offset"] % size == header, (header - 1 + recent["nbytes"]) // size + 1, 0)
    end = (recent["offset"] // size + pages)[-_LAST_RECORDS:]
    return float(pages.mean()), float(pages.std()), float(end.max() + pages.mean())
