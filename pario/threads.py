"""Background threads that take calls from a queue: as many as are asked for, or as many as the system grants.

All are daemon threads: one may be inside a read of a stalled store, and the interpreter would wait for it for ever. But
none of them should run when the interpreter ends, because it freezes them wherever they are, with the locks that they
hold, and the main thread may wait for one of these. So when the script has ended (`_end_all`) each is told to end, and
waited for, but not for long.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import queue
import resource
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from pario import machine
from pario.errors import ParioError

_log = logging.getLogger("pario")

Unit = Callable[[], object]

#: Seconds, when the script has ended, for all threads together to come back from what they are at.
_END_S = 5.0

_warned = False
_over = False
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_stops: dict[weakref.WeakMethod[Any], tuple[Any, ...]] = {}


def start_thread(
    name: str, target: Callable[..., None], *arguments: Any, stop: Callable[[], object] | None
) -> threading.Thread:
    """A daemon thread that runs target(*arguments). Raises ParioError if the system refuses it.

    stop : what `at_end` takes; None: the thread ends by itself, soon or when another one does
    """
    if _over:  # called by `__del__`: such a thread would never run, and `start` wait for it for ever
        raise ParioError(f"the script has ended: no thread ({name}) can be started")
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    _started.add(thread)  # before: Ctrl-C may come while `start` waits for the thread to run
    if stop is not None:
        at_end(stop)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as e:
        if isinstance(e.__context__, KeyboardInterrupt):  # `start` waits by Python's own `Condition`: see below
            raise e.__context__ from None
        raise _refused(name) from e
    return thread


def aside(limit_s: float, work: Callable[..., None], *arguments: Any) -> None:
    """Call work(*arguments) in a thread, and wait for its end this long at most: signals reach the caller meanwhile.
    Raises ParioError if the system refuses the thread."""
    start_thread("pario-aside", work, *arguments, stop=None).join(limit_s)


def at_end(stop: Callable[[], object]) -> None:
    """When the script has ended, call this bound method, if its object still lives, until all threads have ended. It
    lets threads end, and does not wait for them.

    stop : a bound method, or a partial of one with arguments
    """
    if _over:
        return
    method, arguments = (stop.func, stop.args) if isinstance(stop, functools.partial) else (stop, ())
    _stops[weakref.WeakMethod(method, _forget)] = arguments


def _forget(stop: Any) -> None:
    _stops.pop(stop, None)


@atexit.register
def _end_all() -> None:
    """After all other exit handlers of pario (the first to be registered is the last to be called), which may still
    need the threads: other ranks may wait for what they read."""
    global _over
    until = time.monotonic() + _END_S
    while True:
        # Repeatedly: a thread may have tested whether to end just before, and another one may have been started since.
        for reference, arguments in list(_stops.items()):
            if (stop := reference()) is not None:
                with suppress(Exception):
                    stop(*arguments)
        alive = [each for each in list(_started) if each.is_alive()]
        if not alive or time.monotonic() > until:
            break
        alive[0].join(0.05)
    _over = True
    _stops.clear()  # weak references that call back later find a module weakref that is gone
    _in_child.clear()


_in_child: set[weakref.WeakMethod[Any]] = set()


def in_child(forget: Callable[[], object]) -> None:
    """In every process that is forked from this one, call this bound method, if its object still lives."""
    if not _over:
        _in_child.add(weakref.WeakMethod(forget, _in_child.discard))


def _forked() -> None:
    """The threads, and what they work for, belong to the parent."""
    _started.clear()
    _stops.clear()
    for each in list(_in_child):
        if (forget := each()) is not None:
            with suppress(Exception):  # the others must not go on with what is the parent's
                forget()


os.register_at_fork(after_in_child=_forked)


class Condition(threading.Condition):
    """`threading.Condition` whose `wait` always comes back with the lock. If Ctrl-C comes just after Python's own has
    released it, or before it takes it again, the end of the `with` raises RuntimeError instead."""

    def wait(self, timeout: float | None = None) -> bool:
        try:
            return super().wait(timeout)
        except BaseException:
            if not self._is_owned():  # type: ignore[attr-defined]
                self.acquire()
            raise


class Call(Future[Any]):
    """A `Future` with such a `Condition`."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


