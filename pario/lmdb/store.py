"""One open data file, and one snapshot of it with its cached pages: what the compiled functions work on."""

from __future__ import annotations

import os
import struct
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pario.errors import CorruptedError, InvalidError, ParioError, ReadError, SnapshotError
from pario.fetch.base import read_error
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import check_snapshot, file_words, read_snapshot
from pario.format.layout import (
    F_BIGDATA,
    F_DUPDATA,
    F_SUBDATA,
    MDB_DUPFIXED,
    MDB_DUPSORT,
    MDB_INTEGERDUP,
    MDB_INTEGERKEY,
    MDB_REVERSEDUP,
    MDB_REVERSEKEY,
    Db,
)
from pario.format.meta import Snapshot
from pario.format.page import OverflowRun, Page, check_overflow
from pario.format.tree import Tree
from pario.kernels import nodes
from pario.lmdb import abi, errors
from pario.lmdb.native import later
from pario.threads import Workers

if TYPE_CHECKING:
    from pario.lmdb.packed import PackedValues
    from pario.plane.agent import Agent
    from pario.tiers.memory import MemoryTier
    from pario.tiers.served import ServedCopy

#: A file whose meta pages change at every look is looked at this often.
_TRIES = 50
_PAUSE_S = 0.002
#: Whether somebody has committed is looked at this often at least, and where a look takes longer than this, at most for
#: this part of the time. (From a page cache it takes microseconds: there each transaction looks.)
_SEEN_S, _SLOW_LOOK_S, _LOOKING = 0.1, 1e-3, 1 / 20
#: Flags of databases that the list of free pages cannot have (py-lmdb refuses such a file, too).
_NEVER_OF_FREE = MDB_REVERSEKEY | MDB_DUPSORT | MDB_DUPFIXED | MDB_INTEGERDUP | MDB_REVERSEDUP
#: Pages in memory begin where those of the system do.
_ALIGN = 4096
#: Pages that a cache holds at least, whatever its budget: more than one descent needs.
_LEAST_PAGES = 128


#: Threads of one call that reads many values: one per core, and more where the kernel cannot be asked to read ahead.
_READERS, _READERS_WAITING = min(len(os.sched_getaffinity(0)), 4), 8
#: A thread's share of such a call is at least this: below, the hand-over (some 20 us) shows.
_SHARE_BYTES = 256 << 10

_fill: Any = later("fill", globals())
_after_values: Any = later("after_values", globals())
_is_newest: Any = later("is_newest", globals())


