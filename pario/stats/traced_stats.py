"""The counters of a rank whose work is traced.

Seconds are counted at the ends of what they measure. So the counters are the door of most spans: `TracedStats` sees
`decode` grow by 3 ms and knows that this thread has decoded since 3 ms ago. Without a trace a rank has plain
`RankStats`, and nothing of this file takes part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pario.stats.rank import RankStats
from pario.stats.trace import FILL, FULL, TAKEN, Recorder

__all__ = ["TracedStats", "rank_stats"]

#: RankStats field -> kind of the span that ends when it grows
_SPAN_OF = {
    "open": 10,
    "loop": 11,
    "consumer": 12,
    "waiting": 13,
    "share": 14,
    "decode": 15,
    "locate": 16,
    "turn": 17,
    "check": 18,
}

#: Shorter spans than this are not kept (of requests all are): nobody would see them.
_SHORTEST_S = 5e-6


class TracedStats(RankStats):
    """The counters of a rank whose work is traced. A copy of it traces nothing."""

    __slots__ = ("_recorder",)
    _recorder: Recorder | None

    def __new__(cls, *_: Any, **__: Any) -> TracedStats:
        stats = super().__new__(cls)
        stats._recorder = None
        return stats

    def trace(self, recorder: Recorder) -> TracedStats:
        """From now on spans go there."""
        self._recorder = recorder
        return self

    def slot_filled(self, slot: int, group: int, begin: float, nbytes: int) -> None:
        if self._recorder is not None:
            self._recorder.event(FILL, begin, time.perf_counter(), group, 0, nbytes, slot)

    def group_taken(self, group: int, slot: Callable[[], int]) -> None:
        if self._recorder is not None and (number := slot()) >= 0:
            now = time.perf_counter()
            self._recorder.event(TAKEN, now, now, group, 0, 0, number)


def _ends_span(name: str, kind: int) -> property:
    """A counter of seconds that ends a span of the present thread when it grows."""

    def get(self: TracedStats) -> float:
        value: float = self.__dict__[name]
        return value

    def grow(self: TracedStats, value: float) -> None:
        mine = self.__dict__
        if self._recorder is not None:
            took = value - mine[name]
            if took >= _SHORTEST_S:
                now = time.perf_counter()
                self._recorder.event(kind, now - took, now)
        mine[name] = value

    return property(get, grow)


def _counts(name: str, number: int) -> property:
    """A counter whose sum over all loaders is shown over time."""

    def get(self: TracedStats) -> int:
        value: int = self.__dict__[name]
        return value

    def grow(self: TracedStats, value: int) -> None:
        mine, recorder = self.__dict__, self._recorder
        if recorder is not None:
            recorder.sums[number] += value - mine[name]
            now = time.perf_counter()
            if now >= recorder._next_look:
                recorder.look(now)
        mine[name] = value

    return property(get, grow)


def _full_slots() -> property:
    def get(self: TracedStats) -> int:
        value: int = self.__dict__["ready"]
        return value

    def grow(self: TracedStats, value: int) -> None:
        mine = self.__dict__
        if self._recorder is not None:
            now = time.perf_counter()
            self._recorder.event(FULL, now, now, value - mine["ready"])
        mine["ready"] = value

    return property(get, grow)


for _name, _kind in _SPAN_OF.items():
    setattr(TracedStats, _name, _ends_span(_name, _kind))
for _number, _name in enumerate(("bytes_read", "peer_bytes", "served_bytes", "node_bytes")):
    setattr(TracedStats, _name, _counts(_name, _number))
TracedStats.ready = _full_slots()  # type: ignore[assignment]


def rank_stats(recorder: Recorder | None, **known: Any) -> RankStats:
    """The counters of a rank: with a recorder their spans are traced."""
    return RankStats(**known) if recorder is None else TracedStats(**known).trace(recorder)
