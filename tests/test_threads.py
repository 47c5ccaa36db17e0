"""Background threads, and what happens where the system grants fewer than were asked for."""

from __future__ import annotations

import concurrent.futures
import inspect
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from pario import threads
from pario.errors import ParioError
from pario.threads import Call, Condition, Workers, start_thread

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
    assert workers.close()
    assert not {"test-0", "test-1"} & {thread.name for thread in threading.enumerate()}
    assert workers.call(pow, 2, 3).cancelled()
    assert not workers.put(lambda: None)
    assert workers.close()


def test_urgent_work_goes_first() -> None:
    workers, done, go = Workers("test", 1), [], threading.Event()
    first = workers.call(lambda: done.append(go.wait(20)))
    while not first.running():
        time.sleep(1e-3)
    workers.put(lambda: done.append("later"))
    workers.put(lambda: done.append("urgent"), urgent=True)
    go.set()
    assert workers.close()
    assert done == [True, "urgent", "later"]


def test_a_thread_of_its_own_may_end_it() -> None:
    """As the garbage collector does: it runs `__del__` in any thread."""
    workers = Workers("test", 2)
    assert workers.call(workers.close, 0).result(20) is False  # one of its threads still runs
    assert workers.close()


def test_what_has_not_begun_is_cancelled() -> None:
    workers, go = Workers("test", 1), threading.Event()
    running, waiting = workers.call(go.wait, 20), workers.call(go.wait, 20)
    while not running.running():
        time.sleep(1e-3)
    assert not workers.close(0, cancel=True)
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
    assert workers.close()


FORKS = """
import os
from pario.threads import in_child

class Kept:
    def forget(self): print("forgotten", flush=True)

class Failing:
    def forget(self): raise OSError("no descriptor is left")

kept, gone, failing = Kept(), Kept(), [Failing() for _ in range(20)]
in_child(kept.forget)
in_child(gone.forget)
for each in failing: in_child(each.forget)
del gone
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


def test_what_a_fork_forgets() -> None:
    """What lives, once, whatever becomes of others; and the script's end, when objects go that are still registered,
    says nothing."""
    done = subprocess.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "forgotten\n", "")


def test_lanes_share_threads_and_wait_for_each_other() -> None:
    workers = Workers("test", 0)
    saves, writes, done = workers.lane(1), workers.lane(2), []

    def save(number: int) -> None:
        both = threading.Barrier(2)
        done.append((number, sum(call.result(20) for call in [writes.call(both.wait, 20) for _ in range(2)])))

    assert all(saves.put(lambda number=number: save(number)) for number in range(3))
    assert saves.close(20)
    assert done == [(0, 1), (1, 1), (2, 1)]  # one after another, and each had two threads beside its own
    assert not saves.put(lambda: None)
    assert saves.load == 0
    assert {thread.name for thread in threading.enumerate()} & {"test-0", "test-1", "test-2", "test-3"}
    assert writes.call(pow, 2, 3).result(20) == 8
    assert saves.close(0)  # once more: the other lane goes on
    assert writes.call(pow, 2, 3).result(20) == 8
    assert writes.close(20)
    assert writes.call(pow, 2, 3).cancelled()
    assert workers.close(20)  # their threads have ended, or do so


def test_what_has_not_begun_in_a_lane_is_cancelled() -> None:
    workers, go = Workers("test", 0), threading.Event()
    lane = workers.lane(1)
    running, waiting = lane.call(go.wait, 20), lane.call(go.wait, 20)
    while not running.running():
        time.sleep(1e-3)
    assert lane.load == 2
    assert not lane.close(0, cancel=True)
    go.set()
    assert lane.close(20)
    assert running.result() is True
    assert waiting.cancelled()


LANE_IN_CHILD = """
import os, threading
from pario.threads import Workers

workers, held, go = Workers("test", 0), threading.Event(), threading.Event()
lane, other = workers.lane(2), workers.lane(1)

def holds():
    with lane._free:
        held.set()
        go.wait(60)

