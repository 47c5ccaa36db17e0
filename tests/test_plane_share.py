"""Shares: worked examples, and what must hold for any of them. The oracle fills up by small steps, or states a law."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.plane.share import fitted, max_min

AMOUNTS = st.floats(0, 1000)


def of_one(capacity: float, demands: np.ndarray, guarantees: np.ndarray | None = None) -> np.ndarray:
    """One division."""
    first = 0.0 if guarantees is None else fitted(guarantees, capacity)
    return max_min(np.array([capacity]), demands, np.zeros(len(demands), np.int64), first)


def shares(capacity: float, demands: list[float], guarantees: list[float] | None = None) -> list[float]:
    limits = None if guarantees is None else np.array(guarantees, float)
    return np.round(of_one(capacity, np.array(demands, float), limits), 6).tolist()


@pytest.mark.parametrize(
    ("capacity", "demands", "guarantees", "expected"),
    [
        (100, [20, 90, 90], None, [20, 40, 40]),
        (100, [90, 20, 90], None, [40, 20, 40]),  # not in ascending order
        (100, [10, 20], None, [45, 55]),  # what is left, evenly
        (100, [0, 20], None, [0, 100]),  # nothing to who wants nothing
        (100, [0, 0], None, [50, 50]),
        (100, [200, 200, 200, 200], [15, 20, 30, 35], [15, 20, 30, 35]),  # PAIO's four jobs
        (100, [200, 200], [15, 20], [47.5, 52.5]),  # the first two of them
        (100, [200, 5], [15, 20], [95, 5]),  # a guarantee that is not used
        (100, [100, 100], [150, 50], [75, 25]),  # more than there is
        (0, [10, 10], None, [0, 0]),
    ],
)
def test_examples(capacity: float, demands: list[float], guarantees: list[float] | None, expected: list[float]) -> None:
    assert shares(capacity, demands, guarantees) == expected


def by_steps(capacity: float, demands: np.ndarray, steps: int) -> np.ndarray:
    """Drop by drop, each to whoever has least of those that want more."""
    given_ = np.zeros(len(demands))
    drop = capacity / steps
    for _ in range(steps):
        open_ = np.flatnonzero(given_ < demands)
        if not len(open_):
            break
        given_[open_[np.argmin(given_[open_])]] += drop
    return given_


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 500), st.lists(AMOUNTS, min_size=1, max_size=5))
def test_as_if_filled_drop_by_drop(capacity: float, demands: list[float]) -> None:
    wanted = np.array(demands)
    found, slow = of_one(capacity, wanted), by_steps(capacity, wanted, 400)
    # Each may get the half of a drop that it does not need, which others then lack.
    most = (1 + len(demands)) * capacity / 400
    assert (np.abs(np.minimum(found, wanted) - np.minimum(slow, wanted)) <= most).all()


@settings(max_examples=200, deadline=None)
@given(st.floats(1, 500), st.lists(st.tuples(AMOUNTS, AMOUNTS), min_size=1, max_size=8))
@pytest.mark.full
def test_laws(capacity: float, jobs: list[tuple[float, float]]) -> None:
    demands, guarantees = np.array(jobs).T
    found = of_one(capacity, demands, guarantees)
    assert found.sum() == pytest.approx(capacity)
    assert (found >= np.minimum(demands, fitted(guarantees, capacity)) - 1e-9).all()
    if demands.any():
        assert (found[demands == 0] == 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(AMOUNTS, st.floats(0, 50)), min_size=2, max_size=6), st.floats(1, 1e6))
def test_a_larger_claim_takes_no_guarantee(jobs: list[tuple[float, float]], claim: float) -> None:
    demands, guarantees = np.array(jobs).T
    demands[0] += claim
    found = of_one(300.0, demands, guarantees)
    assert (found[1:] >= np.minimum(demands, fitted(guarantees, 300.0))[1:] - 1e-9).all()


GROUPS = st.lists(st.tuples(st.floats(0, 500), st.lists(AMOUNTS, min_size=1, max_size=5)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_several_at_once_are_as_one_by_one(groups: list[tuple[float, list[float]]]) -> None:
    capacity = np.array([each for each, _ in groups])
    demands = np.array([each for _, demands in groups for each in demands])
    group = np.repeat(np.arange(len(groups)), [len(demands) for _, demands in groups])
    one_by_one = [of_one(each, np.array(demands)) for each, demands in groups]
    np.testing.assert_allclose(max_min(capacity, demands, group), np.concatenate(one_by_one), atol=1e-6)
