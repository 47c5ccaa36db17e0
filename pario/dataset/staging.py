"""The tiers of a dataset as one rank sees them: its own, those of the node's service, and those of other nodes."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.dataset.file import DataFile
from pario.dataset.tiers import OpenTiers, same_disks, share_memory, tiers_by_default, wanted_tiers
from pario.errors import ParioError
from pario.fetch.base import Fetcher
from pario.fetch.checked import Checked
from pario.fetch.joined import bases_of
from pario.format.meta import Snapshot
from pario.locate.base import Index
from pario.options import READ_BYTES, Options
from pario.plan.placement import NOBODY, Placement, assign
from pario.plan.selection import Selection
from pario.stats.rank import RankStats
from pario.tiers.asking import CHUNK_BYTES
from pario.tiers.base import AnyTier
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.peers import Peers, Servers
from pario.tiers.pressure import PressureWatch
from pario.tiers.service import Service
from pario.tiers.staged import StagedFetcher
from pario.wire.client import Address

_log = logging.getLogger("pario")

#: Nodes tell each other what they hold if that is at most this many bits: 8 MiB on each rank.
_MOST_BITS = 64 << 20
#: Chunks of a file of which each of several nodes fills its own memory. (Cold, in key order, 4 ranks on 2 nodes of one
#: machine: with CHUNK_BYTES a node whose ranks took 0.8 MB in turn with another's read twice what it needed; 3 KB
#: records came at 0.67 of a py-lmdb loop's rate, with 64 KiB at 0.92 to 1.03; from a disk of 200 MB/s with 64 KiB at
#: 0.9, for 179 MB of 165 were read, so at 1.1.)
_SMALL_CHUNK_BYTES = max(16 << 10, os.sysconf("SC_PAGE_SIZE"))
#: Chunks are made larger, up to CHUNK_BYTES, where there would be more: each batch counts those that are there while a
#: file is copied, which takes 0.1 ms of this many.
_MANY_CHUNKS = 1 << 16
#: This many copies of a chunk other nodes know of, if the quotas have room for them; further ones serve their own node.
_COPIES = 4


@dataclass(eq=False)
class Stage:
    """The tiers of one rank.

    tiers : nearest first; a node's service may have others behind them
    memory : the one in memory, which all ranks of this node share, or None
    watch : lets it shrink, on the rank that fills it
    everywhere : all ranks have tiers
    local : the file is on this node: nobody waits for its chunks (feed/seat.py), and nodes do not share them
    placement, peers, service : None if nodes do not share what they keep; the service only on a node's first rank, if
        no process of its own serves the node
    keeps : bool[chunks]: this node's part of the placement; None without one
    chosen : the records that are read; None: all
    needed : i64[n], the chunks that this node's ranks read in each epoch; None where epochs differ, or it is unknown
    """

    tiers: list[AnyTier]
    memory: MemoryTier | None
    watch: PressureWatch | None
    snapshots: Sequence[Snapshot]
    options: Options
    identity: bytes
    grid: Grid
    everywhere: bool
    local: bool = False
    fetcher: StagedFetcher | None = None
    placement: Placement | None = None
    peers: Peers | None = None
    service: Service | None = None
    keeps: np.ndarray | None = None
    _brings: np.ndarray | None = None
    chosen: Selection | None = None
    _used: np.ndarray | None = None
    needed: np.ndarray | None = None
    _also: int | None = None
    #: whether what keeps its copies is there no more
    is_lost: Callable[[], bool] = lambda: False
    _counting: threading.Lock = field(default_factory=threading.Lock)
    store_reads: int = 0
    store_bytes: int = 0
    stats: RankStats | None = None  # counts the same, since there is a loader

    def count(self, reads: int, nbytes: int) -> None:
        """Count what this rank asked of the store. Any thread."""
        with self._counting:
            self.store_reads += reads
            self.store_bytes += nbytes
        if self.stats is not None:
            self.stats.count_store(reads, nbytes)

    def count_peers(self, **what: int) -> None:
        """See `RankStats.add`. Any thread."""
        if self.stats is not None:
            self.stats.add(**what)

    def through(self, store: Fetcher) -> StagedFetcher:
        """A fetcher that asks the tiers before the store."""
        self.fetcher = StagedFetcher(
            store, self.snapshots, self.tiers, grid=self.grid, read_bytes=READ_BYTES, local=self.local, count=self.count
        )
        if self.peers is not None and self._brings is not None:
            self.fetcher.join(self.peers, self._brings)
        return self.fetcher

    def share(
        self, placement: Placement, peers: Peers, keeps: np.ndarray, brings: np.ndarray, also: int | None = None
    ) -> None:
        """From now on ask other nodes for what this one does not hold.

        keeps, brings : bool[chunks]: what this node keeps, and what of it this process is to bring
        also : a descriptor to close in the end
        """
        self.placement, self.peers, self.keeps, self._brings, self._also = placement, peers, keeps, brings, also
        if self.fetcher is not None:
            self.fetcher.join(peers, brings)

    def meet(self, world: AnyWorld, index: Index | None, checked: Checked | None) -> None:
        """From now on nodes share what they keep, if there are several and the options want that. Collective over
        `world`; raises only what its collectives do.

        index, checked : None if the index is still to be made, through the tiers
        """
        options, grid = self.options, self.grid
        if self.peers is not None or self.local:  # by the node's service
            return
        if not options.peers or world.nodes < 2:
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
            told = world.node, address, room, self.held_bits(world.nodes)
        nodes = sorted((each for each in world.allgather(told) if each is not None), key=lambda each: each[0])
        # Chunks without records are the first ones to have no node. An index that still grows does not know them.
        worth = np.arange(grid.chunks)
        if index is not None and checked is not None and index.is_complete:
            used = self.used(index, checked)
            worth = np.concatenate([used, np.setdiff1d(worth, used)])
        rooms = [room for _, _, room, _ in nodes]
        offers = [room if address is not None else 0 for _, address, room, _ in nodes]
        held = [bits if address is not None else b"" for _, address, _, bits in nodes]
        placement = placed(self.identity, worth, offers, held)
        peers = Peers(
            placement,
            Servers(world.node, [address for _, address, _, _ in nodes], secret),
            serves=world.is_leader,
            identity=self.identity,
            grid=grid,
            count=lambda nbytes: self.count_peers(peer_bytes=nbytes),
        )
        keeps = kept_chunks(placement, world.node, worth, rooms[world.node])
        # The other ranks of a node leave its chunks to the first one.
        self.share(placement, peers, keeps, keeps if world.is_leader else np.zeros(grid.chunks, bool))

    def held_bits(self, nodes: int) -> bytes:
        """What an earlier job has left on this node's disks, a bit per chunk; empty if that is nothing, or if this many
        nodes would have too much to tell."""
        held = self.held()
        return np.packbits(held).tobytes() if held.any() and nodes * self.grid.chunks <= _MOST_BITS else b""

    def held(self) -> np.ndarray:
        """bool[chunks]: what the tiers hold."""
        return np.asarray(np.any([np.zeros(self.grid.chunks, bool), *(tier.held() for tier in self.tiers)], axis=0))

    def _serve(self, secret: bytes, world: AnyWorld) -> Service | None:
        assert self.fetcher is not None  # the node's first rank has opened the file
        try:
            return Service(
                {self.identity: self.fetcher}.get,
                secret,
                threads=self.options.usual_inflight,
                clients=world.size,
                count=lambda nbytes: self.count_peers(served_bytes=nbytes),
            )
        except (OSError, ParioError) as e:
            _log.warning("node %d keeps nothing for other nodes: %s", world.node, e)
            return None

    def used(self, index: Index, checked: Checked) -> np.ndarray:
        """i64[n], the chunks that hold records that are read. The index must be complete."""
        if self._used is None:
            self._used = used_chunks(self.grid, index, checked, self.chosen)
        return self._used

    @property
    def is_plain(self) -> bool:
        """True if chunks may be read through the file's descriptors, which nobody watches."""
        return self.fetcher is not None and not self.fetcher.watched

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
        held = self.held()
        # What other processes keep they bring as soon as anybody needs it.
        if self.placement is not None and not self.is_lost():
            assert self._brings is not None  # set together
            assert self.peers is not None
            owners = self.placement.owners[used]
            kept = (owners != NOBODY).any(axis=1) | held[used]
            mine = (owners[:, 0] == self.peers.node) & self._brings[used]  # for which this process asks the store
            return bool((held[used] | ~mine).all() and kept.all())
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
        if self.watch is not None:
            self.watch.close()
        for tier in self.tiers:
            tier.close()
        fetcher, self.fetcher = self.fetcher, None  # it refers to this: else mappings wait for the garbage collector
        if fetcher is not None:
            fetcher.leave(0)
        also, self._also = self._also, None
        if also is not None:
            os.close(also)


