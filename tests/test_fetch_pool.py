"""The pool of reading threads while its depth changes. The oracle is the content as the test wrote it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from pario import threads
from pario.errors import ClosedError, ReadError
from pario.fetch.pool import Job, ReadPool
from pario.fetch.posix import PosixFetcher
from pario.records import EXTENT
from pario.tune import depth
from pario.tune.knobs import Knob, Setting
from pario.tune.tuner import Law


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(1e-3)


class Gated(PosixFetcher):
    """Each read waits until it is let go; counts those that are under way."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.now = 0
        self.parts: list[int] = []
        self.gate = threading.Semaphore(0)
        self._count = threading.Lock()

    def read(self, reads, out, starts):
        with self._count:
            self.now += 1
            self.parts.append(len(reads))
        assert self.gate.acquire(timeout=20)
        with self._count:
            self.now -= 1
        if int(reads["offset"][-1]) >= self.nbytes:
            raise ReadError("nothing there", path=self.path)
        super().read(reads, out, starts)


class Still(Law):
    """Leaves the depth to the test."""

    def step(self, depth, window):
        return Setting(depth, "a test")


@pytest.fixture
def gated(tmp_path, monkeypatch):
    monkeypatch.setattr(depth, "FastProbe", Still)
    file = tmp_path / "data.mdb"
    np.arange(1 << 16, dtype=np.uint8).tofile(file)
    one = Gated(str(file))
    yield one
    one.close()


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("pario-read")}


