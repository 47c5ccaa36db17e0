"""Products of parameters: every pair of values by default, the whole product under the marker `full`.

What goes wrong between parameters goes wrong between two of them, with few exceptions; those are for the full run.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Choice = tuple[int, ...]


def chosen(sizes: tuple[int, ...]) -> set[Choice]:
    """Rows of the product of range(size) that hold every pair of values; each time the row with most of what is left,
    the first one of several. The same rows on every run."""

    def pairs(row: Choice) -> set[tuple[int, int, int, int]]:
        return {(a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2)}

    rows = list(product(*map(range, sizes)))
    left = set().union(*map(pairs, rows))
    found: set[Choice] = set()
    while left:
        best = max(rows, key=lambda row: len(pairs(row) & left))
        found.add(best)
        left -= pairs(best)
    return found


def pairwise(*values: Iterable[Any]) -> list[Any]:
    """The product of three or more lists of values, for `pytest.mark.parametrize` with as many names."""
    lists = [list(each) for each in values]
    quick = chosen(tuple(map(len, lists)))
    rows = product(*(range(len(each)) for each in lists))
    return [
        pytest.param(
            *(each[k] for each, k in zip(lists, row, strict=True)), marks=() if row in quick else pytest.mark.full
        )
        for row in rows
    ]
