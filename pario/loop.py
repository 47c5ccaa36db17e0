"""The iterator of one epoch, or of the rest of one: batches in order, prepared ahead where that helps."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from pario.errors import ClosedError, ParioError
from pario.records import Batch
from pario.stats.rank import RankStats

__all__ = ["Hooks", "Loop"]

#: Another thread is worth its switches where the caller's time between two batches is this part of a step's own.
_OVERLAP = 0.25


@dataclass(frozen=True)
class Hooks:
    """What a loop asks of its loader.

    check : does everybody else still live and work? Called in the thread that takes the batches
    check_ahead : the same without MPI, for other threads
    prepare(step, check) : everything of a step but what must happen in order
    finish(prepared, step) : the batch
    taken(batch) : it is handed out next
    complete() : the epoch is at its end
    failed(error) : this rank cannot go on
    check_open() : raises ClosedError when the loader is closed
    wake() : let those who wait for bytes look around
    """

    check: Callable[[], None]
    check_ahead: Callable[[], None]
    prepare: Callable[[int, Callable[[], None]], Any]
    finish: Callable[[Any, int], Batch]
    taken: Callable[[Batch], None]
    complete: Callable[[], None]
    failed: Callable[[BaseException], None]
    check_open: Callable[[], None]
    wake: Callable[[], None]


class Loop(Iterator[Batch]):
    """`steps` batches of epoch `epoch`.

    submit : submit(function, *arguments) calls it in another thread; up to `ahead` steps more than the one that is
        waited for are prepared so. None: each step is prepared when it is asked for
    eager : False: `submit` is used only while the caller takes its time between two batches, so that there is
        something to do meanwhile; a caller that asks at once is served by its own thread
    alive_seconds : how often a waiting rank calls `check`
    stats : of this rank; its `consumer` grows by the caller's seconds between two batches, its `waiting` by the others
    """

    def __init__(
        self,
        hooks: Hooks,
        *,
        epoch: int,
        steps: int,
        submit: Callable[..., Future[Any]] | None,
        ahead: int,
        eager: bool,
        alive_seconds: float,
        stats: RankStats,
    ) -> None:
        self._hooks = hooks
        self._epoch = epoch
        self._steps = steps
        self._submit = submit
        self._most_ahead = ahead
        self._eager = eager
        self._away = 0.0, 0.0  # the caller's seconds between its last two batches, and between those before
        self._took = 0.0  # seconds of the last step that was prepared
        self._alive_seconds = alive_seconds
        self._stats = stats
        self._step = 0
        self._ended = threading.Event()
        self._complete = False
        self._taking = threading.Lock()
        self._ahead: deque[Future[Any]] = deque()
        self._submitted = 0
        self._handed_out = 0.0

    def __next__(self) -> Batch:
        if not self._taking.acquire(blocking=False):
            raise ParioError("two threads take batches of one loop", hint="Take them in one thread and pass them on.")
        try:
            return self._next()
        finally:
            self._taking.release()

    def _next(self) -> Batch:
        hooks = self._hooks
        asked = time.perf_counter()
        if self._handed_out:
            self._away = asked - self._handed_out, self._away[0]
            self._stats.consumer += self._away[0]
        if self._ended.is_set():
            hooks.check_open()
            if self._complete:
                raise StopIteration
            raise ParioError(
                f"this loop over epoch {self._epoch} was ended by a newer loop, set_epoch or load_state_dict",
                hint="For two loops at once make two Loaders.",
            )
        step = self._step
        if step == self._steps:
            self._complete = True
            hooks.complete()
            raise StopIteration
        try:
            if self._submit is None or not (self._ahead or self._overlaps()):
                hooks.check()
                prepared = self._prepare(step, hooks.check)
            else:
                prepared = self._next_ahead(self._submit)
            batch = hooks.finish(prepared, step)
        except BaseException as e:
            hooks.failed(e)
            raise
        self._step = step + 1
        hooks.taken(batch)
        self._handed_out = now = time.perf_counter()
        self._stats.waiting += now - asked
        return batch

    def _overlaps(self) -> bool:
        """Is there something to gain by other threads? (A caller is late once when its core is taken from it.)"""
        return self._eager or min(self._away) > _OVERLAP * self._took > 0

    def _prepare(self, step: int, check: Callable[[], None]) -> Any:
        begin = time.perf_counter()
        prepared = self._hooks.prepare(step, check)
        self._took = time.perf_counter() - begin
        return prepared

    def _next_ahead(self, submit: Callable[..., Future[Any]]) -> Any:
        self._submitted = max(self._submitted, self._step)
        last = min(self._steps, self._step + 1 + self._most_ahead) if self._overlaps() else self._submitted
        while self._submitted < last:
            self._ahead.append(submit(self._prepare, self._submitted, self._check_ahead))
            self._submitted += 1
        future = self._ahead[0]  # it stays there meanwhile: end() wakes what is under way
        while True:
            self._hooks.check()
            # Other threads call no MPI: while they work, this thread listens for the other nodes.
            if wait([future], timeout=self._alive_seconds).done:
                self._ahead.popleft()
                return future.result()

    def _check_ahead(self) -> None:
        self._hooks.check_ahead()
        if self._ended.is_set():
            raise ClosedError("the epoch was left")

    def end(self, limit_s: float = math.inf) -> None:
        """Stop preparing further batches; returns when none is under way, after `limit_s` at most."""
        self._ended.set()
        for future in self._ahead:
            future.cancel()
        end = time.monotonic() + limit_s
        while (not_done := [f for f in self._ahead if not f.done()]) and time.monotonic() < end:
            # Again and again: a thread may have looked at `_ended` just before, and fall asleep just after a wake.
            self._hooks.wake()
            wait(not_done, timeout=0.01)
        self._ahead.clear()
