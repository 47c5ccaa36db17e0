"""How far ahead of a consumer work must be: measurements in, a number out. No clock, no threads.

A consumer takes units (steps of the ring, batches) when it likes, and something fills them up again. It waits for
nothing if, at the moment when a filling begins, as many units are there as it takes until the filling has ended. How
long that may be is estimated as TCP estimates when an answer is overdue (Jacobson, "Congestion avoidance and control",
SIGCOMM 1988): the mean of the last fillings and four times their mean deviation, older ones counting less. A filling is
many reads, so that one says more than one packet does: the mean follows twice as fast as TCP's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pario.control.knobs import Knob, Setting
from pario.control.tuner import WINDOW_S

__all__ = ["Bridge", "Filled", "Filling", "RingLaw", "RingTuner", "Takes"]

#: What a new filling weighs in the mean and in the deviation, and how many deviations count.
_MEAN, _DEVIATION, _DEVIATIONS = 1 / 4, 1 / 4, 4
#: The deviation of the first one, as a part of its seconds.
_UNKNOWN = 1 / 8
#: With a number of reads at once that differs by this factor a group is another one.
_OTHER = 2
#: A filling may take this many times as long as it ever should before the consumer waits.
_SPARE = 1.25


class Bridge:
    """Seconds that a filling may take, from those before."""

    def __init__(self) -> None:
        self._mean = self._deviation = 0.0

    def add(self, seconds: float) -> None:
        if not self._mean:
            self._mean, self._deviation = seconds, _UNKNOWN * seconds
            return
        error = seconds - self._mean
        self._mean += _MEAN * error
        self._deviation += _DEVIATION * (abs(error) - self._deviation)

    @property
    def seconds(self) -> float:
        """0: nothing was filled yet."""
        return self._mean + _DEVIATIONS * self._deviation

    @property
    def spared(self) -> float:
        """Seconds for which there should be enough."""
        return _SPARE * self.seconds


class Takes:
    """When a consumer took its last units. Bursts count: it is asked how many it took at once, not how many on
    average."""

    #: Units that are remembered. A burst of more counts as so many.
    MOST = 256

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=self.MOST)

    def add(self, now: float, units: int = 1) -> None:
        """It has taken so many, up to this moment."""
        self._times.extend([now] * min(units, self.MOST))

    @property
    def known(self) -> bool:
        """It has taken more than one."""
        return len(self._times) > 1

    def most_within(self, seconds: float) -> int:
        """The most units that it took within so many seconds after it had taken one."""
        if not self.known:
            return 0
        times = np.fromiter(self._times, np.float64, len(self._times))
        return int((np.searchsorted(times, times + seconds, side="right") - np.arange(len(times))).max()) - 1


@dataclass(frozen=True, slots=True)
class Filling:
    """What the last groups of a ring said.

    group_bytes, tick_bytes : mean bytes of a group, and of what the consumer takes at once
    bridge_s : seconds for which enough should be ahead (`Bridge.spared`)
    taken : the most ticks that it took within them
    short : it had to wait for a group
    room : the most bytes of the ring that the memory of node and control group has room for; None: all
    """

    group_bytes: float
    tick_bytes: float
    bridge_s: float
    taken: int
    short: bool
    room: int | None = None


class Filled(NamedTuple):
    """One group that was filled.

    seconds : from its begin to its end; reading : the sum of its reads'
    at_once : reads of such a group that are made at once, now
    alone : no other group was under way when it began
    """

    seconds: float
    reading: float
    nbytes: int
    at_once: int
    alone: bool


class RingLaw:
    """Bytes of the ring that may be full or filling at once.

    It doubles when the consumer had to wait, and goes down to what it needs, at most by half at once.
    """

    def step(self, nbytes: int, filling: Filling) -> Setting:
        aim = int(filling.group_bytes + filling.taken * filling.tick_bytes)
        if filling.short:
            found = Setting(max(aim, 2 * nbytes), "the loop had to wait for the store")
        else:
            within = f"{filling.bridge_s * 1e3:.3g} ms that a group may take"
            what = f"the loop takes {_count(filling.taken)} in the {within}"
            found = Setting(max(aim, nbytes // 2), what)
        if filling.room is not None and found.value > filling.room:
            return Setting(filling.room, "the node or the control group has no more memory")
        return found


class RingTuner:
    """Turns the bytes of a ring in use. All times are handed in. Not thread-safe but for `knob` and `seconds`.

    slot_bytes : of a slot, which is what a group is taken for until one was filled
    """

    def __init__(self, knob: Knob, slot_bytes: int, law: RingLaw | None = None) -> None:
        self.knob = knob
        self._law = law or RingLaw()
        # Of groups that stood in a queue behind others: from begin to end. Of others: the sum of their reads, of which
        # as many as the depth says are made at once; the depth may change before the next one.
        self._queued, self._alone = Bridge(), Bridge()
        self._was_alone, self._at_once = False, 1
        self._takes = Takes()
        self._group_bytes = float(slot_bytes)
        self._groups = 0
        self._short = False
        self._until = 0.0

    @property
    def seconds(self) -> float:
        """For how long enough should be ahead."""
        if self._was_alone:
            return self._alone.spared / self._at_once
        return self._queued.spared

    def took(self, now: float, ticks: int) -> None:
        """The fastest consumer has taken so many more."""
        self._takes.add(now, ticks)

    def filled(self, now: float, group: Filled, *, short: bool) -> bool:
        """A group is there; returns whether the time has come to `turn`.

        short : the consumer waits for it
        """
        nbytes = group.nbytes
        if not nbytes:  # of other nodes' records alone
            return False
        if not self._at_once / _OTHER < group.at_once < self._at_once * _OTHER:
            self._alone = Bridge()  # so many at once may queue
        self._was_alone, self._at_once = group.alone, group.at_once
        if group.alone:
            self._alone.add(group.reading)
        else:
            self._queued.add(group.seconds)
        self._group_bytes += (nbytes - self._group_bytes) * (_MEAN if self._groups else 1.0)
        self._groups += 1
        self._short = self._short or short
        if self.knob.is_pinned:
            return False
        if now >= self._until:
            return self._short or self._takes.known
        return short and self.knob.value < self.knob.most  # at once, if that changes anything

    def turn(self, now: float, ticks_per_group: float, room: int | None) -> bool:
        """Returns whether the knob has turned."""
        spared = self.seconds
        tick_bytes = self._group_bytes / ticks_per_group
        taken = self._takes.most_within(spared)
        found = Filling(self._group_bytes, tick_bytes, spared, taken, self._short, room)
        self._until, self._short = now + WINDOW_S, False
        return self.knob.turn(*self._law.step(self.knob.value, found))

    def lead(self, ticks_per_group: float) -> int:
        """Ticks that may be ahead of the consumer when a group is begun."""
        return max(0, int((self.knob.value / self._group_bytes - 1) * ticks_per_group + 1e-6))


def _count(ticks: int) -> str:
    return f"{ticks} step{'s' * (ticks != 1)}"
