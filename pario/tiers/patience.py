"""Calls of storage that may not come back for minutes, and nobody who waits for them that long.

The kernel lets no thread out of a read of a disk that does not answer. So such calls run in threads of their own, and
anyone who waits for one leaves it behind after a while. The call itself goes on, and may still read or write when its
caller does other things: so what it reads into, and what it writes, must be memory that nobody else uses.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from pario.errors import ParioError
from pario.threads import start_thread

#: How often a caller looks whether there is any hope, in seconds.
_LOOK_S = 0.25

T = TypeVar("T")

#: Tells anyone who waits that the storage has answered, and that there is more to do.
Step = Callable[[], None]


class StalledError(OSError):
    """The storage has not answered in time."""


class Patience:
    """Runs calls in threads of that name, and waits at most `limit_s` seconds for the storage to answer. Any thread.

    There are as many threads as calls at the same time; they wait for the next ones.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._desks = _Desks()

    @property
    def has_left_calls(self) -> bool:
        """Calls that were left behind have not come back."""
        return self._desks.left_behind > 0

    def call(self, work: Callable[[Step], T]) -> T:
        """What work(step) returns or raises. StalledError if nothing happens for `limit_s` seconds, or if another call
        is left behind meanwhile."""
        task = _Task(work)
        try:
            self._desks.put(self._name, task)
        except ParioError:  # no thread to be had: in this one
            task.run()
        limit, looks, steps = self._limit_s, 0, 0
        # Looks are counted, instead of seconds, since a process that was stopped has not waited meanwhile.
        while not task.done.acquire(timeout=min(_LOOK_S, limit)):
            looks = looks + 1 if task.steps == steps else 0
            steps = task.steps
            if (looks * _LOOK_S >= limit or self.has_left_calls) and self._desks.leave(task):
                raise StalledError(f"nothing has come back for {limit:g} seconds")
        error, task.error = task.error, None
        try:
            if error is not None:
                raise error
            return task.result[0]
        finally:
            del error  # it refers to this frame, and through it to open files

    def close(self) -> None:
        """End the threads, each one when its call has come back. Later calls get new ones. Idempotent."""
        self._desks.close()

    def __del__(self, _over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the interpreter's end a thread that held the lock stands still for ever.
        if not _over() and hasattr(self, "_desks"):
            self._desks.close()


class _Task(Generic[T]):
    """A call. done : locked until it has come back; steps : grows as long as the storage answers"""

    def __init__(self, work: Callable[[Step], T]) -> None:
        self._work = work
        self.done = threading.Lock()
        self.done.acquire()
        self.steps = 0
        self.is_left = False
        self.error: BaseException | None = None
        self.result: list[T] = []

    def run(self) -> None:
        try:
            self.result.append(self._work(self._step))
        except BaseException as e:
            self.error = e
        del self._work  # it refers to open files
        self.done.release()

    def _step(self) -> None:
        self.steps += 1


_Desk = queue.SimpleQueue  # where a thread waits for its next task; None ends it


class _Desks:
    """The threads, which refer to this object and not to their owner: nobody need end them in time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards what follows; the garbage collector may call `close` anywhere
        self._idle: list[_Desk[_Task | None]] = []
        self._era = 0  # of threads that `close` has not ended
        self.left_behind = 0

    def put(self, name: str, task: _Task) -> None:
        """Raises ParioError if there is no thread for it."""
        with self._lock:
            desk: _Desk[_Task | None] | None = self._idle.pop() if self._idle else None
        if desk is None:
            desk = queue.SimpleQueue()
            start_thread(name, self._serve, desk, self._era, stop=self.close)
        desk.put(task)

    def leave(self, task: _Task) -> bool:
        """Note that nobody waits for the task any more. False: it has just come back."""
        with self._lock:
            task.is_left = task.done.locked()
            self.left_behind += task.is_left
            return task.is_left

    def _serve(self, desk: _Desk[_Task | None], era: int) -> None:
        while (task := desk.get()) is not None:
            task.run()
            with self._lock:
                self.left_behind -= task.is_left
                task.error = None if task.is_left else task.error
                if era != self._era:
                    return
                self._idle.append(desk)
            del task

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._era += 1
        for desk in idle:
            desk.put(None)
