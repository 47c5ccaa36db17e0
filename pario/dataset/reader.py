"""Opens a dataset, of one file or several, for a communicator and reads the bytes of any records."""

from __future__ import annotations

import logging
import math
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.comm.base import AnyWorld
from pario.comm.farewell import guard
from pario.comm.world import get_world
from pario.dataset.file import DataFile
from pario.dataset.packed import find_keys_within, open_packed
from pario.dataset.several import checks_of, open_several
from pario.errors import ClosedError, DecodeError, FileError, MissingError, OptionError, ParioError, SnapshotError
from pario.fetch.pool import STOP_S
from pario.fetch.resolve import FETCHERS, Paths, as_paths
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot
from pario.kernels.jit import tell_cache_problem, warm_up
from pario.locate.base import Index, key_of
from pario.locate.database import Database
from pario.locate.open import SOON_S, open_index
from pario.locate.sidecar import Saved, find_saved
from pario.locate.sums import Sums, open_sums
from pario.options import READ_BYTES, Options, Recipe, find_recipe
from pario.plan.coalesce import coalesce
from pario.plan.selection import Selection
from pario.records import Records
from pario.stats.rank import RankStats
from pario.threads import aside, at_end

if TYPE_CHECKING:
    from pario.codec.packing import Packing
    from pario.dataset.staging import Stage
    from pario.decode.unpacking import Unpacking

_log = logging.getLogger("pario")

#: Seconds for the question whether the path still leads to the open file. A later answer is a later warning.
_LOOK_S = 0.5
#: A walk that reads no more than this part of the file reads the store: chunks come later, in the order of their use.
_LITTLE = 0.015
#: A writer may commit between two nodes' looks, or while the file is opened: so all look again, after these seconds.
_PAUSES_S = (0.01, 0.05, 0.25)


