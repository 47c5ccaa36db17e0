"""Control laws of the prefetch depth beside pario's own, for comparison, and traces of all of them.

* `Bbr`: a law like BBR's (Cardwell, Cheng, Gunn, Yeganeh, Jacobson, "BBR: congestion-based congestion control", ACM
  Queue 14(5), 2016): as many reads as the best rate seen times the shortest latency seen, with phases that probe both.
* `Prisma`: the published rule of PRISMA (Macedo et al., "The case for storage optimization decoupling in deep learning
  frameworks", CLUSTER 2021): one thread more whenever the buffer is not nearly full all the time, until it is.

A law is a pure function of windows, so that a run is a list of them: a trace has one line of JSON per window, with the
depth that it ran with, what was measured and what the law said then. `replayed` gives a law the same windows again.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from pario.tune.knobs import Setting
from pario.tune.tuner import FastProbe, Law, Window

__all__ = ["LAWS", "Bbr", "Held", "Prisma", "line", "replayed"]


# -- BBR's way ---------------------------------------------------------------------------------------------------------


class _Phase(Enum):
    STARTUP = 1  # double until the rate does not grow any more
    BANDWIDTH = 2  # a few more, a few less, then six windows as many as fit
    LATENCY = 3  # few reads, to see one without a queue


class Bbr(Law):
    """Bottleneck bandwidth times minimal latency. What is not BBR's: reads instead of bytes, windows instead of round
    trips, and a depth only, no pacing, so that the product gets one read more than it says: without it the rate could
    not be seen to grow.
    """

    #: The rate grows still if it exceeds the best one by this factor; so many windows without: the pipe is full.
    GROWS = 1.25
    WITHOUT = 3
    #: Times the product, window by window, while bandwidth is probed.
    GAINS = (1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    #: The best rate is that of so many windows; the latency is probed again after so many.
    RATES = 10
    LATENCIES = 40

    def __init__(self) -> None:
        self._phase = _Phase.STARTUP
        self._rates: deque[float] = deque(maxlen=self.RATES)
        self._latency = math.inf
        self._best = 0.0  # rate, while it grows
        self._without = self._cycle = self._age = 0

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        return self._phase is _Phase.STARTUP

    @property
    def drains(self) -> bool:  # type: ignore[override]
        return self._phase is _Phase.LATENCY

    def step(self, depth: int, window: Window) -> Setting:
        if window.full:  # BBR calls it limited by the application: such a rate is no bandwidth
            self._phase, self._best, self._without = _Phase.STARTUP, 0.0, 0
            return Setting(min(depth, math.ceil(1.25 * window.in_flight) or 1), "the consumer is slower than the store")
        self._age += 1
        if self._phase is _Phase.LATENCY or window.latency <= self._latency:
            self._latency, self._age = window.latency, 0
        if self._phase is _Phase.LATENCY:
            self._phase = _Phase.BANDWIDTH
            return self._follow(1.0)
        self._rates.append(window.rate)
        if self._phase is _Phase.STARTUP:
            return self._start(depth, window)
        if self._age >= self.LATENCIES:
            self._phase = _Phase.LATENCY
            return Setting(max(1, depth // 2), "half as many, to measure a read without a queue")
        self._cycle = (self._cycle + 1) % len(self.GAINS)
        return self._follow(self.GAINS[self._cycle])

    def _start(self, depth: int, window: Window) -> Setting:
        if window.rate >= self.GROWS * self._best:
            self._best, self._without = window.rate, 0
        else:
            self._without += 1
        if self._without < self.WITHOUT:
            return Setting(2 * depth, f"{window.rate:.0f} reads per second, more than before")
        self._phase, self._cycle, self._best, self._without = _Phase.BANDWIDTH, 1, 0.0, 0
        return self._follow(self.GAINS[1])  # drain what the start has queued

    def _follow(self, gain: float) -> Setting:
        product = max(self._rates, default=0.0) * self._latency
        return Setting(max(1, math.ceil(gain * product)) + 1, f"{gain:g} times {product:.1f} reads, and one")


# -- PRISMA's rule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held(Window):
    """A window that also knows the buffer.

    samples : how often it was looked at: when a read begins, and when the consumer takes something
    held : mean part of it that is reserved (being read) or waits for the consumer, in per cent
    deviation : standard deviation of that, in per cent
    """

    samples: int = 0
    held: float = 0.0
    deviation: float = 0.0


class Prisma(Law):
    """PRISMA's feedback loop, as its code has it: it never takes a thread away, and once satisfied stops for good.

    The published first look comes after 15 s; here after `FIRST_S`, which is kinder. Its buffer grows by files too;
    pario's ring has all its bytes from the beginning, so that where the rule wants a larger buffer nothing happens.
    """

    INTERVAL_S = 0.1
    FIRST_S = 1.0
    SAMPLES = 10
    FULL, EMPTY, CALM = 80.0, 30.0, 20.0  # per cent

    def __init__(self) -> None:
        self._seconds = 0.0
        self._waited = False
        self._seen: list[Held] = []
        self._stopped = False

    def step(self, depth: int, window: Window) -> Setting:
        assert isinstance(window, Held), "PRISMA's rule asks for the buffer"
        self._seconds += window.seconds
        if self._stopped:
            return Setting(depth, "tuning has ended")
        if not self._waited:
            self._waited = self._seconds >= self.FIRST_S
            self._seconds = 0.0 if self._waited else self._seconds
            return Setting(depth, "too early")
        self._seen.append(window)
        number = sum(seen.samples for seen in self._seen)
        if self._seconds < self.INTERVAL_S or number < self.SAMPLES:
            return Setting(depth, "too few samples yet")
        mean = sum(seen.samples * seen.held for seen in self._seen) / number
        square = sum(seen.samples * (seen.deviation**2 + seen.held**2) for seen in self._seen) / number
        deviation = math.sqrt(max(0.0, square - mean * mean))
        self._seen, self._seconds = [], 0.0
        said = f"{mean:.0f} % of the buffer held, deviation {deviation:.0f} %"
        if mean >= self.FULL and deviation <= self.CALM:
            self._stopped = True
            return Setting(depth, f"optimal: {said}")
        if mean <= self.EMPTY or deviation <= self.CALM:
            return Setting(depth + 1, f"one thread more: {said}")
        return Setting(depth, f"a larger buffer is wanted: {said}")


#: name -> a new law
LAWS: dict[str, Callable[[], Law]] = {"FAST + probe": FastProbe, "BBR-like": Bbr, "PRISMA": Prisma}


# -- traces ------------------------------------------------------------------------------------------------------------


def line(when: float, depth: int, window: Window, said: Setting) -> str:
    """One window of a trace, as JSON. when : seconds since the job began"""
    told = {name: _short(value) for name, value in asdict(window).items() if value is not False}
    return json.dumps({"when": round(when, 3), "depth": depth, "window": told, "said": said.value, "why": said.reason})


def told(window: Window) -> Window:
    """The window as a trace has it: a law that is recorded must see the very same numbers."""
    return type(window)(**{name: _short(value) for name, value in asdict(window).items()})


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def replayed(law: Law, trace: Iterable[str]) -> Iterator[tuple[Setting, Setting]]:
    """(what the law says now, what it said when the trace was recorded) for every window."""
    for text in trace:
        noted = json.loads(text)
        kind = Held if "samples" in noted["window"] else Window
        yield law.step(noted["depth"], kind(**noted["window"])), Setting(noted["said"], noted["why"])
