"""When a rank waits for the end of the fill. The clock and the fill are played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pario.tiers import fill_end
from pario.tiers.fill_end import FillEnd

CHUNKS = np.arange(3)


class Played:
    """States of a fill that had 100 chunks to bring at 0 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.to_come, self.comes, self.waits = 0.0, 100, True, []
        monkeypatch.setattr(fill_end.time, "monotonic", lambda: self.now)

    def left(self) -> int:
        return self.to_come

    def wait_coming(self, chunks: np.ndarray, check: Any, limit_s: float, *, absent: bool) -> bool:
        assert chunks is CHUNKS
        assert absent
        self.waits.append(limit_s)
        return self.comes


def waits(states: Any, record_s: float, after: list[tuple[float, int]], waited_s: float = 0.0) -> list[float]:
    end = FillEnd(states)
    end.record_s = record_s
    for at, states.to_come in [(0.0, 100), *after]:
        states.now = at
        end.wait(CHUNKS, 1000, 7.0 + (waited_s if at else 0.0), lambda: None)
    return states.waits


def test_waits_for_what_is_sooner_there_than_read(monkeypatch) -> None:
    assert waits(Played(monkeypatch), 0.001, [(0.04, 20)]) == pytest.approx([0.02])  # the rest in 10 ms, or 1 s alone


@pytest.mark.parametrize(
    ("record_s", "after"),
    [
        (9e-6, [(0.04, 20)]),  # 9 ms alone
        (0.0, [(0.04, 20)]),  # it has read nothing by itself yet
        (1.0, [(0.04, 100)]),  # nothing has come
        (1.0, [(4.0, 90)]),  # 36 s
        (1.0, [(0.04, 0)]),  # all is there
        (1.0, [(0.04, 200)]),  # chunks were given back
    ],
)
def test_reads_by_itself(monkeypatch, record_s, after) -> None:
    assert waits(Played(monkeypatch), record_s, after) == []


def test_a_fill_that_does_not_come_is_waited_for_once(monkeypatch) -> None:
    states = Played(monkeypatch)
    states.comes = False
    assert len(waits(states, 0.001, [(0.04, 20), (0.05, 10), (0.06, 1)])) == 1


@pytest.mark.parametrize(("waited_s", "expected"), [(36.1, [72.0]), (35.9, [])])
def test_a_script_that_has_waited_as_long_waits_for_the_end(monkeypatch, waited_s, expected) -> None:
    assert waits(Played(monkeypatch), 1.0, [(4.0, 90)], waited_s) == pytest.approx(expected)


def test_another_fill_is_another_start(monkeypatch) -> None:
    """Chunks were given back: what the script waited for, and what came, before that does not count."""
    states = Played(monkeypatch)
    end = FillEnd(states)
    for states.now, states.to_come in [(0.0, 60), (4.0, 5), (1000.0, 50), (1010.0, 40)]:  # 40 s left, after 5 s
        end.wait(CHUNKS, 0, 50.0 + states.now / 2, lambda: None)
    assert states.waits == [pytest.approx(2 * 5 * 4 / 55)]
