"""How far ahead of a consumer work must be: measurements in, a number out. No clock, no threads.

A training loop takes batches when it likes, and threads prepare others. It waits for nothing if, at the moment when one
is begun, as many are there as it takes until that one is ready. How long that may be is estimated as TCP estimates when
an answer is overdue (Jacobson, "Congestion avoidance and control", SIGCOMM 1988): the mean of the last preparations and
four times their mean deviation, older ones counting less. A preparation says more than one packet does: the mean
follows twice as fast as TCP's.
"""

from __future__ import annotations

from collections import deque

import numpy as np

#: What a new preparation weighs in the mean and in the deviation, and how many deviations count.
_MEAN, _DEVIATION, _DEVIATIONS = 1 / 4, 1 / 4, 4
#: The deviation of the first one, as a part of its seconds.
_UNKNOWN = 1 / 8


class Bridge:
    """Seconds that a preparation may take, from those before."""

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
        """0: nothing was prepared yet."""
        return self._mean + _DEVIATIONS * self._deviation


class Takes:
    """When a consumer took its last batches. Bursts count: it is asked how many it took at once, not how many on
    average."""

    #: Batches that are remembered.
    MOST = 256

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=self.MOST)

    def add(self, now: float) -> None:
        """It takes one."""
        self._times.append(now)

    def most_within(self, seconds: float) -> int:
        """The most batches that it took within this many seconds after it had taken one."""
        if not self._times:
            return 0
        times = np.fromiter(self._times, np.float64, len(self._times))
        return int((np.searchsorted(times, times + seconds, side="right") - np.arange(len(times))).max()) - 1
