"""How far ahead of a consumer a ring is filled: the estimates, the law, and both against a simulated store and loop."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pario.control.bridge import Bridge, Filled, Filling, RingLaw, RingTuner, Takes
from pario.control.knobs import Knob

SLOT, SLOTS, TICKS = 8 << 20, 6, 8


def test_a_steady_filling_needs_little_more_than_it_takes() -> None:
    bridge = Bridge()
    assert bridge.seconds == 0
    for _ in range(40):
        bridge.add(0.1)
    assert 0.1 <= bridge.seconds < 0.11


def test_one_that_varies_needs_more() -> None:
    random_, bridge = random.Random(1), Bridge()
    found = [random_.uniform(0.05, 0.15) for _ in range(200)]
    covered = 0
    for seconds in found:
        covered += seconds <= bridge.seconds
        bridge.add(seconds)
    assert covered >= 195
    assert bridge.seconds < 0.4


def test_another_depth_is_another_group() -> None:
    """With 64 reads at once each takes longer than with 2."""
    tuner = RingTuner(Knob("bytes", 1, SLOTS * SLOT, 2 * SLOT), SLOT)
    for at_once, reading in [(64, 40.0)] * 10 + [(2, 1.0)] * 2:
        tuner.filled(0.0, Filled(reading / at_once, reading, SLOT, at_once, True), short=False)
    assert 0.5 < tuner.seconds < 1.0


def test_a_group_without_bytes_says_nothing() -> None:
    """Of an epoch's short rest a node may have no record."""
    tuner = RingTuner(Knob("bytes", 1, SLOTS * SLOT, 2 * SLOT), SLOT)
    before = tuner.lead(TICKS)
    assert before == TICKS
    assert not tuner.filled(0.0, Filled(0.0, 0.0, 0, 1, True), short=True)
    assert tuner.lead(TICKS) == before


@pytest.mark.parametrize("seed", range(4))
def test_bursts(seed) -> None:
    """Against counting, take by take."""
    random_ = random.Random(seed)
    takes, times, now = Takes(), [], 0.0
    for _ in range(60):
        now += random_.choice([0.0, 0.01, 0.3])
        units = random_.choice([1, 1, 5])
        takes.add(now, units)
        times += [now] * units
    times = times[-Takes.MOST :]
    for seconds in (0.0, 0.005, 0.1, 1.0):
        oracle = max(sum(at <= later <= at + seconds for later in times[k + 1 :]) for k, at in enumerate(times))
        assert takes.most_within(seconds) == oracle


def test_takes_that_are_not_known() -> None:
    takes = Takes()
    assert not takes.known
    takes.add(1.0)
    assert takes.most_within(10.0) == 0


def test_the_law() -> None:
    law = RingLaw()
    quiet = Filling(group_bytes=8e6, tick_bytes=1e6, bridge_s=0.2, taken=3, short=False)
    assert law.step(40_000_000, quiet) == (20_000_000, "the loop takes 3 steps in the 200 ms that a group may take")
    assert law.step(12_000_000, quiet).value == 11_000_000
    assert law.step(9_000_000, quiet).value == 11_000_000
    short = Filling(group_bytes=8e6, tick_bytes=1e6, bridge_s=0.2, taken=3, short=True)
    assert law.step(10_000_000, short) == (20_000_000, "the loop had to wait for the store")
    tight = Filling(group_bytes=8e6, tick_bytes=1e6, bridge_s=0.2, taken=3, short=True, room=15_000_000)
    assert law.step(10_000_000, tight) == (15_000_000, "the node or the control group has no more memory")


class Simulated:
    """A ring of 6 slots of 8 steps: one group is read after the other, and a loop that takes steps."""

    def __init__(self, group_s: Callable[[float], float], step_s: Callable[[int], float]) -> None:
        self.knob = Knob("bytes", 1, SLOTS * SLOT, 2 * SLOT)
        self.tuner = RingTuner(self.knob, SLOT)
        self._group_s, self._step_s = group_s, step_s
        self.now, self.waited, self.done = 0.0, 0.0, 0
        self.waits: list[float] = []
        self._ready, self._next_at = 0, 0.0
        self._reading: float | None = None  # when it ends
        self._began = 0.0

    def run(self, until: float) -> None:
        while self.now < until:
            if self._reading is None and self._may_begin():
                self._began, self._reading = self.now, self.now + self._group_s(self.now)
            events = [self._reading] if self._reading is not None else []
            if self.done < self._ready:
                events.append(max(self.now, self._next_at))
            self.now = min(events)
            if self.done < self._ready and self.now >= self._next_at:
                if self._next_at and self.now > self._next_at + 1e-9:
                    self.waited += self.now - self._next_at
                    self.waits.append(self.now)
                self.done += 1
                self.tuner.took(self.now, 1)
                self._next_at = self.now + self._step_s(self.done)
            elif self._reading is not None and self.now >= self._reading:
                short = self.done == self._ready and self.now > self._next_at and self.done > 0
                seconds = self.now - self._began
                if self.tuner.filled(self.now, Filled(seconds, 4 * seconds, SLOT, 4, True), short=short):
                    self.tuner.turn(self.now, TICKS, None)
                self._ready += TICKS
                self._reading = None

    def _may_begin(self) -> bool:
        free = self._ready + TICKS <= self.done // TICKS * TICKS + SLOTS * TICKS
        return free and self.done + self.tuner.lead(TICKS) >= self._ready


def test_a_slow_loop_needs_a_quarter_of_the_ring() -> None:
    one = Simulated(lambda now: 0.5, lambda step: 0.32)
    one.run(60)
    assert one.knob.value <= SLOTS * SLOT / 4
    assert one.waited == 0


def test_a_hungry_loop_gets_all_of_it() -> None:
    one = Simulated(lambda now: 0.05, lambda step: 0.0)
    one.run(2)
    assert one.knob.value == SLOTS * SLOT
    assert one.knob.reason == "the loop had to wait for the store"


def test_a_store_that_stalls() -> None:
    """It is bridged the second time, if that comes soon; an hour of quiet gives the memory back."""
    stalls = {20: 3.0, 30: 3.0, 40: 3.0}
    one = Simulated(lambda now: stalls.pop(int(now), 0.3), lambda step: 0.2)
    one.run(29)
    assert one.waited > 0
    first = one.waited
    grown = one.knob.value
    assert grown > 2 * SLOT
    one.run(60)
    assert one.waited < 3 * first
    one.run(3600)
    assert one.knob.value < 1.5 * SLOT + SLOT / TICKS


def test_a_loop_that_takes_in_bursts() -> None:
    one = Simulated(lambda now: 0.2, lambda step: 0.0 if step % 12 else 4.0)
    one.run(100)
    late = [when for when in one.waits if when > 50]
    assert not late
    assert one.knob.value >= SLOT + 11 * SLOT // TICKS


def test_a_loop_that_becomes_fast() -> None:
    one = Simulated(lambda now: 0.1, lambda step: 0.3 if step < 200 else 0.001)
    one.run(40)
    assert one.knob.value < 2 * SLOT
    one.run(70)
    assert one.knob.value == SLOTS * SLOT


def test_the_pinned_one_stays() -> None:
    tuner = RingTuner(Knob("bytes", SLOT, SLOT, SLOT), SLOT)
    for now in range(10):
        assert not tuner.filled(now, Filled(0.1, 0.4, SLOT, 4, False), short=True)
    assert tuner.lead(TICKS) == 0
