"""The conductor: opens a dataset for a communicator and brings the bytes of any records."""

from __future__ import annotations

import logging
import math
import os
import platform
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pario.comm.agree import guard
from pario.comm.world import AnyWorld, Solo, World, get_world
from pario.errors import ClosedError, FileError, MissingError, OptionError, SnapshotError
from pario.fetch.base import STOP_S, ReadPool, open_dataset
from pario.fetch.direct import DirectFetcher
from pario.fetch.mapped import MappedFetcher
from pario.fetch.posix import PosixFetcher
from pario.format.layout import Db
from pario.format.meta import Snapshot
from pario.format.tree import Tree, named_database
from pario.kernels.jit import warm_up
from pario.locate.index import RecordIndex, Saved, find_saved, open_index
from pario.locate.snapshot import check_snapshot, read_snapshot
from pario.locate.walk import PageReader
from pario.options import Options, Recipe
from pario.plan.coalesce import coalesce
from pario.records import Records
from pario.stats.rank import RankStats

__all__ = ["RECIPES", "Reader"]

_log = logging.getLogger("pario")

#: fetch option -> class. "auto" reads through the page cache: a set that fits into memory is read from the storage
#: once. A cold file costs nothing by it on a store of 200 MB/s, and up to a third on a fast local disk (1.0 to 1.1 GB/s
#: against 1.1 to 1.6 with O_DIRECT for 197 KB records in key order, 0.7 to 0.8 against 1.1 to 1.2 for 3 KB ones).
_FETCHERS: dict[str, type[PosixFetcher]] = {
    "auto": PosixFetcher,
    "posix": PosixFetcher,
    "direct": DirectFetcher,
    "mapped": MappedFetcher,  # for recipes only
}

#: recipe -> its words. All but "auto" re-create a step of LMDBIO (Pumma, Si, Feng, Balaji, "Scalable Deep Learning via
#: I/O Analysis and Optimization", ACM TOPC 6(2), 2019), for studies: each adds one optimisation to those before it, but
#: for "dm", which is a branch of its own. What is delivered is the same for all of them, in every order.
RECIPES: dict[str, Recipe] = {
    "auto": Recipe(),
    "plain": Recipe(per_rank=True, locate="sidecar", ahead=False),
    "lmm": Recipe(locate="cursor", fetch="mapped", ahead=False, fill=False),
    "dm": Recipe(locate="speculate", fetch="posix", ahead=False, fill=False),
    "dio": Recipe(locate="walk", fetch="posix", span=True, ahead=False, fill=False),
    "prov": Recipe(locate="sidecar", fetch="posix", span=True, ahead=False, fill=False),
    "coal": Recipe(locate="sidecar", fetch="posix", span=True, ahead=False),
    "stag": Recipe(locate="sidecar", fetch="posix", span=True, ahead=False, stagger=True),
}