lane.put(go.wait)
other.put(holds)
held.wait(60)
if (child := os.fork()) == 0:
    print(lane.close(60), other.close(60), lane.call(pow, 2, 3).cancelled(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
print(lane.close(60), other.close(60))
"""


def test_a_forked_process_does_not_wait_for_its_parents_lanes() -> None:
    done = subprocess.run([sys.executable, "-c", LANE_IN_CHILD], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.stderr) == ("True True True\nTrue True\n", "")


def test_a_lane_that_ends_in_a_thread_of_its_own_does_not_wait_for_it() -> None:
    """As the garbage collector may have it."""
    lane = Workers("test", 0).lane(1)
    assert lane.call(lane.close).result(20) is False
    assert lane.close(20)


def test_ctrl_c_at_any_moment_leaves_a_lane_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("test", 0)
    lane, put = workers.lane(1), workers.put

    def interrupted(unit: Callable[[], None]) -> bool:
        put(unit)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lane.put(lambda: None)
    assert lane.call(pow, 2, 3).result(20) == 8
    assert lane.close(20)
    assert lane.load == 0


def waits_for_a_call() -> None:
    with pytest.raises(concurrent.futures.TimeoutError):
        Call().result(1e-3)


def waits_for_a_condition() -> None:
    condition = Condition()
    with condition:
        try:
            assert not condition.wait(1e-3)
        finally:
            condition.notify_all()


@pytest.mark.parametrize("waits", [waits_for_a_call, waits_for_a_condition])
def test_ctrl_c_at_any_moment_ends_a_wait_as_such(waits: Callable[[], None]) -> None:
    """Before each line that Python's own modules run for it. (Of theirs, some make this a RuntimeError.)"""
    files = {threading.__file__, inspect.getfile(concurrent.futures.Future)}
    left = 0

    def pressed(frame: FrameType, event: str, _value: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename in files:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return pressed

    for line in itertools.count(1):
        left, before = line, sys.gettrace()
        sys.settrace(pressed)
        try:
            waits()
        except KeyboardInterrupt:
            continue
        finally:
            sys.settrace(before)
        break
    assert line > 10


def test_ctrl_c_while_a_thread_begins_is_no_refused_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        """As Python's own, where Ctrl-C comes when its wait has just released the lock."""
        lock = threading.Lock()
        with lock:
            lock.release()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        start_thread("test", lambda: None, stop=None)


def test_a_lane_without_a_thread_is_an_error(granted, caplog: pytest.LogCaptureFixture) -> None:
    """Rather than a unit that waits for ever for what the other lane cannot do."""
    granted(1)
    workers, go = Workers("test", 0), threading.Event()
    saves, writes = workers.lane(2), workers.lane(1)
    first = saves.call(go.wait, 20)
    with pytest.raises(ParioError, match=r"refuses this process a thread \(test-1\)"):
        writes.call(pow, 2, 3)
    assert writes.load == 0
    with caplog.at_level(logging.WARNING, "pario"):
        second = saves.call(pow, 2, 3)  # by the thread that it has
    assert "fewer threads do the work" in caplog.text
    go.set()
    assert (first.result(20), second.result(20)) == (True, 8)
    assert saves.close(20)
    assert writes.close(20)


def test_no_thread_at_all_is_an_error(granted) -> None:
    granted(0)
    workers = Workers("test", 5)
    with pytest.raises(ParioError, match=r"refuses this process a thread \(test-0\): it has \d+.*Options.inflight"):
        workers.call(pow, 2, 3)
    with pytest.raises(ParioError, match=r"\(alone\)"):
        start_thread("alone", print, stop=None)
    assert workers.close()


def test_at_the_end_a_thread_does_itself_what_it_hands_on(granted, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12 on no thread can be started when the script has ended; its main thread is over then."""
    workers, over, done = Workers("test", 1), threading.Event(), []

    def hand_on() -> None:
        over.wait(20)
        done.append(workers.call(threading.get_ident).result(0))

    thread = threading.Thread(target=hand_on)
    thread.start()
    granted(0)
    monkeypatch.setattr(threading, "main_thread", lambda: threading.Thread())
    over.set()
    thread.join(20)
    assert done == [thread.ident]
    assert workers.close()


LIMITED = """
import resource, sys
import pario
options = pario.Options(inflight=64, slots=2, slot_bytes=64 << 10)
how = {"recipe": "ring", "options": options, "comm": "self"}
with pario.Loader(sys.argv[1], 8, lambda value: {"n": len(value)}, **how) as loader:
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


def policies(workers: Workers) -> list[int]:
    """What the scheduler does with this thread, one of the workers, and this thread again."""
    before = os.sched_getscheduler(0)
    theirs = workers.call(os.sched_getscheduler, 0).result(10)
    assert workers.close(10)
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


ENDS = """
import atexit, os, sys, threading, time
begin = time.monotonic()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
@atexit.register  # before pario's: called behind it
def last():
    say("alive", *(each.name for each in threading.enumerate()))
from pario import threads
class User:
    def __init__(self, name):
        self.name, self.over = name, threading.Event()
        threads.start_thread(name, self.over.wait, stop=self.over.set)
        threads.at_end(self.told)
    def told(self):
        say("told", self.name)
        self.over.set()
    def __del__(self):
        self.over.set()
        try:
            threads.start_thread("late", print, stop=None)
        except threads.ParioError as e:
            say("refused")
kept = User("kept")
User("dropped")
workers = threads.Workers("work", 2)
waits = workers.call(kept.over.wait)
"""


@pytest.mark.parametrize(
    "end",
    ["pass", "if not os.fork(): sys.exit(0)\nos.wait()", "threading.Thread(target=lambda: time.sleep(0.5)).start()"],
)
def test_at_the_end_all_are_told_and_waited_for(end: str) -> None:
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", ENDS + end], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert "told kept" in said
    assert "told dropped" not in said
    assert said.count("alive MainThread") == (2 if "fork" in end else 1), done.stdout  # in the child, too
    assert said.index("told kept") > said.index("alive MainThread") or "fork" not in end  # by the parent, after that
    assert "refused" in said
    assert not done.stderr


INTERRUPTED = """
start = threading.Thread.start
def interrupted(thread):
    start(thread)
    raise KeyboardInterrupt
threading.Thread.start = interrupted
for one in (lambda: others.put(lambda: None), lambda: User("started")):
    try:
        one()
    except KeyboardInterrupt:
        say("Ctrl-C")
threading.Thread.start = start
"""


def test_threads_that_ctrl_c_kept_from_their_owners_end_too() -> None:
    """It comes while `start` waits for the thread to run: nobody has it in a list."""
    script = ENDS + 'others = threads.Workers("others", 1)' + INTERRUPTED
    env = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("\n")
    assert said.count("Ctrl-C") == 2
    assert said.count("alive MainThread") == 1, done.stdout
