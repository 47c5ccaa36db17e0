"""Opens the tiers of a dataset on every node: which ones, of which size, and for which state of the file."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from dataclasses import replace
from typing import Any

import numpy as np

from pario import machine
from pario.comm.base import AnyWorld, together
from pario.comm.sockets import Address
from pario.dataset.file import DataFile
from pario.errors import OptionError, ParioError
from pario.fetch.base import Fetcher
from pario.fetch.checked import Checked
from pario.fetch.direct import DirectFetcher
from pario.format.meta import Snapshot
from pario.locate.base import Index
from pario.options import MiB, Options, Tier, read_tiers
from pario.plan.placement import NOBODY, Placement, assign
from pario.stage.base import AnyTier
from pario.stage.disk import DiskTier
from pario.stage.grid import Grid
from pario.stage.memory import MemoryTier
from pario.stage.peers import Peers
from pario.stage.pressure import PressureWatch
from pario.stage.service import Service
from pario.stage.staged import StagedFetcher
from pario.stats.rank import RankStats
from pario.text import decimal_bytes

__all__ = ["Stage", "look_at_tiers", "open_stage"]

_log = logging.getLogger("pario")

#: One chunk is one read, which FUSE and many network file systems carry in one request (see Options.read_bytes).
_CHUNK_BYTES = MiB

#: An automatic memory tier takes at most this part of the memory that is available.
_SHARE_OF_MEMORY = 4

#: Nodes tell each other what they hold if that is at most so many bits: 8 MiB on each rank.
_MOST_BITS = 64 << 20
#: So many copies of a chunk other nodes know of, if the quotas have room for them; further ones serve their own node.
_COPIES = 4

_MEMORY = "memory"
#: a disk's automatic quota: the tier's floor of free space is the limit
_UNLIMITED = 1 << 62


class Stage:
    """The tiers of one rank.

    tiers : nearest first
    memory : the one in memory, which all ranks of this node share, or None
    watch : lets it shrink, on the rank that fills it
    everywhere : all ranks have tiers
    placement, peers, service : None if nodes do not share what they keep; the service only on a node's first rank
    keeps : bool[chunks]: this node's part of the placement; None without one
    """

    def __init__(
        self,
        tiers: list[AnyTier],
        memory: MemoryTier | None,
        watch: PressureWatch | None,
        snapshot: Snapshot,
        options: Options,
        identity: bytes,
        *,
        everywhere: bool,
    ) -> None:
        self.everywhere = everywhere
        self.tiers = tiers
        self.memory = memory
        self.fetcher: StagedFetcher | None = None
        self._snapshot = snapshot
        self._options = options
        self._identity = identity
        self.placement: Placement | None = None
        self.peers: Peers | None = None
        self.service: Service | None = None
        self.keeps: np.ndarray | None = None
        self._brings: np.ndarray | None = None
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

    def count_peers(self, **what: int) -> None:
        """See `RankStats.count_peers`. Any thread."""
        if self.stats is not None:
            self.stats.count_peers(**what)

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
        if self.peers is not None and self._brings is not None:
            self.fetcher.join(self.peers, self._brings)
        return self.fetcher

    def meet(self, world: AnyWorld, index: Index, checked: Checked) -> None:
        """From now on nodes share what they keep, if there are several and the options want that. Collective over
        `world`; raises only what its collectives do."""
        options, grid = self._options, self.tiers[0].grid
        # A node's readers ask each other, too: a chunk that two of them need is read once.
        if not options.peers or (world.nodes < 2 and min(options.readers_per_node, world.size) < 2):
            return
        if not self.everywhere:
            if world.rank == 0:
                _log.warning("nodes do not share their copies: some of them have no tier")
            return
        secret = world.bcast(secrets.token_bytes(32) if world.rank == 0 else None)
        told: tuple[int, Address | None, int, bytes] | None = None
        if world.is_leader:
            self.service = self._serve(secret, world)
            room = max(tier.room() for tier in self.tiers)
            # Others cannot ask a node that does not serve: what it keeps is its own affair.
            address = self.service.address if self.service is not None else None
            told = world.node, address, room, self._held_bits() if world.nodes * grid.chunks <= _MOST_BITS else b""
        nodes = sorted((each for each in world.allgather(told) if each is not None), key=lambda each: each[0])
        # Chunks without records are the first ones to have no node. An index that still grows does not know them.
        worth = np.arange(grid.chunks)
        if index.is_complete:
            used = self.used(index, checked)
            worth = np.concatenate([used, np.setdiff1d(worth, used)])
        rooms = [room for _, _, room, _ in nodes]
        offers = [room if address is not None else 0 for _, address, room, _ in nodes]
        held = np.zeros((len(nodes), grid.chunks), bool)
        for number, (_, address, _, bits) in enumerate(nodes):
            if bits and address is not None:
                held[number] = np.unpackbits(np.frombuffer(bits, np.uint8), count=grid.chunks)
        self.placement = assign(
            int.from_bytes(self._identity[:8], "little"),
            worth,
            offers,
            _COPIES if options.copies == "auto" else int(options.copies),
            held=held,
        )
        self.peers = Peers(
            self.placement,
            world.node,
            [address for _, address, _, _ in nodes],
            serves=world.is_leader,
            secret=secret,
            identity=self._identity,
            grid=grid,
            count=lambda nbytes: self.count_peers(came=nbytes),
        )
        self.keeps = np.zeros(grid.chunks, bool)
        self.keeps[self.placement.kept_by(world.node)] = True
        if options.copies == "auto" or not offers[world.node]:  # what else it has room for it keeps for itself
            others = worth[~self.keeps[worth]]
            self.keeps[others[: max(0, rooms[world.node] - int(self.keeps.sum()))]] = True
        # The other ranks of a node leave its chunks to the first one.
        self._brings = self.keeps if world.is_leader else np.zeros(grid.chunks, bool)
        if self.fetcher is not None:
            self.fetcher.join(self.peers, self._brings)

    def _held_bits(self) -> bytes:
        """What an earlier job has left on this node's disks, a bit per chunk; empty if that is nothing."""
        held = np.zeros(self.tiers[0].grid.chunks, bool)
        for tier in self.tiers:
            held |= tier.held()
        return np.packbits(held).tobytes() if held.any() else b""

    def _serve(self, secret: bytes, world: AnyWorld) -> Service | None:
        assert self.fetcher is not None  # the node's first rank has opened the file
        try:
            return Service(
                self.fetcher,
                self._identity,
                secret,
                threads=self._options.inflight,
                clients=world.size,
                network=True,
                count=lambda nbytes: self.count_peers(served=nbytes),
            )
        except (OSError, ParioError) as e:
            _log.warning("node %d keeps nothing for other nodes: %s", world.node, e)
            return None

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
        memory, used = self.memory, self.used(index, checked)
        if memory is None or len(used) * memory.grid.chunk_bytes > memory.budget:
            return False
        return self.keeps is None or bool(self.keeps[used].all())

    def is_complete(self, index: Index, checked: Checked) -> bool:
        """True if reading records sends no request to the store."""
        if not index.is_complete:
            return False
        used = self.used(index, checked)
        held = np.zeros(self.tiers[0].grid.chunks, bool)
        for tier in self.tiers:
            held |= tier.held()
        if self.placement is not None:  # what other nodes keep they bring as soon as anybody needs it
            assert self.keeps is not None  # set together
            kept = (self.placement.owners[used] != NOBODY).any(axis=1)
            return bool((held | ~self.keeps)[used].all() and kept.all())
        return bool(held[used].all())

    def state(self) -> dict[str, Any]:
        """What this rank's tiers hold and did, for `Loader.stats`."""
        tiers = [
            {"name": tier.name, "held_bytes": int(tier.held().sum()) * tier.grid.chunk_bytes, **vars(tier.counts)}
            for tier in self.tiers
        ]
        state: dict[str, Any] = {"tiers": tiers, "store_reads": self.store_reads, "store_bytes": self.store_bytes}
        if self.peers is not None:
            served = self.service.served_bytes if self.service is not None else 0
            state["peers"] = {**vars(self.peers.counts), "served_bytes": served}
        return state

    def part(self, limit_s: float = 1.0) -> None:
        """Answer other nodes no more, and wait for none. Idempotent."""
        if self.peers is not None:
            self.peers.close()
        if self.service is not None:
            self.service.close(limit_s)

    def close(self) -> None:
        """Idempotent. Copies on disks stay, those in memory until the last rank of the node has closed them."""
        self.part(0)
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
            mine.open(wanted, identity, grid, file.path, fills=world.is_leader)
        memory = _share_memory(mine.memory, grid, world)
    except BaseException:
        mine.close()
        raise
    if memory is None:
        mine.close_memory()
    disks = _same_disks(mine.disks, world)
    tiers: list[AnyTier] = [*([memory] if memory else []), *disks]
    everywhere = bool(world.allreduce_min(bool(tiers)))
    if not tiers:
        return None
    stage = Stage(tiers, memory, mine.watch, snapshot, options, identity, everywhere=everywhere)
    file.read_through(stage.through)
    return stage


