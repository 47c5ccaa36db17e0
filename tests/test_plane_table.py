"""The table of processes against what one process does, written down plainly."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.plane.table import Table


def use(table: Table, rows: list[int], now: float, at: float, used: list[float], wants: float) -> None:
    n = len(rows)
    pairs = np.array([[each, 0.0] for each in used])
    table.use(np.array(rows), np.full(n, now), np.full(n, at), pairs, np.full((n, 2), wants))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1.5), st.floats(0, 100)), min_size=1, max_size=30))
def test_the_peak_is_that_of_the_last_two_seconds(steps: list[tuple[float, float]]) -> None:
    """Of two to two and a half, as they are kept in parts of half a second."""
    table = Table()
    row = table.add()
    now, used = 10.0, 0.0
    use(table, [row], now, now, [used], 0.0)
    seen: deque[tuple[float, float]] = deque()
    for over, nbytes in steps:
        now, used = now + over, used + nbytes
        use(table, [row], now, now, [used], 0.0)
        seen.append((now, nbytes / over))
        least = max(rate for when, rate in seen if when >= now - 2.0)
        most = max(rate for when, rate in seen if when >= now - 2.5)
        assert least * (1 - 1e-6) - 1e-6 <= table.peak[row, 0] <= most * (1 + 1e-6) + 1e-6
        assert math.isclose(table.now[row, 0], nbytes / over, rel_tol=1e-6, abs_tol=1e-6)


def test_rows_are_given_again_as_new() -> None:
    table = Table()
    rows = [table.add() for _ in range(200)]
    assert len(set(rows)) == 200, "more than it had room for"
    use(table, rows, 1.0, 1.0, [0.0] * 200, 5.0)
    use(table, rows, 2.0, 2.0, [7.0] * 200, 5.0)
    assert table.peak[rows, 0].tolist() == [7.0] * 200
    table.remove(rows[3])
    assert table.add() == rows[3]
    assert table.peak[rows[3]].tolist() == [0.0, 0.0]
    assert math.isnan(table.at[rows[3]])
    assert table.wants[rows[3]].tolist() == [math.inf, math.inf]


def test_who_is_told() -> None:
    """Whoever reported, and whose grant is another one by more than a fiftieth."""
    table = Table()
    a, b = table.add(), table.add()

    def due() -> list[bool]:
        return table.due()[[a, b]].tolist()

    assert due() == [True, True], "they have never heard of it"
    assert due() == [False, False], "no limit is no change"
    table.rates[a] = 100.0
    assert due() == [True, False]
    table.rates[a] = 101.0
    assert due() == [False, False]
    table.rates[a] = 103.0
    assert due() == [True, False]
    use(table, [b], 1.0, 1.0, [0.0], 5.0)
    assert due() == [False, True]
    table.safe[b] = 1.0
    assert due() == [False, True]
