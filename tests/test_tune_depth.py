"""The windows in which reads are measured: what counts, when a window ends, what its law is told."""

from __future__ import annotations

import pytest

from pario.tune import depth as module
from pario.tune.depth import Depth
from pario.tune.knobs import Knob, Setting
from pario.tune.tuner import WINDOW_S, Law, Window


class Listens(Law):
    """Asks for one more read each time."""

    hurried = False

    def __init__(self) -> None:
        self.heard: list[Window] = []

    def step(self, depth: int, window: Window) -> Setting:
        self.heard.append(window)
        return Setting(depth + 1, "one more")


@pytest.fixture
def law() -> Listens:
    return Listens()


def depth(law: Law, day: float = 0.0) -> Depth:
    return Depth(Knob("reads in flight", 1, 64, 2), law, day=day)


def read(one: Depth, begin: float, now: float, reads: int = 1, **how: bool) -> bool:
    one.begin(begin, 2)
    return one.end(begin, now, reads, 1000 * reads, **how)


def test_a_window_ends_with_the_quarter_of_the_day(law) -> None:
    one = depth(law, day=100.1)
    found = [read(one, k * 0.01, k * 0.01 + 0.008) for k in range(60)]
    assert [round(k * 0.01 + 0.008, 3) for k, turned in enumerate(found) if turned] == [0.158, 0.408]
    first, second = law.heard
    assert first.number == int(100.258 / WINDOW_S)
    assert second.number == first.number + 1
    assert second.latency == pytest.approx(0.008)
    assert (second.nbytes, second.most) == (1000, 2)
    assert second.in_flight == pytest.approx(0.8, abs=0.05)
    assert second.rate == pytest.approx(100, rel=0.05)
    assert one.knob.value == 4


def test_windows_of_a_slow_store_are_longer(law) -> None:
    """Powers of two of a quarter of a second, so that they end together with those of others."""
    one = depth(law)
    for k in range(60):
        read(one, 0.3 * k, 0.3 * k + 0.29)
    assert len(law.heard) >= 2
    assert {window.number % 4 for window in law.heard[1:]} == {0}


def test_reads_from_before_the_window_do_not_count(law) -> None:
    one = depth(law)
    for k in range(40):
        read(one, 0.01 * k, 0.01 * k + 0.01)
    heard = len(law.heard)
    before = 0.01 * 40
    one.begin(before, 2)
    for k in range(41, 90):
        read(one, 0.01 * k, 0.01 * k + 0.01)
        if len(law.heard) > heard:
            heard = 1000
            one.end(before, 0.01 * k + 0.01, 1, 1000)  # began long ago
    assert all(window.latency == pytest.approx(0.01) for window in law.heard)


def test_several_reads_in_a_row(law) -> None:
    one = depth(law)
    for k in range(8):
        read(one, 0.1 * k, 0.1 * k + 0.1, reads=5)
    assert law.heard[0].latency == pytest.approx(0.02)
    assert law.heard[0].nbytes == 1000


def test_too_few_reads_say_nothing(law) -> None:
    one = depth(law)
    for k in range(7):
        assert not read(one, 2.0 * k, 2.0 * k + 0.01)
    assert read(one, 20.0, 20.01)


def test_a_window_without_a_read(law) -> None:
    """After a drain there may be none for a while."""
    law.hurried = law.drains = True
    one = depth(law)
    assert read(one, 0.0, 0.1, reads=10)
    one.end(0.05, 5.0, 1, 1000)  # began before the new window
    assert len(law.heard) == 1
    assert not read(one, 5.1, 5.2)
    assert read(one, 5.2, 5.3)


def test_full_means_full_all_the_time(law) -> None:
    one, said = depth(law), [True]
    one.is_full = lambda: said[0]
    for k in range(26):
        read(one, 0.01 * k, 0.01 * k + 0.01)
    assert law.heard[-1].full
    said[0] = False
    one.note_full()  # a group is published, and few were ready
    said[0] = True
    for k in range(26, 52):
        read(one, 0.01 * k, 0.01 * k + 0.01)
    assert not law.heard[-1].full
    one.is_full = None  # nobody prefetches
    for k in range(52, 78):
        read(one, 0.01 * k, 0.01 * k + 0.01)
    assert not law.heard[-1].full


def test_a_failed_read_is_told(law) -> None:
    one = depth(law)
    for k in range(26):
        read(one, 0.01 * k, 0.01 * k + 0.01, failed=k == 3)
    assert law.heard[0].failed


def test_reads_in_no_time(law) -> None:
    """The clock may stand still between two looks at it."""
    one = depth(law)
    for k in range(40):
        read(one, 0.01 * k, 0.01 * k)
    assert law.heard[0].latency == module._TICK_S


def test_the_first_read_alone_is_told(law) -> None:
    one = depth(law)
    for k in range(4):
        one.begin(0.001 * k, k + 1)
    for k in range(4):
        one.end(0.001 * k, 0.01 * (k + 1), 1, 1000)
    for k in range(60):
        read(one, 0.05 + 0.01 * k, 0.06 + 0.01 * k)
    assert [window.alone for window in law.heard] == pytest.approx([0.01, 0.0])


def test_the_first_epoch_begins_a_window(law) -> None:
    """Reads of the tree before it are of another kind; later epochs begin none, or short ones would have none."""
    one = depth(law)
    for k in range(7):
        read(one, 0.01 * k, 0.01 * k + 0.01)
    one.follow(lambda: False)
    for k in range(8):
        read(one, 1 + 0.05 * k, 1.05 + 0.05 * k)
        one.follow(lambda: False)
    assert [window.latency for window in law.heard] == pytest.approx([0.05])
