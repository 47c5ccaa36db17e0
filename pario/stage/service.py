"""Answers other processes of the job from the tiers of this node (peers.py asks)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial

import numpy as np

from pario.comm.server import Reply, Server
from pario.comm.sockets import Address, Part
from pario.records import EXTENT
from pario.stage.peers import ABSENT, BRING, HERE, LATER, LIMIT_S, MOST_BYTES, MOST_EXTENTS, READ
from pario.stage.staged import StagedFetcher
from pario.threads import Workers

__all__ = ["Service"]

_log = logging.getLogger("pario")

#: After so many seconds of bringing chunks an answer goes out; the asker asks again for the rest. Well below the time
#: after which it would give this node up.
_BRING_S = 1.0
_IDENTITY_BYTES = 32


class Service:
    """One node's server, in the process that fills its tiers.

    staged : reads of the data file
    identity : bytes[32] of its state
    threads : answer at the same time, and as many chunks are brought at the same time
    clients : processes that may ask
    count(bytes) : called for what is sent, by any thread

    served_bytes : sent so far
    Raises OSError, ParioError.
    """

    def __init__(
        self,
        staged: StagedFetcher,
        identity: bytes,
        secret: bytes,
        *,
        threads: int,
        clients: int,
        network: bool,
        count: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._count = count
        self.served_bytes = 0
        self._staged, self._identity = staged, identity
        self._counting = threading.RLock()  # guards what follows; a future that is done at once calls back at once
        self._bringing: dict[int, Future[None]] = {}
        self._threads = threads
        self._bringers = Workers("pario-bring", threads)
        self._server = Server(
            secret,
            self._answer,
            threads=threads,
            most_bytes=_IDENTITY_BYTES + MOST_EXTENTS * EXTENT.itemsize,
            # A client has four connections, and opens new ones before it has closed the old ones when something fails.
            most_links=16 + 8 * clients,
            limit_s=LIMIT_S / 2,
            network=network,
            slow=(BRING,),
        )

    @property
    def address(self) -> Address:
        return self._server.address

    def _answer(self, kind: int, body: memoryview) -> Reply:
        """Raises ValueError if the request is none."""
        extents = self._extents(kind, body)
        late = self._bring(extents) if kind == BRING else []
        here, parts = self._staged.lend(extents)
        flags = np.where(here, HERE, ABSENT).astype(np.uint8)
        if late:
            chunks = extents["offset"] // self._staged.grid.chunk_bytes
            flags[~here & np.isin(chunks, late)] = LATER
        served = int(extents["nbytes"][here].sum())
        with self._counting:
            self.served_bytes += served
        self._count(served)
        return Reply(kind, [Part(flags), *parts])

    def _extents(self, kind: int, body: memoryview) -> np.ndarray:
        head, rest = body[:_IDENTITY_BYTES], body[_IDENTITY_BYTES:]
        if kind not in (READ, BRING) or head != self._identity or len(rest) % EXTENT.itemsize:
            raise ValueError(f"a request of kind {kind} with {len(body)} bytes, or for another dataset")
        extents = np.frombuffer(rest, EXTENT)
        grid, offsets, nbytes = self._staged.grid, extents["offset"], extents["nbytes"]
        # In this order: sums of wild numbers could overflow.
        inside = (offsets >= 0) & (nbytes > 0) & (nbytes <= grid.chunk_bytes) & (offsets < grid.file_bytes)
        if not (inside & (nbytes <= grid.file_bytes - offsets)).all() or nbytes.sum() > MOST_BYTES:
            raise ValueError("extents outside the file, or too many bytes")
        if (offsets // grid.chunk_bytes != (offsets + nbytes - 1) // grid.chunk_bytes).any():
            raise ValueError("an extent of two chunks")
        return extents

    def _bring(self, extents: np.ndarray) -> list[int]:
        """Bring what is missing; returns the chunks that are still on their way."""
        staged = self._staged
        under_way: dict[int, Future[None]] = {}
        for chunk in dict.fromkeys((extents["offset"] // staged.grid.chunk_bytes).tolist()):
            if not any(tier.has(chunk) for tier in staged.tiers):
                under_way[chunk] = self._brought(chunk)
        # The more requests wait for a thread, the sooner this asker is told to come again.
        patience = _BRING_S * min(1.0, self._threads / max(1, self._server.load(slow=True)))
        _, late = wait(under_way.values(), patience)
        return [chunk for chunk, future in under_way.items() if future in late]

    def _brought(self, chunk: int) -> Future[None]:
        """Done when the chunk is here, or cannot be brought: whoever asked reads the store then, and meets the error.
        """
        with self._counting:
            future = self._bringing.get(chunk)
            if future is None:
                future = self._bringing[chunk] = self._bringers.call(self._staged.bring, chunk, ask_peers=False)
                future.add_done_callback(partial(self._done, chunk))
        return future

    def _done(self, chunk: int, future: Future[None]) -> None:
        with self._counting:
            self._bringing.pop(chunk, None)
        if not future.cancelled() and (error := future.exception()) is not None:
            _log.debug("a chunk could not be brought for another node: %s", error)

    def close(self, limit_s: float = 1.0) -> None:
        """Idempotent."""
        self._server.close(limit_s)
        self._bringers.end(limit_s, cancel=True)
