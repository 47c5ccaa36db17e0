"""Which tiers the options or PARIO_TIERS mean on this node, and opens them."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, TypeVar

from pario import machine
from pario.comm.base import AnyWorld
from pario.dataset.file import DataFile
from pario.errors import OptionError, ParioError
from pario.options import Options, Tier, read_tiers
from pario.text import decimal_bytes
from pario.tiers.asking import here
from pario.tiers.disk import DiskTier
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.pressure import PressureWatch

_log = logging.getLogger("pario")

T = TypeVar("T", bound=MemoryTier)

#: An automatic memory tier takes at most this part of the memory that is available.
_SHARE_OF_MEMORY = 4

_MEMORY = "memory"
#: a disk's automatic quota: the tier's floor of free space is the limit
_UNLIMITED = 1 << 62

#: What nobody has named.
_BY_DEFAULT = (Tier(_MEMORY, "auto"),)

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
    devices = [os.stat(existing(folder)).st_dev for folder in folders]
    if len(set(devices)) < len(devices):
        raise OptionError(
            f"two tiers are on one device: {', '.join(folders)}", hint="A second copy there gains nothing: name one."
        )
    return wanted


def tiers_by_default(
    file: DataFile, need_bytes: int, options: Options, world: AnyWorld
) -> tuple[tuple[Tier, ...], bool]:
    """The tiers of a dataset for which none are named: one of memory, if the nodes have room for all of it, but none
    for a file of this node that is read once; and whether the file is on its nodes alone. Collective over `world`, the
    same on all ranks."""
    mine = (file.is_local, automatic_bytes()) if world.is_leader else None
    nodes = [node for node in world.allgather(mine) if node is not None]
    local = all(here for here, _ in nodes)
    rooms = [min(room, need_bytes) for _, room in nodes]
    room = min(rooms) if local or not options.peers else sum(rooms)
    if room < need_bytes or (local and options.once):
        if world.rank == 0 and not local:
            _log.info(
                "%s: %s will be read, for which a quarter of the nodes' memory has no room: it comes from the store in "
                "every epoch. Name disks of the nodes in PARIO_TIERS to keep copies there",
                file.path,
                decimal_bytes(need_bytes),
            )
        return (), local
    if world.rank == 0:
        _log.info("%s is kept in the memory of the nodes; PARIO_TIERS= switches that off", file.path)
    return _BY_DEFAULT, local


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
        wanted = _BY_DEFAULT if path is not None else ()
    found = []
    for tier in wanted:
        facts: dict[str, Any] = {"where": tier.where, "quota": str(tier.quota), "problem": ""}
        if tier.where == _MEMORY:
            facts["free"] = machine.memory()[1]
        else:
            folder = here(tier.where)
            where, disk = machine.file_system(folder), os.statvfs(existing(folder))
            facts |= {"where": folder, "file_system": where.type, "free": disk.f_bavail * disk.f_frsize}
            if where.shared and not tier.force:
                facts["problem"] = f"other nodes share its file system ({where.type}): copies there gain nothing"
            elif not os.access(existing(folder), os.W_OK | os.X_OK):
                facts["problem"] = "it is not writable"
        found.append(facts)
    return found


def existing(path: str) -> str:
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
    return machine.memory()[1] // _SHARE_OF_MEMORY


def share_memory(mine: T | None, kind: type[T], grid: Grid, world: AnyWorld) -> T | None:
    """The memory tier of this node's leader; None on all nodes unless all ranks can use theirs. Collective."""
    path = world.node_bcast(mine.path if mine is not None else None)
    memory: T | None = mine
    refused = mine is None and path is None
    if path is not None and not world.is_leader:
        try:
            memory = kind.attached(grid, path)
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
