"""When a rank waits for the end of the fill. The fill is played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pario.tiers.fill_end import FillEnd

CHUNKS = np.arange(3)


class Played:
    """States of a fill that needs 0.5 ms for each of its chunks, if nobody takes its cores."""

    def __init__(self, chunk_s: float = 0.0005) -> None:
        self.to_come, self.chunk_s, self.comes, self.waits = 100, chunk_s, True, []
        self.copied, self.waits_copied = 0, []

    def left(self) -> int:
        return self.to_come

    def left_s(self) -> float:
        return self.to_come * self.chunk_s

    def coming_s(self) -> float:
        return self.copied * self.chunk_s

    def wait_coming(self, chunks: np.ndarray, check: Any, limit_s: float, *, absent: bool = False) -> bool:
        """Those that are being copied are there at once."""
        assert chunks is CHUNKS
        (self.waits if absent else self.waits_copied).append(limit_s)
        return self.comes or not absent


def look(end: FillEnd, records: int, waited_s: float) -> None:
    if end.left(waited_s):
        end.wait(CHUNKS, records, waited_s, lambda: None)


def waits(states: Any, record_s: float, to_come: list[int], waited_s: float = 0.0) -> list[float]:
    """The limits of the waits of a rank that has 1,000 records to read, after looks at 100 chunks and these."""
    end = FillEnd(states)
    chunk_s, states.chunk_s = states.chunk_s, 0.0  # nothing has come
    look(end, 1000, 7.0)
    assert states.waits == [0.02]
    states.waits.clear()
    end.record_s, states.chunk_s = record_s, chunk_s
    for states.to_come in to_come:
        look(end, 1000, 7.0 + waited_s)
    return states.waits


@pytest.mark.parametrize("record_s", [0.001, 0.0])
def test_waits_for_what_is_sooner_there_than_read(record_s: float) -> None:
    """The rest is there in 10 ms. Alone it takes 1 s, or nobody knows how long."""
    assert waits(Played(), record_s, [20]) == pytest.approx([0.02])


@pytest.mark.parametrize(
    ("record_s", "to_come", "chunk_s"),
    [
        (9e-6, 20, 0.0005),  # 9 ms alone
        (0.0, 90, 0.4),  # it has read nothing by itself yet
        (1.0, 100, 0.0),  # nothing has come
        (1.0, 90, 0.4),  # 36 s
        (1.0, 0, 0.0005),  # all is there
    ],
)
def test_reads_by_itself(record_s, to_come, chunk_s) -> None:
    assert waits(Played(chunk_s), record_s, [to_come]) == []


@pytest.mark.parametrize(("copied", "limit_s"), [(2, 0.02), (64, 0.128), (900, 0.25)])
def test_what_is_being_copied_is_waited_for_as_long_as_that_takes(copied: int, limit_s: float) -> None:
    """64 chunks of 1 ms are under way: none of them is read by itself before. (A rank that read after 20 ms what was
    on its way read a tenth of a file twice, from a disk of 200 MB/s on two nodes.)"""
    states = Played(0.001)
    states.copied = copied
    look(FillEnd(states), 10, 0.0)
    assert states.waits_copied == [pytest.approx(limit_s)]


def test_a_fill_that_does_not_come_is_waited_for_once() -> None:
    states = Played()
    states.comes = False
    assert len(waits(states, 0.001, [20, 10, 1])) == 1


def test_no_wait_goes_beyond_twice_the_limit(monkeypatch) -> None:
    """However often the fill comes a little nearer. The limit is 0.25 s, of a start."""
    now = [100.0]
    monkeypatch.setattr("pario.tiers.fill_end.time.monotonic", lambda: now[0])

    class Slow(Played):
        def wait_coming(self, chunks: np.ndarray, check: Any, limit_s: float, *, absent: bool = False) -> bool:
            super().wait_coming(chunks, check, limit_s, absent=absent)
            if absent and self.chunk_s:
                self.to_come, now[0] = self.to_come - 1, now[0] + limit_s
            return not absent

    assert sum(waits(Slow(), 0.0, [90])) == pytest.approx(0.5)


def test_a_fill_that_is_late_and_comes_is_waited_for() -> None:
    class Late(Played):
        def wait_coming(self, chunks: np.ndarray, check: Any, limit_s: float, *, absent: bool = False) -> bool:
            self.comes = self.to_come < 10
            if absent and self.chunk_s:
                self.to_come -= 5
            return super().wait_coming(chunks, check, limit_s, absent=absent)

    assert len(waits(Late(), 0.001, [20])) == 4


@pytest.mark.parametrize(("waited_s", "expected"), [(36.1, [72.0]), (35.9, [])])
def test_a_script_that_has_waited_as_long_waits_for_the_end(waited_s, expected) -> None:
    assert waits(Played(0.4), 1.0, [90], waited_s) == pytest.approx(expected)


def test_another_fill_is_another_start() -> None:
    """Chunks were given back: what the script waited for before that does not count."""
    states = Played(1.0)
    end = FillEnd(states)
    for waited_s, states.to_come in [(50.0, 60), (52.0, 5), (550.0, 50), (555.0, 40), (556.0, 5)]:
        look(end, 0, waited_s)
    assert states.waits == [pytest.approx(2 * 5)]
