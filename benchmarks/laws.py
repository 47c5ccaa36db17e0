"""A control law of the prefetch depth beside pario's own, for comparison, and traces of both.

* `Prisma`: the published rule of PRISMA (Macedo et al., "The case for storage optimization decoupling in deep learning
  frameworks", CLUSTER 2021): one thread more whenever the buffer is not nearly full all the time, until it is.

A law is a pure function of windows, so that a run is a list of them: a trace has one line of JSON per window, with the
depth that it ran with, what was measured and what the law said then. `replayed` gives a law the same windows again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pario.tune.knobs import Setting
from pario.tune.tuner import FastProbe, Law, Window

__all__ = ["LAWS", "Held", "Prisma", "line", "replayed"]


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
LAWS: dict[str, Callable[[], Law]] = {"FAST + probe": FastProbe, "PRISMA": Prisma}


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
