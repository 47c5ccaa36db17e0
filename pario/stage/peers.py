"""Chunks that other nodes keep: asks them for bytes, so that the store is asked once by one of them.

Each node knows from plan/placement.py which nodes keep a chunk. The first of these that lives is responsible for it: it
alone brings the chunk from the store, when it needs it itself or when the first other node asks for it. A node that
fails to answer is left alone for a while; what it was responsible for is then the next one's task, or the asker reads
the store. Both sides never wait for each other: a node that is asked to bring a chunk reads the store, and asks nobody.

    request    identity of the dataset, 32 bytes; then EXTENTs, each within one chunk
    answer     one byte per extent (HERE, ABSENT, LATER), then the bytes of those that are here
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from pario.comm.sockets import Address, Client, Request
from pario.plan.placement import Placement
from pario.records import EXTENT
from pario.stage.grid import Grid

__all__ = [
    "ABSENT",
    "BRING",
    "HERE",
    "LATER",
    "LIMIT_S",
    "MOST_BYTES",
    "MOST_EXTENTS",
    "READ",
    "PeerCounts",
    "Peers",
    "Piece",
]

_log = logging.getLogger("pario")

#: kinds of requests: what you hold; and bring what you do not
READ, BRING = 1, 2
#: what became of an extent: its bytes follow; the node does not have it; ask again, it is being brought
HERE, ABSENT, LATER = 1, 0, 2

#: One request asks for at most so much.
MOST_EXTENTS, MOST_BYTES = 1000, 8 << 20
#: A node that sends nothing for so many seconds is given up.
LIMIT_S = 8.0
#: Seconds until it is asked again; twice as long each time, up to the second number.
_REST_S, _MOST_REST_S = 30.0, 600.0


class Piece(NamedTuple):
    """Bytes that are wanted: where they lie in the data file (within one chunk), how many, and where they belong."""

    offset: int
    nbytes: int
    start: int


@dataclass
class PeerCounts:
    """What this process has asked of other nodes.

    requests, read_bytes : requests, and bytes that came
    damaged : answers with another checksum than their bytes
    lost : times that a node was given up for a while
    """

    requests: int = 0
    read_bytes: int = 0
    damaged: int = 0
    lost: int = 0


class _Wanted(NamedTuple):
    """A piece, and whom to ask for it: (node, kind), best first."""

    piece: Piece
    tries: Iterator[tuple[int, int]]


class Peers:
    """The other nodes of a job, as one process sees them. Any thread.

    placement : which node keeps which chunk
    node : of this process
    serves : this process is the one that answers for its node
    addresses : per node; None: it answers nobody
    secret : of the job
    identity : bytes[32] of the state of the data file
    """

    def __init__(
        self,
        placement: Placement,
        node: int,
        addresses: Sequence[Address | None],
        *,
        serves: bool,
        secret: bytes,
        identity: bytes,
        grid: Grid,
    ) -> None:
        self.counts = PeerCounts()
        self._placement, self._node, self._serves = placement, node, serves
        self._identity, self._grid = identity, grid
        self._clients = [Client(each, secret, LIMIT_S) if each is not None else None for each in addresses]
        self._lock = threading.Lock()  # guards the counts and the two below
        self._rests_until = [0.0] * len(addresses)
        self._rest_s = [_REST_S] * len(addresses)
        self._closed = False

    def read(self, pieces: Sequence[Piece], out: np.ndarray, *, keeps: bool = False) -> list[Piece]:
        """Fill `out` (u8) from other nodes; returns the pieces that none of them has. Raises nothing.

        A piece may reach beyond the end of the file; those bytes stay as they are.
        keeps : this node keeps the chunks, too, so whoever is responsible is asked first: others bring theirs only now
        """
        missing: list[Piece] = []
        pending = [_Wanted(piece, self._tries(piece.offset // self._grid.chunk_bytes, keeps)) for piece in pieces]
        while pending:
            by_node: dict[tuple[int, int], list[_Wanted]] = {}
            for wanted in pending:
                whom = next(wanted.tries, None)
                if whom is None:
                    missing.append(wanted.piece)
                else:
                    by_node.setdefault(whom, []).append(wanted)
            pending = self._ask_all(by_node, out)
        return sorted(missing)

    def _tries(self, chunk: int, keeps: bool) -> Iterator[tuple[int, int]]:
        """Whom to ask for a chunk, and what. Nodes that are given up meanwhile are left out."""
        owners = [int(node) for node in self._placement.owners[chunk] if node >= 0]
        responsible = next((node for node in owners if self._is_me(node) or self._is_up(node)), None)
        tried = set()
        if responsible is not None and self._is_me(responsible):  # this process is to bring it
            tried.add(responsible)
            responsible = None
        if not keeps:
            nearest = next(filter(self._can_ask, self._placement.sources(chunk, self._node)), None)
            if nearest is not None and nearest != responsible:
                tried.add(nearest)
                yield nearest, READ
        if responsible is not None and self._can_ask(responsible):
            tried.add(responsible)
            yield responsible, BRING
        for node in owners:
            if node not in tried and self._can_ask(node):
                yield node, READ

    def _can_ask(self, node: int) -> bool:
        return self._is_up(node) and not self._is_me(node)

    def _is_me(self, node: int) -> bool:
        return self._serves and node == self._node

    def _is_up(self, node: int) -> bool:
        return self._clients[node] is not None and time.monotonic() >= self._rests_until[node]

    def _ask_all(self, by_node: dict[tuple[int, int], list[_Wanted]], out: np.ndarray) -> list[_Wanted]:
        """Send all requests before the first answer is awaited; returns what is still missing."""
        asked: list[tuple[int, int, list[_Wanted], Request | None]] = []
        for (node, kind), group in by_node.items():
            for part in _cut(group):
                asked.append((node, kind, part, self._ask(node, kind, part)))
        left: list[_Wanted] = []
        for node, kind, part, request in asked:
            flags = self._receive(node, part, request, out)
            for wanted, flag in zip(part, flags, strict=True):
                if flag == LATER:
                    left.append(_Wanted(wanted.piece, chain([(node, kind)], wanted.tries)))
                elif flag != HERE:
                    left.append(wanted)
        return left

    def _ask(self, node: int, kind: int, part: list[_Wanted]) -> Request | None:
        client = self._clients[node]
        if client is None or not self._is_up(node):
            return None
        extents = np.array([(piece.offset, self._length(piece)) for piece, _ in part], EXTENT)
        with self._lock:
            self.counts.requests += 1
        try:
            return client.ask(kind, self._identity + extents.tobytes())
        except OSError as e:
            self._give_up(node, e)
            return None

    def _length(self, piece: Piece) -> int:
        return min(piece.nbytes, self._grid.file_bytes - piece.offset)

    def _receive(self, node: int, part: list[_Wanted], request: Request | None, out: np.ndarray) -> list[int]:
        """What became of each piece."""
        nothing = [ABSENT] * len(part)
        if request is None:
            return nothing
        try:
            if not self._is_up(node):  # given up meanwhile: do not wait for it once more
                return nothing
            request.head()
            flags = np.empty(len(part), np.uint8)
            request.read([flags])
            here = [piece for (piece, _), flag in zip(part, flags.tolist(), strict=True) if flag == HERE]
            request.read([out[piece.start : piece.start + self._length(piece)] for piece in here])
            right = request.is_right()
        except OSError as e:
            self._give_up(node, e)
            return nothing
        finally:
            request.drop()
        with self._lock:
            if right:
                self._rest_s[node] = _REST_S
                self.counts.read_bytes += sum(map(self._length, here))
            else:
                self.counts.damaged += 1
        return flags.tolist() if right else nothing

    def _give_up(self, node: int, error: OSError) -> None:
        with self._lock:
            if self._closed or time.monotonic() < self._rests_until[node]:
                return
            rest = self._rest_s[node]
            self._rests_until[node] = time.monotonic() + rest
            self._rest_s[node] = min(2 * rest, _MOST_REST_S)
            self.counts.lost += 1
        _log.warning("node %d does not answer (%s); it is not asked for chunks for %g s", node, error, rest)

    def close(self) -> None:
        """Requests under way end without an answer. Idempotent."""
        self._closed = True
        for client in self._clients:
            if client is not None:
                client.close()


def _cut(group: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Parts that one request may ask for."""
    part: list[_Wanted] = []
    nbytes = 0
    for wanted in group:
        if part and (len(part) == MOST_EXTENTS or nbytes + wanted.piece.nbytes > MOST_BYTES):
            yield part
            part, nbytes = [], 0
        part.append(wanted)
        nbytes += wanted.piece.nbytes
    if part:
        yield part