def reads_of(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    reads = np.zeros(n, EXTENT)
    reads["offset"], reads["nbytes"] = np.arange(n) * 16, 16
    return reads, np.zeros(16 * n, np.uint8), np.arange(n) * 16


def test_threads_come_and_go_while_a_job_runs(gated) -> None:
    knob = Knob("reads in flight", 1, 8, 2)
    pool = ReadPool(gated, knob)
    reads, out, starts = reads_of(64)
    done = threading.Event()
    pool.submit(reads, out, starts, lambda error, seconds: done.set())
    until(lambda: gated.now == 2)
    assert len(names()) == 2
    knob.turn(8, "a test")
    pool._resize()
    until(lambda: gated.now == 8)
    assert len(names()) == 8
    knob.turn(1, "a test")
    pool._resize()
    gated.gate.release(8)
    until(lambda: len(names()) == 1)
    until(lambda: gated.now == 1)
    gated.gate.release(1000)
    assert done.wait(20)
    assert (out == np.arange(16 * 64, dtype=np.uint8)).all()
    assert pool.close(20)
    assert not names()


def test_idle_threads_end_too(gated) -> None:
    gated.gate.release(1000)
    knob = Knob("reads in flight", 1, 6, 6)
    pool = ReadPool(gated, knob)
    pool._reads_per_part = lambda: 1  # type: ignore[method-assign]  # or one may be left alone at the barrier
    reads, out, starts = reads_of(6)
    together = threading.Barrier(6)  # so that all come
    gated.read = lambda *_: together.wait(20)  # type: ignore[method-assign]
    pool.read(reads, out, starts)
    assert len(names()) == 6
    knob.turn(2, "a test")
    pool._resize()
    until(lambda: len(names()) == 2)
    together = threading.Barrier(2)
    pool.read(reads, out, starts)  # with those that are left
    assert len(names()) == 2
    assert pool.close(20)


def test_reads_that_take_long_go_one_by_one(gated) -> None:
    """Nobody knows at first how long they take; short ones are then taken together."""
    gated.gate.release(1 << 20)
    pool = ReadPool(gated, 1)
    reads, out, starts = reads_of(200)
    pool.read(reads, out, starts)
    assert gated.parts[0] == 1
    assert max(gated.parts) > 1
    gated.parts.clear()
    pool._depth.quickest = 0.02
    pool._depth.end = lambda *_, **__: False  # type: ignore[method-assign]  # it stays so
    pool.read(reads, out, starts)
    assert gated.parts == [1] * 200
    assert pool.close(20)


def test_what_memory_has_says_nothing_about_the_store(tmp_path) -> None:
    """It answers at once: threads would take long parts of what the store has, and the law find the store quick."""

    class Half(PosixFetcher):
        """Every other read is a copy out of memory; the others take 12 ms."""

        def read(self, reads, out, starts):
            self.last = int((reads["offset"] % 32 == 0).sum())
            time.sleep(0.012 * self.last)
            parts.append(len(reads))
            super().read(reads, out, starts)

        def missed(self, reads):
            return self.last

    parts: list[int] = []
    np.arange(1 << 16, dtype=np.uint8).tofile(tmp_path / "data.mdb")
    with closing(Half(str(tmp_path / "data.mdb"))) as half:
        pool = ReadPool(half, 1)
        reads, out, starts = reads_of(60)
        pool.read(reads, out, starts)
        assert parts == [1] * 60
        assert pool.latency >= 0.012
        assert pool.close(20)


def test_parts_of_a_job() -> None:
    """Each thread gets its share of what is left, none shorter than a unit."""
    mib = 1 << 20
    reads = np.zeros(8, EXTENT)
    reads["nbytes"] = mib

    def parts(threads: int, most: int = 100) -> list[int]:
        job, found = Job(reads, np.empty(0), np.empty(0), lambda *_: None, 256 << 10), []
        while job.left:
            first, last = job.take(job.cost // threads, most)
            assert job.nbytes(first, last) == (last - first) * mib
            found.append(last - first)
        return found

    assert parts(8) == [1] * 8
    assert parts(4) == [2, 1, 1, 1, 1, 1, 1]
    assert parts(3) == [2, 2, 1, 1, 1, 1]
    assert parts(1) == [8]
    assert parts(1, most=3) == [3, 3, 2]
    assert parts(64) == [1] * 8


def test_parts_are_long_while_other_jobs_wait(gated) -> None:
    """Then the threads need not divide the first one."""
    pool, ended = ReadPool(gated, 2), threading.Semaphore(0)
    pool._depth.quickest = 1e-6
    pool._depth.end = lambda *_, **__: False  # type: ignore[method-assign]  # it stays so
    reads = np.zeros(16, EXTENT)
    reads["nbytes"] = 1
    for _ in range(4):
        pool.submit(reads, np.empty(16, np.uint8), np.arange(16), lambda *_: ended.release())
    gated.gate.release(1000)
    for _ in range(4):
        assert ended.acquire(timeout=20)
    assert sum(gated.parts) == 64
    assert max(gated.parts) == 16  # half of 64, and 8 without the others
    assert pool.close(20)


def test_an_error_ends_the_job(gated) -> None:
    """Once: when the reads have ended that are under way. No more begin. The pool is as good as before."""
    pool, said = ReadPool(gated, 4), []
    reads, out, starts = reads_of(64)
    reads["offset"] += 1 << 16  # beyond the end
    pool.submit(reads, out, starts, lambda error, seconds: said.append(error))
    until(lambda: gated.now == 4)
    gated.gate.release(1)
    until(lambda: gated.now == 3)
    assert not said
    gated.gate.release(3)
    until(lambda: bool(said))
    assert [type(error) for error in said] == [ReadError]
    assert sum(gated.parts) < 16
    gated.gate.release(1000)
    reads, out, starts = reads_of(64)
    pool.read(reads, out, starts)
    assert (out == np.arange(16 * 64, dtype=np.uint8)).all()
    assert pool.close(20)
    assert len(said) == 1


def test_a_job_that_is_withdrawn_ends_with_the_reads_that_are_in_flight(gated) -> None:
    pool = ReadPool(gated, 2)
    said: list[tuple[str, object]] = []

    def submitted(name: str) -> Job:
        return pool.submit(*reads_of(8), lambda error, seconds: said.append((name, type(error))))

    begun = submitted("begun")
    until(lambda: gated.now == 2)
    waiting, last = submitted("waiting"), submitted("last")
    pool.withdraw(waiting)
    assert said == [("waiting", ClosedError)]  # at once
    pool.withdraw(begun)
    assert len(said) == 1
    gated.gate.release(1000)
    until(lambda: len(said) == 3)
    assert dict(said) == {"waiting": ClosedError, "begun": ClosedError, "last": type(None)}
    assert sum(gated.parts) == 2 + 8  # those in flight, and those of the last job
    for job in (begun, waiting, last):
        pool.withdraw(job)  # has ended
    assert pool.close(20)
    assert len(said) == 3


def test_no_deeper_than_there_are_threads(gated, monkeypatch) -> None:
    """The system grants three threads: the depth is no larger, and says why."""
    gated.gate.release(1000)
    start, left = threading.Thread.start, [3]

    def started(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    monkeypatch.setattr(threads, "_warned", True)
    knob = Knob("reads in flight", 1, 16, 8)
    pool = ReadPool(gated, knob)
    reads, out, starts = reads_of(64)
    pool.read(reads, out, starts)
    assert (out == np.arange(16 * 64, dtype=np.uint8)).all()
    assert knob.value <= 3
    assert knob.most == 3
    assert pool.close(20)


def test_a_job_that_comes_while_the_depth_grows_takes_nothing_for_a_refusal(gated) -> None:
    """Threads are not asked for yet when the next job is submitted."""
    gated.gate.release(1000)
    knob = Knob("reads in flight", 1, 16, 2)
    pool = ReadPool(gated, knob)
    assert knob.turn(8, "a test")
    reads, out, starts = reads_of(64)
    done = threading.Event()
    pool.submit(reads, out, starts, lambda error, seconds: done.set())
    assert (knob.most, knob.reason) == (16, "a test")
    assert done.wait(20)
    assert pool.close(20)
