"""Answers other processes from the tiers of this node (peers.py asks)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

import numpy as np

from pario.comm.launcher import own_addresses
from pario.records import EXTENT
from pario.tiers import peers
from pario.tiers.grid import Grid
from pario.tiers.peers import LIMIT_S
from pario.tiers.staged import StagedFetcher
from pario.wire.client import Address
from pario.wire.frames import Part, Word
from pario.wire.server import PATIENT, SLOW, AnsweringServer, Reply

_log = logging.getLogger("pario")

#: After this many seconds of bringing chunks an answer goes out; the asker asks again for the rest. Well below the time
#: after which it would give this node up.
_BRING_S = 1.0
_IDENTITY_BYTES = 32

#: a chunk that is being brought, and the kind of request that wants it
_What = tuple[StagedFetcher, int, int]


class Service:
    """One node's server, in the process that fills its tiers.

    datasets(identity) : reads of the data file whose state has this identity, bytes[32]; None: it is not known here
    threads : answer at the same time, and as many chunks are brought at the same time
    clients : processes that may ask
    count(bytes) : called for what is sent, by any thread
    more : answers to other kinds of requests: more[kind](body), any thread; what it raises closes the connection

    served_bytes : sent so far; room : threads for questions to other nodes
    Raises OSError, ParioError.
    """

    def __init__(
        self,
        datasets: Callable[[bytes], StagedFetcher | None],
        secret: bytes,
        *,
        threads: int,
        clients: int,
        count: Callable[[int], None] = lambda nbytes: None,
        more: Mapping[int, Callable[[bytes], bytes]] | None = None,
    ) -> None:
        self._count, self._datasets, self._more = count, datasets, dict(more or {})
        self.served_bytes = 0
        self._counting = threading.Lock()  # guards what follows
        self._bringing: dict[_What, Future[None]] = {}
        self._threads = threads
        self._server = AnsweringServer(
            secret,
            self._answer,
            threads=threads,
            most_bytes=_IDENTITY_BYTES + peers.MOST_EXTENTS * EXTENT.itemsize,
            # A client has four connections, and opens new ones before it has closed the old ones when something fails.
            most_links=16 + 8 * clients,
            limit_s=LIMIT_S / 2,
            hosts=own_addresses(),
            sorts={peers.BRING: SLOW, peers.KEEP: SLOW, peers.ROOM: SLOW, peers.OPEN: PATIENT, peers.ASSIGN: PATIENT},
        )
        # Those that bring chunks for this node (keep) may wait for other nodes, which wait for those that bring for
        # others; these wait for the store alone, and those that ask for rooms for other nodes' servers.
        # (The first epoch of 401 MB through a service, 20 ms and 100 MB/s, 4 runs in turns: 4.71 s; with twice as many
        # threads 4.76, four times as many 4.82. From another node, 197 KB in "global" order: 0.948 of the store's rate,
        # so with twice as many 0.945, with half of them 0.942.)
        lane = self._server.workers.lane  # before anybody knows the address
        self._bring_lane, self._keep_lane, self.room = lane(threads), lane(threads), lane(16)

    @property
    def address(self) -> Address:
        return self._server.address

    def _answer(self, kind: int, body: bytes) -> Reply:
        """Raises ValueError if the request is none."""
        if kind in self._more:
            return Reply(kind, [Part(np.frombuffer(self._more[kind](body), np.uint8))])
        head, rest = body[:_IDENTITY_BYTES], body[_IDENTITY_BYTES:]
        known = kind in (peers.READ, peers.BRING, peers.KEEP)
        if not known or len(head) < _IDENTITY_BYTES or len(rest) % EXTENT.itemsize:
            raise ValueError(f"a request of kind {kind} with {len(body)} bytes")
        extents = np.frombuffer(rest, EXTENT)
        staged = self._datasets(head)
        if staged is None:
            return Reply(kind, [Part(np.full(len(extents), Word.ABSENT, np.uint8))])
        _check(extents, staged.grid)
        late = self._bring(staged, extents, kind) if kind != peers.READ else []
        here, parts = staged.lend(extents)
        flags = np.where(here, Word.HERE, Word.ABSENT).astype(np.uint8)
        if late:
            flags[~here & np.isin(extents["offset"] // staged.grid.chunk_bytes, late)] = Word.LATER
        served = int(extents["nbytes"][here].sum())
        with self._counting:
            self.served_bytes += served
        self._count(served)
        return Reply(kind, [Part(flags), *parts])

    def _bring(self, staged: StagedFetcher, extents: np.ndarray, kind: int) -> list[int]:
        """Bring what is missing; returns the chunks that are still on their way."""
        chunks = list(dict.fromkeys((extents["offset"] // staged.grid.chunk_bytes).tolist()))
        missing = [chunk for chunk in chunks if not any(tier.has(chunk) for tier in staged.tiers)]
        under_way = {chunk: self._brought(staged, chunk, kind) for chunk in missing}
        # The more requests wait for a thread, the sooner this asker is told to come again. What is here does not wait
        # for what is still to come, nor what comes first for the last.
        patience = _BRING_S * min(1.0, self._threads / max(1, self._server.load()))
        _, late = wait(under_way.values(), patience if len(missing) == len(chunks) else 0, FIRST_COMPLETED)
        return [chunk for chunk, future in under_way.items() if future in late]

    def _brought(self, staged: StagedFetcher, chunk: int, kind: int) -> Future[None]:
        """Done when the chunk is here, or cannot be brought: anyone who asked reads the store then, and meets it."""
        what, mine = (staged, chunk, kind), Future[None]()
        with self._counting:
            future = self._bringing.setdefault(what, mine)
        if future is mine:
            lane = self._keep_lane if kind == peers.KEEP else self._bring_lane
            done = partial(self._arrived, what, future)
            lane.run(partial(staged.bring, chunk, done, ask_peers=kind == peers.KEEP))
        return future

    def _arrived(self, what: _What, future: Future[None], error: BaseException | None) -> None:
        with self._counting:
            self._bringing.pop(what, None)
        if error is not None:
            _log.debug("a chunk could not be brought for another process: %s", error)
        future.set_result(None)

    def close(self, limit_s: float = 1.0) -> None:
        """Idempotent."""
        self._server.leave(limit_s)
        for lane in (self._bring_lane, self._keep_lane, self.room):
            lane.close(limit_s)


def _check(extents: np.ndarray, grid: Grid) -> None:
    """Raises ValueError."""
    offsets, nbytes = extents["offset"], extents["nbytes"]
    # In this order: sums of wild numbers could overflow.
    inside = (offsets >= 0) & (nbytes > 0) & (nbytes <= grid.chunk_bytes) & (offsets < grid.file_bytes)
    if not (inside & (nbytes <= grid.file_bytes - offsets)).all() or nbytes.sum() > peers.MOST_BYTES:
        raise ValueError("extents outside the file, or too many bytes")
    if (offsets // grid.chunk_bytes != (offsets + nbytes - 1) // grid.chunk_bytes).any():
        raise ValueError("an extent of two chunks")
