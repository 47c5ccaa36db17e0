"""Several reads of one fetcher in flight."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np

from pario.errors import ClosedError, OptionError
from pario.fetch.base import Fetcher
from pario.threads import Workers

__all__ = ["STOP_S", "ReadPool"]

#: Seconds for reads in flight after an error. A stalled store keeps them; they end with the process at the latest.
STOP_S = 1.0


class ReadPool:
    """Threads that keep up to `inflight` reads of one fetcher in flight.

    A job is cut into units of neighbouring reads. Each unit runs in one call without the GIL, so that thousands of
    small reads cost no interpreter time and a few long ones still use all threads.
    """

    #: Cost of the hand-over to a thread (about 10 us) and of the way to the storage, in bytes.
    UNIT_BYTES = 256 << 10
    #: Up to this many reads, of bytes that the kernel has probably prefetched, need no other threads.
    INLINE_READS = 64

    def __init__(self, fetcher: Fetcher, inflight: int) -> None:
        if inflight < 1:
            raise OptionError(f"inflight must be at least 1, got {inflight!r}")
        self.fetcher = fetcher
        self.inflight = inflight
        self._readers = Workers("pario-read", inflight)
        self._callers = Workers("pario-call", inflight)

    def submit(
        self,
        reads: np.ndarray,
        out: np.ndarray,
        starts: np.ndarray,
        done: Callable[[BaseException | None, float], None],
        urgent: bool = False,
    ) -> None:
        """Start a job; `done(error or None, seconds)` is called once, by the thread that finishes last.

        seconds : sum over the threads of the time in its reads
        urgent : ahead of all others that wait for a thread
        Raises ClosedError after `close`, ParioError if the system grants not even one thread.
        """
        m = len(reads)
        units: list[Callable[[], None]] = []
        if m == 0:
            units.append(lambda: done(None, 0.0))
        else:
            # Each read counts as if it were longer: where the way to the storage is long, a few short ones must not
            # stand in line behind each other.
            cost = np.cumsum(reads["nbytes"] + self.UNIT_BYTES)
            aim = max(self.UNIT_BYTES, int(cost[-1]) // self.inflight)
            # Units end where the running sum passes a multiple of the target.
            ends = np.flatnonzero(np.diff(cost // aim)) + 1
            cuts = [0, *ends.tolist(), m]
            job = _Job(len(cuts) - 1, done)
            for first, last in pairwise(cuts):
                units.append(_unit(self.fetcher, reads[first:last], out, starts[first:last], job))
        if not self._readers.put(*units, urgent=urgent):
            raise self._closed()

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Like `Fetcher.read`, spread over the threads; returns when all bytes are there."""
        if len(reads) <= (self.INLINE_READS if self.fetcher.reads_ahead else 1):
            self.fetcher.read(reads, out, starts)
            return
        finished = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None, seconds: float) -> None:
            if error is not None:
                errors.append(error)
            finished.set()

        self.submit(reads, out, starts, done)
        finished.wait()
        if errors:
            raise errors[0]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function` in another thread, for work that reads by itself. It may wait for reads of this pool, so the
        pool's threads do not run it. At most `inflight` calls run at once. Raises ClosedError after `close`."""
        if self._callers.has_ended:
            raise self._closed()
        return self._callers.call(function, *arguments)

    def close(self, limit_s: float = math.inf) -> bool:
        """Finish queued units, then end the threads; accepts no more jobs. The fetcher stays open.

        Returns whether the threads ended within `limit_s`: a stalled store keeps them.
        """
        end = time.monotonic() + limit_s
        ended = self._readers.end(limit_s)
        return self._callers.end(max(0.0, end - time.monotonic())) and ended

    def _closed(self) -> ClosedError:
        return ClosedError("the read threads have ended", path=self.fetcher.path)


class _Job:
    """Counts the remaining units of one submission."""

    def __init__(self, units: int, done: Callable[[BaseException | None, float], None]) -> None:
        self._left = units
        self._seconds = 0.0
        self._done = done
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def unit_finished(self, error: BaseException | None, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done(self._error, self._seconds)


def _unit(fetcher: Fetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray, job: _Job) -> Callable[[], None]:
    def run() -> None:
        error: BaseException | None = None
        begin = time.perf_counter()
        try:
            fetcher.read(reads, out, starts)
        except BaseException as e:
            error = e
        job.unit_finished(error, time.perf_counter() - begin)

    return run
