"""Opens the tiers of a dataset on every node: which ones, of which size, and for which state of the file."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from typing import Any

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld, together
from pario.dataset.file import DataFile
from pario.errors import OptionError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.checked import Checked
from pario.fetch.direct import DirectFetcher
from pario.format.meta import Snapshot
from pario.locate.base import Index
from pario.options import MiB, Options, Tier, read_tiers
from pario.stage.base import AnyTier
from pario.stage.disk import DiskTier
from pario.stage.grid import Grid
from pario.stage.memory import MemoryTier
from pario.stage.pressure import PressureWatch
from pario.stage.staged import StagedFetcher
from pario.stats.rank import RankStats
from pario.text import decimal_bytes

__all__ = ["Stage", "open_stage"]

_log = logging.getLogger("pario")

#: One chunk is one read, which FUSE and many network file systems carry in one request (see Options.read_bytes).
_CHUNK_BYTES = MiB

#: An automatic memory tier takes at most this part of the memory that is available.
_SHARE_OF_MEMORY = 4

_MEMORY = "memory"
#: a disk's automatic quota: the tier's floor of free space is the limit
_UNLIMITED = 1 << 62


class Stage:
    """The tiers of one rank.

    tiers : nearest first
    memory : the one in memory, which all ranks of this node share, or None
    watch : lets it shrink, on the rank that fills it
    """

    def __init__(
        self,
        tiers: list[AnyTier],
        memory: MemoryTier | None,
        watch: PressureWatch | None,
        snapshot: Snapshot,
        options: Options,
    ) -> None:
        self.tiers = tiers
        self.memory = memory
        self.fetcher: StagedFetcher | None = None
        self._snapshot = snapshot
        self._options = options
        self._used: np.ndarray | None = None
        self._watch = watch
        self._counting = threading.Lock()
        self.store_reads = self.store_bytes = 0
        self.stats: RankStats | None = None  # counts the same, since there is a loader

    def count(self, reads: int, nbytes: int) -> None:
        """Count what this rank asked of the store. Any thread."""
        with self._counting:
            self.store_reads += reads
            self.store_bytes += nbytes
        if self.stats is not None:
            self.stats.count_store(reads, nbytes)

    def through(self, store: Fetcher) -> StagedFetcher:
        """A fetcher that asks the tiers before the store."""
        self.fetcher = StagedFetcher(
            store,
            self._snapshot,
            self.tiers,
            past_cache=_past_cache(store) if self._options.fetch == "auto" else None,
            read_bytes=self._options.read_bytes,
            count=self.count,
        )
        return self.fetcher

    def used(self, index: Index, checked: Checked) -> np.ndarray:
        """i64[n], the chunks that hold records. The index must be complete."""
        if self._used is None:
            extents = index.extents
            begins, lengths = checked.spans(
                np.ascontiguousarray(extents["offset"]), np.ascontiguousarray(extents["nbytes"])
            )
            self._used = self.tiers[0].grid.chunks_at(begins, lengths)
        return self._used

    def fits_memory(self, index: Index, checked: Checked) -> bool:
        """Whether the memory tier has room for all records; on the rank that fills it."""
        memory = self.memory
        return memory is not None and len(self.used(index, checked)) * memory.grid.chunk_bytes <= memory.budget

    def is_complete(self, index: Index, checked: Checked) -> bool:
        """True if reading records sends no request to the store."""
        if not index.is_complete:
            return False
        used = self.used(index, checked)
        held = np.zeros(self.tiers[0].grid.chunks, bool)
        for tier in self.tiers:
            held |= tier.held()
        return bool(held[used].all())

    def state(self) -> dict[str, Any]:
        """What this rank's tiers hold and did, for `Loader.stats`."""
        tiers = [
            {"name": tier.name, "held_bytes": int(tier.held().sum()) * tier.grid.chunk_bytes, **vars(tier.counts)}
            for tier in self.tiers
        ]
        return {"tiers": tiers, "store_reads": self.store_reads, "store_bytes": self.store_bytes}

    def close(self) -> None:
        """Idempotent. Copies on disks stay, those in memory until the last rank of the node has closed them."""
        if self._watch is not None:
            self._watch.close()
        for tier in self.tiers:
            tier.close()


def open_stage(file: DataFile, world: AnyWorld, snapshot: Snapshot, options: Options) -> Stage | None:
    """Open the tiers that the options or PARIO_TIERS want; None if they want none, or if none can be used.

    From then on `file` reads through them. Collective over `world`. All ranks raise, OptionError where it
    was noticed, if tiers cannot be meant; a tier that its storage refuses is left out, with a warning.
    """
    with together(world, "looking at the tiers"):
        wanted = _wanted(options) if world.rank == 0 else ()
        identity = _identity(file.pool.fetcher, snapshot) if wanted else b""
    wanted, identity, file_bytes = world.bcast((wanted, identity, snapshot.file_bytes))
    if not wanted:
        return None
    grid = Grid(file_bytes, _CHUNK_BYTES)
    mine = _Opened()
    try:
        with together(world, "opening the tiers"):
            mine.open(wanted, identity, grid, fills=world.is_leader)
        memory = _share_memory(mine.memory, grid, world)
    except BaseException:
        mine.close()
        raise
    tiers: list[AnyTier] = [*([memory] if memory else []), *mine.disks]
    if memory is None:
        mine.close_memory()
    if not tiers:
        return None
    stage = Stage(tiers, memory, mine.watch, snapshot, options)
    file.read_through(stage.through)
    return stage


