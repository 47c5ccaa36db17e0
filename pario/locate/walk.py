"""Exact: every record's place, from branch and leaf pages alone.

Rank 0 reads the branch pages level by level; the leaf pages are divided among the ranks that have the file open, each
of which scans its own; an exclusive scan over the ranks' counts settles the record ids. Overflow pages, where large
values lie, are never touched: for records of 3 KB that is about 1 % of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.errors import CorruptedError, DatabaseError, EmptyError, FileError, ParioError, SnapshotError
from pario.fetch.pool import ReadPool
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import MAX_DEPTH, Db
from pario.format.meta import Snapshot
from pario.format.page import Node, Page
from pario.format.tree import Tree, ascends, key_order, named_database, not_ascending, only_named_databases
from pario.locate.database import Database
from pario.locate.leaves import LeafScan, check_inside
from pario.locate.meta import Route
from pario.plan.coalesce import coalesce
from pario.plan.schedule import even_split

#: Pages are read and scanned in batches of this many bytes, neighbours in the file by one read of at most READ_BYTES.
BATCH_BYTES = 4 << 20
READ_BYTES = 512 << 10
#: Names that one rank contributes to an error message.
_NAMES = 64


@dataclass
class Located:
    """What the walk found. The arrays exist on rank 0 only; elsewhere they are None.

    n : records
    extents : EXTENT[n], in key order
    key_data : u8[...], all keys one after the other; key_nbytes : u16[k], their lengths
    key_counts : i64[k], records of each key; None where every key has one (no MDB_DUPSORT)
    bytes_read : of the data file by all ranks together, meta pages left out
    """

    n: int
    extents: np.ndarray | None
    key_data: np.ndarray | None
    key_nbytes: np.ndarray | None
    key_counts: np.ndarray | None
    bytes_read: int


def build(
    pool: ReadPool | None,
    database: Database,
    world: AnyWorld,
    progress: Callable[[int, int], None] | None = None,
    *,
    native: bool | None = None,
    begun: Begun | None = None,
) -> Located:
    """Find all records of a database. Collective over `world`; an error is raised on all ranks.

    pool : of the open file; None on ranks (never rank 0) that leave the reading to the others
    progress : called as progress(done, total) on rank 0, in its leaf pages
    native : see LeafScan
    begun : the branch pages are read already

    Raises DatabaseError (EmptyError among them), CorruptedError, ReadError, SnapshotError.
    """
    walk, record, leaves = begun or begin(pool, database, world)
    scan = walk.scan(record, leaves, progress, native)
    return walk.settle(record, scan)


#: a walk whose branch pages are read; the database's record; i64[m], its leaf pages in key order, shared by the node
Begun = tuple["Walk", Db, np.ndarray]


def begin(pool: ReadPool | None, database: Database, world: AnyWorld) -> Begun:
    """The first half of `build`: rank 0 reads the branch pages. Collective; raises as `build` does."""
    walk = Walk(pool, database, world)
    return walk, *walk.find_leaves()


class Walk:
    def __init__(self, pool: ReadPool | None, database: Database, world: AnyWorld) -> None:
        self.pool = pool
        self.snapshot = database.snapshot
        self.db = database.name
        self.world = world
        self.path = database.path
        self.pages = PageReader(self.opened, self.snapshot)
        #: of its own: the leaf pages around a tree of duplicates stay in the other's buffer
        self.dup_pages = PageReader(self.opened, self.snapshot)
        self.route: Route | None = None

    def opened(self) -> ReadPool:
        assert self.pool is not None  # a rank without a share reads nothing
        return self.pool

    def find_leaves(self) -> tuple[Db, np.ndarray]:
        """The database's record, and i64[m], the page numbers of its leaves in key order, shared by the node. Rank 0
        learns where meta records would stand (`route`)."""
        world, snapshot = self.world, self.snapshot
        record = snapshot.main
        leaves: np.ndarray | None = None
        with self.together("reading the branch pages"):
            if world.rank == 0:
                if self.db is not None:
                    record = named_database(Tree(self.pages.one, snapshot, snapshot.main), self.db)
                if record.md_root >= 0:
                    self.route = Route(record.md_root, record.md_flags, snapshot.layout)
                    leaves = self.descend([Tree(self.pages.one, snapshot, record)], self.pages, self.route)[0]
        record = world.bcast(record)
        if record.md_root < 0:
            what = "the database holds no record" if self.db is None else f"the database {self.db!r} holds no record"
            raise world.raised_by_all(EmptyError(what, path=self.path))
        return record, world.share_array(leaves)

    def meta_between(self, leaves: np.ndarray) -> bool:
        """Whether a leaf page other than the first and the last one holds a meta record. On rank 0; reads those where
        one would stand: none, if all names stand before the first key or behind the last one."""
        assert self.route is not None  # rank 0 has found the leaves
        names = {name: pgno for name, pgno in self.route.leaves.items() if pgno not in (leaves[0], leaves[-1])}
        pages = self.pages.pages(np.unique(np.fromiter(names.values(), np.int64, len(names))))
        return any(not names.keys().isdisjoint(page.key(i) for i in range(page.n)) for page in pages)

    def scan(
        self, record: Db, leaves: np.ndarray, progress: Callable[[int, int], None] | None, native: bool | None
    ) -> LeafScan:
        """Scan this rank's share of the leaves."""
        world = self.world
        mates, before = world.allreduce_sum(self.pool is not None), world.exscan(self.pool is not None)
        start, stop = even_split(len(leaves), mates, before) if self.pool is not None else (0, 0)
        # A guess, from a number in the file that may be wrong: no more than one record per 8 bytes of the leaves.
        guess = record.md_entries * (stop - start) // len(leaves) * 9 // 8 + 256
        most = (stop - start) * self.snapshot.page_size // 8
        scan = LeafScan(
            self.snapshot,
            record.md_flags,
            named=self.db is not None,
            records=min(guess, record.md_entries, most),
            native=native,
            expand=lambda nodes: self.expand(nodes, record.md_flags, native),
        )
        with self.together("scanning the leaf pages"):
            if self.pool is not None:
                check_size(self.pool, self.snapshot)
            mine = leaves[start:stop]
            done = 0
            for pgnos, buf, at in self.pages.batches(mine):
                scan.add(buf, at, pgnos)
                done += len(pgnos)
                if progress is not None and world.rank == 0:
                    progress(done, len(mine))
            if self.pool is not None:
                check_snapshot(self.pool.fetcher, self.snapshot)
        return scan

    def settle(self, record: Db, scan: LeafScan) -> Located:
        """Number the records, check the whole, bring it to rank 0."""
        world = self.world
        names = [name for theirs in world.allgather(scan.names[:_NAMES]) for name in theirs]
        if names:
            count = world.allreduce_sum(len(scan.names))
            raise world.raised_by_all(only_named_databases(names, self.path, count))
        first_id = world.exscan(scan.n)
        n = world.allreduce_sum(scan.n)
        if n != record.md_entries:
            raise world.raised_by_all(
                CorruptedError(
                    f"the tree holds {n:,} records, its entry in the file says {record.md_entries:,}",
                    path=self.path,
                    page=record.md_root,
                )
            )
        with together(world, "checking the index"):
            check_inside(scan.extents, first_id, self.snapshot, self.path)
        # `LeafScan` compares inside a rank's share; what is left are the borders.
        order = key_order(record.md_flags, self.snapshot.layout)
        ends = [both for both in world.allgather(scan.end_keys()) if both is not None]
        for (_, before), (after, _) in pairwise(ends):
            if not ascends(order, before, after):
                raise world.raised_by_all(not_ascending(before, after).at(path=self.path))
        key_counts = scan.key_counts
        return Located(
            n=n,
            extents=world.gather_array(scan.extents),
            key_data=world.gather_array(scan.key_data),
            key_nbytes=world.gather_array(scan.key_nbytes),
            key_counts=world.gather_array(key_counts) if key_counts is not None else None,
            bytes_read=world.allreduce_sum(self.pages.bytes_read + self.dup_pages.bytes_read),
        )

    def descend(self, trees: list[Tree], pages: PageReader, route: Route | None = None) -> list[np.ndarray]:
        """Page numbers of the leaves of each tree, in key order; reads the branch pages of all trees level by level.

        route : sees the branch pages
        """
        levels = [np.array([tree.db.md_root], np.int64) for tree in trees]
        for level in range(1, MAX_DEPTH):
            todo = [i for i, tree in enumerate(trees) if tree.db.md_depth > level]
            if not todo:
                break
            below: list[list[np.ndarray]] = [[] for _ in trees]
            owners = iter(np.repeat(todo, [len(levels[i]) for i in todo]).tolist())
            for page in pages.pages(np.concatenate([levels[i] for i in todo])):
                owner = next(owners)
                trees[owner].check_page(page, level)
                below[owner].append(page.children())
                if route is not None:
                    route.seen(page)
            for i in todo:
                levels[i] = np.concatenate(below[i])
                _check_distinct(levels[i])
        return levels

    def expand(self, nodes: list[Node], flags: int, native: bool | None) -> list[np.ndarray]:
        """EXTENT[m] of the duplicates of each node, whose duplicates form a tree of their own."""
        snapshot = self.snapshot
        pages = self.dup_pages
        trees = [Tree(pages.one, snapshot, node.db(), dups_of=flags) for node in nodes]
        leaves = self.descend(trees, pages)
        lengths = [len(level) for level in leaves]
        entries = [tree.db.md_entries for tree in trees]
        most = sum(lengths) * snapshot.page_size
        scan = LeafScan(snapshot, flags, dups=True, records=min(sum(entries), most), native=native)
        # A tree of fixed-size duplicates consists of LEAF2 pages.
        pads = np.repeat([tree.db.md_pad if tree.fixed else 0 for tree in trees], lengths).astype(np.int64)
        counts = np.empty(sum(lengths), np.int64)
        done = 0
        for pgnos, buf, at in pages.batches(np.concatenate(leaves)):
            scan.add(buf, at, pgnos, pads[done : done + len(pgnos)])
            counts[done : done + len(pgnos)] = scan.page_records
            done += len(pgnos)
        per_tree = np.add.reduceat(counts, np.cumsum([0, *lengths[:-1]]))
        for node, expected, found in zip(nodes, entries, per_tree.tolist(), strict=True):
            if expected != found:
                raise node.page.fault(f"key {node.key!r} has {found:,} duplicates, its entry says {expected:,}")
        return np.split(scan.extents, np.cumsum(per_tree)[:-1])

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """`comm.base.together`, with what `explained` adds to errors."""
        with together(self.world, doing), explained(lambda: self.pool, self.snapshot, self.path):
            yield