class _Opened:
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
                self.disks += _open_disk(_here(tier), identity, grid, path)

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
    folders = [_here(tier).where for tier in wanted if tier.where != _MEMORY]
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


def look_at_tiers() -> list[dict[str, Any]]:
    """What PARIO_TIERS means on this node: per tier where, quota, free (bytes) and problem ("" if it can be used), and
    for folders file_system. Makes nothing."""
    try:
        wanted = _wanted(Options())
    except OptionError as e:
        return [{"where": "PARIO_TIERS", "quota": "", "free": 0, "problem": str(e)}]
    found = []
    for tier in wanted:
        facts: dict[str, Any] = {"where": tier.where, "quota": str(tier.quota), "problem": ""}
        if tier.where == _MEMORY:
            facts["free"] = machine.memory(swap=False)[1]
        else:
            folder = _here(tier).where
            where, disk = machine.file_system(folder), os.statvfs(_existing(folder))
            facts |= {"where": folder, "file_system": where.type, "free": disk.f_bavail * disk.f_frsize}
            if where.shared and not tier.force:
                facts["problem"] = f"other nodes share its file system ({where.type}): copies there gain nothing"
            elif not os.access(_existing(folder), os.W_OK | os.X_OK):
                facts["problem"] = "it is not writable"
        found.append(facts)
    return found


def _here(tier: Tier) -> Tier:
    """The tier on this node: its folder may name variables, as $TMPDIR. Raises OptionError."""
    where = os.path.expandvars(tier.where)
    if "$" in where:
        raise OptionError(f"tier {tier.where!r} names a variable that is not set on this node")
    return replace(tier, where=where)


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
        budget = min(most, machine.memory(swap=False)[1] // _SHARE_OF_MEMORY)
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


def _same_disks(mine: list[DiskTier], world: AnyWorld) -> list[DiskTier]:
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
        quota = machine.memory(swap=False)[1] // _SHARE_OF_MEMORY if found.kind == "memory" else _UNLIMITED
        quota = max(quota, grid.chunk_bytes)
    try:
        return [DiskTier(tier.where, identity, grid, quota, path=path)]
    except OSError as e:
        _log.warning("tier %s is left out: %s", tier.where, e)
        return []
