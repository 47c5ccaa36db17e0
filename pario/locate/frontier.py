"""Scans leaf pages one after the other, so that extents become known while records are read.

The branch pages give the page numbers of all leaves in key order. The *frontier* is the number of leaves scanned so
far, and the exact id of the next record. `Growth` holds the frontier and the extents found so far, in memory that the
ranks of a node share. Each rank that scans a leaf writes its extents there; all ranks write the same values. Pages that
are in memory already are not read again: those read for one group of records (`Fetched`), and those kept for later
groups (`Spare`).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pario.comm.futex import fence
from pario.errors import ClosedError, CorruptedError
from pario.fetch.pool import ReadPool
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import Db
from pario.format.meta import Snapshot
from pario.format.page import Page
from pario.format.tree import ascends, key_order, not_ascending, only_named_databases
from pario.locate.database import Database
from pario.locate.leaves import LeafScan, check_inside
from pario.locate.walk import BATCH_BYTES, PageReader, check_pages, explained
from pario.plan.coalesce import Reads
from pario.records import EXTENT

#: The least bytes of a node in a leaf: header and pointer.
_LEAST_ITEM = 10
#: Leaves just before the frontier from which the next ones are guessed.
RECENT_LEAVES = 512
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


class Growth:
    """The extents of one database's records, as far as they are known on this node. Any thread.

    Parameters
    ----------
    database : the database, whose `record` is known
    leaves : i64[m], its leaf pages in key order
    extents : EXTENT[n], zeroed memory shared by the node; an extent is known if its `offset` is not 0
    first : i64[m + 1], zeroed memory shared by the node: `first[j]` is the first record of leaf j, 0 if unknown
    pool : returns the read pool of the open file; called when pages are read
    keep_keys : keep the keys of all leaves, for a side-car

    Attributes
    ----------
    pages : reads leaf pages and counts them
    spare : keeps leaf pages that hold values and are in no slot of the ring; None: they are not kept
    kept_keys : (key_data u8[...], key_nbytes u16[k]) of the leaves so far, one pair per scan; None: not kept
    """

    def __init__(
        self,
        database: Database,
        *,
        leaves: np.ndarray,
        extents: np.ndarray,
        first: np.ndarray,
        pool: Callable[[], ReadPool],
        keep_keys: bool,
    ) -> None:
        assert database.record is not None
        self.record: Db = database.record
        self.snapshot = database.snapshot
        self.leaves = leaves
        self.extents = extents
        self.first = first
        self.n = len(extents)
        self.pages = PageReader(pool, database.snapshot)
        self.spare: Spare | None = None
        self.kept_keys: list[tuple[np.ndarray, np.ndarray]] | None = [] if keep_keys else None
        self._path = database.path
        self._named = database.name is not None
        self._pool = pool
        self._lock = threading.RLock()
        self._leaf = 0
        self._last_key: bytes | None = None
        self._closed = False
        try:
            check_pages(leaves, self.snapshot)
        except CorruptedError as e:
            raise e.at(path=self._path) from None

    # -- the frontier --------------------------------------------------------------------------------------------------

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
        while self.kept_keys is None and self._leaf < len(self.leaves) and self.first[self._leaf + 1]:
            unknown = self.first[self._leaf + 1 : self._leaf + 1025] == 0
            self._leaf += int(np.argmax(unknown)) if unknown.any() else len(unknown)
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
                pgnos = self.leaves[leaf : leaf + max(window, RECENT_LEAVES)]
                source = found
                at = pages_in(source, pgnos)
                if window and at[0] < 0 and later is not None:
                    source = later.found
                    at = pages_in(source, pgnos)
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
                with self._explained():
                    buf = source.copy(at[:take]) if held[0] and source is not None else self._read(pgnos[:take])
                    self._scan(leaf, known, buf, bool(held[0] and source is found), until)

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
        with self._lock, self._explained():
            leaf, _ = self.frontier()
            leaves = np.searchsorted(self.first[: leaf + 1], ids, side="right") - 1
            pages = {j: self._page(j) for j in np.unique(leaves).tolist()}
            starts = self.first[leaves].tolist()
            found = [pages[j].key(i - start) for j, i, start in zip(leaves.tolist(), ids.tolist(), starts, strict=True)]
            check_snapshot(self._pool().fetcher, self.snapshot)
            return found

    def end(self) -> tuple[list[bytes], list[bytes]]:
        """(keys of the first leaf, keys of the last one); afterwards the places of the first and the last record are
        known. Reads three leaf pages at most.

        Raises as `grow` does.
        """
        self.grow(1)
        with self._lock, self._explained():
            last = self._scanned(self._read(self.leaves[-1:]), self.leaves[-1:])
            keys, m = last.keys(), last.n
            if not keys or m > self.n:
                raise self._wrong_count(m)
            if not self.extents["offset"][-1]:
                check_inside(last.extents, self.n - m, self.snapshot, self._path)
                self._store(self.n - m, last.extents)
            first = self._page(0)
            return [first.key(i) for i in range(first.n)], keys

    def close(self) -> None:
        """Let go of the shared memory."""
        with self._lock:
            self._closed = True
            self.extents = np.empty(0, EXTENT)
            self.first = self.leaves = np.empty(0, np.int64)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """An error of a page says which file, or that a writer has overtaken us."""
        return explained(self._pool, self.snapshot, self._path)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the index was closed", path=self._path)

    def _window(self, leaf: int, known: int, until: int) -> int:
        """Leaves that are probably needed."""
        if known >= until or leaf == len(self.leaves):
            return 0
        most = min(len(self.leaves) - leaf, max(1, BATCH_BYTES // self.snapshot.page_size))
        return min(most, max(1, math.ceil((until - known) / self.per_leaf(leaf))))

    def per_leaf(self, leaf: int) -> float:
        """Records of a leaf: the mean of those just before `leaf`."""
        recent = min(leaf, RECENT_LEAVES)
        if not recent:
            return self.n / len(self.leaves)
        return float(self.first[leaf] - self.first[leaf - recent]) / recent

    def _read(self, pgnos: np.ndarray) -> np.ndarray:
        """u8[m * P]: these pages, one after the other."""
        size = self.snapshot.page_size
        out = np.empty((len(pgnos), size), np.uint8)
        done = 0
        for batch, buf, at in self.pages.batches(pgnos):
            out[done : done + len(batch)] = buf.reshape(-1, size)[at // size]
            done += len(batch)
        return out.reshape(-1)

    def _page(self, leaf: int) -> Page:
        return Page(self._read(self.leaves[leaf : leaf + 1]), int(self.leaves[leaf]), self.snapshot)

    def _scanned(self, buf: np.ndarray, pgnos: np.ndarray) -> LeafScan:
        size = self.snapshot.page_size
        scan = LeafScan(self.snapshot, self.record.md_flags, named=self._named, records=len(pgnos) * size // 24)
        scan.add(buf, np.arange(len(pgnos), dtype=np.int64) * size, np.ascontiguousarray(pgnos))
        if scan.names:
            raise only_named_databases(scan.names, self._path)
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
        check_inside(scan.extents, known, self.snapshot, self._path)
        self._store(known, scan.extents)
        # Last: who sees it believes the places before it.
        self.first[leaf + 1 : leaf + m + 1] = known + np.cumsum(scan.page_records)
        self._leaf = leaf + m
        if self.kept_keys is not None:
            self.kept_keys.append((scan.key_data.copy(), scan.key_nbytes.copy()))
        size = self.snapshot.page_size
        if self.spare is not None and (scan.extents["offset"] % size != self.snapshot.header).any():
            rest = np.flatnonzero(known + np.cumsum(scan.page_records) > (until if own else 0))
            self.spare.keep(pgnos[rest], buf, rest * size)

    def _store(self, first: int, extents: np.ndarray) -> None:
        known = self.extents[first : first + len(extents)]
        known["nbytes"] = extents["nbytes"]
        fence()
        known["offset"] = extents["offset"]
        fence()

    def _wrong_count(self, found: int) -> CorruptedError:
        return CorruptedError(
            f"the tree's leaves up to here hold {found:,} records, its entry in the file says {self.n:,} in all",
            path=self._path,
            page=self.record.md_root,
        )


def check_entries(record: Db, leaves: int, page_size: int, path: str) -> None:
    """Raises CorruptedError where this many leaves cannot hold the records that the database's entry promises: before
    memory is made for them."""
    if not leaves <= record.md_entries <= leaves * page_size // _LEAST_ITEM:
        raise CorruptedError(
            f"{leaves:,} leaf pages cannot hold the {record.md_entries:,} records of the tree's entry in the file",
            path=path,
            page=record.md_root,
        )
