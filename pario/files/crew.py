"""How many threads receive calls: one, and more as long as calls have to wait.

A second thread costs the first one time even if there is one program: it is woken on another processor, and waits there
for the interpreter's lock. (Two to eight threads for one program: 50 to 62 us per open of a small file, one thread: 38
to 50 us. Four programs with a timer of 1 kHz: with one thread one call in 9 ends by EINTR, with eight one in 200.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

#: Calls that are received at once, and records that are read side by side from a slow store.
_THREADS = 8
#: A thread that had to wait for nobody in this many calls is not needed.
_CALM = 64


class Crew:
    """The threads that answer calls, one at a time.

    lock : anyone who answers a call has it; resting : threads that receive no calls now
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._wanted = threading.Semaphore(0)
        self.resting = 0
        self._failed: list[BaseException] = []
        self._ended = threading.Semaphore(0)

    def work(self, serve: Callable[[Duty], None]) -> None:
        """Run `serve` in all threads, until one of them ends. Raises what it raised."""

        def run(number: int) -> None:
            try:
                if number:
                    self._rest()
                serve(Duty(self, first=not number))
            except BaseException as e:
                self._failed.append(e)
            finally:
                self._ended.release()

        for number in range(_THREADS):
            threading.Thread(target=run, args=(number,), daemon=True).start()
        self._ended.acquire()
        if self._failed:
            raise self._failed[0]

    def _rest(self) -> None:
        with self.lock:
            self.resting += 1
        self._wanted.acquire()

    def call_another(self) -> None:
        """One more thread is to receive calls. The lock is held."""
        if self.resting:
            self.resting -= 1
            self._wanted.release()

    @contextlib.contextmanager
    def given_up(self, another: bool) -> Iterator[None]:
        """Let others answer calls meanwhile. another : this takes long, so that one of them must be awake"""
        if another:
            self.call_another()
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


class Duty:
    """What one of the threads does for each call. first : this one never rests"""

    def __init__(self, crew: Crew, first: bool) -> None:
        self._crew, self._first = crew, first
        self._acquire, self._release = crew.lock.acquire, crew.lock.release
        self._calm = 0

    def begin(self, others_wait: Callable[[], bool]) -> None:
        if self._acquire(False):
            self._calm += 1
        else:
            self._acquire()
            self._calm = 0
        if others_wait():
            self._crew.call_another()
            self._calm = 0

    def end(self) -> None:
        self._release()
        if self._calm > _CALM and not self._first:
            self._calm = 0
            self._crew._rest()
