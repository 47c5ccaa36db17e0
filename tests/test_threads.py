"""Background threads, and what happens where the system grants fewer than were asked for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from pario import threads
from pario.errors import ParioError
from pario.threads import Workers, start_thread

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def granted(monkeypatch: pytest.MonkeyPatch):
    """granted(n): the system lets this process start n more threads, and then says what it says."""
    start = threading.Thread.start

    def limit(n: int) -> None:
        left = [n]

        def started(thread: threading.Thread) -> None:
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", started)

    monkeypatch.setattr(threads, "_warned", False)
    return limit


def test_as_many_threads_as_there_is_work() -> None:
    workers = Workers("test", 3)
    both = threading.Barrier(2)
    waits = [workers.call(both.wait, 20) for _ in range(2)]
    assert {future.result() for future in waits} == {0, 1}
    with pytest.raises(ZeroDivisionError):
        workers.call(divmod, 1, 0).result()
    names = {thread.name for thread in threading.enumerate()}
    assert {"test-0", "test-1"} <= names
    assert "test-2" not in names
    assert workers.end()
    assert not {"test-0", "test-1"} & {thread.name for thread in threading.enumerate()}
    assert workers.call(pow, 2, 3).cancelled()
    assert not workers.put(lambda: None)
    assert workers.end()


def test_urgent_work_goes_first() -> None:
    workers, done, go = Workers("test", 1), [], threading.Event()
    first = workers.call(lambda: done.append(go.wait(20)))
    while not first.running():
        time.sleep(1e-3)
    workers.put(lambda: done.append("later"))
    workers.put(lambda: done.append("urgent"), urgent=True)
    go.set()
    assert workers.end()
    assert done == [True, "urgent", "later"]


def test_a_thread_of_its_own_may_end_it() -> None:
    """As the garbage collector does: it runs `__del__` in any thread."""
    workers = Workers("test", 2)
    assert workers.call(workers.end, 0).result(20) is False  # one of its threads still runs
    assert workers.end()


def test_what_has_not_begun_is_cancelled() -> None:
    workers, go = Workers("test", 1), threading.Event()
    running, waiting = workers.call(go.wait, 20), workers.call(go.wait, 20)
    while not running.running():
        time.sleep(1e-3)
    assert not workers.end(0, cancel=True)
    go.set()
    assert running.result() is True
    while not waiting.done():
        time.sleep(1e-3)
    assert waiting.cancelled()


def test_fewer_threads_do_the_work(granted, caplog) -> None:
    """One warning per process, whatever else is refused."""
    granted(2)
    workers = Workers("test", 5)
    both = threading.Barrier(2)
    with caplog.at_level(logging.WARNING, "pario"):
        waits = [workers.call(both.wait, 20) for _ in range(4)]
        assert sorted(future.result() for future in waits) == [0, 0, 1, 1]
    (record,) = caplog.records
    assert "2 of 5 threads named test do the work" in record.getMessage()
    assert workers.end()


def test_no_thread_at_all_is_an_error(granted) -> None:
    granted(0)
    workers = Workers("test", 5)
    with pytest.raises(ParioError, match=r"refuses this process a thread \(test-0\): it has \d+.*Options.inflight"):
        workers.call(pow, 2, 3)
    with pytest.raises(ParioError, match=r"\(alone\)"):
        start_thread("alone", print)
    assert workers.end()


LIMITED = """
import resource, sys
import pario
options = pario.Options(own_rows="never", inflight=64, slots=2, slot_bytes=64 << 10)
with pario.Loader(sys.argv[1], 8, lambda value: {"n": len(value)}, options=options, comm="self") as loader:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), hard))
    try:
        said = f"read {sum(len(batch.ids) for batch in loader)}"
    except pario.errors.ParioError as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
sys.stdout.write(said + "\\n")
"""


def limited(path: str, more: int) -> str:
    """What is said where the address space may grow by so many bytes once the loader is there."""
    argv = [sys.executable, "-c", LIMITED, path, str(more)]
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_small_address_space(caffe_datum) -> None:
    """`ulimit -v`: all records with the threads there is room for, or an error that names the limit."""
    assert limited(caffe_datum.path, 200 << 20) == f"read {len(caffe_datum.truth)}\n"
    said = limited(caffe_datum.path, 1 << 20)
    assert "refuses this process a thread" in said
    assert "address space in bytes (ulimit -v)" in said


def test_parts_are_shared_with_idle_threads_and_nobody_waits_for_busy_ones() -> None:
    workers = Workers("test", 2)
    try:
        both = threading.Barrier(2)
        names: list[str] = []

        def work(number: int) -> None:
            if number < 2:
                both.wait(30)  # this thread and another one
            names.append(threading.current_thread().name)

        workers.share(work, [(k,) for k in range(6)], 2)
        assert len(names) == 6
        assert len(set(names)) == 2
        # All threads are busy: a thread of the pool itself does its parts alone.
        done: list[int] = []
        first = [workers.call(workers.share, lambda k: done.append(k), [(k,) for k in range(50)], 2) for _ in range(4)]
        assert all(future.result(30) is None for future in first)
        assert sorted(done) == sorted([*range(50)] * 4)

        def fails(number: int) -> None:
            raise IndexError(f"part {number}")

        with pytest.raises(IndexError, match="part"):
            workers.share(fails, [(k,) for k in range(5)], 2)
    finally:
        assert workers.end(30)


def policies(workers: Workers) -> list[int]:
    """What the scheduler does with this thread, one of the workers, and this thread again."""
    before = os.sched_getscheduler(0)
    theirs = workers.call(os.sched_getscheduler, 0).result(10)
    assert workers.end(10)
    return [before, theirs, os.sched_getscheduler(0)]


def test_only_threads_that_compute_stand_back() -> None:
    assert policies(Workers("reads", 1)) == [os.SCHED_OTHER] * 3
    assert policies(Workers("computes", 1, computes=True)) == [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]


@pytest.mark.parametrize("chosen", [os.SCHED_IDLE, os.SCHED_FIFO])
def test_another_policy_of_the_user_stays(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda thread: chosen)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("it was changed"))
    assert Workers("computes", 1, computes=True).call(int, "7").result(10) == 7


def test_a_refused_policy_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert Workers("computes", 1, computes=True).call(int, "7").result(10) == 7
