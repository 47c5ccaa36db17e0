"""Several reads of one fetcher in flight."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np

from pario.errors import ClosedError, ParioError
from pario.fetch.base import Fetcher
from pario.threads import Call, Workers, at_end
from pario.tune.depth import Depth
from pario.tune.knobs import Knob

#: Seconds for reads in flight after an error. A stalled store keeps them; they end with the process at the latest.
STOP_S = 1.0


class Behind(Protocol):
    """Work for threads that have nothing else to read."""

    def next(self) -> int | None:
        """What to bring; None: there is nothing more."""

    def bring(self, what: int) -> int:
        """Bring it, once for each `next`, or begin to. Returns the bytes that the store was asked for; raises
        nothing."""


class ReadPool:
    """Threads that keep up to `inflight` reads of one fetcher in flight.

    The reads of a job are handed to the threads in parts of neighbours. Each part is read in one call without the GIL,
    so that thousands of small reads cost no interpreter time and a few long ones still use all threads. The slower the
    reads, the shorter the parts: a part that takes long could not be divided when more threads come.

    inflight : a fixed number, or a knob that follows what is measured (pario/plane)
    """

    #: Cost of the hand-over to a thread (about 10 us) and of the way to the storage, in bytes.
    UNIT_BYTES = 256 << 10
    #: Seconds that a part takes if its reads take less. (197 KB records in "global" order out of a disk tier, 5 epochs
    #: each next to other work: 2 ms 2.9 to 4.6 s, 8 ms 1.7 to 2.5 s, 16 ms 2.0 to 3.2 s.)
    UNIT_S = 8e-3
    #: What a copy out of memory takes, about.
    _COPY_S = 1e-5

    def __init__(self, fetcher: Fetcher, inflight: int | Knob) -> None:
        knob = Knob("inflight", inflight, inflight, inflight) if isinstance(inflight, int) else inflight
        self.fetcher = fetcher
        self.knob = knob
        self._depth = Depth(knob, day=time.time() - time.perf_counter())
        self._lock = threading.RLock()  # guards all of the depth but its knob, and the two below
        self._jobs: deque[Job] = deque()  # with reads that no thread has taken yet
        self._active = 0  # threads that take parts, or will when they have started
        self._behind: Behind | None = None
        self._reading = 0
        self._missed = 1.0  # of the last reads, the part that were no copies out of memory
        self._readers = Workers("pario-read", self.inflight)
        self._threads = self.inflight  # as many as `_readers` was told
        at_end(self._quit)

    @property
    def inflight(self) -> int:
        """Reads that may be in flight now."""
        return self.knob.value

    @property
    def latency(self) -> float:
        """Seconds of one read, of the last ones; 0: none was made yet."""
        return self._depth.latency

    def follow(self, is_full: Callable[[], bool]) -> None:
        """From now on `is_full()` says whether enough prefetched bytes wait for the consumer, so that more reads in
        flight would not help. Called in any thread, under a lock: it must not wait."""
        with self._lock:
            self._depth.follow(is_full)

    def unfollow(self, is_full: Callable[[], bool]) -> None:
        """Ask this one no more."""
        with self._lock:
            if self._depth.is_full == is_full:
                self._depth.is_full = None

    def note_full(self) -> None:
        """Ask that now: prefetched bytes are about to become more."""
        with self._lock:
            self._depth.note_full()

    def submit(
        self,
        reads: np.ndarray,
        out: np.ndarray,
        starts: np.ndarray,
        done: Callable[[BaseException | None, float], None],
        urgent: bool = False,
    ) -> Job:
        """Start a job; `done(error or None, seconds)` is called once, by the thread that finishes last.

        seconds : sum over the threads of the time in its reads
        urgent : ahead of all others that wait for a thread
        Returns what `withdraw` takes. Raises ClosedError after `close`, ParioError if the system grants not even one
        thread.
        """
        job = Job(reads, out, starts, done, self.UNIT_BYTES)
        if len(reads) == 0:
            if not self._readers.put(lambda: done(None, 0.0), urgent=urgent):
                raise self._closed()
            return job
        with self._lock:
            if self._readers.has_ended:
                raise self._closed()
            if urgent:
                self._jobs.appendleft(job)
            else:
                self._jobs.append(job)
            try:
                self._wake(len(reads))
            except BaseException:
                self._jobs.remove(job)
                raise
        return job

    def withdraw(self, job: Job) -> None:
        """Nobody needs the job any more: its reads that no thread has begun stay undone, and `done` is called with
        ClosedError when those that are in flight have ended. Nothing happens to a job whose reads have all begun."""
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.remove(job)
            ended = job.drop(ClosedError("nobody needs these reads any more", path=self.fetcher.path))
        if ended:
            job.done(job.error, job.seconds)

    def _quit(self) -> None:
        self._behind = None
        for job in list(self._jobs):
            self.withdraw(job)

    def _wake(self, reads: int) -> None:
        """Let threads come for this many more reads. Raises ParioError."""
        if self._threads != (threads := self.inflight):  # the knob is turned by anybody
            self._threads = threads
            self._readers.resize(threads)
        more = min(self.inflight - self._active, reads)
        if more > 0:
            self._active += more
            came = False
            try:
                came = self._readers.put(*[self._run] * more)
            finally:
                if not came:
                    self._active -= more
            if not came:
                raise self._closed()
        if (granted := self._readers.granted) is not None and granted < self.inflight:
            self.knob.limit(granted, "the system refuses another thread")

    def _run(self) -> None:
        """Read part after part while there are any, and this thread is not one too many."""
        while (part := self._take()) is not None:
            part()
            del part  # it refers to its submitter, and the next one may never come

    def _read_part(self, job: Job, first: int, last: int, begin: float) -> None:
        error: BaseException | None = None
        reads = missed = last - first
        try:
            self.fetcher.read(job.reads[first:last], job.out, job.starts[first:last])
            missed = self.fetcher.missed(reads)
        except BaseException as e:
            error = e
        now = time.perf_counter()
        with self._lock:
            self._reading -= 1
            # What the memory tier gives says nothing about the store. (With it a thread took a whole group of reads at
            # once: after the memory was given back an epoch took 1.3 to 1.7 s, so 1.24 to 1.26.)
            self._missed += (missed / reads - self._missed) * 0.125
            nbytes = job.nbytes(first, last) * missed // reads
            turned = missed > 0 and self._depth.end(begin, now, missed, nbytes, failed=error is not None)
            ended = job.part_ended(error, now - begin)
            if error is not None:
                with suppress(ValueError):  # all its reads are taken
                    self._jobs.remove(job)
        if turned:
            self._resize()
        if ended:
            job.done(job.error, job.seconds)

    def work_behind(self, behind: Behind) -> None:
        """Let threads that no job needs bring what `behind` has next, until it has nothing more. Raises ParioError if
        the system grants not even one thread, ClosedError after `close`."""
        with self._lock:
            self._behind = behind
            self._depth.begin_epoch()
            self._wake(self.inflight)

    def _bring(self, behind: Behind) -> None:
        what = behind.next()
        begin = time.perf_counter()
        with self._lock:
            if what is None:
                if self._behind is behind:
                    self._behind = None
                return
            self._reading += 1
            self._depth.begin(begin, self._reading)
        nbytes = behind.bring(what)
        with self._lock:
            self._reading -= 1
            # What other tiers, nodes and processes bring says nothing about the store.
            turned = nbytes > 0 and self._depth.end(begin, time.perf_counter(), 1, nbytes)
        if turned:
            self._resize()

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            behind = self._behind
            if self._active > self.inflight or (not self._jobs and behind is None):
                self._active -= 1
                return None
            if not self._jobs and behind is not None:
                return partial(self._bring, behind)
            job = self._jobs[0]
            waiting = sum(each.cost for each in self._jobs)
            first, last = job.take(waiting // self.inflight, self._reads_per_part())
            if not job.left:
                self._jobs.popleft()
            self._reading += 1
            begin = time.perf_counter()
            self._depth.begin(begin, self._reading)
            return partial(self._read_part, job, first, last, begin)

    def _reads_per_part(self) -> int:
        # Without the time in queues: they are no reason for more of them.
        seconds = self._missed * self._depth.quickest + (1 - self._missed) * self._COPY_S
        return max(1, int(self.UNIT_S / seconds)) if self._depth.quickest else 1

    def _resize(self) -> None:
        """The depth has changed: threads that are too many end, those that are missing come."""
        with self._lock:
            if not self._readers.has_ended:
                with suppress(ParioError):  # those that are there do the work
                    self._wake(self.inflight if self._behind else sum(job.left for job in self._jobs))

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        """Like `Fetcher.read`, spread over the threads; returns when all bytes are there."""
        if len(reads) <= 1:
            self.fetcher.read(reads, out, starts)
            return
        finished = Call()
        self.submit(reads, out, starts, lambda error, _seconds: finished.set_exception(error))
        finished.result()

    def close(self, limit_s: float = math.inf) -> bool:
        """Finish queued jobs, then end the threads; accepts no more jobs. The fetcher stays open.

        Returns whether the threads ended within `limit_s`: a stalled store keeps them.
        """
        self._behind = None
        return self._readers.close(limit_s)

    def _closed(self) -> ClosedError:
        return ClosedError("the read threads have ended", path=self.fetcher.path)


class Job:
    """The reads of one submission: which are taken, and which have ended. Not thread-safe."""

    def __init__(
        self,
        reads: np.ndarray,
        out: np.ndarray,
        starts: np.ndarray,
        done: Callable[[BaseException | None, float], None],
        unit_bytes: int,
    ) -> None:
        self.reads, self.out, self.starts, self.done = reads, out, starts, done
        self.error: BaseException | None = None
        self.seconds = 0.0
        # Bytes up to the end of each read. Each counts as if it were longer by a unit: where the way to the storage is
        # long, a few short ones must not stand in line behind each other.
        self._costs = [0, *np.cumsum(reads["nbytes"] + unit_bytes).tolist()]
        self._unit_bytes = unit_bytes
        self._next = 0
        self._parts = 0  # under way

    @property
    def left(self) -> int:
        """Reads that nobody has taken."""
        return len(self.reads) - self._next

    @property
    def cost(self) -> int:
        """Of the reads that nobody has taken, in bytes."""
        return self._costs[-1] - self._costs[self._next]

    def take(self, aim: int, most: int) -> tuple[int, int]:
        """The next reads [first, last): those of about this much cost, at most `most`."""
        first, costs = self._next, self._costs
        last = first + 1
        if most > 1:
            end = costs[first] + max(self._unit_bytes, aim)
            last = max(last, min(first + most, bisect_right(costs, end) - 1))
        self._next = last
        self._parts += 1
        return first, last

    def nbytes(self, first: int, last: int) -> int:
        return self._costs[last] - self._costs[first] - (last - first) * self._unit_bytes

    def drop(self, error: BaseException) -> bool:
        """Take no more of its reads. Returns whether none is under way."""
        self.error = self.error or error
        self._next = len(self.reads)
        return not self._parts

    def part_ended(self, error: BaseException | None, seconds: float) -> bool:
        """Returns whether the job has ended with it."""
        self.seconds += seconds
        self.error = self.error or error
        if error is not None:
            self._next = len(self.reads)  # the rest is of no use
        self._parts -= 1
        return not self._parts and not self.left
