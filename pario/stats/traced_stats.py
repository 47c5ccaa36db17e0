"""The counters of a rank whose work is traced.

Seconds are counted at the ends of what they measure. So the counters are the door of most spans: `TracedStats` sees
`decode` grow by 3 ms and knows that this thread has decoded since 3 ms ago. Without a trace a rank has plain
`RankStats`, and nothing of this file takes part.
"""

from __future__ import annotations

import time
from typing import Any

from pario.stats.rank import RankStats
from pario.stats.trace import COUNTED, FILL, FULL, SPAN_OF, Recorder

#: Shorter spans than this are not kept (of requests all are): there would be thousands of them in a second, and on the
#: screen they are thinner than a line.
_SHORTEST_S = 50e-6


class TracedStats(RankStats):
    """The counters of a rank whose work is traced. A copy of it traces nothing."""

    __slots__ = ("_recorder",)
    _recorder: Recorder | None

    def __new__(cls, *_: Any, **__: Any) -> TracedStats:
        stats = super().__new__(cls)
        stats._recorder = None
        return stats

    @classmethod
    def traced(cls, recorder: Recorder, **known: Any) -> TracedStats:
        """Counters whose spans go there."""
        stats = cls(**known)
        stats._recorder = recorder
        return stats

    def slot_filled(self, slot: int, group: int, begin: float, nbytes: int) -> None:
        if self._recorder is not None:
            self._recorder.event(FILL, begin, time.perf_counter(), group, 0, nbytes, slot)


class _EndsSpan:
    """A counter of seconds that ends a span of the present thread when it grows. Without `__get__`, anyone who reads it
    gets the object's own value as quickly as any."""

    def __init__(self, name: str, kind: int) -> None:
        self._name, self._kind = name, kind

    def __set__(self, stats: TracedStats, value: float) -> None:
        mine, name = stats.__dict__, self._name
        took = value - mine.get(name, value)
        mine[name] = value
        if took >= _SHORTEST_S and (recorder := stats._recorder) is not None:
            now = time.perf_counter()
            recorder.event(self._kind, now - took, now)


class _FullSlots:
    """The sum of what is shown over time."""

    def __set__(self, stats: TracedStats, value: int) -> None:
        mine, recorder = stats.__dict__, stats._recorder
        if recorder is not None:
            now = time.perf_counter()
            recorder.event(FULL, now, now, value - mine["ready"])
        mine["ready"] = value


for _kind, _name in enumerate(SPAN_OF, COUNTED):
    setattr(TracedStats, _name, _EndsSpan(_name, _kind))
TracedStats.ready = _FullSlots()  # type: ignore[assignment]