class Reader:
    """The records of one LMDB, for the ranks of a communicator.

    Collective over `comm`: construction and `close`. `read` and `keys` are not: any rank may call them at any time.
    `Options.readers_per_node` ranks of a node open the file at once, the others when they call `read` for the first
    time: on a shared file system every open is a question to the one server that everybody asks.

    Parameters
    ----------
    path : data file, or directory that holds data.mdb
    comm : an mpi4py communicator; it is duplicated. None: COMM_WORLD under a launcher, else this process alone,
        without any MPI library.
    db : name of a named database; None is the main one
    options : see `Options`
    recipe : a name of `RECIPES` (docs/recipes.md); "auto" unless a study wants another. `read` follows its words for
        locating and fetching only, so that "plain", which is about whole epochs, reads here as "prov" does
    save_index : keep the index beside the dataset (or in the user's cache directory) for the next start
    progress : called as progress(done, total) while the index is built, in leaf pages, on rank 0
    grow : let the index grow while records are read, where the recipe allows that and no saved one fits

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
        recipe: str = "auto",
        save_index: bool = True,
        progress: Callable[[int, int], None] | None = None,
        grow: bool = False,
    ) -> None:
        self.options = options or Options()
        self.world: AnyWorld = comm if isinstance(comm, (World, Solo)) else get_world(comm)
        if self.world is not comm:  # a Loader has compared its arguments
            known = recipe in RECIPES
            wrong = None if known else OptionError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
            self.world.agree(wrong, "looking at the arguments of Reader")
        self.recipe = RECIPES[recipe]
        self.world.alive_seconds = self.options.alive_seconds
        self._pool: ReadPool | None = None
        self._closed = False
        self._opening = threading.Lock()
        self._epochs = 0
        self._replaced = False
        feeders = self.feeders = min(self.options.readers_per_node, self.world.node_size)
        # The ranks that read: spread over the node, the leader first. `feeder` is this one's number or None.
        places = [f * self.world.node_size // feeders for f in range(feeders)]
        self.feeder = places.index(self.world.node_rank) if self.world.node_rank in places else None
        self._places = places
        self._grow = grow and not self.recipe.per_rank and self.recipe.locate in ("auto", "speculate", "cursor")
        self._given = path
        try:
            self._open(db, save_index, progress)
        except BaseException as e:
            self.world.abandon(e)
            if self._pool is not None and self._pool.close(STOP_S):
                self._pool.fetcher.close()
            raise
        if self.world is not comm:  # a Loader has its own guard
            guard(self.world, self)

    def _open(
        self,
        db: str | bytes | None,
        save_index: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        world = self.world
        error: BaseException | None = None
        name = db.encode() if isinstance(db, str) else db
        snapshot: Snapshot | None = None
        saved: Saved | None = None
        try:
            if world.is_leader:
                self._pool = self._open_pool()
            if world.rank == 0:
                snapshot, saved = self._look(name)
            else:
                warm_up()  # while this rank has nothing to do but wait for rank 0
        except BaseException as e:
            error = e
        # One rank decides which snapshot everybody reads.
        snapshot = world.bcast(snapshot)
        if world.is_leader and world.rank and error is None and snapshot is not None:
            try:
                self._compare(snapshot)
            except BaseException as e:
                error = e
        mine = None
        if self._pool is not None and error is None:
            fetcher = self._pool.fetcher
            mine = fetcher.path, fetcher.status(), f"/proc/{os.getpid()}/fd/{fetcher.fileno()}"
        found = world.node_bcast(mine)
        if found is not None and snapshot is not None:
            self.path, self._file, self._leaders_file = found
            try:
                if self.feeder is not None and self._pool is None:
                    self._pool = self._open_like_leader()
            except BaseException as e:
                error = e
        self._agree(error)
        assert snapshot is not None  # _agree raised otherwise
        self.snapshot = snapshot
        # LMDBIO's readers get their places from one process that walks through the whole tree ("walk").
        alone = self.recipe.locate == "walk" and world.rank != 0
        self.index: RecordIndex = open_index(
            self.path,
            None if alone else self._pool,
            snapshot,
            world,
            db=name,
            save=save_index and self._uses_sidecar,
            progress=progress,
            saved=saved,
            grow=(lambda: self.pool) if self._grow else None,
        )

    def _open_pool(self) -> ReadPool:
        return ReadPool(open_dataset(self._given, self._fetcher), self.options.inflight)

    @property
    def _fetcher(self) -> type[PosixFetcher]:
        return _FETCHERS[self.recipe.fetch or self.options.fetch]

    def _look(self, db: bytes | None) -> tuple[Snapshot, Saved | None]:
        """The file's newest state, and the side-car if one is known to be of it: then one read tells."""
        assert self._pool is not None
        fetcher = self._pool.fetcher
        saved: Saved | None = None

        def known(snapshot: Snapshot) -> bool:
            nonlocal saved
            saved = find_saved(fetcher, snapshot, db, look=self._uses_sidecar)
            return saved.parts is not None

        return read_snapshot(fetcher, believe=known), saved

    @property
    def _uses_sidecar(self) -> bool:
        return self.recipe.locate in ("auto", "sidecar")

    def _compare(self, snapshot: Snapshot) -> None:
        """A copy on this node, or a file that was replaced a moment ago, must be the one that rank 0 describes."""
        assert self._pool is not None
        mine = read_snapshot(self._pool.fetcher, believe=snapshot.__eq__)
        if mine != snapshot:
            raise FileError(
                f"this node sees another file than rank 0: transaction {mine.txnid} with "
                f"{mine.main.md_entries} entries, against {snapshot.txnid} with {snapshot.main.md_entries}",
                path=self._pool.fetcher.path,
                rank=self.world.rank,
                hint="Bring the copies on all nodes up to date.",
            )

    def _open_like_leader(self) -> ReadPool:
        """For this rank too, the file that its node's leader opened: through the leader's handle, since the path may
        lead to another file by now, or to none; by the path where the system does not let us."""
        for via in (self._leaders_file, None):
            try:
                fetcher = self._fetcher(self.path, via)
            except FileError:
                if via is None:
                    raise
                continue
            if os.path.samestat(fetcher.status(), self._file):
                return ReadPool(fetcher, self.options.inflight)
            fetcher.close()
        raise SnapshotError(
            "the file was replaced after another rank of this node had opened it",
            path=self.path,
            rank=self.world.rank,
            hint="Open the dataset again.",
        )

    def _agree(self, error: BaseException | None) -> None:
        """All go on or all raise; a path that exists on some nodes only says on which. Collective."""
        world = self.world
        if world.allreduce_max(error is not None):
            missing = world.allgather((world.node, platform.node()) if isinstance(error, MissingError) else None)
            where = sorted({place for place in missing if place is not None})
            if isinstance(error, MissingError) and missing[0] is None:
                nodes = ", ".join(f"node {node} ({host})" for node, host in where[:8]) + ", ..." * (len(where) > 8)
                error = MissingError(
                    f"{error.what}, on {len(where)} of {world.nodes} nodes: {nodes}; on rank 0's node there is",
                    path=error.path,
                    rank=world.rank,
                    hint="Every node must see the dataset under the same path: mount it there, or copy it.",
                )
            world.agree(error, "opening the dataset")

    @property
    def pool(self) -> ReadPool:
        self._check_open()
        if self._pool is None:
            with self._opening:
                if self._pool is None:
                    self._pool = self._open_like_leader()
        return self._pool

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader is already closed", path=self.path)

    def __len__(self) -> int:
        """Number of records."""
        return self.index.n

    def reader_of(self, group: int) -> int:
        """The rank, by its number on this node, that reads a group of the schedule."""
        return self._places[group % self.feeders]

    def read(self, ids: Iterable[int] | np.ndarray, stats: RankStats | None = None) -> Records:
        """The bytes of these records, in this order, in memory of their own.

        ids : i64[n], record ids in 0..len(self)-1; any order, repetitions allowed
        stats : its `reads` and `bytes_read` grow
        Raises OptionError for an id out of range, ReadError, SnapshotError, CorruptedError.
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
        extents = self.index.places(wanted)
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
        if stats is not None:
            stats.count(len(plan.reads), int(plan.reads["nbytes"].sum()))
        # The snapshot first: when a writer overtook us, wrong headers are its work and not damage.
        self.check_snapshot()
        offsets, nbytes = (np.ascontiguousarray(extents[name]) for name in ("offset", "nbytes"))
        self.index.check_headers(data, plan.record_starts, offsets, nbytes, wanted)
        return Records(wanted, data, plan.record_starts, nbytes)

    def keys(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """The keys of these records."""
        self._check_open()
        return self.index.keys(np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64))

    def tree(self) -> Db:
        """The entry of the database's tree in the file: how many pages of which kind. Reads a few pages where the
        database is a named one; not collective."""
        main, name = self.snapshot.main, self.index.database
        if name is None:
            return main
        if self.index.growth is not None:
            return self.index.growth.record
        return named_database(Tree(PageReader(self.pool, self.snapshot).one, self.snapshot, main), name)

    def check_snapshot(self) -> None:
        """Raises SnapshotError if a writer may have overwritten pages of the snapshot that this reader opened."""
        check_snapshot(self.pool.fetcher, self.snapshot)

    def warn_if_replaced(self) -> None:
        """Called before an epoch; but for the first, log it if another file stands behind the path now.

        What is open stays readable and unchanged.
        """
        self._epochs += 1
        if self._epochs > 1 and not self._replaced and self.pool.fetcher.is_replaced():
            self._replaced = True
            _log.warning("%s was replaced by another file; this reader goes on with the one it opened", self.path)

    def close(self) -> None:
        """Collective over `comm`. A second call does nothing."""
        self.abandon()
        self.world.free()

    def abandon(self, limit_s: float = math.inf) -> None:
        """Close what this rank holds alone; not collective. Files with reads under way after `limit_s` close later."""
        self._closed = True
        if self._pool is not None:
            if self._pool.close(limit_s):
                self._pool.fetcher.close()
            self._pool = None
        self.index.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """Tell the others; they may not come, so that an error on one rank must not wait for them."""
        self.world.abandon(error)
        self.abandon(STOP_S)

    def __repr__(self) -> str:
        return f"Reader({self.path!r}, records={len(self):,}, ranks={self.world.size})"