class DataFile(PosixFetcher):
    """Closes itself when nobody refers to it any more: another thread may be reading while the environment closes.

    limits : of the control plane, if there is one; gate(bytes) : waits until they may be asked of the store,
        and says whether to go on: False if a signal's handler has raised, what is then the last of `raised`
    """

    raised: list[BaseException]

    def __init__(self, path: str, readahead: bool, limits: Agent | None) -> None:
        super().__init__(path)
        self.limits, self.raised = limits, []
        self.gate = None if limits is None else _gate(limits, self.raised)
        if readahead and self.gate is None:
            self._tell(os.POSIX_FADV_NORMAL)

    def pread(self, offset: int, nbytes: int) -> bytes:
        if self.limits is not None:
            self.limits.take(nbytes, 1)
        return super().pread(offset, nbytes)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        if self.limits is not None:
            self.limits.take(int(reads["nbytes"].sum()), len(reads))
        super().read(reads, out, starts)

    def __del__(self, _over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end the modules that close() needs may be gone, and the system closes it anyway.
        if not _over() and hasattr(self, "_fd"):
            self.close()


def _gate(limits: Agent, raised: list[BaseException]) -> Callable[[int], bool]:
    def gate(nbytes: int) -> bool:
        try:
            limits.take(nbytes, 1)
        except BaseException as e:  # in the main thread: compiled functions pass errors on by number
            raised.append(e)
            return False
        return True

    return gate


class Handle:
    """A database in a snapshot.

    packed : how to unpack its values; `Store.packed` finds out
    """

    __slots__ = ("at", "db", "packed", "words")

    def __init__(self, db: Db, words: array[int]) -> None:
        self.db = db
        self.words = words
        self.at = words.buffer_info()[0]
        self.packed: PackedValues | Literal[False] | None = False  # nobody has looked


class Store:
    """One snapshot of one file.

    at : address of the words that the compiled functions take
    metas_at, metas : where both meta pages stand in the file, and their bytes when the snapshot was taken
    """

    __slots__ = (
        *("__weakref__", "_arrays", "_copy", "_look_at", "_took"),
        *("at", "file", "handles", "metas", "metas_at", "snapshot", "words"),
    )

    def __init__(self, file: DataFile, cache_bytes: int) -> None:
        self.file = file
        self.snapshot, self.metas_at, self.metas = _take(file)
        snapshot, layout = self.snapshot, self.snapshot.layout
        if snapshot.flags & _NEVER_OF_FREE:
            raise InvalidError(f"the list of free pages has impossible flags {snapshot.flags:#x}", page=snapshot.meta)
        size = snapshot.page_size
        pages = min(cache_bytes // size, snapshot.last_pgno + 1)
        slots = max(pages, _LEAST_PAGES)
        places = 1 << (2 * slots - 1).bit_length()
        meta_bytes = layout.meta.itemsize
        meta_at, other_at = both = [n * size + layout.header for n in (snapshot.meta, 1 - snapshot.meta)]
        meta, other = (np.frombuffer(self.metas, np.uint8, meta_bytes, at - self.metas_at) for at in both)
        # Untouched memory costs nothing: the cache grows with what is read.
        pool = np.empty(slots * size + _ALIGN, np.uint8)
        pool = pool[-pool.ctypes.data % _ALIGN :]
        table = np.zeros(places, np.int64)
        page_of = np.full(slots, -1, np.int64)
        lives = np.zeros(slots, np.uint8)
        self._arrays = (meta, other, pool, table, page_of, lives)
        words = array("q", bytes(8 * abi.STORE_WORDS))
        known = file_words(snapshot)
        words[: len(known)] = array("q", known)
        words[abi.FD] = file.fileno()
        words[abi.OPEN] = 1
        words[abi.GATE] = 0 if file.gate is None else id(file.gate)
        words[abi.NOWAIT] = 1
        words[abi.META_AT], words[abi.META_BYTES], words[abi.META] = meta_at, meta_bytes, meta.ctypes.data
        words[abi.OTHER_AT], words[abi.OTHER] = other_at, other.ctypes.data
        words[abi.POOL], words[abi.SLOTS] = pool.ctypes.data, slots
        words[abi.TABLE], words[abi.MASK] = table.ctypes.data, places - 1
        words[abi.PAGE_OF], words[abi.LIVES] = page_of.ctypes.data, lives.ctypes.data
        self.words = words
        self._copy: ServedCopy | None = None
        self._look_at = self._took = 0.0  # when to look for a newer snapshot, and seconds of the last look
        self.at = words.buffer_info()[0]
        self.handles: dict[bytes | None, Handle] = {None: self._handle(snapshot.main, named=False)}

    def close(self) -> None:
        """Every later call says "closed"."""
        self.words[abi.OPEN] = 0

    def is_newest(self) -> bool:
        """Whether nobody has committed since the snapshot was taken; False also if unsure."""
        return bool(_is_newest(self.at))

    def is_new_enough(self) -> bool:
        """`is_newest`, or was so within the last tenth of a second if the last two looks took long."""
        begin = time.perf_counter()
        if begin < self._look_at:
            return True
        newest = self.is_newest()
        end = time.perf_counter()
        slow, self._took = min(end - begin, self._took), end - begin  # of both: one may have waited for a core
        self._look_at = end + min(_SEEN_S, slow / _LOOKING) if newest and slow > _SLOW_LOOK_S else 0.0
        return newest

    def read_copy(self, copy: ServedCopy) -> None:
        """From now on read what it holds from there."""
        self._copy = copy  # as long as anybody reads: the system gives numbers of files to others
        words, tier = self.words, copy.tier
        words[abi.COPY_FD], words[abi.CHUNK_BITS] = tier.fd, tier.grid.chunk_bytes.bit_length() - 1
        words[abi.COPY_STATES] = tier.states.address

    @property
    def copy(self) -> MemoryTier | None:
        """The tier of the node's service, if there is one."""
        return self._copy.tier if self._copy is not None else None

    def handle(self, name: bytes | None) -> Handle | None:
        """The database of this name, None if there is none.

        Raises IncompatibleError if the name is the key of a record, CorruptedError, BadTxnError.
        """
        found = self.handles.get(name)
        if found is None and name is not None:
            db = self._find(name)
            if db is None:
                return None
            found = self.handles[name] = self._handle(db, named=True)
        return found

    def packed(self, handle: Handle) -> PackedValues | None:
        """How the values of this database are packed; None if they are not. Raises lmdb errors."""
        found = handle.packed
        if found is False:
            from pario.lmdb.packed import find_packed

            found = handle.packed = find_packed(self, handle)
        return found

    def read_values(self, jobs: np.ndarray) -> None:
        """Read noted values (abi.JOB_WORDS) to their places, several reads at once where there are many.

        jobs : i64[m, JOB_WORDS], ascending by page. Raises lmdb errors.
        """
        parts = _parts(jobs, _READERS_WAITING if not self.words[abi.NOWAIT] else _READERS)
        failures = np.zeros((len(parts), 4), np.int64)
        running = [self._filled(part, failure) for part, failure in zip(parts[1:], failures[1:], strict=True)]
        try:
            # This thread works, too; the others get the interpreter's lock when it begins.
            statuses = [_fill(self.at, parts[0], failures[0])]
        finally:
            _settle(running)  # nobody may write to the values any more when an exception drops them
        statuses += [task.result() for task in running]
        for part, status, failure in zip(parts, statuses, failures, strict=True):
            done = _after_values(self.at, part.ctypes.data, status, failure.ctypes.data)
            if done is not True:
                raise self.error(done, "read")

    def _filled(self, part: np.ndarray, failure: np.ndarray) -> Future[int]:
        """What `batches.fill` says of this part: in another thread, or in this one where the system grants none."""
        try:
            return _threads().call(_fill, self.at, part, failure)
        except ParioError:
            filled: Future[int] = Future()
            filled.set_result(_fill(self.at, part, failure))
            return filled

    def tree(self) -> Tree:
        """The main database, page by page."""
        return Tree(self.read_page, self.snapshot, self.snapshot.main)

    def read_page(self, pgno: int) -> bytes:
        size = self.snapshot.page_size
        page = self.file.pread(pgno * size, size)
        check_snapshot(self.file, self.snapshot)
        return page

    def _find(self, name: bytes) -> Db | None:
        main = self.tree()
        if main.flags & (MDB_DUPSORT | MDB_INTEGERKEY):
            return None
        try:
            path, found = main.seek(name + b"\0" if self.snapshot.version > 1 else name)
            if not found:
                return None
            node = path[-1][0].node(path[-1][1])
            if node.flags != F_SUBDATA:
                raise errors.IncompatibleError(f"{name!r} is the key of a record, not a database", path=self.file.path)
            return node.db()
        except ParioError as e:
            e.at(path=self.file.path)
            raise errors.translated(e, "opening a database") from e

    def _handle(self, db: Db, named: bool) -> Handle:
        flags = db.md_flags
        big = self.snapshot.byteorder == "big"
        integer_way = nodes.FORWARD if big else nodes.BACKWARD
        key_integer = flags & MDB_INTEGERKEY and not flags & MDB_REVERSEKEY
        words = array("q", bytes(8 * abi.HANDLE_WORDS))
        words[abi.ROOT], words[abi.DEPTH] = db.md_root, db.md_depth
        words[abi.DUPSORT] = bool(flags & MDB_DUPSORT)
        words[abi.WAY] = nodes.BACKWARD if flags & MDB_REVERSEKEY else integer_way if key_integer else nodes.FORWARD
        words[abi.INTEGER] = bool(key_integer)
        dup_reverse = nodes.BACKWARD if flags & MDB_REVERSEDUP else nodes.FORWARD
        words[abi.DUP_WAY] = integer_way if flags & MDB_INTEGERDUP else dup_reverse
        words[abi.DUP_INTEGER] = bool(flags & MDB_INTEGERDUP)
        keys = nodes.KEYS_BACKWARD * (words[abi.WAY] == nodes.BACKWARD) | nodes.KEYS_INTEGERS * words[abi.INTEGER]
        dups = nodes.DUPS_BACKWARD * (words[abi.DUP_WAY] == nodes.BACKWARD)
        dups |= nodes.DUPS_INTEGERS * words[abi.DUP_INTEGER]
        words[abi.RULES], words[abi.DUP_RULES] = keys | dups, dups // nodes.DUPS_BACKWARD | nodes.ARE_DUPS
        # The main database can get its flags when there is something in it already.
        if named and flags & MDB_DUPSORT:
            words[abi.RULES] |= nodes.HAS_DUPS
        return Handle(db, words)

    # -- errors --------------------------------------------------------------------------------------------------------

    def error(self, noted: bytes | bytearray, what: str) -> errors.Error:
        """The exception for what a compiled function returned; `what` names the operation."""
        code, page, offset, a, b, c = struct.unpack("=6q", noted)
        path = self.file.path
        if code == abi.CLOSED:
            return errors.closed()
        if code == abi.INTERRUPTED and self.file.raised:
            return self.file.raised.pop()  # type: ignore[return-value]
        if code == abi.EMPTY_KEY:
            return errors.BadValsizeError(f"{what}: an empty key or value")
        if code == abi.INCOMPATIBLE:
            return errors.IncompatibleError(f"{what}: the database was not created with dupsort=True")
        if code == abi.UNPOSITIONED:
            return errors.InvalidParameterError(f"{what}: the cursor stands nowhere")
        try:
            if code == abi.OVERTAKEN:
                self._look_at = 0.0
                check_snapshot(self.file, self.snapshot)
                raise SnapshotError("the meta page of our snapshot changed while the file was read", path=path)
            if code == abi.FAILED:
                raise read_error(path, offset, a, 0, b)
            if code == abi.SHORT:
                raise CorruptedError(
                    f"page {page} (with what belongs to it, {a:,} bytes) lies beyond the end of the file: {b:,} bytes "
                    "are there",
                    page=page,
                    offset=offset,
                    hint="The file was cut off, or its copy is incomplete",
                )
            self._explain(code, page, a, b, c)
        except ReadError as e:
            return errors.translated(e.at(path=path), what)  # type: ignore[arg-type]
        except ParioError as e:
            return errors.translated(e.at(path=path), what)
        return errors.CorruptedError(f"{what}: page {page} contradicts the tree it is in", path=path, page=page)

    def _explain(self, code: int, pgno: int, a: int, b: int, c: int) -> None:
        """Raises CorruptedError with what is wrong with a page, in the words of format/page.py."""
        snapshot = self.snapshot
        size = snapshot.page_size
        if code == abi.BAD_RUN:
            need = (snapshot.header - 1 + a + snapshot.sum_size) // size + 1
            run = OverflowRun(pgno, need, pgno * size + snapshot.header, a)
            check_overflow(self.file.pread(pgno * size, size), run, snapshot)
            raise CorruptedError(
                f"not the overflow run that was looked for, of {c:,} pages and written by transaction {b}",
                page=pgno,
                offset=pgno * size,
            )
        page = Page(self.file.pread(pgno * size, size) if pgno >= 0 else b"", pgno, snapshot)
        if code == abi.MISPLACED:
            kind = "branch" if a < b - 1 else f"leaf2 page of {c}-byte items" if c else "leaf"
            raise page.fault(f"a {page.kind} page at level {a + 1} of {b}, where a {kind} belongs")
        what, i = a & 0xFF, a >> 8
        if what in (nodes.ROOM, nodes.DUP_ROOM):
            whose = f"the duplicates of item {i}" if what == nodes.DUP_ROOM else "the nodes"
            raise page.fault(f"{whose} leave room between them or overlap: a size or a pointer is wrong")
        if what in (nodes.ORDER, nodes.DUP_ORDER):
            whose = f"the duplicates of item {i} are not in" if what == nodes.DUP_ORDER else f"item {i} is out of"
            fault = page.fault(f"{whose} order")
            fault.hint = "Damage, or a program that set its own comparison function (mdb_set_compare)"
            raise fault
        if page.kind == "branch":
            page.children()
        for i in range(page.n):
            if page.kind != "leaf":
                page.key_span(i)
                continue
            node = page.node(i)
            if node.flags & F_BIGDATA:
                node.overflow()
            elif node.flags & F_SUBDATA:
                node.db()
            elif node.flags & F_DUPDATA:
                inner = node.sub_page()
                for j in range(inner.n):
                    inner.key_span(j)
                    if inner.kind == "leaf" and (inner.node(j).nbytes or inner.node(j).flags):
                        raise page.fault(f"duplicate {j} of item {i} has data of its own", node.data_start)
        if any(page.kind == "leaf" and page.node(i).flags & F_DUPDATA for i in range(page.n)):
            raise page.fault("duplicates of keys in a database without (no MDB_DUPSORT)")


def _settle(tasks: Sequence[Future[int]]) -> None:
    """Wait for all of them, whatever signals raise meanwhile."""
    raised: BaseException | None = None
    while not all(task.done() for task in tasks):
        try:
            for task in tasks:
                if not task.cancelled():
                    task.exception()
        except BaseException as e:
            raised = e
    if raised is not None:
        raise raised


def _parts(jobs: np.ndarray, most: int) -> list[np.ndarray]:
    """The jobs cut into pieces of about equal numbers of bytes."""
    ends = np.cumsum(jobs[:, 1])
    pieces = int(max(1, min(most, ends[-1] // _SHARE_BYTES, len(jobs))))
    if pieces == 1:
        return [jobs]
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, pieces) // pieces)
    return [part for part in np.split(jobs, cuts) if len(part)]


@cache
def _threads() -> Workers:
    """This process's threads; those of the parent do not live in a forked child."""
    return Workers("pario-lmdb", _READERS_WAITING)


os.register_at_fork(after_in_child=_threads.cache_clear)


def _take(file: DataFile) -> tuple[Snapshot, int, bytes]:
    """The newest snapshot, and (offset, bytes) of both meta pages that belong to it."""
    for _ in range(_TRIES):
        file.nbytes = os.fstat(file.fileno()).st_size
        try:
            snapshot = read_snapshot(file)
        except SnapshotError:
            time.sleep(_PAUSE_S)
            continue
        layout = snapshot.layout
        metas = file.pread(layout.header, snapshot.page_size + layout.meta.itemsize)
        offset = snapshot.meta * snapshot.page_size
        own = np.frombuffer(metas, layout.meta, 1, offset)[0]
        other = np.frombuffer(metas, layout.meta, 1, snapshot.page_size - offset)[0]
        if int(own["mm_txnid"]) == snapshot.txnid >= int(other["mm_txnid"]):
            return snapshot, layout.header, metas
    raise SnapshotError("writers commit without pause", path=file.path)
