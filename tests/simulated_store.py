"""A store and its readers as discrete events: an oracle for control laws, without files, threads or a clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from pario.tune.depth import Depth
from pario.tune.knobs import START_DEPTH


class Store:
    """Answers a read after `latency` seconds and the transfer of its bytes. One link carries the transfers one by one.

    Both may be changed while the simulation runs.
    """

    def __init__(self, latency: float, bytes_per_s: float, *, jitter: float = 0.3, seed: int = 0) -> None:
        self.latency, self.bytes_per_s, self.jitter = latency, bytes_per_s, jitter
        self.now = 0.0
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._free_at = 0.0

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def read(self, nbytes: int, then: Callable[[], None]) -> None:
        late = self.latency * math.exp(self._random.gauss(0.0, self.jitter) - self.jitter**2 / 2)
        self.at(self.now + late, lambda: self._transfer(nbytes, then))

    def _transfer(self, nbytes: int, then: Callable[[], None]) -> None:
        self._free_at = max(self._free_at, self.now) + nbytes / self.bytes_per_s
        self.at(self._free_at, then)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    def smallest_depth(self, nbytes: int, part: float = 0.95) -> float:
        """Reads in flight that give this part of what the store can give, without jitter."""
        return part * (self.latency * self.bytes_per_s / nbytes + 1)


class Job:
    """Reads `nbytes` after `nbytes`, with as many in flight as `depth` says.

    consumer_s : seconds that the consumer needs for a read; 0: it waits for nothing but reads
    ahead : reads that may be done or under way beyond what the consumer has taken, in groups of `group`
    """

    def __init__(
        self, store: Store, nbytes: int, depth: Depth, *, consumer_s: float = 0.0, ahead: int = 0, group: int = 1
    ) -> None:
        self.store, self.nbytes, self.depth, self.consumer_s = store, nbytes, depth, consumer_s
        self.done: list[float] = []  # times
        self.depths: list[tuple[float, int]] = []
        self.latencies: list[tuple[float, float]] = []
        self._ahead, self._group = ahead, group
        self._in_flight = self._begun = self._taken = 0
        self._busy = False
        self.running = True
        if consumer_s:
            depth.is_full = lambda: len(self.done) - self._taken >= ahead // 2

    def start(self, when: float = 0.0) -> None:
        self.store.at(when, self._fill)

    def _fill(self) -> None:
        while self.running and self._in_flight < self.depth.knob.value and self._has_room():
            self._in_flight += 1
            self._begun += 1
            begin = self.store.now
            self.depth.begin(begin, self._in_flight)
            self.store.read(self.nbytes, lambda begin=begin: self._ended(begin))

    def _has_room(self) -> bool:
        released = self._taken // self._group * self._group
        return not self._ahead or self._begun < released + self._ahead

    def _ended(self, begin: float) -> None:
        now = self.store.now
        self._in_flight -= 1
        self.done.append(now)
        self.latencies.append((now, now - begin))
        if len(self.done) % self._group == 0:
            self.depth.note_full()
        if self.depth.end(begin, now, 1, self.nbytes):
            self.depths.append((now, self.depth.knob.value))
        if self.consumer_s and not self._busy:
            self._take()
        self._fill()

    def _take(self) -> None:
        self._busy = self._taken < len(self.done)
        if self._busy:
            self._taken += 1
            self.store.at(self.store.now + self.consumer_s, self._consumed)

    def _consumed(self) -> None:
        self._take()
        self._fill()

    def rate(self, first: float, last: float) -> float:
        """Bytes per second."""
        return self.nbytes * sum(first <= when < last for when in self.done) / (last - first)

    def mean_depth(self, first: float, last: float) -> float:
        return _mean([(0.0, START_DEPTH), *self.depths], first, last)

    def mean_latency(self, first: float, last: float) -> float:
        found = [latency for when, latency in self.latencies if first <= when < last]
        return sum(found) / len(found)

    def time_to(self, rate: float, after: float, *, step: float = 0.25) -> float:
        """Seconds after `after` until a quarter of a second reaches this rate."""
        when = after
        while when < after + 60 and self.rate(when, when + step) < rate:
            when += step
        return when + step - after


def _mean(steps: list[tuple[float, Any]], first: float, last: float) -> float:
    total = 0.0
    for (begin, value), (end, _) in itertools.pairwise([*steps, (math.inf, 0)]):
        total += value * max(0.0, min(end, last) - max(begin, first))
    return total / (last - first)


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))
