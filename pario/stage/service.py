"""Answers other processes of the job from the tiers of this node (peers.py asks)."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from pario.comm.server import Reply, Server
from pario.comm.sockets import Address, Part
from pario.errors import ParioError
from pario.records import EXTENT
from pario.stage.peers import ABSENT, BRING, HERE, LATER, LIMIT_S, MOST_BYTES, MOST_EXTENTS, READ
from pario.stage.staged import StagedFetcher

__all__ = ["Service"]

_log = logging.getLogger("pario")

#: After so many seconds of bringing chunks an answer goes out; the asker comes again for the rest. Well below the time
#: after which it would give this node up.
_BRING_S = 1.0
_IDENTITY_BYTES = 32


class Service:
    """One node's server, in the process that fills its tiers.

    staged : reads of the data file
    identity : bytes[32] of its state
    threads : answer at the same time
    clients : processes that may ask

    served_bytes : sent so far
    Raises OSError, ParioError.
    """

    def __init__(
        self, staged: StagedFetcher, identity: bytes, secret: bytes, *, threads: int, clients: int, network: bool
    ) -> None:
        self.served_bytes = 0
        self._staged, self._identity = staged, identity
        self._counting = threading.Lock()
        self._server = Server(
            secret,
            self._answer,
            threads=threads,
            most_bytes=_IDENTITY_BYTES + MOST_EXTENTS * EXTENT.itemsize,
            # Each client has a connection per thread that asks.
            most_links=threads * clients,
            limit_s=LIMIT_S,
            network=network,
        )

    @property
    def address(self) -> Address:
        return self._server.address

    def _answer(self, kind: int, body: memoryview) -> Reply:
        """Raises ValueError if the request is none."""
        extents = self._extents(kind, body)
        flags = np.full(len(extents), ABSENT, np.uint8)
        parts = [Part(flags)]
        end, brought = time.monotonic() + _BRING_S, 0
        for k, (offset, nbytes) in enumerate(extents.tolist()):
            part = self._staged.lend(offset, nbytes)
            if part is None and kind == BRING:
                if brought and time.monotonic() > end:
                    flags[k] = LATER
                    continue
                part = self._bring(offset, nbytes)
                brought += 1
            if part is not None:
                flags[k] = HERE
                parts.append(part)
        with self._counting:
            self.served_bytes += sum(len(part.view) for part in parts[1:])
        return Reply(kind, parts)

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

    def _bring(self, offset: int, nbytes: int) -> Part | None:
        try:
            self._staged.bring(offset // self._staged.grid.chunk_bytes, ask_peers=False)
        except ParioError as e:  # whoever asked reads the store, and meets the error there
            _log.debug("a chunk could not be brought for another node: %s", e)
            return None
        return self._staged.lend(offset, nbytes)

    def close(self, limit_s: float = 1.0) -> None:
        """Idempotent."""
        self._server.close(limit_s)
