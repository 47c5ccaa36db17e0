"""The iterator over one epoch, or the rest of one: batches in order, prepared ahead if that helps."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, TimeoutError
from contextlib import suppress

from pario.errors import ClosedError, ParioError
from pario.feed.source import Ahead, Parts, Source
from pario.loader.lifetime import Lifetime
from pario.plan.stream import Work
from pario.records import Batch
from pario.stats.rank import RankStats

#: Another thread repays its context switches if the caller's time between two batches is this fraction of a step's.
_OVERLAP = 0.25
#: Several repay them without that if the last times that steps were prepared, FIRST to _LAST of them, have each taken a
#: thread longer than LONG_S seconds of its core. (One rank on two cores, everything in memory, two threads ÷ the caller
#: alone, by its milliseconds a step: 3 KB records 0.07: 0.39, 0.15: 0.80, 0.58: 1.18, 2.0: 1.54; 197 KB 0.24: 0.87,
#: 0.40: 1.10, 0.81: 1.13, 1.6: 1.01, 3.0: 0.97, where the memory is what limits; 100 bytes 0.14: 0.55, 1.2: 1.41.)
LONG_S, FIRST, _LAST = 5e-4, 4, 16
#: For a caller that asks faster than steps are prepared, as many are prepared at once as take this long together.
#: (Everything in memory, one core / one rank on two, ÷ one step at a time: 3 KB in batches of 256 with 1 ms 1.25 /
#: 1.54, this 1.31 / 1.85, 4 ms 1.25 / 2.06; 100 bytes in batches of 1,024 on two cores 1.22, 1.46, 1.59.)
AT_ONCE_S = 2e-3


class Epoch(Iterator[Batch]):
    """The batches of one rank in one epoch, or in the rest of one.

    source : source of the records
    work : the epoch and its number of steps
    lifetime : the loader's; an error ends it
    stats : this rank's counters: `consumer` grows by the caller's seconds between two batches, `waiting` by the rest
    alive_seconds : how often a waiting rank checks whether the others still live
    taken(batch) : called before a batch is handed out
    complete() : called when all batches have been handed out
    """

    def __init__(
        self,
        source: Source,
        work: Work,
        lifetime: Lifetime,
        stats: RankStats,
        *,
        alive_seconds: float,
        taken: Callable[[Batch], None],
        complete: Callable[[], None],
    ) -> None:
        assert lifetime.decode is not None  # set by the constructor
        self._source = source
        self._ahead = source.ahead
        self._decode = lifetime.decode
        self._lifetime = lifetime
        self._epoch = work.epoch
        self._steps = work.schedule.steps
        self._stats = stats
        self._alive_seconds = alive_seconds
        self._taken = taken
        self._at_end = complete
        # The caller's seconds between its last two batches, and between the two before. At the start one is enough.
        self._away = math.inf, math.inf
        # Seconds that preparing the last step took, and those of a thread's core the last times, since more were
        # prepared at once than before.
        self._took, self._computing = 0.0, deque[float]()
        self._at_once, self._most = 1, 0  # steps that are prepared at once, and the most that were
        self._ready: deque[Parts] = deque()
        self._ended = threading.Event()
        self._complete = False
        self._taking = threading.Lock()
        self._under_way: deque[Future[list[Parts]]] = deque()
        self._step = self._submitted = 0
        self._handed_out = self._computed = 0.0

    def __next__(self) -> Batch:
        if not self._taking.acquire(blocking=False):
            raise ParioError("two threads take batches of one loop", hint="Take them in one thread and pass them on.")
        try:
            return self._next()
        finally:
            self._taking.release()

    def _next(self) -> Batch:
        asked = time.perf_counter()
        if self._handed_out:
            self._away = asked - self._handed_out, self._away[0]
            self._stats.consumer += self._away[0]
            computed = time.thread_time() - self._computed
            self._stats.computed += min(max(0.0, computed), self._away[0])  # another thread has another clock
        if self._ended.is_set():
            self._lifetime.check_open()
            if self._complete:
                raise StopIteration
            raise ParioError(
                f"this loop over epoch {self._epoch} was ended by a newer loop, set_epoch or load_state_dict",
                hint="For two loops at once make two Loaders.",
            )
        step = self._step
        if step == self._steps:
            self._complete = True
            self._at_end()
            raise StopIteration
        try:
            self._lifetime.check()
            if not self._ready:
                if self._ahead is None or not (self._under_way or self._overlaps(self._ahead)):
                    self._ready += self._prepare(step, self._lifetime.check, min(self._at_once, self._steps - step))
                else:
                    self._ready += self._next_ahead(self._ahead)
            batch = self._decode.batch(self._ready.popleft(), step, self._epoch)
        except BaseException as e:
            if isinstance(e, CancelledError) and self._ended.is_set():
                raise ClosedError("another thread has ended this loop") from None
            self._lifetime.abandon(e)
            raise
        self._step = step + 1
        self._taken(batch)
        self._handed_out = now = time.perf_counter()
        self._computed = time.thread_time()
        self._stats.waiting += now - asked
        self._decode.taken(now, self._took, self._stats, 0 if self._ahead is None else self._ahead.most)
        return batch

    def _overlaps(self, ahead: Ahead) -> bool:
        """True if other threads would gain time. (A single late caller may just have lost its core for a moment.)"""
        long = ahead.least > 1 and len(self._computing) >= FIRST and min(self._computing) > LONG_S
        return ahead.eager or long or min(self._away) > _OVERLAP * self._took > 0

    def _prepare(self, step: int, check: Callable[[], None], steps: int) -> list[Parts]:
        begin, computed = time.perf_counter(), time.thread_time()
        parts = self._source.prepare(step, check, steps)
        self._took = (time.perf_counter() - begin) / steps
        if steps > self._most:
            self._most, self._computing = steps, deque(maxlen=_LAST)
        self._computing.append(time.thread_time() - computed)
        # Step by step: one that took long may have lost its core for a moment.
        wanted = int(AT_ONCE_S / max(self._took, 1e-9)) if min(self._away) < self._took else 1
        self._at_once = max(1, steps // 2, min(wanted, 2 * steps, self._source.most_steps))
        return parts

    def _next_ahead(self, ahead: Ahead) -> list[Parts]:
        ready = self._under_way.popleft() if self._under_way and self._under_way[0].done() else None
        self._submit(ahead)
        return self._awaited() if ready is None else ready.result()

    def _submit(self, ahead: Ahead) -> None:
        """Let other threads prepare what is missing ahead of this step."""
        self._submitted = max(self._submitted, self._step)
        beyond = max(ahead.steps, ahead.least * self._at_once)  # all threads have work
        last = min(self._steps, self._step + 1 + beyond) if self._overlaps(ahead) else self._submitted
        while self._submitted < last:
            steps = min(self._at_once, self._steps - self._submitted)
            self._under_way.append(ahead.submit(self._prepare, self._submitted, self._check_ahead, steps))
            self._submitted += steps

    def _awaited(self) -> list[Parts]:
        """What is in preparation next, when it is there."""
        future = self._under_way[0]  # it stays in the queue, so that end() wakes it
        while not future.done():
            self._lifetime.check()
            # Other threads call no MPI, so this thread listens for other nodes while they work.
            with suppress(TimeoutError):
                future.exception(self._alive_seconds)  # waits in fewer steps than `wait`
        self._under_way.popleft()
        return future.result()

    def _check_ahead(self) -> None:
        self._lifetime.check_node()
        if self._ended.is_set():
            raise ClosedError("the epoch was left")

    def close(self, limit_s: float = math.inf) -> None:
        """Stop preparing batches. Waits until none is in preparation, for at most `limit_s` seconds."""
        self._ended.set()
        for future in self._under_way:
            future.cancel()
        end = time.monotonic() + limit_s
        while (not_done := [f for f in self._under_way if not f.done()]) and time.monotonic() < end:
            # Repeatedly: a thread may have tested `_ended` just before, and fall asleep just after a wake.
            self._source.wake()
            with suppress(TimeoutError, CancelledError):
                not_done[0].exception(0.01)
        if self._taking.acquire(blocking=False):  # else the thread that takes a batch still looks at them
            self._under_way.clear()
            self._ready.clear()
            self._taking.release()


class Loop(Iterator[Batch]):
    """What the script holds of an epoch. It has left the loop when it holds this no longer; the loader keeps the epoch,
    whose preparation it has to end."""

    def __init__(self, epoch: Epoch) -> None:
        self._epoch = epoch

    def __next__(self) -> Batch:
        return next(self._epoch)
