"""How far ahead of a consumer work must be: the estimates."""

from __future__ import annotations

import random

import pytest

from pario.tune.bridge import Bridge, Takes


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


@pytest.mark.parametrize("seed", range(4))
def test_bursts(seed) -> None:
    """Against counting, take by take."""
    random_ = random.Random(seed)
    takes, times, now = Takes(), [], 0.0
    for _ in range(60):
        now += random_.choice([0.0, 0.01, 0.3])
        for _ in range(random_.choice([1, 1, 5])):
            takes.add(now)
            times.append(now)
    times = times[-Takes.MOST :]
    for seconds in (0.0, 0.005, 0.1, 1.0):
        oracle = max(sum(at <= later <= at + seconds for later in times[k + 1 :]) for k, at in enumerate(times))
        assert takes.most_within(seconds) == oracle


def test_one_take_says_nothing() -> None:
    takes = Takes()
    assert takes.most_within(10.0) == 0
    takes.add(1.0)
    assert takes.most_within(10.0) == 0