def check_size(pool: ReadPool, snapshot: Snapshot) -> None:
    """Raises SnapshotError on a rank that opened an earlier state of the file."""
    if pool.fetcher.nbytes < snapshot.file_bytes:
        raise SnapshotError(
            f"this rank opened the file when it had {pool.fetcher.nbytes:,} bytes, the one that read the "
            f"meta pages when it had {snapshot.file_bytes:,}",
            hint="A writer is at work, or this node's view of the file lags behind; open it again",
        ).at(path=pool.fetcher.path)


@contextmanager
def explained(pool: Callable[[], ReadPool | None], snapshot: Snapshot, path: str) -> Iterator[None]:
    """Errors get the path; and when a writer overtook us, damage is its work."""
    try:
        yield
    except ParioError as error:
        mine = pool() if isinstance(error, FileError) and not isinstance(error, DatabaseError) else None
        if mine is not None:
            with suppress(FileError):
                try:
                    check_snapshot(mine.fetcher, snapshot)
                except SnapshotError as overtaken:
                    error = overtaken
        raise error.at(path=path) from None


class PageReader:
    """Reads pages: neighbours in the file by one read, the others one by one, nothing in between (but for O_DIRECT's
    blocks, if pages are smaller).

    pool : of the open file; asked for when pages are read
    bytes_read, reads : so far
    """

    def __init__(self, pool: Callable[[], ReadPool], snapshot: Snapshot) -> None:
        self.bytes_read = 0
        self.reads = 0
        self._pool = pool
        self._snapshot = snapshot
        self._size = snapshot.page_size
        self._batch = max(1, BATCH_BYTES // self._size)
        self._buffer = np.empty(0, np.uint8)

    def one(self, pgno: int) -> bytes:
        """One page's bytes."""
        check_pages(np.array([pgno]), self._snapshot)
        data = self._pool().fetcher.pread(pgno * self._size, self._size)
        self.bytes_read += len(data)
        self.reads += 1
        return data

    def pages(self, pgnos: np.ndarray) -> Iterator[Page]:
        """These pages, in this order. Each is valid until the next one."""
        for numbers, buf, at in self.batches(pgnos):
            for pgno, start in zip(numbers.tolist(), at.tolist(), strict=True):
                yield Page(buf[start : start + self._size], pgno, self._snapshot)

    def batches(self, pgnos: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields (page numbers i64[m], buffer u8[...], place of each page in it i64[m]), in the order of `pgnos`.

        The buffer is used again for the next batch.
        """
        check_pages(pgnos, self._snapshot)
        for start in range(0, len(pgnos), self._batch):
            batch = np.array(pgnos[start : start + self._batch], np.int64)
            yield batch, *self._read(batch)

    def _read(self, pgnos: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pool, size = self._pool(), self._size
        plan = coalesce(
            pgnos * size,
            np.full(len(pgnos), size),
            align=pool.fetcher.align,
            gap_bytes=0,
            read_bytes=max(READ_BYTES, pool.fetcher.align),
            file_bytes=pool.fetcher.nbytes,
        )
        buf = self._room(plan.nbytes)
        pool.read(plan.reads, buf, plan.starts)
        self.bytes_read += int(plan.reads["nbytes"].sum())
        self.reads += len(plan.reads)
        return buf, plan.record_starts

    def _room(self, nbytes: int) -> np.ndarray:
        """u8[nbytes] at an address that suits the fetcher."""
        align = self._pool().fetcher.align
        if len(self._buffer) < nbytes:
            memory = np.empty(nbytes + align, np.uint8)
            start = -memory.ctypes.data % align
            self._buffer = memory[start : start + nbytes]
        return self._buffer[:nbytes]


def check_pages(pgnos: np.ndarray, snapshot: Snapshot) -> None:
    """Raises CorruptedError for the first of these pages that lies beyond the end of the file."""
    beyond = (pgnos + 1) * snapshot.page_size > snapshot.file_bytes
    if beyond.any():
        pgno = int(pgnos[int(np.argmax(beyond))])
        raise CorruptedError(
            f"page {pgno} lies beyond the end of the file ({snapshot.file_bytes:,} bytes)",
            page=pgno,
            offset=pgno * snapshot.page_size,
            hint="The file was cut off, or its copy is incomplete",
        )


def _check_distinct(pgnos: np.ndarray) -> None:
    """Raises CorruptedError if two branch entries of a level lead to one page: the records below would come twice."""
    ordered = np.sort(pgnos)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        pgno = int(ordered[1:][int(np.argmax(twice))])
        raise CorruptedError("two branch entries lead to one page", page=pgno)
