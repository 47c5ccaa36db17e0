"""The machine: a clock, I/O servers with queues and read-ahead segments, and the links of the nodes.

    node                         server (one of several, blocks of the file go round them)
    reader --- request --->  elevator queue -> disks: seek unless a known stream goes on, then bytes
      ^                                          |  (bytes read before are in the server's memory: no disk)
      |                                          v
      +--- link (bytes, calls) <-----------  network: per request, bytes

Every arrow is a queue of its own and one thing at a time passes it. Times in seconds, sizes in bytes, rates in bytes/s.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Clock", "Extent", "Link", "Machine", "Store"]

Extent = tuple[int, int]  # offset in the file, bytes
Call = Callable[[], None]


class Clock:
    """Runs calls at their times; calls of the same time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *given: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, call, given))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._heap:
            self.now, _, call, given = heapq.heappop(self._heap)
            call(*given)


@dataclass(frozen=True)
class Machine:
    """A file system and the nodes in front of it.

    servers : I/O servers over which the blocks of a file go round
    block : bytes of a block
    disk_rate : bytes/s that the disks of one server give to streams that they know
    seek_s : seconds lost where a request continues no stream that the server knows
    segments : streams that a server knows at once, the least recently used one is forgotten
    net_rate, request_s : bytes/s and seconds per request of one server's network and processor
    wire_s : seconds on the way, there and back together
    link_rate : bytes/s that a node takes in by long reads
    call_s : seconds per read call of a node
    fault_s : seconds per page fault whose page the node has already
    wake_s : seconds per process woken in vain, and fault, when several processes of a node wait for their pages
    depth : blocks that a node's client has under way for one read call
    ahead : blocks that the read-ahead of a mapping has under way
    next_s : seconds per step of a cursor
    shared_rate : bytes/s of all servers together; 0: no such limit (a token clock, as stores are throttled in tests)
    """

    servers: int = 10
    block: int = 4 << 20
    disk_rate: float = 300e6
    seek_s: float = 0.010
    segments: int = 32
    net_rate: float = 500e6
    request_s: float = 0.001
    wire_s: float = 0.0001
    link_rate: float = 2.7e9
    call_s: float = 2e-6
    fault_s: float = 6e-6
    wake_s: float = 10e-6
    depth: int = 16
    ahead: int = 2
    next_s: float = 1e-6
    shared_rate: float = 0.0


class Link:
    """One node's way in: requests come through one after the other, each with its bytes and its calls (or faults)."""

    def __init__(self) -> None:
        self.free = 0.0
        self.bytes = 0


class _Request:
    __slots__ = ("block", "done", "hi", "lo")

    def __init__(self, block: int, lo: int, hi: int, done: Call) -> None:
        self.block, self.lo, self.hi, self.done = block, lo, hi, done


class _Server:
    """Sweeps over the disks, each of the requests that waited when it began, in ascending order; then the network,
    first come, first served. (Were requests let into a sweep under way, one stream could keep it.)
    """

    def __init__(self, store: Store, number: int) -> None:
        self.store = store
        self.sweep: list[tuple[int, int, _Request]] = []  # in descending order: served from the end
        self.next_sweep: list[tuple[int, int, _Request]] = []
        self.count = 0
        self.busy = False
        self.net_free = 0.0
        self.random = random.Random(number)
        self.known: OrderedDict[int, None] = OrderedDict()  # where each known stream would go on
        self.held: dict[int, list[tuple[int, int]]] = {}  # block -> parts of it in memory
        self.disk_bytes = self.seeks = 0

    def submit(self, request: _Request) -> None:
        if self._has(request):
            self._send(request)
            return
        self.count += 1
        machine = self.store.machine
        place = request.block // machine.servers * machine.block + request.lo
        self.next_sweep.append((place, self.count, request))
        if not self.busy:
            self.known.clear()
            self._next()

    def _has(self, request: _Request) -> bool:
        for lo, hi in self.held.get(request.block, ()):  # noqa: SIM110 - a generator costs a tenth of the run
            if lo <= request.lo and request.hi <= hi:
                return True
        return False

    def _next(self) -> None:
        machine = self.store.machine
        while self.sweep or self.next_sweep:
            if not self.sweep:
                self.sweep, self.next_sweep = sorted(self.next_sweep, reverse=True), self.sweep
            place, _, request = self.sweep.pop()
            if self._has(request):  # came in for somebody else meanwhile
                self._send(request)
                continue
            nbytes = request.hi - request.lo
            seconds = nbytes / machine.disk_rate
            if place in self.known:
                del self.known[place]
            else:
                seconds += machine.seek_s * self.random.expovariate(1.0)
                self.seeks += 1
                if len(self.known) >= machine.segments:
                    self.known.popitem(last=False)
            self.known[place + nbytes] = None
            self.disk_bytes += nbytes
            self.busy = True
            self.store.clock.at(self.store.clock.now + seconds, self._read, request)
            return
        self.busy = False

    def _read(self, request: _Request) -> None:
        self.held.setdefault(request.block, []).append((request.lo, request.hi))
        self._send(request)
        self._next()

    def _send(self, request: _Request) -> None:
        store, nbytes = self.store, request.hi - request.lo
        machine = store.machine
        start = max(self.net_free, store.clock.now)
        if machine.shared_rate:
            start = store.shared_free = max(start, store.shared_free) + nbytes / machine.shared_rate
        self.net_free = start + machine.request_s + nbytes / machine.net_rate
        store.clock.at(self.net_free, request.done)


class Store:
    """The file system: reads of a file's extents by nodes, whatever recipe asks for them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.clock = Clock()
        self.servers = [_Server(self, number) for number in range(machine.servers)]
        self.shared_free = 0.0
        self.asked = self.delivered = self.requests = 0

    @property
    def disk_bytes(self) -> int:
        return sum(server.disk_bytes for server in self.servers)

    @property
    def seeks(self) -> int:
        return sum(server.seeks for server in self.servers)

    def cut(self, extent: Extent) -> list[tuple[int, int, int]]:
        """(block, first byte in it, stop) of an extent."""
        offset, nbytes = extent
        block = self.machine.block
        cuts, stop = [], offset + nbytes
        while offset < stop:
            number = offset // block
            upto = min(stop, (number + 1) * block)
            cuts.append((number, offset - number * block, upto - number * block))
            offset = upto
        return cuts

    def read(self, link: Link, extent: Extent, done: Call, *, window: int, byte_s: float) -> None:
        """Read one extent, `window` blocks under way at once; the node takes `byte_s` seconds for each byte.

        done() is called when the last byte is there.
        """
        pieces = self.cut(extent)
        cuts = iter(pieces)
        self.asked += extent[1]
        left = extent[1]
        clock, servers, wire_s = self.clock, self.servers, self.machine.wire_s

        def ask() -> None:
            cut = next(cuts, None)
            if cut is not None:
                block, lo, hi = cut
                self.requests += 1
                servers[block % len(servers)].submit(_Request(block, lo, hi, lambda: sent(hi - lo)))

        def sent(nbytes: int) -> None:
            link.free = max(link.free, clock.now) + nbytes * byte_s
            clock.at(link.free + wire_s, arrived, nbytes)

        def arrived(nbytes: int) -> None:
            nonlocal left
            left -= nbytes
            link.bytes += nbytes
            self.delivered += nbytes
            ask()
            if not left:
                done()

        for _ in range(min(window, len(pieces))):
            ask()