class Reader:
    """The records of one LMDB, or of several one after the other, for the ranks of a communicator.

    Collective over `comm`: construction and `close`. `read` and `keys` are not: any rank may call them at any time.
    One rank of a node opens the file at once, the others when they first call `read`.

    Parameters
    ----------
    path : data file, or directory that holds data.mdb; or several, as `Loader` takes them
    comm : an mpi4py communicator; it is duplicated. None: COMM_WORLD under a launcher, else this process alone,
        without any MPI library. "self": this process alone, whatever started it
    db : name of a named database; None is the main one
    options : see `Options`
    recipe : a name of `pario.options.RECIPES` (measurements/recipes.md), or a `Recipe`; "auto" unless a study wants
        another. `read` uses only its settings for locating and fetching, so "plain", which concerns whole epochs, reads
        here as "prov" does
    save_index : keep the index beside the dataset (or in the user's cache directory) for the next start
    progress : called as progress(done, total) while the index is built, in leaf pages, on rank 0
    grow : let the index grow while records are read, if the recipe allows that, no saved index fits, and making one
        would take a while
    verify : compare the values that are read with the checksums that `python -m pario data checksum` saved
    tiers : `use_tiers` will be called. Where a walk through the leaf pages reads much of the file, it uses them already

    Raises
    ------
    FileError and its children, on all ranks together.
    """

    def __init__(
        self,
        path: Paths,
        *,
        comm: Any = None,
        db: str | bytes | None = None,
        options: Options | None = None,
        recipe: str | Recipe = "auto",
        save_index: bool = True,
        progress: Callable[[int, int], None] | None = None,
        grow: bool = False,
        verify: bool = False,
        tiers: bool = False,
    ) -> None:
        self.options = options or Options()
        self.world = get_world(comm, "making a Reader")
        wrong: BaseException | None = None
        paths: tuple[str, ...] = ()
        try:
            self.recipe = find_recipe(recipe)
            paths = as_paths(path)
        except (OptionError, TypeError) as e:
            wrong = e
        if self.world is not comm:  # a Loader has compared its arguments
            self.world.agree(wrong, "looking at the arguments of Reader")
        self.world.alive_seconds = self.options.alive_seconds
        self.stage: Stage | None = None
        #: how to unpack the values; None: they are not packed
        self.unpacking: Unpacking | None = None
        #: how the values are packed, of several files those of the first one; None: they are not
        self.packing: Packing | None = None
        self.sums: Sums | None = None
        self._tiers = tiers and self.recipe.source in ("auto", "ring")
        self._chosen: Selection | None = None
        self._epochs = 0
        self._replaced = False
        self._grow = grow and self.recipe.locate in ("auto", "speculate", "cursor")
        # Usually through the page cache: a set that fits into memory is read from the storage once, and a cold file
        # costs nothing by it on a store of 200 MB/s.
        self.file = DataFile(paths, self.world, self.options, FETCHERS[self.recipe.fetch or "posix"])
        try:
            self._open(db, save_index, progress)
            self.unpacking = open_packed(self.index, self.world)
            self.packing = None if self.unpacking is None else self.unpacking.packings[0]
            find_keys_within(self.index, self.unpacking, partial(self.read_stored, verify=False))
            if self.recipe.source == "per_rank" and self.index.keys_within is not None:
                what = "this recipe reads records with py-lmdb, and some of these lie in blocks"
                hint = "Use another one, or pack with --block no."
                raise self.world.raised_by_all(OptionError(what, path=self.path, hint=hint))
            if verify:
                pool = self.file.pool if self.world.rank == 0 else None
                self.sums = open_sums(self.index, pool, self.world)
        except BaseException as e:
            self.world.abandon(e)
            self.file.close(STOP_S)
            if self.stage is not None:
                self.stage.close()
            raise
        if self.world is not comm:  # a Loader has its own guard
            guard(self.world, self)
            at_end(partial(self.abandon, 0))

    def _open(
        self,
        db: str | bytes | None,
        save_index: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        world, file = self.world, self.file
        tell_cache_problem(world.rank)
        name = db.encode() if isinstance(db, str) else db
        for pause_s in (*_PAUSES_S, 0.0):
            snapshots, saved, error = self._look_together(name)
            if not pause_s or not world.allreduce_max(isinstance(error, _OtherStateError | SnapshotError)):
                break
            time.sleep(pause_s)
        try:
            file.share(error is None and bool(snapshots))
        except BaseException as e:
            error = e
        _agree(world, error)
        self.snapshots = snapshots
        self.snapshot = snapshot = snapshots[0]  # of the only file, or the first one; `_agree` raised without any
        self.path = file.path
        self.index: Index
        one, save = len(snapshots) == 1, save_index and self._uses_sidecar
        # What a walk reads much of it should bring into the tiers at once: the leaf pages of the main database.
        much = snapshot.main.md_leaf_pages * snapshot.page_size > _LITTLE * snapshot.file_bytes
        self._walked_through_tiers = one and self._tiers and name is None and much
        if self._walked_through_tiers:
            self.stage = _open_tiers(self, None)
            if self.stage is not None:
                self.stage.meet(world, None, None)
        # LMDBIO's readers get the extents from one process that walks through the whole tree ("walk").
        pool = None if self.recipe.locate == "walk" and world.rank != 0 else file.opened
        if one:
            grow = (lambda: file.pool) if self._grow else None
            database = Database(self.path, snapshot, name)
            # Other recipes are studied as they are; and what other nodes see, too, may be far away.
            soon_s = SOON_S if self.recipe.locate == "auto" and world.rank == 0 and file.is_local else 0.0
            self.index = open_index(
                database, pool, world, save=save, progress=progress, saved=saved, grow=grow, soon_s=soon_s
            )
        else:
            if self.recipe.source == "per_rank":
                what = "this recipe reads one LMDB with py-lmdb"
                raise world.raised_by_all(OptionError(what, path=self.path, hint="Use another one."))
            several = [Database(*each, name) for each in zip(file.paths, snapshots, strict=True)]
            self.index = open_several(several, file, world, reads=pool is not None, save=save, progress=progress)
        self.checked = checks_of(file, self.index)

    def _look_together(self, db: bytes | None) -> tuple[tuple[Snapshot, ...], Saved | None, BaseException | None]:
        """The leaders open the file, and one rank decides which snapshots all ranks read: these; on that rank what the
        side-car says; and what is wrong on this one. Collective."""
        world, file = self.world, self.file
        error: BaseException | None = None
        snapshots: tuple[Snapshot, ...] = ()
        saved: Saved | None = None
        try:
            if world.is_leader:
                file.open()
            if world.rank == 0:
                snapshots, saved = _newest(file, db, sidecar=self._uses_sidecar)
            else:
                warm_up()  # while this rank waits for rank 0
        except BaseException as e:
            error = e
        snapshots, paths = world.bcast((snapshots, file.paths))
        if world.is_leader and world.rank and error is None and snapshots:
            try:
                _compare(file, paths, snapshots, world.rank)
            except BaseException as e:
                error = e
        return snapshots, saved, error

    @property
    def _uses_sidecar(self) -> bool:
        return self.recipe.locate in ("auto", "sidecar")

    def __len__(self) -> int:
        """Number of records."""
        return self.index.n

    def read(self, ids: Iterable[int] | np.ndarray, stats: RankStats | None = None, *, verify: bool = True) -> Records:
        """The values of these records, in this order, in new memory; packed ones (docs/packing.md) are unpacked.

        ids : i64[n], record ids in 0..len(self)-1; any order, repetitions allowed
        stats : counts `reads` and `bytes_read`
        verify : False where the caller compares with the checksums itself, if this reader has them
        Raises OptionError for an id out of range, ReadError, SnapshotError, CorruptedError (ChecksumError among them),
        DecodeError for a packed value that is damaged.
        """
        records = self.read_stored(ids, stats, verify=verify)
        return records if self.unpacking is None else _unpacked(self, records)

    def read_stored(
        self, ids: Iterable[int] | np.ndarray, stats: RankStats | None = None, *, verify: bool = True
    ) -> Records:
        """`read`, the values as they lie in the file."""
        wanted = self.index.checked(ids if isinstance(ids, np.ndarray) else list(ids))
        pool = self.file.pool
        if len(wanted) == 0:
            empty = np.empty(0, np.int64)
            return Records(wanted, np.empty(0, np.uint8), empty, empty)
        align = pool.fetcher.align
        offsets, nbytes = self.index.extents_of(wanted)
        begins, lengths = self.checked.spans(offsets, nbytes)
        plan = coalesce(
            begins,
            lengths,
            align=align,
            gap_bytes=self.options.gap_bytes,
            read_bytes=READ_BYTES,
            file_bytes=pool.fetcher.nbytes,
        )
        memory = np.empty(plan.nbytes + align, np.uint8)
        data = memory[-memory.ctypes.data % align :][: plan.nbytes]
        pool.read(plan.reads, data, plan.starts)
        if stats is not None:
            stats.count(len(plan.reads), int(plan.reads["nbytes"].sum()))
        records = Records(wanted, data, plan.behind(offsets - begins).record_starts, nbytes)
        self.checked.records(records, offsets)
        if verify and self.sums is not None:
            self.sums.check(records)
        return records

    def keys(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """The keys of these records."""
        self.file.check_open()
        return self.index.keys(np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64))

    def save_index(self) -> None:
        """Save the index that an epoch without one has found; on rank 0."""
        try:
            self.index.save()
        except ParioError as e:  # all records of this epoch were good; the next epoch raises the error if it matters
            _log.warning("the index of %s is not complete: %s", self.path, e)

    def use_tiers(self, chosen: Selection | None = None) -> None:
        """From now on read through the service of the node, if PARIO_SERVICE names one, else through the tiers of
        `Options.tiers` or PARIO_TIERS (docs/tiers.md): whole chunks, as long as they have room. Recipes for studies go
        on reading the store. Collective over `comm`.

        chosen : the records that will be read; None: all. It is closed together with the reader
        Raises OptionError."""
        self._chosen = chosen
        if self._tiers and not self._walked_through_tiers:
            self.stage = _open_tiers(self, chosen)
        if self.stage is not None:
            self.stage.chosen = chosen
            if not self._walked_through_tiers:
                self.stage.meet(self.world, self.index, self.checked)

    @property
    def is_staged(self) -> bool:
        """True if the tiers of this node hold all records: reading them sends no request to the store."""
        return self.stage is not None and self.stage.is_complete(self.index, self.checked)

    def warn_if_replaced(self) -> None:
        """Called before an epoch; except before the first, log a warning if the path leads to another file now.

        The open file stays readable and unchanged.
        """
        self._epochs += 1
        if self._epochs > 1 and not self._replaced and not self.is_staged:
            # In a thread, so that errors and signals reach this one while the store stalls. No thread, no warning.
            with suppress(ParioError):
                aside(_LOOK_S, self._warn_if_replaced)

    def _warn_if_replaced(self) -> None:
        with suppress(ClosedError):
            for path in [file.path for file in self.file.pool.fetcher.files if file.is_replaced()][:1]:
                self._replaced = True
                _log.warning("%s was replaced by another file; this reader goes on with the one it opened", path)

    def close(self) -> None:
        """Collective over `comm`. A second call does nothing."""
        self.abandon()
        self.world.close()

    def abandon(self, limit_s: float = math.inf) -> None:
        """Close this rank's own resources; not collective. Files with reads in flight after `limit_s` close later."""
        if self.stage is not None:
            self.stage.part(min(limit_s, STOP_S))  # first: reads may be waiting for another node
        self.file.close(limit_s)
        if self.stage is not None:
            self.stage.close()
        if self._chosen is not None:
            self._chosen.close()
        if self.sums is not None:
            self.sums.close()
        self.index.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if error is None:
            self.close()
        else:
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """Tell the others without waiting: they may not come."""
        self.world.abandon(error)
        self.abandon(STOP_S)

    def _part(self) -> None:
        """No other rank waits for this rank's reads."""

    def __repr__(self) -> str:
        return f"Reader({self.path!r}, records={len(self):,}, ranks={self.world.size})"


def _newest(file: DataFile, db: bytes | None, *, sidecar: bool) -> tuple[tuple[Snapshot, ...], Saved | None]:
    """The newest state of each file; of a single one also the side-car if it matches: then one read of the meta pages
    is enough."""
    pool = file.pool
    if len(file.fetchers) > 1:
        return tuple(read_snapshot(one, tars=True) for one in file.fetchers), None
    saved: Saved | None = None

    def known(snapshot: Snapshot) -> bool:
        nonlocal saved
        saved = find_saved(pool, snapshot, db, look=sidecar)
        return saved.places is not None

    return (read_snapshot(pool.fetcher, believe=known, tars=True),), saved


def _unpacked(reader: Reader, records: Records) -> Records:
    """The values of packed records. Raises DecodeError for the first one that is damaged."""
    assert reader.unpacking is not None
    values, failures = reader.unpacking.unpacked(records)
    for row, why in failures:
        record = int(records.ids[row])
        where, key = reader.index.files.path_of(record), key_of(reader.index, record)
        raise DecodeError(why, path=where, rank=reader.world.rank, record=record, key=key)
    return values


def _open_tiers(reader: Reader, chosen: Selection | None, *, waits: bool = True) -> Stage | None:
    """chosen : what will be read; None: all; waits : for a service that starts. Collective; raises OptionError."""
    from pario.dataset.staging import open_stage, used_chunks
    from pario.dataset.tiers import service_folder

    file, world, snapshots, options = reader.file, reader.world, reader.snapshots, reader.options
    stage: Stage | None = None
    # A service keeps single files.
    if len(snapshots) == 1 and world.allreduce_max(world.rank == 0 and bool(service_folder(options))):
        from pario.dataset.served import open_served

        stage = open_served(file, world, snapshots[0], options, waits=waits)
    if stage is None:
        need = None if chosen is None else (lambda grid: len(used_chunks(grid, reader.index, reader.checked, chosen)))
        by_default = reader.recipe.source == "auto"
        stage = open_stage(file, world, snapshots, options, by_default=by_default, need=need)
    if stage is not None:
        # A thread of the stage refers to it, so that it would outlive a reader that is dropped.
        weakref.finalize(reader, stage.close).atexit = False
    return stage


def renew_tiers(reader: Reader) -> None:
    """The service that kept the copies has gone: join the one that has come since, or take tiers of this job's own.
    Collective over the reader's `comm`."""
    lost, reader.stage = reader.stage, None
    reader.file.read_through(lambda store: store)
    if lost is not None:
        lost.close()
    stage = reader.stage = _open_tiers(reader, reader._chosen, waits=False)
    if stage is not None:
        stage.chosen = reader._chosen
        stage.meet(reader.world, reader.index, reader.checked)


class _OtherStateError(FileError):
    """This node sees another state of a file than rank 0."""


def _compare(file: DataFile, paths: Sequence[str], snapshots: Sequence[Snapshot], rank: int) -> None:
    """Raise an error if this node has another copy, or a file that was just replaced, than rank 0 describes."""
    if file.paths != paths and max(len(file.paths), len(paths)) > 1:
        others = sorted(set(file.paths) ^ set(paths))
        raise FileError(
            f"this node sees {len(file.paths)} files, rank 0 sees {len(paths)}; not on both: {', '.join(others[:5])}",
            rank=rank,
            hint="Wait until all nodes see the same files, or name them in a list.",
        )
    for fetcher, snapshot in zip(file.fetchers, snapshots, strict=True):
        mine = read_snapshot(fetcher, believe=snapshot.__eq__, tars=True)
        if mine != snapshot:
            raise _OtherStateError(
                f"this node sees another file than rank 0: {mine.said}, against {snapshot.said}",
                path=fetcher.path,
                rank=rank,
                hint="Bring the copies on all nodes up to date.",
            )


def _agree(world: AnyWorld, error: BaseException | None) -> None:
    """All continue or all raise; the error says on which nodes a path is missing. Collective."""
    if world.allreduce_max(error is not None):
        missing = world.allgather((world.node, platform.node()) if isinstance(error, MissingError) else None)
        where = sorted({node for node in missing if node is not None})
        if isinstance(error, MissingError) and missing[0] is None:
            nodes = ", ".join(f"node {node} ({host})" for node, host in where[:8]) + ", ..." * (len(where) > 8)
            error = MissingError(
                f"{error.what}, on {len(where)} of {world.nodes} nodes: {nodes}; on rank 0's node there is",
                path=error.path,
                rank=world.rank,
                hint="Every node must see the dataset under the same path: mount it there, or copy it.",
            )
        world.agree(error, "opening the dataset")