def used_chunks(grid: Grid, index: Index, checked: Checked, chosen: Selection | None) -> np.ndarray:
    """i64[n], the chunks that hold these records (None: all), and what their checks need. The index must be complete.
    """
    if chosen is None:
        extents = index.extents
        offsets, nbytes = np.ascontiguousarray(extents["offset"]), np.ascontiguousarray(extents["nbytes"])
        return grid.chunks_at(*checked.spans(offsets, nbytes))
    held = np.zeros(grid.chunks, bool)
    for start, stop in chosen.pieces():
        offsets, nbytes = index.extents_of(chosen.ids(np.arange(start, stop)))
        held[grid.chunks_at(*checked.spans(offsets, nbytes))] = True
    return np.flatnonzero(held)


def placed(identity: bytes, worth: np.ndarray, rooms: Sequence[int], held_bits: Sequence[bytes]) -> Placement:
    """`assign` the chunks of this state of a dataset. held_bits : of each node, as of `Stage.held_bits`"""
    held = None
    if any(held_bits):
        held = np.zeros((len(rooms), len(worth)), bool)
        for row, bits in zip(held, held_bits, strict=True):
            row[:] = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(row)) if bits else False
    return assign(int.from_bytes(identity[:8], "little"), worth, rooms, _COPIES, held=held)


