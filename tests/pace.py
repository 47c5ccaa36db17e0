"""How slow is this machine? What is promised in seconds is promised on processors that nobody else uses.

Virtual machines share their host with others, and were seen to be from twice to a hundred times as slow for minutes:
the processor time of a loop tells most of it, and the share of time that the host gave to others ("steal") the rest.
Waiting for our own processes counts as neither.

As a script (.ci/run) it prints, when it is ended by SIGTERM, the mean slowness while it ran, in percent.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

#: The loop's processor time on the machine on which the README's test command takes 7 minutes.
ADDITIONS, REFERENCE_S = 500_000, 0.026

PAUSE_S = 5.0


class Pace:
    """How slow the machine is, from the moment at which this was made; the loop runs then and by `sample`."""

    def __init__(self) -> None:
        self._used, self._stolen = jiffies()
        self._loops = [loop_s()]

    def sample(self) -> None:
        self._loops.append(loop_s())

    @property
    def slowness(self) -> float:
        """1 on a machine as fast as the reference or faster, 2 on one half as fast."""
        used, stolen = jiffies()
        steal = 1 + (stolen - self._stolen) / max(1, used - self._used)
        return max(1.0, steal * sum(self._loops) / len(self._loops) / REFERENCE_S)


def loop_s() -> float:
    begin, total = time.process_time(), 0
    for i in range(ADDITIONS):
        total += i
    return time.process_time() - begin


def jiffies() -> tuple[int, int]:
    """(used by us, given to others) by all processors so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq, steal


class Ended(Exception):
    pass


def end(*_: Any) -> None:
    raise Ended


def main() -> None:
    pace = Pace()
    signal.signal(signal.SIGTERM, end)
    try:
        while True:
            time.sleep(PAUSE_S)
            pace.sample()
    except Ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(round(100 * pace.slowness))


if __name__ == "__main__":
    main()
