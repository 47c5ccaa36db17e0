"""Chunks that other nodes keep: asks them for bytes, so that the store is asked once by one of them.

Each node knows from plan/placement.py which nodes keep a chunk. The first of these that lives is responsible for it: it
alone brings the chunk from the store, when it needs it itself or when the first other node asks for it. A node that
fails to answer is left alone for a while; what it was responsible for is then the next one's task, or the asker reads
the store. No nodes wait for each other in a circle: one that is asked to bring a chunk reads the store, and asks
nobody; and every answer is taken as soon as it comes.

What several threads want from one node while a request to it is under way goes out together as the next request: the
slower the answers, the larger the requests.

    request    identity of the dataset, 32 bytes; then EXTENTs, each within one chunk
    answer     one byte per extent (a `Word`: HERE, ABSENT, LATER), then the bytes of those that are here
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from pario.machine import open_files
from pario.plan.placement import Placement
from pario.threads import Call, Lane, Workers
from pario.tiers.grid import Grid
from pario.wire.client import Address, Answer, Client, DamagedError
from pario.wire.frames import Word

_log = logging.getLogger("pario")

#: a node, and the kind of request that it gets
Whom = tuple[int, int]

#: kinds of requests: what you hold; bring what you do not, as the one responsible; bring it because your node keeps it
READ, BRING, KEEP = 1, 2, 3
#: of a service that is a process of its own (dataset/host.py): here is a dataset; who keeps what; how much can you keep
OPEN, ASSIGN, ROOM = 4, 5, 6

#: One request asks for at most this much.
MOST_EXTENTS, MOST_BYTES = 1000, 8 << 20
#: A node that sends nothing for this many seconds is given up.
LIMIT_S = 8.0
#: Seconds until it is asked again; twice as long each time, up to the second number.
_REST_S, _MOST_REST_S = 30.0, 600.0
#: Requests of one kind to one node that are under way: while one is answered, another one is on its way.
_REQUESTS = 2
#: Failures of this process, not of the node that it asks.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
#: Threads that ask, on a job of many nodes.
_MOST_THREADS = 16


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


class _Call:
    """One call of `Peers.read`: done when no extent is under way.

    extents, out, starts : of the call
    found : bool[n]: which ones came
    news : when something came for the last time
    """

    def __init__(self, extents: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self.extents, self.out, self.starts = extents, memoryview(out), starts
        self.found = np.zeros(len(extents), bool)
        self.done = Call()
        self.news = time.monotonic()
        self._under_way = len(extents)
        self._lock = threading.Lock()
        self.finished(np.empty(0, np.int64), found=False)  # of none, all have come

    def finished(self, which: np.ndarray, *, found: bool) -> None:
        """which : i64[k], numbers of extents"""
        with self._lock:
            self.found[which] = found
            self._under_way -= len(which)
            if not self._under_way and not self.done.done():
                self.done.set_result(None)

    def views(self, which: np.ndarray) -> list[memoryview]:
        """The memory of these extents."""
        begins = self.starts[which]
        ends = begins + self.extents["nbytes"][which]
        return [self.out[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]


class _Bundle(NamedTuple):
    """Extents of one call that go to one node. which : i64[k], their numbers; then : whom to ask if it has none"""

    call: _Call
    which: np.ndarray
    then: tuple[Whom, ...]


class _Line:
    """What waits for one kind of request to one node. lane : sends the requests"""

    def __init__(self, pool: Workers) -> None:
        self.waiting: deque[_Bundle] = deque()
        self.lane = Lane(pool, _REQUESTS)
        self._lock = threading.Lock()

    def take(self) -> list[_Bundle]:
        """As much as one request may ask for."""
        taken: list[_Bundle] = []
        extents, nbytes = MOST_EXTENTS, MOST_BYTES
        with self._lock:
            while self.waiting and extents:
                call, which, then = self.waiting.popleft()
                sums = np.cumsum(call.extents["nbytes"][which])
                fit = min(extents, len(which), int(np.searchsorted(sums, nbytes, side="right")))
                if fit < len(which):
                    self.waiting.appendleft(_Bundle(call, which[fit:], then))
                if not fit:
                    break
                taken.append(_Bundle(call, which[:fit], then))
                extents, nbytes = extents - fit, nbytes - int(sums[fit - 1])
        return taken


class Servers(NamedTuple):
    """Those that share what they keep, as one of their nodes knows them.

    node : number of this node
    addresses : per node; None: it answers nobody
    secret : which all of them know
    """

    node: int
    addresses: Sequence[Address | None]
    secret: bytes


class Peers:
    """The other nodes, as one process sees them. Any thread.

    placement : which node keeps which chunk
    servers : of the nodes
    serves : this process is the one that answers for its node
    kept : bool[chunks]: what the node's service, another process, is to bring for this one; None: nothing
    node : of this process
    identity : bytes[32] of the state of the data file
    count(bytes) : called for what came, by any thread
    """

    def __init__(
        self,
        placement: Placement,
        servers: Servers,
        *,
        serves: bool,
        identity: bytes,
        grid: Grid,
        kept: np.ndarray | None = None,
        count: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._count, self._kept = count, kept
        self.counts = PeerCounts()
        self.placement, self.node, self._me = placement, servers.node, servers.node if serves else -1
        addresses, secret = servers.addresses, servers.secret
        self._identity, self._grid = identity, grid
        self._clients = [Client(each, secret, LIMIT_S) if each is not None else None for each in addresses]
        self._workers = pool = Workers("pario-peers", min(_MOST_THREADS, 2 * len(addresses)))
        self._lines = {(node, kind): _Line(pool) for node in range(len(addresses)) for kind in (READ, BRING, KEEP)}
        self._lock = threading.Lock()  # guards the counts, and the two below
        self._rests = [(0.0, _REST_S)] * len(addresses)  # until when a node is left alone, and how long the next time
        self._closed = False
        self._most_idle = max(_REQUESTS, open_files() // 8)

    def read(self, extents: np.ndarray, out: np.ndarray, starts: np.ndarray, *, keeps: bool = False) -> np.ndarray:
        """bool[n]: which of these extents other nodes had; they were written to `out[starts[i]:]`, others left
        undefined. Raises nothing.

        extents : EXTENT[n] inside the file, each within one chunk; out : u8[k], contiguous; starts : i64[n]
        keeps : this node keeps the chunks, too, so the responsible node is asked first: others bring theirs only now
        """
        call = _Call(extents, out, starts)
        chunks, inverse = np.unique(extents["offset"] // self._grid.chunk_bytes, return_inverse=True)
        ways: dict[tuple[Whom, ...], int] = {}  # those of chunks that are the same nodes' go together
        numbers = [ways.setdefault(self._whom(chunk, keeps), len(ways)) for chunk in chunks.tolist()]
        way = np.array(numbers, np.int64)[inverse]
        lines: set[Whom] = set()
        for whom, number in ways.items():
            lines |= self._send_on(call, np.flatnonzero(way == number), whom)
        self._start(lines)
        try:
            call.done.result()
        except BaseException:  # a signal: nobody must write to this memory when the caller uses it for other things
            wait([call.done], 2 * LIMIT_S)
            raise
        return call.found

    def _send_on(self, call: _Call, which: np.ndarray, whom: tuple[Whom, ...]) -> set[Whom]:
        """Let these extents wait for the first of these nodes that can be asked; returns its line."""
        for k, (node, kind) in enumerate(whom):
            if self._can_ask(node):
                self._lines[node, kind].waiting.append(_Bundle(call, which, whom[k + 1 :]))
                return {(node, kind)}
        call.finished(which, found=False)
        return set()

    def _start(self, lines: Iterable[Whom]) -> None:
        """Let threads send what waits in these lines."""
        for whom in lines:
            self._lines[whom].lane.run(partial(self._run, *whom))

    def _run(self, node: int, kind: int) -> None:
        """Send what waits in a line until nothing does."""
        line = self._lines[node, kind]
        try:
            while part := line.take():
                flags = np.full(sum(len(each.which) for each in part), Word.ABSENT, np.uint8)
                try:
                    flags = self._exchange(node, kind, part, flags)
                except Exception as e:
                    _log.warning("asking node %d for chunks failed: %r", node, e)
                finally:  # the calls must not wait for ever
                    self._start(self._hand_out(line, part, flags) - {(node, kind)})
        except BaseException:
            self._start([(node, kind)])  # what waits in this line is somebody else's
            raise

    def _hand_out(self, line: _Line, part: list[_Bundle], flags: np.ndarray) -> set[Whom]:
        """flags : what became of each extent of a request; returns the lines where those wait that are not here."""
        lines: set[Whom] = set()
        for whose, which, then in part:
            mine, flags = flags[: len(which)], flags[len(which) :]
            if (mine == Word.HERE).any():
                whose.news = time.monotonic()
            elif time.monotonic() - whose.news > LIMIT_S:  # it cannot bring them: its store may be stalled
                mine = np.where(mine == Word.LATER, Word.ABSENT, mine)
            here, later = which[mine == Word.HERE], which[mine == Word.LATER]
            whose.finished(here, found=True)
            if len(later):
                line.waiting.append(_Bundle(whose, later, then))
            absent = which[(mine != Word.HERE) & (mine != Word.LATER)]
            if len(absent):
                lines |= self._send_on(whose, absent, then)
        return lines

    def is_responsible(self, chunk: int) -> bool:
        """True if this process is to bring the chunk for all nodes."""
        return self._responsible(chunk) == self._me

    def _responsible(self, chunk: int) -> int | None:
        owners = self.placement.owners[chunk].tolist()
        return next((node for node in owners if node >= 0 and (node == self._me or self._is_up(node))), None)

    def _whom(self, chunk: int, keeps: bool) -> tuple[Whom, ...]:
        """Whom to ask for a chunk, and what, best first. Nodes that are given up now are left out."""
        whom: dict[int, int] = {}  # what for: the first that is said counts
        responsible = self._responsible(chunk)
        if self._kept is not None and self._kept[chunk]:
            whom[self.node] = KEEP
        if not keeps:
            nearest = next(filter(self._can_ask, self.placement.sources(chunk, self.node)), None)
            if nearest is not None and nearest != responsible:
                whom.setdefault(nearest, READ)
        if responsible is not None:
            whom.setdefault(responsible, BRING)
        for node in self.placement.owners[chunk].tolist():
            whom.setdefault(node, READ)
        return tuple((node, kind) for node, kind in whom.items() if node >= 0 and self._can_ask(node))

    def _can_ask(self, node: int) -> bool:
        return self._is_up(node) and node != self._me

    def _is_up(self, node: int) -> bool:
        return self._clients[node] is not None and not self._closed and time.monotonic() >= self._rests[node][0]

    def _exchange(self, node: int, kind: int, part: list[_Bundle], nothing: np.ndarray) -> np.ndarray:
        """Ask a node; what became of each extent, u8[n]."""
        client = self._clients[node]
        if client is None or not self._is_up(node):
            return nothing
        body = self._identity + np.concatenate([call.extents[which] for call, which, _ in part]).tobytes()

        def take(answer: Answer) -> tuple[np.ndarray, int]:
            flags = np.empty(len(nothing), np.uint8)
            answer.read([memoryview(flags)])
            views: list[memoryview] = []
            at = 0
            for call, which, _ in part:
                mine, at = flags[at : at + len(which)], at + len(which)
                views += call.views(which[mine == Word.HERE])
            answer.read(views)
            return flags, sum(map(len, views))

        with self._lock:
            self.counts.requests += 1
        try:
            flags, nbytes = client.ask(kind, body, take)
        except DamagedError:
            with self._lock:
                self.counts.damaged += 1
            return nothing
        except OSError as e:
            if e.errno in _OURS:
                _log.debug("node %d cannot be asked: %s", node, e)
            else:
                self._give_up(node, e)
            return nothing
        finally:  # of many nodes few keep connections: descriptors are the script's, too
            few = 3 * _REQUESTS * len(self._clients) <= self._most_idle  # three kinds of questions to each
            if not few and sum(each.idle for each in self._clients if each is not None) > self._most_idle:
                client.close_idle()
        with self._lock:
            self._rests[node] = self._rests[node][0], _REST_S
            self.counts.read_bytes += nbytes
        self._count(nbytes)
        return flags

    def _give_up(self, node: int, error: OSError) -> None:
        with self._lock:
            if not self._is_up(node):  # meanwhile
                return
            _, rest = self._rests[node]
            self._rests[node] = time.monotonic() + rest, min(2 * rest, _MOST_REST_S)
            self.counts.lost += 1
        _log.warning("node %d does not answer (%s); it is not asked for chunks for %g s", node, error, rest)

    def close(self) -> None:
        """Requests under way end without an answer. Idempotent."""
        self._closed = True
        for client in self._clients:
            if client is not None:
                client.close()
        self._workers.close(0)
