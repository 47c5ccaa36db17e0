"""The conductor: opens a dataset for a communicator and brings the bytes of any records."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pario.comm.world import AnyWorld, Solo, World, get_world
from pario.errors import ClosedError, FileError, OptionError
from pario.fetch.base import ReadPool, resolve
from pario.fetch.direct import DirectFetcher
from pario.fetch.posix import PosixFetcher
from pario.locate.index import RecordIndex, open_index
from pario.locate.snapshot import check_snapshot, read_snapshot
from pario.options import Options
from pario.plan.coalesce import coalesce
from pario.records import Records

__all__ = ["Reader"]

_log = logging.getLogger("pario")

#: fetch option -> class. "auto" reads through the page cache: on the machines we measured it reaches the same cold
#: bandwidth as O_DIRECT (benchmarks/), and a set that fits into memory is read from the storage once.
_FETCHERS: dict[str, type[PosixFetcher]] = {"auto": PosixFetcher, "posix": PosixFetcher, "direct": DirectFetcher}


class Reader:
    """The records of one LMDB, for the ranks of a communicator.

    Collective over `comm`: construction and `close`. `read` and `keys` are not: any rank may call them at any time.

    Parameters
    ----------
    path : data file, or directory that holds data.mdb
    comm : an mpi4py communicator; it is duplicated. None: COMM_WORLD under a launcher, else this process alone,
        without any MPI library.
    db : name of a named database; None is the main one
    options : see `Options`
    save_index : keep the index beside the dataset (or in the user's cache directory) for the next start
    progress : called as progress(done, total) while the index is built, in leaf pages, on rank 0

    Raises
    ------
    FileError and its children, on all ranks together.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        comm: Any = None,
        db: str | bytes | None = None,
        options: Options | None = None,
        save_index: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.options = options or Options()
        self.world: AnyWorld = comm if isinstance(comm, (World, Solo)) else get_world(comm)
        self._pool: ReadPool | None = None
        self._replaced = False
        try:
            self._open(path, db, save_index, progress)
        except BaseException:
            if self._pool is not None:
                self._pool.close()
                self._pool.fetcher.close()
            self.world.free(collective=False)
            raise

    def _open(
        self,
        path: str | os.PathLike[str],
        db: str | bytes | None,
        save_index: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        world = self.world
        error: BaseException | None = None
        name = db.encode() if isinstance(db, str) else db
        try:
            self.path = resolve(path)
            self._pool = ReadPool(_FETCHERS[self.options.fetch](self.path), self.options.inflight)
        except BaseException as e:
            error = e
        world.agree(error, "opening the dataset")
        assert self._pool is not None  # agree raised otherwise
        # One rank decides which snapshot everybody reads.
        snapshot = None
        if world.rank == 0:
            try:
                snapshot = read_snapshot(self._pool.fetcher)
            except BaseException as e:
                error = e
        world.agree(error, "reading the meta pages")
        self.snapshot = world.bcast(snapshot)
        if world.is_leader and world.rank:
            # A copy on this node, or a file that was replaced a moment ago, must be the one that rank 0 describes.
            try:
                mine = read_snapshot(self._pool.fetcher)
                if mine != self.snapshot:
                    raise FileError(
                        f"this node sees another file than rank 0: transaction {mine.txnid} with "
                        f"{mine.main.md_entries} entries, against {self.snapshot.txnid} with "
                        f"{self.snapshot.main.md_entries}",
                        path=self.path,
                        rank=world.rank,
                        hint="Bring the copies on all nodes up to date.",
                    )
            except Exception as e:
                error = e
        world.agree(error, "comparing the file with rank 0's")
        self.index: RecordIndex = open_index(
            self.path, self._pool, self.snapshot, world, db=name, save=save_index, progress=progress
        )

    @property
    def pool(self) -> ReadPool:
        self._check_open()
        assert self._pool is not None
        return self._pool

    def _check_open(self) -> None:
        if self._pool is None:
            raise ClosedError("the reader is already closed", path=self.path)

    def __len__(self) -> int:
        """Number of records."""
        return self.index.n

    def read(self, ids: Iterable[int] | np.ndarray) -> Records:
        """The bytes of these records, in this order, in memory of their own.

        ids : i64[n], record ids in 0..len(self)-1; any order, repetitions allowed
        Raises OptionError for an id out of range, ReadError, SnapshotError.
        """
        wanted = np.ascontiguousarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        pool = self.pool
        if len(wanted) == 0:
            empty = np.empty(0, np.int64)
            return Records(wanted, np.empty(0, np.uint8), empty, empty)
        if int(wanted.min()) < 0 or int(wanted.max()) >= len(self):
            raise OptionError(
                f"record ids must lie in 0..{len(self) - 1}, got {int(wanted.min())}..{int(wanted.max())}",
                path=self.path,
            )
        extents = self.index.extents[wanted]
        align = pool.fetcher.align
        plan = coalesce(
            np.ascontiguousarray(extents["offset"]),
            np.ascontiguousarray(extents["nbytes"]),
            lead_bytes=self.index.header_bytes,
            align=align,
            gap_bytes=self.options.gap_bytes,
            read_bytes=self.options.read_bytes,
            file_bytes=pool.fetcher.nbytes,
        )
        memory = np.empty(plan.nbytes + align, np.uint8)
        data = memory[-memory.ctypes.data % align :][: plan.nbytes]
        pool.read(plan.reads, data, plan.starts)
        self.check_snapshot()
        return Records(wanted, data, plan.record_starts, np.ascontiguousarray(extents["nbytes"]))

    def keys(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """The keys of these records."""
        self._check_open()
        return self.index.keys(np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64))

    def check_snapshot(self) -> None:
        """Raises SnapshotError if a writer may have overwritten pages of the snapshot that this reader opened."""
        check_snapshot(self.pool.fetcher, self.snapshot)

    def warn_if_replaced(self) -> None:
        """Log it if another file stands behind the path now. What is open stays readable and unchanged."""
        if not self._replaced and self.pool.fetcher.is_replaced():
            self._replaced = True
            _log.warning("%s was replaced by another file; this reader goes on with the one it opened", self.path)

    def close(self) -> None:
        """Collective over `comm`. A second call does nothing."""
        self.abandon()
        self.world.free()

    def abandon(self, wait: bool = True) -> None:
        """Close what this rank holds alone; not collective. Without `wait`, files close when their threads end."""
        if self._pool is not None:
            self._pool.close(wait)
            if wait:
                self._pool.fetcher.close()
            self._pool = None
            self.index.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            # Other ranks may not come: an error on one rank must not wait for them.
            self.abandon()
            self.world.free(collective=False)

    def __repr__(self) -> str:
        return f"Reader({self.path!r}, records={len(self):,}, ranks={self.world.size})"
