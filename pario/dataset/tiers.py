"""Which tiers the options or PARIO_TIERS mean on this node, and opens them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld, together
from pario.dataset.file import DataFile
from pario.errors import OptionError, ParioError
from pario.fetch.base import Fetcher
from pario.options import Options, Tier, read_tiers
from pario.stage.asking import here
from pario.stage.disk import DiskTier
from pario.stage.grid import Grid
from pario.stage.memory import MemoryTier
from pario.stage.pressure import PressureWatch
from pario.text import decimal_bytes

__all__ = [
    "OpenTiers",
    "automatic_bytes",
    "look_at_tiers",
    "no_tiers",
    "same_disks",
    "service_folder",
    "share_memory",
    "tiers_by_default",
    "wanted_tiers",
]

_log = logging.getLogger("pario")

T = TypeVar("T", bound=MemoryTier)

#: An automatic memory tier takes at most this part of the memory that is available.
_SHARE_OF_MEMORY = 4

_MEMORY = "memory"
#: a disk's automatic quota: the tier's floor of free space is the limit
_UNLIMITED = 1 << 62

#: What nobody has named, for a file that other nodes see, too.
_BY_DEFAULT = (Tier(_MEMORY, "auto"),)
#: The page cache holds a file if it has this fraction of a sample of this many bytes, evenly over the file.
_CACHED, _SAMPLE = 0.98, 64


class OpenTiers:
    """What this rank has opened so far."""

    def __init__(self) -> None:
        self.memory: MemoryTier | None = None
        self.watch: PressureWatch | None = None
        self.disks: list[DiskTier] = []

    def open(self, wanted: tuple[Tier, ...], identity: bytes, grid: Grid, path: str, *, fills: bool) -> None:
        """fills : this rank makes its node's memory tier. Raises OptionError, ParioError."""
        if fills:
            self.memory = _make_memory(wanted, grid)
        if self.memory is not None:
            self.watch = PressureWatch(self.memory)
        for tier in wanted:
            if tier.where != _MEMORY:
                self.disks += _open_disk(replace(tier, where=here(tier.where)), identity, grid, path)

    def close_memory(self) -> None:
        if self.watch is not None:
            self.watch.close()
        if self.memory is not None:
            self.memory.close()

    def close(self) -> None:
        self.close_memory()
        for disk in self.disks:
            disk.close()


def service_folder(options: Options) -> str:
    """Where the service of each node can be found; "": the tiers are this job's own, as are those that it names."""
    return "" if options.tiers is not None or not options.peers else os.environ.get("PARIO_SERVICE", "")


def wanted_tiers(options: Options) -> tuple[Tier, ...] | None:
    """What the options or PARIO_TIERS name, which may be no tiers at all; None if neither is given.

    Raises OptionError."""
    text = os.environ.get("PARIO_TIERS")
    if options.tiers is None and text is None:
        return None
    try:
        wanted = options.tiers if options.tiers is not None else read_tiers(text or "")
    except OptionError as e:
        raise OptionError(f"PARIO_TIERS={text!r}: {e.what}", hint=e.hint) from None
    folders = [here(tier.where) for tier in wanted if tier.where != _MEMORY]
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


def no_tiers(world: AnyWorld, options: Options, path: str) -> None:
    """Several files have no tiers: an error if the options name any, and a warning if the environment does. Collective;
    raises OptionError on all ranks."""
    with together(world, "looking at the tiers"):
        if options.tiers:
            raise OptionError(
                "several LMDBs have no tiers", path=path, hint="Leave Options.tiers out, or load one LMDB at a time."
            )
        if world.rank == 0 and (service_folder(options) or wanted_tiers(options)):
            _log.warning("%s: several LMDBs have no tiers and no service; they are read from the store", path)


def tiers_by_default(file: DataFile, file_bytes: int, options: Options, world: AnyWorld) -> tuple[Tier, ...]:
    """The tiers of a dataset for which none are named: one of memory if other nodes see the file, too, the nodes have
    room for all of it, and their page caches do not hold it yet. Collective over `world`, the same on all ranks.

    Elsewhere the first epoch loses more than the later ones of a short job gain: a file in the page cache takes two to
    six times as long once (docs/tiers.md).
    """
    found: tuple[bool, bool, int] | None = None
    if world.is_leader:
        fetcher = file.pool.fetcher
        shared = all(machine.file_system_of(each.path, each.status().st_dev).shared for each in fetcher.files)
        found = shared, shared and _is_cached(fetcher), automatic_bytes()
    nodes = [node for node in world.allgather(found) if node is not None]
    rooms = [min(room, file_bytes) for _, _, room in nodes]
    room = sum(rooms) if options.peers else min(rooms)
    if not all(shared for shared, _, _ in nodes) or all(cached for _, cached, _ in nodes):
        return ()
    if room < file_bytes:
        if world.rank == 0:
            _log.info(
                "%s has %s, for which a quarter of the nodes' memory has no room: every epoch reads it from the store. "
                "Name disks of the nodes in PARIO_TIERS to keep copies there",
                file.path,
                decimal_bytes(file_bytes),
            )
        return ()
    if world.rank == 0:
        _log.info("%s is kept in the memory of the nodes; PARIO_TIERS= switches that off", file.path)
    return _BY_DEFAULT


