"""A fetcher that asks the tiers of this node first, then other nodes, and the store for what nobody has.

    read --> memory tier --> disk tier --> other nodes --> store
                 <---------------<-----------<-----------      a chunk is kept in every tier that it passes and that
                                                               has room, if this node is to keep it
A chunk is read whole, and once, as long as any tier has room; whoever needs it meanwhile waits for that read. Of other
chunks exactly the bytes that were asked for are read. What comes from the store is compared with the
snapshot's meta page before anybody gets or keeps it, so that bytes out of a tier need no further look at the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from pario.comm.sockets import Part
from pario.fetch.base import Fetcher, OpenFile
from pario.fetch.snapshot import check_snapshot
from pario.format.meta import Snapshot
from pario.records import EXTENT
from pario.stage.base import AnyTier
from pario.stage.grid import Grid
from pario.stage.peers import Peers, Piece

__all__ = ["StagedFetcher"]

#: Reads of whole chunks are multiples of this, for stores that want aligned ones.
_ALIGN = 4096
#: Whether the page cache holds a chunk is asked at each of so many bytes, up to the first that it does not hold.
_PROBE = 64 << 10


class StagedFetcher(Fetcher):
    """Reads of one data file through the tiers of this node.

    store : has the data file open, and is closed with this fetcher
    snapshot : the state of the file that is read
    tiers : the nearest one first, at least one, all of the same grid
    past_cache : has the same file open, bypasses the page cache, and is closed with this fetcher. It reads the chunks
        that the page cache does not hold: they need not lie in memory twice
    read_bytes : the longest single read of the store
    count(reads, bytes) : called for what was read from the store, by any thread

    Raises SnapshotError, besides what the store raises.
    """

    staged = True

    def __init__(
        self,
        store: Fetcher,
        snapshot: Snapshot,
        tiers: Sequence[AnyTier],
        *,
        past_cache: Fetcher | None = None,
        read_bytes: int,
        count: Callable[[int, int], None],
    ) -> None:
        self.path, self.nbytes, self.align = store.path, store.nbytes, store.align
        self.tiers = tuple(tiers)
        self.grid: Grid = tiers[0].grid
        self._count = count
        self._store = store
        self._snapshot = snapshot
        self._past_cache = past_cache
        self._read_bytes = -(-read_bytes // _ALIGN) * _ALIGN
        self._peers: Peers | None = None
        self._keeps: np.ndarray | None = None
        self._lock = threading.Lock()
        self._on_their_way: dict[int, threading.Event] = {}

    def join(self, peers: Peers, keeps: np.ndarray) -> None:
        """From now on ask other nodes before the store, and bring only these chunks (bool[chunks])."""
        self._peers, self._keeps = peers, keeps

    @property
    def files(self) -> tuple[OpenFile, ...]:
        return self._store.files

    def pread(self, offset: int, nbytes: int) -> bytes:
        return self._store.pread(offset, nbytes)

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self._store.files[0].fileno()  # raises ClosedError, whatever the tiers hold
        missing: list[Piece] = []
        columns = (reads["offset"].tolist(), reads["nbytes"].tolist(), np.asarray(starts).tolist())
        for offset, nbytes, start in zip(*columns, strict=True):
            if start < 0 or start + nbytes > out.nbytes:
                raise IndexError(f"reads end at byte {start + nbytes} of a buffer of {out.nbytes}")
            memory = out[start : start + min(nbytes, self.nbytes - offset)]
            if not self.tiers[0].read(offset, memory):
                missing += self._read(offset, memory, start, offset + nbytes)
        if missing and self._peers is not None:
            missing = self._peers.read(missing, out)
        if missing:
            rest = np.array(_joined(missing), np.int64)
            self._read_store(_extents(rest[:, 0], rest[:, 1]), out, rest[:, 2], self._store)

    def _read(self, offset: int, out: np.ndarray, start: int, end: int) -> Iterator[Piece]:
        """Fill `out` from the tiers; yields what they neither have nor are to bring.

        end : of the read; beyond the end of the file if the store's alignment wants that
        """
        at, last = offset, offset + len(out)
        while at < last:
            chunk = at // self.grid.chunk_bytes
            until = min(last, (chunk + 1) * self.grid.chunk_bytes)
            if (self._keeps is None or self._keeps[chunk]) and not all(tier.is_full for tier in self.tiers):
                self.bring(chunk)
            part = out[at - offset : until - offset]
            if not any(tier.read(at, part) for tier in self.tiers):
                yield Piece(at, (end if until == last else until) - at, start + at - offset)
            at = until

    def lend(self, offset: int, nbytes: int) -> Part | None:
        """Bytes within one chunk out of this node's tiers, for another process; None if no tier has them."""
        return next((part for tier in self.tiers if (part := tier.lend(offset, nbytes)) is not None), None)

    def bring(self, chunk: int, *, ask_peers: bool = True) -> None:
        """Bring a chunk into the nearest tier that has room, unless that one or a nearer one has it. If others are at
        it, wait for them. Raises ReadError, SnapshotError, ClosedError.

        ask_peers : other nodes may have it, or are to bring it
        """
        with self._lock:
            others = self._on_their_way.get(chunk)
            if others is None:
                self._on_their_way[chunk] = threading.Event()
        if others is not None:
            others.wait()
            return
        try:
            for k, tier in enumerate(self.tiers):
                load = partial(self._load, chunk, k + 1, ask_peers)
                if tier.has(chunk) or (not tier.is_full and tier.fill(chunk, load)):
                    break
        finally:
            with self._lock:
                self._on_their_way.pop(chunk).set()

    def _load(self, chunk: int, first: int, ask_peers: bool, out: np.ndarray) -> None:
        """Read a chunk from the tiers behind the first ones, from another node or from the store, then keep it in these
        tiers, too."""
        offset, nbytes = self.grid.span(chunk)
        if any(tier.read(offset, out[:nbytes]) for tier in self.tiers[first:]):
            return
        peers = self._peers if ask_peers else None
        if peers is None or peers.read([Piece(offset, nbytes, 0)], out, keeps=True):
            self._load_from_store(offset, nbytes, out)
        for tier in self.tiers[first:]:
            if not tier.is_full:
                tier.put(chunk, out[:nbytes])

    def _load_from_store(self, offset: int, nbytes: int, out: np.ndarray) -> None:
        store = self._store
        if self._past_cache is not None and store.cached_share(np.arange(offset, offset + nbytes, _PROBE), 1.0) != 1.0:
            store = self._past_cache
        size = -(-nbytes // store.align) * store.align
        starts = np.arange(0, size, self._read_bytes)
        self._read_store(_extents(offset + starts, np.minimum(self._read_bytes, size - starts)), out, starts, store)

    def _read_store(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray, store: Fetcher) -> None:
        store.read(reads, out, starts)
        check_snapshot(self._store, self._snapshot)
        self._count(len(reads), int(reads["nbytes"].sum()))

    def close(self) -> None:
        self._store.close()
        if self._past_cache is not None:
            self._past_cache.close()


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours in the file that are also neighbours in memory as one."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        last = joined[-1]
        if (last.offset + last.nbytes, last.start + last.nbytes) == (piece.offset, piece.start):
            joined[-1] = Piece(last.offset, last.nbytes + piece.nbytes, last.start)
        else:
            joined.append(piece)
    return joined


def _extents(offsets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    extents = np.empty(len(offsets), EXTENT)
    extents["offset"], extents["nbytes"] = offsets, nbytes
    return extents
