"""The prefetch depth of one reading rank: a knob, windows in which its reads are measured, a law that turns it.

All times are handed in, so that a simulated store can drive it as well as a real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pario.tune.knobs import Knob
from pario.tune.tuner import WINDOW_S, FastProbe, Law, Window

#: A window has at least this many reads, and at least as many as were in flight: the whole queue has been renewed.
_LEAST_READS = 8
_TIMES = 2
#: A hurried window lasts at least this many latencies, and this many seconds.
_HURRIED = 2.0, 0.02
#: A probe as well: of fewer reads each job would see another base latency, and take another share.
_PROBE = 1.5, 0.1
#: How fast the quickest read is forgotten: twice as long counts after 35 others.
_FORGETS = 1.02
#: No read takes less, whatever the clock says.
_TICK_S = 1e-9
#: A steady one lasts at least this many latencies: a power of two times WINDOW_S, so that all jobs have the same ones.
_STEADY_LATENCIES = 2.0


class Depth:
    """How many reads may be in flight. Not thread-safe but for `knob`: its owner calls it under a lock.

    knob : the depth; a pinned one stays, whatever is measured
    law : turns it
    day : what to add to the times that are handed in, for seconds of the day's clock
    """

    def __init__(self, knob: Knob, law: Law | None = None, *, day: float = 0.0) -> None:
        self._day = day
        self._length = WINDOW_S  # seconds of steady windows
        self.knob = knob
        self._law = law or FastProbe()
        #: the number of groups that wait for the consumer is large enough; None: nobody prefetches
        self.is_full: Callable[[], bool] | None = None
        #: seconds of one read, of the last ones; 0: none was made yet
        self.latency = 0.0
        #: of those that found the shortest queue: what one takes while the store is not busy, or a little more
        self.quickest = 0.0
        self._open_window(0.0)
        self._begun = False
        self._followed = False  # an epoch has begun

    def _open_window(self, now: float, drain_s: float = 0.0) -> None:
        # Were only reads counted that begin after the drain, a probe of two latencies would see the shorter ones.
        self._from, self._since = now, now + drain_s
        if self._law.hurried:
            latencies, seconds = _PROBE if self._law.drains else _HURRIED
            self._until = self._since + max(seconds, latencies * self.latency)
        else:
            self._length = WINDOW_S
            while self._length < _STEADY_LATENCIES * self.latency:
                self._length *= 2
            self._until = (self._number(now) + 1) * self._length - self._day
        self._reads = 0  # begun in this window or its drain, and ended in it
        self._seconds = 0.0  # theirs
        self._nbytes = 0
        self._all_seconds = 0.0
        self._all_reads = 0
        self._most = 0
        self._alone = 0.0  # seconds of the first read that began with no other in flight ...
        self._alone_since: float | None = None  # ... at this time
        self._was_short = False  # of prefetched groups
        self._failed = False

    def follow(self, is_full: Callable[[], bool]) -> None:
        """An epoch begins, which says whether enough waits for the consumer."""
        self.is_full = is_full
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """The first reads of records: those of the tree before them are of another kind."""
        if not self._followed:
            self._followed, self._begun = True, False

    def note_full(self) -> None:
        """Called when a group is about to be published: the moment when fewest wait for the consumer."""
        if self.is_full is not None and not self.is_full():
            self._was_short = True

    def begin(self, now: float, in_flight: int) -> None:
        """A read begins, with which this many are in flight."""
        if not self._begun:
            self._begun = True
            self._open_window(now)
        self._most = max(self._most, in_flight)
        if in_flight == 1 and self._alone_since is None:
            self._alone_since = now

    def end(self, begin: float, now: float, reads: int, nbytes: int, *, failed: bool = False) -> bool:
        """One thread has made these reads, one after the other, since `begin`. Returns whether the depth changed."""
        seconds = now - begin
        latency = seconds / reads
        self.latency += (latency - self.latency) * (0.125 if self.latency else 1.0)
        self.quickest = min(latency, self.quickest * _FORGETS) if self.quickest else latency
        if self.knob.is_pinned:
            return False
        self._all_seconds += max(0.0, min(seconds, now - self._since))
        self._all_reads += reads
        self._failed = self._failed or failed
        if begin == self._alone_since and not self._alone:
            self._alone = latency
        if begin >= self._from and now >= self._since:
            self._reads += reads
            self._seconds += seconds
            self._nbytes += nbytes
        if now < self._until or self._reads < self._enough():
            return False
        return self._close_window(now)

    def _enough(self) -> int:
        """Reads that a window must have."""
        at_once = max(1, min(self._most, self.knob.value))
        if self.is_full is not None and not self._was_short:  # what the consumer needs says no queue
            return min(at_once, _LEAST_READS)
        return at_once if self._law.drains else max(_LEAST_READS, _TIMES * at_once)

    def _number(self, now: float) -> int:
        """The steady window of this moment, counted from the same moment in all jobs."""
        return math.floor((now + self._day) / self._length)

    def _close_window(self, now: float) -> bool:
        self.note_full()
        elapsed = now - self._since
        window = Window(
            number=self._number(now) * round(self._length / WINDOW_S),
            seconds=elapsed,
            latency=max(self._seconds / self._reads, _TICK_S),
            nbytes=self._nbytes / self._reads,
            most=self._most,
            in_flight=self._all_seconds / elapsed,
            rate=self._all_reads / elapsed,
            full=self.is_full is not None and not self._was_short,
            failed=self._failed,
            alone=self._alone,
        )
        changed = self.knob.turn(*self._law.step(self.knob.value, window))
        self._open_window(now, self.latency if self._law.drains else 0.0)
        return changed