def _is_cached(fetcher: Fetcher) -> bool:
    """The page cache of this node holds the file, as far as the kernel tells."""
    offsets = np.linspace(0, max(0, fetcher.nbytes - 1), _SAMPLE).astype(np.int64)
    return (fetcher.cached_share(offsets, _CACHED) or 0.0) >= _CACHED


def look_at_tiers(path: str | None) -> list[dict[str, Any]]:
    """What PARIO_TIERS means on this node: per tier where, quota, free (bytes) and problem ("" if it can be used), and
    for folders file_system. Makes nothing.

    path : a data file, for which there may be a tier by default
    """
    try:
        wanted = wanted_tiers(Options())
    except OptionError as e:
        return [{"where": "PARIO_TIERS", "quota": "", "free": 0, "problem": str(e)}]
    if wanted is None:
        wanted = _BY_DEFAULT if path is not None and machine.file_system(path).shared else ()
    found = []
    for tier in wanted:
        facts: dict[str, Any] = {"where": tier.where, "quota": str(tier.quota), "problem": ""}
        if tier.where == _MEMORY:
            facts["free"] = machine.memory(swap=False)[1]
        else:
            folder = here(tier.where)
            where, disk = machine.file_system(folder), os.statvfs(_existing(folder))
            facts |= {"where": folder, "file_system": where.type, "free": disk.f_bavail * disk.f_frsize}
            if where.shared and not tier.force:
                facts["problem"] = f"other nodes share its file system ({where.type}): copies there gain nothing"
            elif not os.access(_existing(folder), os.W_OK | os.X_OK):
                facts["problem"] = "it is not writable"
        found.append(facts)
    return found


def _existing(path: str) -> str:
    """The path, or its nearest parent that exists."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _make_memory(wanted: tuple[Tier, ...], grid: Grid) -> MemoryTier | None:
    """Raises OptionError for a quota below one chunk."""
    if wanted[0].where != _MEMORY:
        return None
    budget, most = wanted[0].quota_bytes, grid.chunks * grid.chunk_bytes
    if budget is None:
        budget = min(most, automatic_bytes())
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


def automatic_bytes() -> int:
    """What an automatic memory tier takes at most."""
    return machine.memory(swap=False)[1] // _SHARE_OF_MEMORY


def share_memory(mine: T | None, kind: type[T], grid: Grid, world: AnyWorld) -> T | None:
    """The memory tier of this node's leader; None on all nodes unless all ranks can use theirs. Collective."""
    paths = world.node_bcast(mine.paths if mine is not None else None)
    memory: T | None = mine
    refused = mine is None and paths is None
    if paths is not None and not world.is_leader:
        try:
            memory = kind.attached(grid, paths)
        except (OSError, ParioError) as e:
            _log.warning("no memory tier: rank %d cannot open that of its node's first rank: %s", world.rank, e)
            refused = True
    if not world.allreduce_max(refused):
        return memory
    if memory is not None:
        memory.close()
    return None


def same_disks(mine: list[DiskTier], world: AnyWorld) -> list[DiskTier]:
    """The disks that all ranks of this node could open: they must agree on where records come from. Collective."""
    everyone = world.allgather((world.node, [disk.name for disk in mine]))
    names = set.intersection(*(set(names) for node, names in everyone if node == world.node))
    for disk in mine:
        if disk.name not in names:
            _log.warning("tier %s is left out: another rank of this node cannot use it", disk.name)
            disk.close()
    return [disk for disk in mine if disk.name in names]


def _open_disk(tier: Tier, identity: bytes, grid: Grid, path: str) -> list[DiskTier]:
    """The tier, or none if its storage refuses. Raises OptionError."""
    found = machine.file_system(tier.where)
    if found.shared and not tier.force:
        raise OptionError(
            f"tier {tier.where} is on a file system that other nodes share ({found.type}): copies there gain nothing",
            hint="Name a folder on a disk of the node, or pass Tier(..., force=True).",
        )
    quota = tier.quota_bytes
    if quota is None:
        # What lies in memory and outlives the job must not take all of it.
        quota = automatic_bytes() if found.kind == "memory" else _UNLIMITED
        quota = max(quota, grid.chunk_bytes)
    try:
        return [DiskTier(tier.where, identity, grid, quota, path=path)]
    except OSError as e:
        _log.warning("tier %s is left out: %s", tier.where, e)
        return []
