"""Control laws of the prefetch depth: measurements in, a depth out. No clock, no threads: a trace can be replayed.

A store answers a read in `base` seconds if nothing waits in front of it. With w reads in flight and w / base below what
the store can serve, each more read in flight adds throughput. Beyond that point reads queue: the latency R grows with w
and the rate does not. So w * (1 - base / R) of the w reads wait in queues, and a law looks for the depth at which a few
do: fewer waste the store, more only delay everybody who shares it.

The law follows FAST TCP (Wei, Jin, Low, Hegde, "FAST TCP: motivation, architecture, algorithms, performance", IEEE/ACM
ToN 14(6), 2006). Done differently:

* `base` is not the smallest latency ever seen. A window at half the depth measures it again from time to time, and soon
  after the latency has jumped. The mean of old and new: with the smallest of two, jobs' shares differed twofold.
* A job that halves its own depth cannot tell the queue of others from a slow store. So all jobs measure at the same
  time: windows end at multiples of their length on the day's clock, and windows of certain numbers are for probes.
* What a job keeps in queues is counted in bytes: a store gives each job the part of its rate that the job has of the
  queue. It grows with the square root of the bytes in flight: in proportion to them, a large job would stay large for
  ever; a fixed number is lost in the noise of a large depth.
* When the latency has leapt, the depth doubles for a window: a queue gets longer with it, a slower store does not get
  slower still. Nothing shrinks before it is known which of the two it is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from pario.tune.knobs import Setting

#: Seconds of a window in the steady state.
WINDOW_S = 0.25

#: Bytes that a job keeps waiting in the store's queue: the geometric mean of this and of what it has in flight, ...
_QUEUED_BYTES = 376 << 10
#: ... but this many reads at least, or a store is idle between long ones, and this part of those in flight at most: it
#: may serve one by one.
_QUEUED_LEAST, _QUEUED_MOST = 1.2, 0.57
#: To a store no read is shorter than this: what it takes besides the bytes.
_SHORT_BYTES = 64 << 10
#: A window whose number reaches a multiple of this is a probe, if the latency is steady ...
_PROBE_EVERY = 12
#: ... and of this one, if the latency has jumped, or if the base latency comes from few reads.
_DOUBTS_EVERY = 2
#: The latency has jumped if it exceeds that of the window before by this factor: a fifth more is noise.
_JUMP = 1.5
#: Above this factor it is more than another job's coming, whose queue does not grow when this job looks upward.
_LEAP = 2.0
#: A window may end in the middle of a jump: what came before it follows by this factor at most.
_RISE = 1.25
#: Twice the depth lengthens a queue by this factor at most: beyond, the store is still getting slower.
_TWICE = 2.2
#: In a probe a queue's latency falls: above this part of it there was none. Below this part of the base is no noise.
_NO_QUEUE = 0.75
#: The reads behind a first one show whether the store serves one by one: then w of them take w times as long as that
#: one. This part of w, but at least _SERIAL_LEAST, and a probe has to agree.
_SERIAL, _SERIAL_LEAST = 0.5, 1.75
#: Reads of a size that differs by this factor have another latency.
_OTHER_SIZE = 2.0
#: Reads in flight, as a multiple of what the consumer needs.
_SPARE = 1.25
#: The least number: the reads of a group come in a burst, and with a single one in flight a group takes long enough to
#: need more of the ring. (40 ms per sample, 20 ms per read, 197 KB: a third of the ring with 1, less than a quarter
#: with 2.)
_LEAST = 2
#: The consumer takes groups in bursts: what it needs is a mean over several windows.
_MEMORY = 0.7


@dataclass(frozen=True, slots=True)
class Window:
    """What the reads of a short time said.

    number : of the window that follows, in units of WINDOW_S since midnight or another moment that all jobs know
    seconds : its length
    latency : mean seconds of one read, of those begun in this window
    nbytes : mean bytes of one read
    most : most reads in flight at once
    in_flight : mean reads in flight, over all the time
    rate : reads finished per second
    full : prefetched groups were waiting for the consumer all the time: a deeper prefetch helps nobody
    failed : a read failed
    alone : seconds of the first read that began while no other was in flight; 0: there was none
    """

    number: int
    seconds: float
    latency: float
    nbytes: float
    most: int
    in_flight: float
    rate: float
    full: bool = False
    failed: bool = False
    alone: float = 0.0


class Law(ABC):
    """One job's control of its prefetch depth.

    hurried : the next window may end as soon as it has seen enough reads, and need not end with those of other jobs
    drains : the next window begins when the reads have ended that are in flight now
    """

    hurried = True
    drains = False

    @abstractmethod
    def step(self, depth: int, window: Window) -> Setting:
        """The next depth, after a window that ran with `depth`. The caller keeps it within its bounds."""


class _Mode(Enum):
    START = 1  # double until reads queue
    STEADY = 2
    DOWN = 3  # this window runs at half the depth or less
    UP = 4  # ... at twice the depth


class FastProbe(Law):
    """FAST with probes of the base latency (see the module)."""

    def __init__(self) -> None:
        self._mode = _Mode.START
        self._base = math.inf  # seconds of a read that waits for no other
        self._before = 0.0  # latency of the last window at full depth
        self._full_depth = 1  # the depth before the probe
        self._size = 0.0  # bytes of a read, to which these latencies belong
        self._doubts = False  # probe soon
        self._jumped = False  # the base may be that of another store: no step before a probe
        self._fine = self._owed = 0.0  # the depth before it was rounded, and what rounding has left out
        self._number = 0  # of the last window
        self._said = 0  # the depth that was asked for last
        self._refused = False  # it is above the bound
        self._doubled = False  # since the start
        self._searched = 0  # the depth of the start, in front of which a probe looks for a queue
        self._idle = False  # the consumer is the limit
        self._needed = self._over = 0.0  # seconds of reads while it was, over this many seconds; older ones count less

    @property
    def hurried(self) -> bool:  # type: ignore[override]
        return self._mode is not _Mode.STEADY and not self._idle

    @property
    def drains(self) -> bool:  # type: ignore[override]
        return self._mode is _Mode.DOWN

    def step(self, depth: int, window: Window) -> Setting:
        self._refused = depth < self._said
        found = self._decide(depth, window)
        self._said, self._number = found.value, window.number
        return found

    def _decide(self, depth: int, window: Window) -> Setting:
        if not self._size / _OTHER_SIZE <= window.nbytes <= self._size * _OTHER_SIZE:
            self._forget(window.nbytes)
        self._idle = window.full
        if window.failed:
            self._mode = _Mode.STEADY
            return Setting(max(1, depth // 2), "a read failed")
        if window.full:
            return self._shrink(depth, window)
        self._needed = self._over = 0.0
        if self._mode is _Mode.DOWN:
            return self._probe_ended(window)
        if self._mode is _Mode.UP:
            return self._looked_up(depth, window)
        if 2 * window.most < depth:
            return Setting(depth, f"no more than {window.most} reads were there to be made at once")
        return self._start(depth, window) if self._mode is _Mode.START else self._steady(depth, window)

    def _forget(self, nbytes: float) -> None:
        """Latencies of reads of another size say nothing."""
        self._size, self._base, self._before = nbytes, math.inf, 0.0
        self._mode, self._jumped = _Mode.START, False

    def _shrink(self, depth: int, window: Window) -> Setting:
        """The consumer is the limit."""
        depth = self._full_depth if self._mode in (_Mode.DOWN, _Mode.UP) else depth
        self._mode = _Mode.START  # when it is not the limit any more, be quick
        self._base = min(self._base, window.latency)
        self._before = 0.0
        self._needed = _MEMORY * self._needed + window.in_flight * window.seconds
        self._over = _MEMORY * self._over + window.seconds
        enough = max(_LEAST, math.ceil(_SPARE * self._needed / self._over))
        return Setting(min(depth, max(enough, depth // 2)), "the consumer is slower than the store")

    def _start(self, depth: int, window: Window) -> Setting:
        self._base = min(self._base, window.latency)
        if depth > 1 and 0 < window.alone * max(_SERIAL_LEAST, _SERIAL * depth) < window.latency:
            self._base, self._doubled, self._searched = window.alone, False, depth
            fewer = round(depth * window.alone / window.latency + self._aim(depth))
            return self._probe(min(depth // 2, fewer), window)
        if self._queued(depth, window) < self._aim(depth) and not self._refused:
            self._before, self._doubled = window.latency, True
            return Setting(2 * depth, f"reads do not queue yet: {_ms(window.latency)} each")
        # A base latency that comes from the few reads of a few threads is doubtful.
        self._mode, self._doubts, self._doubled = _Mode.STEADY, self._doubled and not self._refused, False
        return self._follow(depth, window)

    def _steady(self, depth: int, window: Window) -> Setting:
        jump = window.latency / self._before if self._before and not self._jumped else 0.0
        if jump > _LEAP:
            return self._look_up(depth, window)
        if jump > _JUMP:
            self._doubts = self._jumped = True
        every = _DOUBTS_EVERY if self._doubts else _PROBE_EVERY
        if depth > 1 and window.number // every > self._number // every:
            return self._probe(depth, window)
        if self._jumped and depth > 1:
            return Setting(depth, f"reads take {_ms(window.latency)}: a queue, or a slower store?")
        if self._jumped:  # nothing of its own can queue
            self._base, self._jumped, self._doubts = window.latency, False, False
        self._base = min(self._base, window.latency)
        found = self._follow(depth, window)
        if 3 * self._queued(depth, window) < self._aim(depth) and found.value > depth and not self._refused:
            self._mode = _Mode.START  # much less than a moment ago; at the bound doubling would only put probes off
        return found

    def _look_up(self, depth: int, window: Window) -> Setting:
        self._mode, self._full_depth, self._before = _Mode.UP, depth, window.latency
        return Setting(2 * depth, f"reads take {_ms(window.latency)}: twice as many, to see whether they queue")

    def _looked_up(self, depth: int, window: Window) -> Setting:
        full, before = self._full_depth, self._before
        if depth > full and window.latency > _TWICE * before:
            return self._look_up(full, window)
        self._mode, self._before = _Mode.STEADY, window.latency
        if window.latency * _JUMP < before:
            return Setting(full, f"a stall has passed: {_ms(window.latency)} each")
        if depth > full and depth * (1 - before / window.latency) < self._aim(depth):
            self._mode, self._base, self._doubled = _Mode.START, min(before, window.latency), True
            return Setting(2 * depth, f"reads do not queue yet: {_ms(window.latency)} each")
        self._doubts = self._jumped = True
        return Setting(full, f"reads take {_ms(window.latency)}: a queue, or a slower store?")

    def _probe(self, depth: int, window: Window) -> Setting:
        self._mode, self._full_depth, self._doubts = _Mode.DOWN, depth, False
        self._before = window.latency
        # Less than what queues, and three quarters of it again: half a short depth would still be a queue.
        fewer = max(1, min(depth // 2, round(depth - 1.75 * self._aim(depth))))
        return Setting(fewer, f"{fewer} instead of {depth}, to measure a read without a queue")

    def _probe_ended(self, window: Window) -> Setting:
        depth, self._mode = self._full_depth, _Mode.STEADY
        searched, self._searched = self._searched, 0
        slower = window.latency > _NO_QUEUE * self._before  # it was no queue
        if searched and slower:  # the first read was quick by chance
            self._mode, self._base = _Mode.START, window.latency
            return Setting(searched, f"reads do not queue yet: {_ms(window.latency)} each")
        if searched or (self._jumped and slower) or window.latency < _NO_QUEUE * self._base:
            # Nearer to the depth step by step: several jobs that doubled here would not see each other's queue.
            self._base = window.latency
        else:
            self._base = (self._base + window.latency) / 2
        self._jumped = False
        return Setting(depth, self._reason())

    def _follow(self, depth: int, window: Window) -> Setting:
        """FAST's step: half way to the depth at which as many reads queue as should."""
        self._before = min(window.latency, _RISE * (self._before or math.inf))
        if abs(self._fine - depth) > 1:
            self._fine, self._owed = depth, 0.0
        aim = self._fine * self._base / window.latency + self._aim(self._fine)
        self._fine = max(1.0, min(2.0 * depth, 0.5 * self._fine + 0.5 * aim))
        self._owed += self._fine
        found = round(self._owed)
        self._owed -= found
        return Setting(found, self._reason())

    def _aim(self, depth: float) -> float:
        """Reads of this many in flight that should wait in queues."""
        queued = math.sqrt(depth * _QUEUED_BYTES / max(self._size, _SHORT_BYTES))
        return min(_QUEUED_MOST * depth, max(_QUEUED_LEAST, queued))

    def _queued(self, depth: int, window: Window) -> float:
        return depth * (1 - self._base / window.latency)

    def _reason(self) -> str:
        return f"as many as keep the store busy; a read without a queue takes {_ms(self._base)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
