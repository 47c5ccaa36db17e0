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
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from pario.errors import ParioError
from pario.plan.placement import Placement
from pario.threads import Workers
from pario.tiers.grid import Grid
from pario.wire.client import Address, Client, Request
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
        self.done = threading.Event()
        self.news = time.monotonic()
        self._under_way = len(extents)
        self._lock = threading.Lock()

    def finished(self, which: np.ndarray, *, found: bool) -> None:
        """which : i64[k], numbers of extents"""
        with self._lock:
            self.found[which] = found
            self._under_way -= len(which)
            if not self._under_way:
                self.done.set()

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
    """What waits for one kind of request to one node, and how many requests are under way."""

    def __init__(self) -> None:
        self.waiting: deque[_Bundle] = deque()
        self.under_way = 0

    def take(self) -> list[_Bundle]:
        """As much as one request may ask for."""
        taken: list[_Bundle] = []
        extents, nbytes = MOST_EXTENTS, MOST_BYTES
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
        self.placement, self.node, self._serves = placement, servers.node, serves
        addresses, secret = servers.addresses, servers.secret
        self._identity, self._grid = identity, grid
        self._clients = [Client(each, secret, LIMIT_S) if each is not None else None for each in addresses]
        self._lines = {(node, kind): _Line() for node in range(len(addresses)) for kind in (READ, BRING, KEEP)}
        self._workers = Workers("pario-peers", min(_MOST_THREADS, 2 * len(addresses)))
        self._lock = threading.Lock()  # guards the counts, the lines, and the three below
        self._rests_until = [0.0] * len(addresses)
        self._rest_s = [_REST_S] * len(addresses)
        self._closed = False
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_idle = max(_REQUESTS, (files if files != resource.RLIM_INFINITY else 1 << 20) // 8)

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
            call.done.wait()
        except BaseException:  # a signal: nobody must write to this memory when the caller uses it for other things
            call.done.wait(2 * LIMIT_S)
            raise
        return call.found

    def _send_on(self, call: _Call, which: np.ndarray, whom: tuple[Whom, ...]) -> set[Whom]:
        """Let these extents wait for the first of these nodes that can be asked; returns its line."""
        for k, (node, kind) in enumerate(whom):
            if self._can_ask(node):
                with self._lock:
                    self._lines[node, kind].waiting.append(_Bundle(call, which, whom[k + 1 :]))
                return {(node, kind)}
        call.finished(which, found=False)
        return set()

    def _start(self, lines: Iterable[Whom]) -> None:
        """Let threads send what waits in these lines, unless enough of them do."""
        for whom in lines:
            line = self._lines[whom]
            with self._lock:
                starts = bool(line.waiting) and line.under_way < _REQUESTS
                line.under_way += starts
            if starts:
                self._by_thread(partial(self._run, *whom))

    def _by_thread(self, work: Callable[[], None]) -> None:
        try:
            accepted = self._workers.put(work)
        except ParioError:
            accepted = False
        if not accepted:  # no thread: in this one
            work()

    def _run(self, node: int, kind: int) -> None:
        """Send what waits in a line until nothing does."""
        line = self._lines[node, kind]
        while True:
            with self._lock:
                part = line.take()
                if not part:
                    line.under_way -= 1
                    return
            flags = np.full(sum(len(each.which) for each in part), Word.ABSENT, np.uint8)
            interrupted: BaseException | None = None
            try:
                flags = self._exchange(node, kind, part, flags)
            except BaseException as e:  # the calls must not wait for ever
                interrupted = e
                _log.warning("asking node %d for chunks failed: %r", node, e)
            lines: set[Whom] = set()
            at = 0
            for whose, which, then in part:
                mine, at = flags[at : at + len(which)], at + len(which)
                if (mine == Word.HERE).any():
                    whose.news = time.monotonic()
                elif time.monotonic() - whose.news > LIMIT_S:  # it cannot bring them: its store may be stalled
                    mine = np.where(mine == Word.LATER, Word.ABSENT, mine)
                here, later = which[mine == Word.HERE], which[mine == Word.LATER]
                if len(here):
                    whose.finished(here, found=True)
                if len(later):
                    with self._lock:
                        line.waiting.append(_Bundle(whose, later, then))
                absent = which[(mine != Word.HERE) & (mine != Word.LATER)]
                if len(absent):
                    lines |= self._send_on(whose, absent, then)
            self._start(lines - {(node, kind)})
            if interrupted is not None and not isinstance(interrupted, Exception):
                self._by_thread(partial(self._run, node, kind))  # what waits in this line is somebody else's
                raise interrupted

    def is_responsible(self, chunk: int) -> bool:
        """True if this process is to bring the chunk for all nodes."""
        responsible = self._responsible(chunk)
        return responsible is not None and self._is_me(responsible)

    def _responsible(self, chunk: int) -> int | None:
        owners = self.placement.owners[chunk].tolist()
        return next((node for node in owners if node >= 0 and (self._is_me(node) or self._is_up(node))), None)

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
        return self._is_up(node) and not self._is_me(node)

    def _is_me(self, node: int) -> bool:
        return self._serves and node == self.node

    def _is_up(self, node: int) -> bool:
        return self._clients[node] is not None and not self._closed and time.monotonic() >= self._rests_until[node]

    def _exchange(self, node: int, kind: int, part: list[_Bundle], nothing: np.ndarray) -> np.ndarray:
        """Ask a node; what became of each extent, u8[n]."""
        client = self._clients[node]
        if client is None or not self._is_up(node):
            return nothing
        body = self._identity + np.concatenate([call.extents[which] for call, which, _ in part]).tobytes()
        for again in (True, False):
            with self._lock:
                self.counts.requests += 1
            try:
                with closing(client.ask(kind, body)) as request:
                    return self._receive(node, part, request, nothing)
            except TimeoutError as e:
                self._give_up(node, e)
                break
            except OSError as e:
                if e.errno in _OURS:
                    _log.debug("node %d cannot be asked: %s", node, e)
                    break
                if again:  # a connection that it has closed since it was used last
                    client.close_idle()
                else:
                    self._give_up(node, e)
            finally:  # of many nodes few keep connections: descriptors are the script's, too
                if sum(each.idle for each in self._clients if each is not None) > self._most_idle:
                    client.close_idle()
        return nothing

    def _receive(self, node: int, part: list[_Bundle], request: Request, nothing: np.ndarray) -> np.ndarray:
        """The answer. Raises OSError."""
        request.head()
        flags = np.empty(len(nothing), np.uint8)
        request.read([memoryview(flags)])
        views: list[memoryview] = []
        at = 0
        for call, which, _ in part:
            mine, at = flags[at : at + len(which)], at + len(which)
            views += call.views(which[mine == Word.HERE])
        request.read(views)
        right = request.is_right()
        nbytes = sum(map(len, views)) if right else 0
        with self._lock:
            if right:
                self._rest_s[node] = _REST_S
                self.counts.read_bytes += nbytes
            else:
                self.counts.damaged += 1
        self._count(nbytes)
        return flags if right else nothing

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
        self._workers.end(0)
