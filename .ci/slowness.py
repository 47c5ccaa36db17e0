"""How slow is this machine while something else runs? Prints, when it is ended by SIGTERM, the mean in percent.

100 is the machine on which the README's test command takes 7 minutes: two cores of their own, on which the loop below
takes REFERENCE_S of processor time. Virtual machines share their host with others, and were seen to be five times as
slow for minutes: the processor time of the loop tells most of it, and the share of time that the host gave to others
("steal") the rest. Waiting for our own processes counts as neither.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

ADDITIONS, REFERENCE_S, PAUSE_S = 2_000_000, 0.105, 5.0


class Ended(Exception):
    pass


def end(*_: Any) -> None:
    raise Ended


def loop_s() -> float:
    begin, total = time.process_time(), 0
    for i in range(ADDITIONS):
        total += i
    return time.process_time() - begin


def jiffies() -> tuple[int, int]:
    """(used by us, given to others) by all processors so far."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + irq + softirq, steal


def main() -> None:
    factors = [loop_s() / REFERENCE_S]
    signal.signal(signal.SIGTERM, end)
    used, stolen = jiffies()
    try:
        while True:
            time.sleep(PAUSE_S)
            factors.append(loop_s() / REFERENCE_S)
    except Ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    used_now, stolen_now = jiffies()
    steal = 1 + (stolen_now - stolen) / max(1, used_now - used)
    print(max(100, round(100 * steal * sum(factors) / len(factors))))


if __name__ == "__main__":
    main()
