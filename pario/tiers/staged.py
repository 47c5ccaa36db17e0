"""A fetcher that asks the tiers of this node first, then other nodes, and the store for what nobody has.

    read --> memory tier --> disk tier --> other nodes --> store
                 <---------------<-----------<-----------      a chunk is kept in every tier that it passes and that
                                                               has room, if this node is to keep it
A chunk is read whole, and once, as long as any tier has room; a rank that needs it meanwhile waits for that. Of other
chunks exactly the bytes that were asked for are read. What comes from the store is compared with the
snapshot's meta page before anybody gets or keeps it, so that bytes out of a tier need no further look at the store.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from pario.buffers import Buffers
from pario.fetch.base import Fetcher, OneFile
from pario.fetch.pool import STOP_S
from pario.fetch.snapshot import Counter, SharedLook
from pario.format.meta import Snapshot
from pario.records import EXTENT
from pario.threads import Workers
from pario.tiers.base import AnyTier
from pario.tiers.grid import Grid
from pario.tiers.peers import Peers
from pario.wire.frames import SENDFILE_BYTES, Part

#: Reads of whole chunks are multiples of this, for stores that want aligned ones.
_ALIGN = 4096
#: Out of a disk of this node, in reads of this size, if this fraction of the file is there. (Key order of 197 KB
#: records next to other work, 5 epochs each: reads of 1 MiB 2.3 to 3.3 s, 2.2 to 2.9 s of a processor; of 4 MiB 1.8 to
#: 1.9 s, 1.6 to 1.9 s.) A chunk that is missing costs the others of its read its round trip.
_LONG_BYTES, _MOSTLY = 4 << 20, 0.95

#: Threads that ask others for chunks. (Of 16 too often all wait for chunks that others have yet to read: 0.92 of a
#: store of 20 ms and 200 MB/s in "global" order on 2 nodes; 32 0.94, 64 0.94.)
ASKERS = 32
#: Threads that look whether the file has changed, and put away what the store has given.
_LANDERS = 8
#: Bytes of chunks that are being read from the store or wait for such a look; more are not begun. And the least memory
#: of one: a large page.
_LANDING_BYTES, _LEAST_BYTES = 256 << 20, 2 << 20

#: done(error)
Done = Callable[[BaseException | None], object]

_lent = threading.local()
#: The number of the file where there is one.
_THE_ONE = np.zeros(1, np.int64)


class StagedFetcher(Fetcher):
    """Reads of a dataset through the tiers of this node.

    store : has the data file open, and is closed with this fetcher
    snapshots : the state of each file that is read
    tiers : the nearest one first, all of the same grid
    grid : of the data file
    read_bytes : the longest single read of the store
    local : the file is on this node: what no tier has is read as it is asked for, and others bring the chunks
    count(reads, bytes) : called for what was read from the store, by any thread

    asks : another process reads the store for this one; peers : other nodes that may have chunks
    askers : threads for `bring` of what `is_others`: they wait, and those that read must not

    Raises SnapshotError, besides what the store raises.
    """

    staged = True

    def __init__(
        self,
        store: Fetcher,
        snapshots: Sequence[Snapshot],
        tiers: Sequence[AnyTier],
        *,
        grid: Grid,
        read_bytes: int,
        local: bool = False,
        count: Counter,
    ) -> None:
        self.path, self.nbytes, self.align = store.path, store.nbytes, store.align
        self.limited, self.watched = store.limited, store.watched
        self.tiers = tuple(tiers)
        self.grid = grid
        self._count = count
        self._local = local
        self._store = store
        pool = Workers("pario-chunks", 0)
        self.askers, landers, self._reader = self._lanes = pool.lane(ASKERS), pool.lane(_LANDERS), pool.lane(1)
        looks = zip(store.files, snapshots, strict=True)
        self._looks = [SharedLook(part, snapshot, landers, count) for part, snapshot in looks]
        self._landing = threading.Semaphore(max(1, _LANDING_BYTES // max(grid.chunk_bytes, _LEAST_BYTES)))
        self._scratch = Buffers(grid.chunk_bytes)
        # Of each file: reads that have taken bytes past the tiers, and how many of them a look has followed.
        self._direct, self._looked = np.zeros(len(self._looks), np.int64), np.zeros(len(self._looks), np.int64)
        self._read_bytes = -(-read_bytes // _ALIGN) * _ALIGN
        self.peers: Peers | None = None
        self.asks = any(tier.asks for tier in tiers)
        self._keeps: np.ndarray | None = None
        self._lock, self._last = threading.Lock(), threading.local()
        self._on_their_way: dict[int, list[Done]] = {}  # whom to call
        self._had = np.zeros(grid.chunks, bool)  # chunks that were put into a tier

    def join(self, peers: Peers, keeps: np.ndarray) -> None:
        """From now on ask other nodes before the store, and bring only these chunks (bool[chunks])."""
        self.peers, self._keeps = peers, keeps

    @property
    def long_bytes(self) -> int:  # type: ignore[override]
        held = np.any([tier.held() for tier in self.tiers], axis=0)
        return _LONG_BYTES if held.mean() >= _MOSTLY else 0

    @property
    def files(self) -> tuple[OneFile, ...]:
        return self._store.files

    def pread(self, offset: int, nbytes: int) -> bytes:
        return self._store.pread(offset, nbytes)

    def announce(self, operations: int) -> None:
        self._store.announce(operations)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self._store.files[0].fileno()  # raises ClosedError, whatever the tiers hold
        offsets, nbytes, starts = _pieces(Grid(self.nbytes, self.grid.chunk_bytes), reads, starts, out.nbytes)
        extents = _extents(offsets, np.minimum(nbytes, self.nbytes - offsets))
        left = np.arange(len(extents))
        left = _take(self.tiers[:1], extents, out, starts, left)
        self._last.missed = len(left) if self.tiers and self.tiers[0].near else len(extents)
        if len(left) and not self._local:
            self._bring_all(offsets[left] // self.grid.chunk_bytes)
            left = _take(self.tiers, extents, out, starts, left)
        if len(left) and self.peers is not None:
            left = left[~self.peers.read(extents[left], out, starts[left])]
        if len(left):
            reads, starts = _joined(offsets[left], nbytes[left], starts[left])
            self._store.read(reads, out, starts)
            self._taken(reads)

    def missed(self, reads: int) -> int:
        return min(reads, self._last.missed)

    def _taken(self, reads: np.ndarray) -> None:
        """The store has given these bytes to the caller, who will `look`."""
        numbers = np.unique(self._store.file_of(reads["offset"])) if len(self._looks) > 1 else _THE_ONE
        with self._lock:
            self._direct[numbers] += 1
        self._count(len(reads), int(reads["nbytes"].sum()))

    def look(self) -> None:
        """(A group of reads has one look, and not each of its parts: 121 MB from a store of 20 ms and 100 MB/s, a
        memory tier without room, 4 epochs each: 1.30 to 1.57 s; so 1.14 to 1.37 s.)"""
        direct = self._direct.copy()
        for number in np.flatnonzero(direct > self._looked).tolist():
            self._looks[number].check_alone()
            self._looked[number] = direct[number]  # of a thread that was overtaken: then there is one look too many

    def read_now(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        if not self._local:  # chunks are brought whole
            return super().read_now(reads, out, starts)
        there = self._store.read_now(reads, out, starts)
        self._taken(reads[there])
        return there

    def _bring_all(self, chunks: np.ndarray) -> None:
        """Those that this process is to bring, in this order."""
        if self._keeps is not None:
            chunks = chunks[self._keeps[chunks]]
        arrivals: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        wanted = list(dict.fromkeys(chunks.tolist()))
        main = threading.current_thread() is threading.main_thread()  # Ctrl-C must not leave a chunk half brought
        for chunk in wanted:
            if main:
                self._reader.run(partial(self.bring, chunk, arrivals.put))
            else:
                self.bring(chunk, arrivals.put)
        for error in filter(None, [arrivals.get() for _ in wanted]):
            raise error

    def lend(self, extents: np.ndarray) -> tuple[np.ndarray, list[Part]]:
        """What this node's tiers have of these extents (EXTENT[n], each within one chunk), for another process:
        bool[n], and the bytes of those, one after another, which are valid until this thread lends again."""
        nbytes = extents["nbytes"]
        if len(extents) and nbytes.mean() >= SENDFILE_BYTES:
            columns = zip(extents["offset"].tolist(), nbytes.tolist(), strict=True)
            parts = [next(filter(None, (tier.lend(*each) for tier in self.tiers)), None) for each in columns]
            return np.array([part is not None for part in parts], bool), [part for part in parts if part is not None]
        ends = np.cumsum(nbytes)
        memory: np.ndarray | None = getattr(_lent, "memory", None)
        if memory is None or len(memory) < nbytes.sum():
            memory = _lent.memory = np.empty(int(nbytes.sum()), np.uint8)
        missing = _take(self.tiers, extents, memory, ends - nbytes, np.arange(len(extents)))
        here = np.ones(len(extents), bool)
        here[missing] = False
        bounds = np.flatnonzero(np.diff(here, prepend=False, append=False)).tolist()  # of the runs that are here
        cuts = np.concatenate([[0], ends]).tolist()
        return here, [Part(memory[cuts[a] : cuts[b]]) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]

    def bring(self, chunk: int, done: Done, *, ask_peers: bool = True) -> int:
        """Bring a chunk into the nearest tier that has room, unless that one or a nearer one has it, or others are at
        it. Returns the bytes that the store was asked for; raises nothing.

        done(error) : called once, by any thread, when it is here, there was no room, or it could not be read; the error
            is a ReadError, SnapshotError or ClosedError. It may be called before this returns, or long after: a look at
            the file follows the read of the store, and this thread does not wait for it
        ask_peers : other nodes may have it, or are to bring it
        """
        with self._lock:
            waiting = self._on_their_way.setdefault(chunk, [])
            waiting.append(done)
            if len(waiting) > 1:
                return 0
        try:
            for number, tier in enumerate(self.tiers):
                if tier.has(chunk) or (not tier.is_full and tier.ask(chunk)):
                    break
                if not tier.is_full and not tier.asks:
                    return self._load(chunk, self.tiers[number:], ask_peers)
        except Exception as e:  # no memory
            self._arrived(chunk, e)
            return 0
        self._arrived(chunk, None)
        return 0

    def _arrived(self, chunk: int, error: BaseException | None) -> None:
        with self._lock:
            waiting = self._on_their_way.pop(chunk, [])
        for done in waiting:
            done(error)

    def _load(self, chunk: int, tiers: Sequence[AnyTier], ask_peers: bool) -> int:
        """Read a chunk from these tiers but the first one, from another node or from the store; all of them are to keep
        it. Returns the bytes of the store."""
        memory = self._scratch.take(self.grid.chunk_bytes)
        offset, nbytes = self.grid.span(chunk)
        data, claims = memory[:nbytes], ExitStack()
        land = partial(self._land, chunk, tiers, memory, claims)
        try:
            near = any(tier.read(offset, data) for tier in tiers[1:])
            if not near and ask_peers and self.peers is not None and self.is_others(chunk):
                whole = _extents(np.array([offset]), np.array([nbytes]))
                near = bool(self.peers.read(whole, memory, np.zeros(1, np.int64), keeps=True).all())
            if not near:
                # Other processes wait only for a read of the store: one that waits for other nodes could wait in a
                # circle.
                for tier in tiers:
                    claims.enter_context(tier.bringing(chunk))
                if not any(tier.read(offset, data) for tier in tiers):  # which another process has just brought
                    claims.enter_context(self._landing)
                    size = -(-nbytes // self.align) * self.align
                    begins = np.arange(0, size, self._read_bytes)
                    reads = _extents(offset + begins, np.minimum(self._read_bytes, size - begins))
                    self._store.read(reads, memory, begins)
                    self._count(len(reads), size)
                    self._looks[int(self._store.file_of(reads["offset"])[0])].after(land)  # a chunk lies in one file
                    return size
        except Exception as e:
            land(e)
        else:
            land(None)
        return 0

    def is_others(self, chunk: int) -> bool:
        """True if another process or node is to bring this chunk, so that bringing it here is asking for it."""
        # Others have what this node is responsible for only if it had it itself, and gave it back.
        peers = self.peers
        mine = peers is None or (not self._had[chunk] and peers.is_responsible(chunk))
        return self.asks or not mine

    def _land(
        self, chunk: int, tiers: Sequence[AnyTier], memory: np.ndarray, claims: ExitStack, error: BaseException | None
    ) -> None:
        """Keep a chunk that is right, unless there is an error."""
        try:
            with claims:
                if error is None:
                    self._had[chunk] = True
                    for tier in tiers:
                        if not tier.is_full:
                            tier.put(chunk, memory[: self.grid.span(chunk)[1]])
        except BaseException as e:
            error = e
        self._scratch.give(memory)
        self._arrived(chunk, error)

    def leave(self, limit_s: float = STOP_S) -> bool:
        """Its own threads end; returns whether they have, within `limit_s` seconds. The store stays open."""
        end = time.monotonic() + limit_s
        return all([lane.close(max(0.0, end - time.monotonic())) for lane in self._lanes])

    def close(self) -> None:
        if self.leave():  # else the last one who reads it closes it
            self._store.close()


def _take(
    tiers: Sequence[AnyTier], extents: np.ndarray, out: np.ndarray, starts: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """Read from these tiers; returns which numbers of `left` none of them has."""
    for tier in tiers:
        left = left[~tier.read_many(extents[left], out, starts[left])]
        if not len(left):
            break
    return left


def _pieces(grid: Grid, reads: np.ndarray, starts: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The reads, cut where chunks end: (offsets, bytes, starts), i64[n]. Raises IndexError.

    The last piece of a read may reach beyond the end of the file, if the store's alignment wants that.
    """
    offsets, nbytes, starts = reads["offset"], reads["nbytes"], np.asarray(starts)
    ends = starts + nbytes
    if len(reads) and (starts.min() < 0 or ends.max() > room):
        raise IndexError(f"reads end at byte {ends.max()} of a buffer of {room}")
    size = grid.chunk_bytes
    first, last = offsets // size, (np.minimum(offsets + nbytes, grid.file_bytes) - 1) // size
    counts = np.where(nbytes > 0, last - first + 1, 0)
    of = np.repeat(np.arange(len(reads)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.where(number == 0, offsets[of], (first[of] + number) * size)
    stops = np.where(number == counts[of] - 1, offsets[of] + nbytes[of], (first[of] + number + 1) * size)
    return begins, stops - begins, starts[of] + begins - offsets[of]


def _joined(offsets: np.ndarray, nbytes: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(EXTENT[m], starts i64[m]): neighbours in the file that are also neighbours in memory as one."""
    follows = (offsets[1:] == offsets[:-1] + nbytes[:-1]) & (starts[1:] == starts[:-1] + nbytes[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return _extents(offsets[first], np.add.reduceat(nbytes, first)), starts[first]


def _extents(offsets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    extents = np.empty(len(offsets), EXTENT)
    extents["offset"], extents["nbytes"] = offsets, nbytes
    return extents
