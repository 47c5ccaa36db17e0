"""Records before there is an index: leaf after leaf in key order, pages guessed ahead, an index as a by-product.

The branch pages give the page numbers of all leaves in key order. A *frontier* goes through them: leaves scanned so
far, and the ordinal number of the next record, which is exact. `Growth` holds it, and the places found so far in memory
that the ranks of a node share: whoever reads a leaf writes what it says, and everybody writes the same.

`Speculator` says, for records behind the frontier, which page ranges they probably fill, so that leaf pages come along
with the data instead of being asked for one by one, and several groups of records are under way before the first one's
places are known:

    leaves     L0      L1      L2      L3   :      L4      L5
    file     --#=======#=======#=======#====:======#=======#=====-->        = values of the leaf before them
    known    |----------------------|       :
                          frontier  ^       : a group of records behind it: so many leaves further, so many pages each

A leaf stands before its values, but where a commit moved it; then the pages counted from the leaf before it hold. What
a guess misses is read exactly once the leaves are scanned, unless it was read before: LMDB puts short values into pages
that an earlier commit freed, and those were among the pages of an earlier guess (`Spare`). Every group is guessed, but
only when the last two guesses were good is one believed; else leaves are read first and then the records exactly.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pario.comm.futex import fence
from pario.errors import ClosedError, CorruptedError, DatabaseError
from pario.fetch.base import ReadPool
from pario.format.layout import MDB_DUPSORT, Db
from pario.format.meta import Snapshot
from pario.format.page import Page
from pario.format.tree import ascends, key_order, list_names, not_ascending
from pario.locate.leaves import LeafScan, check_inside
from pario.locate.snapshot import check_snapshot
from pario.locate.walk import BATCH_BYTES, PageReader, check_pages, explain
from pario.plan.coalesce import Reads
from pario.records import EXTENT
from pario.stats.rank import RankStats

__all__ = [
    "LEAST_LEAVES",
    "MOST_REPEATED",
    "Fetched",
    "Growth",
    "Later",
    "Outlook",
    "Settled",
    "Speculator",
    "may_grow",
]

#: Fewer leaf pages are read faster than they are avoided.
LEAST_LEAVES = 16
#: Of all pages: what several readers may read of leaf pages that others read too.
MOST_REPEATED = 0.02
#: A leaf's item takes so many bytes at least: node header, pointer.
_LEAST_ITEM = 10
#: Leaves and records just before the frontier from which the next ones are guessed.
_RECENT_LEAVES = 512
_RECENT_RECORDS = 1024
#: The last one in the file is among so many records before the frontier.
_LAST_RECORDS = 64
#: Of a group's pages: what a good guess may miss, and read in vain.
_MOST_MISSED = 0.02
_MOST_EXTRA = 0.035
#: Of a group's pages: the widest margin at either end of a guess.
_WIDEST = 0.012
#: Guesses in a row that must have been good before one is believed.
_PROOFS = 2
#: Of the file's pages: so many read in vain, and nothing more is guessed.
_BUDGET = 0.03
#: Bytes of pages that are kept because a later group may want them.
_SPARE_BYTES = 4 << 20


def may_grow(snapshot: Snapshot, record: Db, readers: int) -> bool:
    """Whether a database is read well without an index: else it is walked first, by all ranks together.

    readers : ranks that read; each of them scans all leaves
    """
    repeated = record.md_leaf_pages * (readers - 1)
    return (
        snapshot.native
        and not record.md_flags & MDB_DUPSORT
        and record.md_leaf_pages >= LEAST_LEAVES
        and repeated <= MOST_REPEATED * (snapshot.last_pgno + 1)
    )


class Spare:
    """Pages that were read and may be wanted still: the oldest ones make room for new ones."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._size = snapshot.page_size
        self._most = max(16, _SPARE_BYTES // snapshot.page_size)
        self._pages: OrderedDict[int, np.ndarray] = OrderedDict()

    def keep(self, pgnos: np.ndarray, data: np.ndarray, at: np.ndarray) -> None:
        """The pages that begin at `at` in `data`; copies."""
        for pgno, start in zip(pgnos[-self._most :].tolist(), at[-self._most :].tolist(), strict=True):
            self._pages[pgno] = data[start : start + self._size].copy()
        while len(self._pages) > self._most:
            self._pages.popitem(last=False)

    def holds(self, offsets: np.ndarray) -> np.ndarray:
        """bool[k]: whether the pages are there in which these bytes of the file lie."""
        if not self._pages:
            return np.zeros(len(offsets), bool)
        return np.isin(offsets // self._size, np.fromiter(self._pages, np.int64, len(self._pages)))

    def get(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes] from byte `offset` of the file on, if all of it is there."""
        first, last = offset // self._size, (offset + nbytes - 1) // self._size
        pages = [self._pages[pgno] for pgno in range(first, last + 1) if pgno in self._pages]
        if len(pages) <= last - first:
            return None
        whole = np.concatenate(pages) if len(pages) > 1 else pages[0]
        start = offset - first * self._size
        return whole[start : start + nbytes]


class Growth:
    """The places of one database's records, as far as known on this node. Any thread.

    Parameters
    ----------
    record : of the database; named : it is a named one
    leaves : i64[m], its leaf pages in key order
    extents : EXTENT[n], zeroed memory shared by the node; a place is known where `offset` is not 0
    first : i64[m + 1], zeroed memory shared by the node: `first[j]` is the first record of leaf j, 0 if unknown
    pool : of the open file; asked for when pages are read
    path : of the data file
    keep_keys : remember the keys of all leaves, for a side-car

    Attributes
    ----------
    bytes_read, reads : of leaf pages, by this object alone
    spare : where to keep leaf pages that hold values and are in no slot; None: nowhere
    """

    def __init__(
        self,
        *,
        snapshot: Snapshot,
        record: Db,
        named: bool,
        leaves: np.ndarray,
        extents: np.ndarray,
        first: np.ndarray,
        pool: Callable[[], ReadPool],
        path: str,
        keep_keys: bool,
    ) -> None:
        self.snapshot = snapshot
        self.record = record
        self.leaves = leaves
        self.extents = extents
        self.first = first
        self.path = path
        self.n = len(extents)
        self._named = named
        self._pool = pool
        self._pages: PageReader | None = None
        self._lock = threading.RLock()
        self._leaf = 0
        self._last_key: bytes | None = None
        self._keys: list[tuple[np.ndarray, np.ndarray]] | None = [] if keep_keys else None
        self.spare: Spare | None = None
        self._closed = False
        try:
            check_pages(leaves, snapshot)
        except CorruptedError as e:
            raise e.at(path=path) from None

    @staticmethod
    def check_entries(record: Db, leaves: int, page_size: int, path: str) -> None:
        """Raises CorruptedError where so many leaves cannot hold the records that the database's entry promises:
        before memory is made for them."""
        if not leaves <= record.md_entries <= leaves * page_size // _LEAST_ITEM:
            raise CorruptedError(
                f"{leaves:,} leaf pages cannot hold the {record.md_entries:,} records of the tree's entry in the file",
                path=path,
                page=record.md_root,
            )

    # -- the frontier --------------------------------------------------------------------------------------------------

    @property
    def bytes_read(self) -> int:
        return self._pages.bytes_read if self._pages is not None else 0

    @property
    def reads(self) -> int:
        return self._pages.reads if self._pages is not None else 0

    @property
    def is_complete(self) -> bool:
        return self.frontier()[0] == len(self.leaves)

    def frontier(self) -> tuple[int, int]:
        """(leaves scanned, records in them)."""
        with self._lock:
            self._follow()
            return self._leaf, int(self.first[self._leaf])

    def _follow(self) -> None:
        """Past the leaves that another rank of the node has scanned; not where their keys are wanted, too."""
        self._check_open()
        before = self._leaf
        while self._keys is None and self._leaf < len(self.leaves) and self.first[self._leaf + 1]:
            some = self.first[self._leaf + 1 : self._leaf + 1025] == 0
            self._leaf += int(np.argmax(some)) if some.any() else len(some)
            self._last_key = None
        if self._leaf > before:
            fence()  # what is read next was written before the words that were seen

    def grow(self, until: int, found: Fetched | None = None, later: Later | None = None) -> int:
        """Scan leaves until the places of records below `until` are known, and those that `found` holds next.

        found : pages that were read already; later : others that are on their way
        Returns how many leaf pages had to be read. Raises CorruptedError, DatabaseError, ReadError, SnapshotError.
        """
        missing = 0
        with self._lock:
            while True:
                leaf, known = self.frontier()
                window = self._window(leaf, known, until)
                pgnos = self.leaves[leaf : leaf + max(window, _RECENT_LEAVES)]
                source = found
                at = _pages_in(source, pgnos)
                if window and at[0] < 0 and later is not None:
                    source = later.found
                    at = _pages_in(source, pgnos)
                    if at[0] >= 0 and not later.wait():
                        at[:] = -1
                held = at >= 0
                # A run of leaves that are there, or else of those that are not, as far as they are needed.
                if len(held) and held[0]:
                    take = len(held) if held.all() else int(np.argmin(held))
                else:
                    take = int(np.argmax(held[:window])) if held[:window].any() else window
                if not take:
                    return missing
                missing += take * (not held[0])
                try:
                    buf = source.copy(at[:take]) if held[0] and source is not None else self._read(pgnos[:take])
                    self._scan(leaf, known, buf, bool(held[0] and source is found), until)
                except BaseException as e:
                    raise explain(e, self._pool(), self.snapshot, self.path) from None

    def complete(self) -> None:
        """Scan what is left. Raises as `grow` does."""
        if not self.is_complete:
            self.grow(self.n)
            check_snapshot(self._pool().fetcher, self.snapshot)

    def reach(self, ids: np.ndarray) -> None:
        """Let the places of these records be known. Raises as `grow` does."""
        if len(ids) and not (self.extents["offset"][ids] > 0).all():
            self.grow(int(ids.max()) + 1)
        fence()  # the sizes are read after the places that were seen

    def keys(self, ids: np.ndarray) -> list[bytes]:
        """Their keys, out of the leaves. Raises as `grow` does."""
        self.grow(int(ids.max()) + 1)
        with self._lock:
            leaf, _ = self.frontier()
            leaves = np.searchsorted(self.first[: leaf + 1], ids, side="right") - 1
            pages = {j: self._page(j) for j in np.unique(leaves).tolist()}
            starts = self.first[leaves].tolist()
            found = [pages[j].key(i - start) for j, i, start in zip(leaves.tolist(), ids.tolist(), starts, strict=True)]
            check_snapshot(self._pool().fetcher, self.snapshot)
            return found

    def all_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """(key_data u8[...], key_nbytes u16[n]) of a complete index; only with `keep_keys`."""
        assert self._keys is not None
        data, nbytes = zip(*self._keys, strict=True)
        return np.concatenate(data), np.concatenate(nbytes)

    @property
    def keeps_keys(self) -> bool:
        return self._keys is not None

    def forget_keys(self) -> None:
        """They are kept elsewhere."""
        with self._lock:
            self._keys = None

    def end(self) -> tuple[bytes, bytes]:
        """(first key, last key); afterwards the places of both records are known. Reads two leaf pages."""
        self.grow(1)
        with self._lock:
            last = self._scanned(self._read(self.leaves[-1:]), self.leaves[-1:])
            ends, m = last.end_keys(), last.n
            if ends is None or m > self.n:
                raise self._wrong_count(m)
            if not self.extents["offset"][-1]:
                self._store(self.n - m, last.extents)
            return self._page(0).key(0), ends[1]

    def close(self) -> None:
        """Let go of the shared memory."""
        with self._lock:
            self._closed = True
            self.extents = np.empty(0, EXTENT)
            self.first = self.leaves = np.empty(0, np.int64)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the index was closed", path=self.path)

    def _window(self, leaf: int, known: int, until: int) -> int:
        """Leaves that are probably needed."""
        if known >= until or leaf == len(self.leaves):
            return 0
        most = min(len(self.leaves) - leaf, max(1, BATCH_BYTES // self.snapshot.page_size))
        return min(most, max(1, math.ceil((until - known) / self.per_leaf(leaf))))

    def per_leaf(self, leaf: int) -> float:
        """Records of a leaf: the mean of those just before `leaf`."""
        recent = min(leaf, _RECENT_LEAVES)
        if not recent:
            return self.n / len(self.leaves)
        return float(self.first[leaf] - self.first[leaf - recent]) / recent

    def _read(self, pgnos: np.ndarray) -> np.ndarray:
        """u8[m * P]: these pages, one after the other."""
        if self._pages is None:
            self._pages = PageReader(self._pool(), self.snapshot)
        size = self.snapshot.page_size
        out = np.empty((len(pgnos), size), np.uint8)
        done = 0
        for some, buf, at in self._pages.batches(pgnos):
            out[done : done + len(some)] = buf.reshape(-1, size)[at // size]
            done += len(some)
        return out.reshape(-1)

    def _page(self, leaf: int) -> Page:
        return Page(self._read(self.leaves[leaf : leaf + 1]), int(self.leaves[leaf]), self.snapshot)

    def _scanned(self, buf: np.ndarray, pgnos: np.ndarray) -> LeafScan:
        size = self.snapshot.page_size
        scan = LeafScan(self.snapshot, self.record.md_flags, named=self._named, records=len(pgnos) * size // 24)
        scan.add(buf, np.arange(len(pgnos), dtype=np.int64) * size, np.ascontiguousarray(pgnos))
        if scan.names:
            raise DatabaseError(
                f"the file holds named databases: {list_names(scan.names)}",
                path=self.path,
                hint=f'Say which one to read, for example db="{scan.names[0].decode(errors="backslashreplace")}"',
            )
        return scan

    def _scan(self, leaf: int, known: int, buf: np.ndarray, own: bool, until: int) -> None:
        """The leaves from `leaf` on, whose first record is `known`; own : they are in the slot of the group that ends
        before record `until`."""
        m = len(buf) // self.snapshot.page_size
        pgnos = self.leaves[leaf : leaf + m]
        scan = self._scanned(buf, pgnos)
        ends = scan.end_keys()
        assert ends is not None  # a leaf without items is damage, and said so
        if self._last_key is not None and not ascends(
            key_order(self.record.md_flags, self.snapshot.layout), self._last_key, ends[0]
        ):
            raise not_ascending(self._last_key, ends[0], int(pgnos[0]), int(pgnos[0]) * self.snapshot.page_size)
        self._last_key = ends[1]
        stop = known + scan.n
        if stop > self.n or (leaf + m == len(self.leaves)) != (stop == self.n):
            raise self._wrong_count(stop)
        check_inside(scan.extents, known, self.snapshot, self.path)
        self._store(known, scan.extents)
        # Last: who sees it believes the places before it.
        self.first[leaf + 1 : leaf + m + 1] = known + np.cumsum(scan.page_records)
        self._leaf = leaf + m
        if self._keys is not None:
            self._keys.append((scan.key_data.copy(), scan.key_nbytes.copy()))
        size = self.snapshot.page_size
        if self.spare is not None and (scan.extents["offset"] % size != self.snapshot.header).any():
            rest = np.flatnonzero(known + np.cumsum(scan.page_records) > (until if own else 0))
            self.spare.keep(pgnos[rest], buf, rest * size)

    def _store(self, first: int, extents: np.ndarray) -> None:
        place = self.extents[first : first + len(extents)]
        place["nbytes"] = extents["nbytes"]
        fence()
        place["offset"] = extents["offset"]
        fence()

    def _wrong_count(self, found: int) -> CorruptedError:
        return CorruptedError(
            f"the tree's leaves up to here hold {found:,} records, its entry in the file says {self.n:,} in all",
            path=self.path,
            page=self.record.md_root,
        )


def _pages_in(found: Fetched | None, pgnos: np.ndarray) -> np.ndarray:
    return found.pages(pgnos) if found is not None else np.full(len(pgnos), -1, np.int64)


class Fetched:
    """Which bytes of the file lie where in a buffer.

    data : u8[k], the buffer; reads : what was read into it
    """

    def __init__(self, data: np.ndarray, reads: Reads, snapshot: Snapshot) -> None:
        self.data = data
        self._size = snapshot.page_size
        first, nbytes, place = reads.reads["offset"], reads.reads["nbytes"], reads.starts
        # Long runs were cut into several reads; what a last block has beyond the end of the file is not there.
        stop = np.minimum(first + nbytes, snapshot.file_bytes)
        new = np.ones(len(first), bool)
        new[1:] = (first[1:] != stop[:-1]) | (place[1:] - place[:-1] != nbytes[:-1])
        at = np.flatnonzero(new)
        self._first, self._place = first[at], place[at]
        self._stop = stop[np.append(at[1:], len(first)) - 1] if len(first) else stop

    def places(self, offset: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """i64[k]: where these ranges begin in the buffer, -1 for those that are not all there."""
        if not len(self._first):
            return np.full(len(offset), -1, np.int64)
        run = np.searchsorted(self._first, offset, side="right") - 1
        there = (run >= 0) & (offset + nbytes <= self._stop[run])
        return np.where(there, self._place[run] + offset - self._first[run], -1)

    def bytes_at(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes] from byte `offset` of the file on, if all of it is there."""
        at = int(self.places(np.array([offset]), np.array([nbytes]))[0])
        return self.data[at : at + nbytes] if at >= 0 else None

    def copy(self, at: np.ndarray) -> np.ndarray:
        """u8[m * P]: the pages that begin there, one after the other."""
        return np.concatenate([self.data[start : start + self._size] for start in at.tolist()])

    def pages(self, pgnos: np.ndarray) -> np.ndarray:
        """i64[m]: where these pages begin in the buffer, or -1."""
        return self.places(pgnos * self._size, np.full(len(pgnos), self._size))


@dataclass(frozen=True, slots=True)
class Later:
    """What the following group brings: a border may lie otherwise than it was guessed.

    found : where it will be; wait : returns when it is there, False if it will not come
    """

    found: Fetched
    wait: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Span:
    """A guess: the values of records [first, stop) lie in pages [low, high), of which `margins` are reserve."""

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
    """What to read for some records before all their places are known.

    ids : i64[k], ascending
    offsets, nbytes : i64[m], byte ranges of the file
    known : how many of the ids, from the first on, have exact places; all of them: nothing is guessed
    spans : the guesses for the others; believed : they are among the ranges
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
    places : i64[k], where each value begins in the buffer, -1 for those that are not in it
    spare : (i, bytes) of some of the latter that were read earlier: page header or what stands there, then the value
    """

    extents: np.ndarray
    places: np.ndarray
    spare: list[tuple[int, np.ndarray]]


class Speculator:
    """Guesses for one feed, group after group in the order of the epoch.

    growth : of the node
    stats : of this rank; its `guessed`, `missed` and `extra` grow
    guess : False: leaves ahead and then exactly, always
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
        """So many groups may be under way before the next one is settled: few until guesses have proved good."""
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
        """Pages before and behind a guess of so many: what the last ones would have needed."""
        widest = max(1, int(_WIDEST * pages))
        low = max((-begin for begin, _ in self._errors), default=0.0)
        high = max((end for _, end in self._errors), default=0.0)
        return min(widest, max(0, math.ceil(low))), min(widest, max(0, math.ceil(high)))

    # -- after -------------------------------------------------------------------------------------------------------

    def settle(self, outlook: Outlook, found: Fetched, later: Later | None = None) -> Settled:
        """Where the records of a group lie that was read; in the order of the groups. Raises as `Growth.grow` does."""
        growth, ids, lead = self._growth, outlook.ids, self._header
        missing = growth.grow(int(ids[-1]) + 1, found, later) if len(ids) else 0
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
            some = self._growth.extents[span.first : span.stop]
            begin = some["offset"] // self._size
            pages = (self._header - 1 + some["nbytes"]) // self._size + 1
            own = some["offset"] % self._size == self._header  # not in a leaf
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
        low = math.floor(self._place(first, 0) + 1e-6) - margins[0]
        high = math.ceil(self._place(stop - 1, 1) - 1e-6) + margins[1]
        low = min(max(2, low), self._pages - 1)
        return _Span(first, stop, low, min(max(high, low + 1), self._pages), margins)

    def _place(self, record: int, more: int) -> float:
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
    some = growth.extents[max(0, known - _RECENT_RECORDS) : known]
    pages = np.where(some["offset"] % size == header, (header - 1 + some["nbytes"]) // size + 1, 0)
    end = (some["offset"] // size + pages)[-_LAST_RECORDS:]
    return float(pages.mean()), float(pages.std()), float(end.max() + pages.mean())