def kept_chunks(placement: Placement, node: int, worth: np.ndarray, room: int) -> np.ndarray:
    """bool[chunks]: what a node keeps: its part of the placement, and for itself what else it has room for.

    worth : i64[chunks], the chunks, the most useful ones first; room : in chunks
    """
    keeps = np.zeros(len(worth), bool)
    keeps[placement.kept_by(node)] = True
    others = worth[~keeps[worth]]
    keeps[others[: max(0, room - int(keeps.sum()))]] = True
    return keeps


def open_stage(
    file: DataFile,
    world: AnyWorld,
    snapshots: Sequence[Snapshot],
    options: Options,
    *,
    by_default: bool,
    need: Callable[[Grid], int] | None = None,
    serves: bool = False,
) -> Stage | None:
    """Open the tiers that the options or PARIO_TIERS name, or those by default; None if there are to be none, or if
    none can be used.

    by_default : there may be tiers that nobody names
    need : how many chunks of the grid will be read; None: all
    serves : processes of other jobs will read the memory tier

    From then on `file` reads through them. Collective over `world`. All ranks raise, OptionError where it
    was noticed, if tiers cannot be meant; a tier that its storage refuses is left out, with a warning.
    """
    with together(world, "looking at the tiers"):
        wanted = wanted_tiers(options) if world.rank == 0 else ()
    sizes = [snapshot.file_bytes for snapshot in snapshots]
    wanted, file_bytes = world.bcast((wanted, int(bases_of(sizes)[-1]) + sizes[-1]))
    local, grid = False, Grid(file_bytes, CHUNK_BYTES)
    if wanted is None and by_default:
        chunks = grid.chunks if need is None else need(grid)
        wanted, local = tiers_by_default(file, chunks * grid.chunk_bytes, options, world)
        if local and world.nodes > 1:  # what lies between this node's records is of no use to it
            small = 1 << (file_bytes // _MANY_CHUNKS).bit_length()
            grid = Grid(file_bytes, min(max(_SMALL_CHUNK_BYTES, small), CHUNK_BYTES))
    if not wanted:
        return None
    with together(world, "looking at the tiers"):
        identity = file.identity(snapshots) if world.rank == 0 else b""
    identity = world.bcast(identity)
    mine = OpenTiers()
    try:
        with together(world, "opening the tiers"):
            mine.open(wanted, identity, grid, file.path, fills=world.is_leader)
        memory = share_memory(mine.memory, MemoryTier, grid, world)
    except BaseException:
        mine.close()
        raise
    if memory is None:
        mine.close_memory()
    disks = same_disks(mine.disks, world)
    tiers: list[AnyTier] = [*([memory] if memory else []), *disks]
    everywhere = bool(world.allreduce_min(bool(tiers)))
    if not tiers:
        return None
    stage = Stage(tiers, memory, mine.watch, snapshots, options, identity, grid, everywhere=everywhere)
    stage.local = local
    file.read_through(stage.through)
    return stage
