"""A mixture's turns and draws, as numbers: shares in every prefix, each pass through a source once per record, the same
at any cut."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from pario.errors import OptionError
from pario.plan.mixture import MOST_PERIOD, MixedOrder, Mixture, as_units, turns
from pario.plan.stream import Stream

RNG = np.random.default_rng(0)
UNITS = [
    (1, 1),
    (7, 3),
    (1, 2, 3),
    (1, 100),
    (5, 5, 1, 1, 1),
    (997, 991, 12),
    *(tuple(RNG.integers(1, 40, k).tolist()) for k in (2, 3, 5, 9, 20)),
]


@pytest.mark.parametrize("units", UNITS, ids=str)
def test_every_prefix_has_its_shares(units: tuple[int, ...]) -> None:
    source, before = turns(units)
    period = sum(units)
    drawn = np.cumsum(source[:, None] == np.arange(len(units)), axis=0)
    # |drawn - share * positions| < 1, in whole numbers
    share = np.arange(1, period + 1)[:, None] * np.array(units)
    assert (np.abs(drawn * period - share) < period).all()
    assert drawn[-1].tolist() == list(units)
    assert (before == drawn[np.arange(period), source] - 1).all()


def test_weights_are_taken_as_they_are_written() -> None:
    assert as_units([0.7, 0.3]) == (7, 3)
    assert as_units((2, 4, 6)) == (1, 2, 3)
    assert as_units(np.array([0.1, 0.25])) == (2, 5)
    assert as_units([1e-3, 1]) == (1, 1000)
    assert as_units([5]) == (1,)


def test_weights_without_a_small_denominator_are_rounded() -> None:
    for weights in (RNG.random(7).tolist(), [1e-12, 1.0, 3.0], [2**0.5, 3**0.5], RNG.random(300).tolist()):
        units = as_units(weights)
        assert sum(units) <= MOST_PERIOD
        shares = [Fraction(repr(weight)) / sum(Fraction(repr(w)) for w in weights) for weight in weights]
        for unit, share in zip(units, shares, strict=True):
            assert unit >= 1
            assert abs(Fraction(unit, sum(units)) - share) <= Fraction(max(2, len(weights)), MOST_PERIOD)


@pytest.mark.parametrize(
    "weights", [[], [0.5, 0], [1, -1], [1, float("nan")], [1, float("inf")], "ab", None, 3, [1, None]], ids=repr
)
def test_what_no_weights_are(weights: object) -> None:
    with pytest.raises(OptionError, match="weights must be numbers above 0"):
        as_units(weights)


def test_more_weights_than_can_be_rounded() -> None:
    assert len(as_units([1] * 5000)) == 5000
    with pytest.raises(OptionError, match="5000 weights have no common denominator"):
        as_units(RNG.random(5000).tolist())


MIXTURES = [
    Mixture((7, 3), (40, 25)),
    Mixture((1, 1), (3, 200)),
    Mixture((1, 2, 3), (17, 1, 60)),
    Mixture((1, 9), (100, 7)),
]


@pytest.mark.parametrize("shuffle", [False, "global"])
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_each_pass_through_a_source_has_each_record_once(mixture: Mixture, shuffle: bool | str) -> None:
    edges = np.cumsum([0, *mixture.sizes])
    drawn: list[list[int]] = [[] for _ in mixture.sizes]
    for epoch in range(4):
        ids = MixedOrder(mixture, shuffle, 5, epoch).ids(0, mixture.n)
        source = np.searchsorted(edges, ids, side="right") - 1
        counts = np.bincount(source, minlength=len(mixture.sizes))
        assert counts.tolist() == list(mixture.drawn(mixture.n))
        assert (np.abs(counts - mixture.n * np.array(mixture.units) / mixture.period) < 1).all()
        for k, one in enumerate(drawn):
            one += ids[source == k].tolist()
    for k, (first, stop) in enumerate(pairwise(edges.tolist())):
        size = stop - first
        passes = [drawn[k][at : at + size] for at in range(0, len(drawn[k]), size)]
        for one in passes[:-1]:
            assert sorted(one) == list(range(first, stop))
        assert len(set(passes[-1])) == len(passes[-1])
        if shuffle and size > 20 and len(passes) > 2:
            assert passes[0] != passes[1]
        if not shuffle:
            assert all(one == list(range(first, first + len(one))) for one in passes)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_parts_are_those_of_the_whole(mixture: Mixture) -> None:
    order = MixedOrder(mixture, "global", 9, 2)
    whole = order.ids(0, mixture.n)
    again = MixedOrder(mixture, "global", 9, 2)
    for start in (mixture.n // 2, 3, 0):  # backwards, too: passes that are no longer kept
        assert again.ids(start, mixture.n).tolist() == whole[start:].tolist()
    positions = RNG.permutation(mixture.n)[:50]
    assert again.take(positions).tolist() == whole[positions].tolist()
    assert MixedOrder(mixture, "global", 8, 2).ids(0, mixture.n).tolist() != whole.tolist()
    assert order.take(np.empty(0, np.int64)).tolist() == []


def test_two_sources_of_one_size_have_different_orders() -> None:
    ids = MixedOrder(Mixture((1, 1), (50, 50)), "global", 0, 0).ids(0, 100)
    assert ids[ids < 50].tolist() != (ids[ids >= 50] - 50).tolist()


def test_the_order_stays_as_it_is() -> None:
    """Saved states go on in it: if it must change, so must `loader.state.VERSION`."""
    assert turns((7, 3))[0].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert MixedOrder(Mixture((7, 3), (5, 4)), "global", 1, 0).ids(0, 9).tolist() == [2, 0, 8, 3, 1, 6, 4, 4, 2]


def test_a_stream_of_a_mixture() -> None:
    mixture = MIXTURES[0]
    stream = Stream(mixture.n, 4, 3, "global", 5, 0, 0, False, mixture=mixture)
    assert stream.order(3).ids(0, 20).tolist() == MixedOrder(mixture, "global", 5, 3).ids(0, 20).tolist()
    assert stream.steps(0, 3) == 6


def test_what_no_mixture_is() -> None:
    for units, sizes in (((1, 2), (3,)), ((), ()), ((1, 0), (3, 3)), ((1, 1), (3, 0)), ((MOST_PERIOD, 1), (3, 3))):
        with pytest.raises(OptionError):
            Mixture(units, sizes)
    with pytest.raises(OptionError, match="record by record"):
        MixedOrder(MIXTURES[0], "block", 0, 0)
