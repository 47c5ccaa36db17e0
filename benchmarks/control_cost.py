"""What the token bucket costs per read, in processor time (a part of benchmarks/control.py).

Whole runs differ by more than the bucket costs. So one thread reads a file in memory in blocks of some milliseconds, a
block without and a block with the bucket, in turn, the first of each pair drawn by chance; what counts is the
difference of each pair in this thread's processor time, divided by the reads of a block. Beside it the same with the
bucket on neither side, which shows what this can tell. A thread of the ring's pool asks once for a part of several
milliseconds; how often is counted, and times the cost it is the part of the time that the bucket takes, at most: if all
calls stood in each other's way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.measure import middle_interval
from pario.records import EXTENT


class Counted:
    """A gate that counts how often it is asked."""

    def __init__(self, gate: Any) -> None:
        self._gate, self.calls = gate, 0

    @property
    def grain_bytes(self) -> int:
        return int(self._gate.grain_bytes)

    def take(self, nbytes: int, operations: int) -> None:
        self.calls += 1
        self._gate.take(nbytes, operations)

    def hold(self) -> bool:
        return bool(self._gate.hold())

    def release(self) -> None:
        self._gate.release()


def pairs(sides: tuple[Any, Any], nbytes: int, total: int, n: int, reads: int) -> dict[str, Any]:
    """sides : two fetchers; nbytes : of a read; total : of the file; n : pairs; reads : of a block

    Seconds per read: of the first side, and the difference of the second to it with the bounds of 95 %.
    """
    run = [_block(side, nbytes, total, reads) for side in sides]
    for each in run:
        each()
    chance = random.Random(0)
    found = np.empty((n, 2))
    for k in range(n):
        first = chance.randrange(2)
        for which in (first, 1 - first):
            found[k, which] = run[which]()
    found /= reads
    gap = found[:, 1] - found[:, 0]
    more, low, high = middle_interval(gap)
    return {"read_s": float(np.median(found[:, 0])), "more_s": more, "low_s": low, "high_s": high}


def _block(fetcher: Any, nbytes: int, total: int, n: int) -> Callable[[], float]:
    """Processor seconds of a block of n reads, one per call, always of the same bytes of the file."""
    out = np.empty(nbytes, np.uint8)
    starts = np.zeros(1, np.int64)
    each = np.zeros((n, 1), EXTENT)
    most = total // nbytes
    each["offset"][:, 0] = np.random.default_rng(1).permutation(most)[np.arange(n) % most] * nbytes
    each["nbytes"] = nbytes

    def run() -> float:
        begin = time.thread_time_ns()
        for k in range(n):
            fetcher.read(each[k], out, starts)
        return (time.thread_time_ns() - begin) * 1e-9

    return run
