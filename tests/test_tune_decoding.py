"""Threads that decode and batches ahead: the laws, and both against a simulated loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pario.tune.decoding import AheadLaw, DecodeTuner, Decoding, Loop, ThreadsLaw
from pario.tune.knobs import Knob

QUIET = Decoding(waits=0.0, busy=0.5, idle=3.0, prepares=0.5, taken=1, room=16)
WAITS = replace(QUIET, waits=0.3, busy=1.0)


def test_more_threads_while_the_loop_waits_and_a_core_is_idle() -> None:
    law = ThreadsLaw()
    assert law.step(2, WAITS) == (4, "the loop waits for decoding 30% of the time")
    crowded = law.step(2, replace(WAITS, idle=0.2))
    assert crowded == (2, "the loop waits for decoding 30% of the time, and no core is idle")
    assert law.step(2, replace(WAITS, waits=0.03)) == (2, "the loop hardly waits for decoding")


def test_fewer_when_the_loop_is_the_limit() -> None:
    law = ThreadsLaw()
    assert law.step(8, QUIET) == (4, "decoding keeps 0.5 busy, and nobody waits for it")
    assert law.step(4, QUIET).value == 2
    assert law.step(2, QUIET).value == 1
    assert ThreadsLaw().step(4, replace(QUIET, busy=2.6)).value == 4


def test_batches_ahead() -> None:
    law = AheadLaw()
    assert law.step(2, QUIET) == (2, "the loop takes up to 2 while one is being prepared")
    assert law.step(8, replace(QUIET, taken=5)).value == 6
    assert law.step(2, replace(QUIET, taken=5)).value == 6
    assert law.step(2, WAITS) == (4, "the loop takes batches in bursts")
    assert law.step(2, replace(WAITS, prepares=0.97)).value == 2  # a longer queue would be empty, too
    assert law.step(2, replace(QUIET, taken=9, room=3)) == (3, "held_bytes has no room for more")


class Simulated:
    """A loop of `consumer(k)` seconds a batch, one thread that prepares, decoders of `work` seconds a batch."""

    def __init__(self, work: float, cores: int) -> None:
        self.work, self.cores = work, cores
        self.threads, self.ahead = Knob("threads", 1, cores, cores), Knob("ahead", 1, 16, 2)
        self.tuner = DecodeTuner(self.threads, self.ahead, cores)
        self.now = self.consumer = self.waiting = self.decoded = 0.0
        self.batches = 0
        self._ready: list[float] = []  # when each batch is there
        self._free_at = 0.0

    def run(self, batches: int, consumer) -> None:
        for _ in range(batches):
            while len(self._ready) < self.batches + 1 + self.ahead.value:
                seconds = self.work / self.threads.value
                self._free_at = max(self._free_at, self.now) + seconds
                self._ready.append(self._free_at)
                self.decoded += self.work
            waited = max(0.0, self._ready[self.batches] - self.now)
            self.batches += 1
            self.now += waited
            self.waiting += waited
            if self.tuner.taken(self.now, self.work / self.threads.value):
                loop = Loop(self.consumer, self.waiting, 0.0, self.batches)
                self.tuner.turn(self.now, loop, self.decoded, self.decoded, 16)
            self.now += consumer(self.batches)
            self.consumer += consumer(self.batches)


def test_a_slow_loop_needs_one_thread() -> None:
    one = Simulated(work=0.02, cores=8)
    one.run(100, lambda k: 0.1)
    assert (one.threads.value, one.ahead.value) == (1, 1)  # batches are taken one by one
    assert one.waiting == pytest.approx(0.02 / 8)  # the first batch


def test_a_fast_loop_keeps_all_threads_and_gets_them_back() -> None:
    one = Simulated(work=0.08, cores=8)
    one.run(100, lambda k: 0.005)
    assert one.threads.value == 8
    one.run(100, lambda k: 0.2)
    assert one.threads.value == 1
    one.run(100, lambda k: 0.005)
    assert one.threads.value == 8


def test_a_loop_that_takes_in_bursts() -> None:
    one = Simulated(work=0.02, cores=1)
    one.run(200, lambda k: 0.0 if k % 4 else 0.4)
    waited = one.waiting
    one.run(100, lambda k: 0.0 if k % 4 else 0.4)
    assert one.ahead.value >= 4
    assert one.waiting - waited < 0.01


def test_pinned_ones_stay() -> None:
    tuner = DecodeTuner(Knob("threads", 2, 2, 2), Knob("ahead", 3, 3, 3), 4)
    assert tuner.is_pinned
    for k in range(40):
        tuner.taken(float(k), 0.5)
        assert not tuner.turn(float(k), Loop(0.1 * k, 0.9 * k, 0.0, 10 * k), float(k), float(k), 16)
    assert (tuner.threads.value, tuner.ahead.value) == (2, 3)