class _Opened:
    """What this rank has opened so far."""

    def __init__(self) -> None:
        self.memory: MemoryTier | None = None
        self.watch: PressureWatch | None = None
        self.disks: list[DiskTier] = []

    def open(self, wanted: tuple[Tier, ...], identity: bytes, grid: Grid, *, fills: bool) -> None:
        """fills : this rank makes its node's memory tier. Raises OptionError, ParioError."""
        if fills:
            self.memory = _make_memory(wanted, grid)
        if self.memory is not None:
            self.watch = PressureWatch(self.memory)
        for tier in wanted:
            if tier.where != _MEMORY:
                self.disks += _open_disk(tier, identity, grid)

    def close_memory(self) -> None:
        if self.watch is not None:
            self.watch.close()
        if self.memory is not None:
            self.memory.close()

    def close(self) -> None:
        self.close_memory()
        for disk in self.disks:
            disk.close()


def _past_cache(store: Fetcher) -> Fetcher | None:
    """The same open file past the page cache, if it lies on a block device of this node."""
    if not store.read_ahead_bytes:
        return None
    (file,) = store.files
    try:
        return DirectFetcher(store.path, f"/proc/self/fd/{file.fileno()}")
    except ParioError:  # a file system without O_DIRECT
        return None


def _wanted(options: Options) -> tuple[Tier, ...]:
    """Raises OptionError."""
    text = os.environ.get("PARIO_TIERS", "")
    try:
        wanted = options.tiers if options.tiers is not None else read_tiers(text)
    except OptionError as e:
        raise OptionError(f"PARIO_TIERS={text!r}: {e.what}", hint=e.hint) from None
    folders = [tier.where for tier in wanted if tier.where != _MEMORY]
    if len(wanted) - len(folders) > 1 or (len(folders) < len(wanted) and wanted[0].where != _MEMORY):
        raise OptionError(
            f"tiers are named from the nearest on, with at most one of memory: got {', '.join(t.where for t in wanted)}"
        )
    devices = [os.stat(_existing(folder)).st_dev for folder in folders]
    if len(set(devices)) < len(devices):
        raise OptionError(
            f"two tiers are on one device: {', '.join(folders)}", hint="A second copy there gains nothing: name one."
        )
    return wanted


def _existing(path: str) -> str:
    """The path, or its nearest parent that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _identity(store: Fetcher, snapshot: Snapshot) -> bytes:
    """bytes[32] that tell this state of the file from all others. (Device numbers differ between mounts.)"""
    status = store.files[0].status()
    words = f"pario 1 {status.st_ino} {status.st_size} {status.st_mtime_ns} ".encode()
    return hashlib.sha256(words + store.pread(0, 2 * snapshot.page_size)).digest()


def _make_memory(wanted: tuple[Tier, ...], grid: Grid) -> MemoryTier | None:
    """Raises OptionError for a quota below one chunk."""
    if wanted[0].where != _MEMORY:
        return None
    budget, most = wanted[0].quota_bytes, grid.chunks * grid.chunk_bytes
    if budget is None:
        budget = min(most, machine.memory()[1] // _SHARE_OF_MEMORY)
        if budget < grid.chunk_bytes:
            _log.warning("no memory tier: a quarter of the memory that is available is %s", decimal_bytes(budget))
            return None
    elif budget < grid.chunk_bytes and budget >= grid.file_bytes:
        budget = grid.chunk_bytes  # a file that is smaller than a chunk
    try:
        return MemoryTier.made(grid, min(budget, most))
    except OSError as e:
        _log.warning("no memory tier: %s", e)
        return None


def _share_memory(mine: MemoryTier | None, grid: Grid, world: AnyWorld) -> MemoryTier | None:
    """The memory tier of this node's leader; None on all nodes unless all ranks can use theirs. Collective."""
    paths = world.node_bcast(mine.paths if mine is not None else None)
    memory, refused = mine, mine is None and paths is None
    if paths is not None and not world.is_leader:
        try:
            memory = MemoryTier.attached(grid, paths)
        except (OSError, ParioError) as e:
            _log.warning("no memory tier: rank %d cannot open that of its node's first rank: %s", world.rank, e)
            refused = True
    if not world.allreduce_max(refused):
        return memory
    if memory is not None:
        memory.close()
    return None


def _open_disk(tier: Tier, identity: bytes, grid: Grid) -> list[DiskTier]:
    """The tier, or none if its storage refuses. Raises OptionError."""
    found = machine.file_system(tier.where)
    if found.shared and not tier.force:
        raise OptionError(
            f"tier {tier.where} is on a file system that other nodes share ({found.type}): copies there gain nothing",
            hint="Name a folder on a disk of the node, or pass Tier(..., force=True).",
        )
    quota = tier.quota_bytes
    try:
        return [DiskTier(tier.where, identity, grid, _UNLIMITED if quota is None else quota)]
    except OSError as e:
        _log.warning("tier %s is left out: %s", tier.where, e)
        return []