class AnyWorkers(ABC):
    """Runs units of work in threads: `Workers`, or one `Lane` of them."""

    _cancelled = False

    @abstractmethod
    def put(self, unit: Unit, /) -> bool:
        """Let a thread run this unit; False after `close`. A unit must not raise.

        Raises ParioError if not even one thread can be started.
        """

    def run(self, unit: Unit) -> None:
        """Let a thread run this unit; this one does if there is no other for it."""
        with suppress(ParioError):
            if self.put(unit):
                return
        unit()

    @abstractmethod
    def close(self, limit_s: float = math.inf, cancel: bool = False) -> bool:
        """Accept no more work, let the threads finish what is queued, and end them. Idempotent.

        cancel : cancel calls that have not started
        Returns whether the threads ended within `limit_s` seconds.
        """

    def call(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Call:
        """Call function(*arguments, **more) in a thread. After `close` the future is cancelled."""
        future = Call()

        def run() -> None:
            if self._cancelled:
                future.cancel()
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*arguments, **more)
                except BaseException as e:
                    future.set_exception(e)
                else:
                    future.set_result(result)

        if not self.put(run):
            future.cancel()
            future.set_running_or_notify_cancel()
        return future


class Workers(AnyWorkers):
    """Up to `most` threads that take units of work from one queue; each starts when there is work for it. `resize`
    changes their number, and each `lane` adds to it.

    If the system refuses another thread, fewer do the work, and a warning says so once per process.

    name : name of the threads; a number is appended
    computes : the threads compute rather than wait for storage: one that wakes up for work does not take the core
        from a thread that runs, such as the training loop (SCHED_BATCH). Where a thread waits for reads, it must do so:
        the sooner it asks for the next one the better
    """

    # DLIO on two cores and two ranks, steps of 41 ms, cold disk, 6 and 7 runs in turn, median AU: decoding threads as
    # all others 97.1 and 96.7 %, SCHED_BATCH 97.8 %; reading ones only 96.9 %, all of pario's 97.7 and 97.7 %; nice 19
    # for all 97.0 %, nice 10 96.8 %, slices of 0.1 ms 96.2 %. Two ranks that compute without a pause on both cores, 4
    # runs: 3 KB 7.8 -> 6.9 ms per step, 147 KB 34.6 -> 36.6 ms (single runs 32 to 40 ms either way).

    def __init__(self, name: str, most: int, *, computes: bool = False) -> None:
        self._name = name
        self._computes = computes
        self._most = most
        self._lanes = 0
        #: how many threads there were when the system refused another one, since the last `resize`; None if it has not
        self.granted: int | None = None
        self._queue: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._urgent: deque[Unit] = deque()
        self._lock = threading.RLock()  # the garbage collector may call `close` inside `put`
        self._threads: list[threading.Thread] = []
        self._under_way = 0  # units queued or running
        self.has_ended = False

    def put(self, *units: Unit, urgent: bool = False) -> bool:
        """Let threads run these units; False after `close`. A unit must not raise.

        urgent : ahead of all others that wait for a thread
        Raises ParioError if not even one thread can be started.
        """
        with self._lock:
            if self.has_ended:
                return False
            self._under_way += len(units)
            try:
                self._grow()
            except BaseException as e:
                self._under_way -= len(units)
                # From Python 3.12 on none can be when the script has ended: a thread then does itself what it hands on.
                main = threading.main_thread()
                if main.is_alive() or threading.current_thread() is main or not isinstance(e, ParioError):
                    raise
            else:
                for unit in units:
                    if urgent:
                        self._urgent.append(unit)
                        unit = _nothing  # wakes a waiting thread; a busy one checks `_urgent` first
                    self._queue.put(unit)
                return True
        for unit in units:
            unit()
        return True

    def lane(self, most: int) -> Lane:
        """`most` more threads, so that units of one sort never wait for those of others. The threads end with the last
        lane."""
        self._most += most
        self._lanes += 1
        return Lane(self, most)

    def left(self) -> None:
        """`Lane` calls this at its end."""
        with self._lock:
            self._lanes -= 1
        if not self._lanes:
            self.close(0)

    def resize(self, most: int) -> None:
        """From now on up to `most` threads. Surplus ones end when they have done the unit that they are at."""
        with self._lock:
            if self.has_ended:
                return
            self._most, self.granted = most, None
            idle = max(0, len(self._threads) - most)
            self._under_way += idle
            for _ in range(idle):
                self._queue.put(_nothing)  # wakes one that waits
            with suppress(ParioError):  # those that are there do the work
                self._grow()

    def close(self, limit_s: float = math.inf, cancel: bool = False) -> bool:
        with self._lock:
            if not self.has_ended:
                self._queue.put(None)
            self.has_ended = True
            self._cancelled = self._cancelled or cancel
            threads, self._threads = self._threads, []
        end = time.monotonic() + limit_s
        # The garbage collector runs `__del__` in any thread.
        for thread in [each for each in threads if each is not threading.current_thread()]:
            thread.join(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
        return not any(thread.is_alive() for thread in threads)

    def _grow(self) -> None:
        """Start the threads that are missing."""
        while len(self._threads) < min(self._under_way, self._most):
            name = f"{self._name}-{len(self._threads)}"  # may be that of one which is just ending
            try:
                self._threads.append(start_thread(name, self._work, stop=functools.partial(self.close, 0, True)))
            except ParioError as e:
                if not self._threads or self._lanes:  # one lane may wait for another one
                    raise
                _warn(f"{len(self._threads)} of {self._most} threads named {self._name} do the work: {e}")
                self._most = self.granted = len(self._threads)

    def _work(self) -> None:
        if self._computes:
            _stand_back()
        while (unit := self._queue.get()) is not None:
            self._run_urgent()
            unit()
            del unit  # it refers to its submitter, and the next one may never come
            with self._lock:
                self._under_way -= 1
                if len(self._threads) > self._most:  # never after `close`, which takes the list
                    self._threads.remove(threading.current_thread())
                    return
        self._queue.put(None)  # for the next one, though Ctrl-C has kept it out of the list

    def _run_urgent(self) -> None:
        with suppress(IndexError):
            while True:
                self._urgent.popleft()()


class Lane(AnyWorkers):
    """At most `most` of a pool's threads, for units of one sort, which may wait for those of another lane.

    load : units that are queued or running
    """

    def __init__(self, pool: Workers, most: int) -> None:
        self._pool, self._most = pool, most
        self._free = Condition()  # on a lock that may be taken twice: see `Workers`
        self._units: deque[Unit] = deque()
        self._busy: dict[object, int] = {}  # each run of units -> its thread, 0 before one has it
        self._ended = False
        in_child(self.forget)

    @property
    def load(self) -> int:
        return len(self._busy) + len(self._units)

    def put(self, unit: Unit, /) -> bool:
        with self._free:
            if self._ended:
                return False
            self._units.append(unit)
            if len(self._busy) == self._most:
                return True
            run, started = object(), False
            self._busy[run] = 0
            try:
                started = self._pool.put(functools.partial(self._run, run))
            except ParioError as e:
                if len(self._busy) == 1:
                    raise
                _warn(f"fewer threads do the work: {e}")
            finally:
                if not started:
                    self._busy.pop(run, None)
                    if not self._busy:
                        self._units.pop()
            return started or bool(self._busy)

    def _run(self, run: object) -> None:
        while True:
            with self._free:
                if run not in self._busy:  # Ctrl-C came when the pool had it: `put` has taken it back
                    return
                self._busy[run] = threading.get_ident()
                if not self._units:
                    del self._busy[run]
                    self._free.notify_all()
                    return
                unit = self._units.popleft()
                self._cancelled = self._cancelled or self._pool._cancelled
            unit()
            del unit  # it refers to its submitter

    def close(self, limit_s: float = math.inf, cancel: bool = False) -> bool:
        mine = threading.get_ident()  # the garbage collector runs `__del__` in any thread
        with self._free:
            first, self._ended = not self._ended, True
            self._cancelled = self._cancelled or cancel
            others_done = lambda: all(thread == mine for thread in self._busy.values())  # noqa: E731
            self._free.wait_for(others_done, min(limit_s, threading.TIMEOUT_MAX))
            idle = not self._busy
        if first:
            self._pool.left()
        return idle

    def forget(self) -> None:
        """In a process that was forked: the threads are its parent's, and one of them may have held the lock."""
        self._free, self._busy, self._ended = Condition(), {}, True


def _nothing() -> None:
    """Stands in the queue for an urgent unit."""


def _stand_back() -> None:
    """Make the calling thread one of SCHED_BATCH, unless the user has chosen another policy for the process."""
    with suppress(OSError):  # a sandbox may refuse it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _warn(text: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        _log.warning("%s", text)


def _refused(name: str) -> ParioError:
    """The error for a thread that the system refused, with the limits that apply."""
    soft = {what: resource.getrlimit(limit)[0] for what, limit in _LIMITS.items()}
    limits = [f"{what} {value:,}" for what, value in soft.items() if value != resource.RLIM_INFINITY]
    limits += [f"{used:,} of {most:,} tasks of the control group" for most, used in machine.task_limits()]
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    of = "of unlimited size" if stack == resource.RLIM_INFINITY else f"of {stack:,} bytes"
    return ParioError(
        f"the system refuses this process a thread ({name}): it has {threading.active_count()}, with stacks {of}; "
        f"limits: {', '.join(limits) or 'none that it tells'}",
        hint="Raise the limit, or ask for fewer threads (Options.inflight, decode_threads) or for smaller stacks "
        "(threading.stack_size(1 << 20) before the Loader is made)",
    )


_LIMITS = {
    "address space in bytes (ulimit -v)": resource.RLIMIT_AS,
    "processes and threads of this user (ulimit -u)": resource.RLIMIT_NPROC,
}
