"""Knobs: bounded, with a reason."""

from __future__ import annotations

import logging

import pytest

from pario.errors import OptionError
from pario.tune.knobs import Knob


def test_within_its_bounds(caplog) -> None:
    knob = Knob("reads in flight", 2, 16, 1)
    assert knob.setting == (2, "nothing is measured yet")
    with caplog.at_level(logging.DEBUG, "pario"):
        assert knob.turn(40, "much to do")
        assert not knob.turn(16, "still")
    assert knob.setting == (16, "still")
    assert [record.getMessage() for record in caplog.records] == ["reads in flight: 2 -> 16, much to do"]
    assert not knob.is_pinned


def test_a_pinned_one_stays() -> None:
    knob = Knob("reads in flight", 8, 8, 2)
    assert knob.is_pinned
    assert not knob.turn(3, "fewer would do")
    assert knob.setting == (8, "set by the user")


def test_a_limit_that_is_found_later() -> None:
    knob = Knob("reads in flight", 4, 16, 8)
    knob.limit(3, "no more threads")
    assert (knob.least, knob.most, knob.setting) == (3, 3, (3, "no more threads"))
    knob.limit(9, "higher is no limit")
    assert (knob.most, knob.reason) == (3, "no more threads")


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4)])
def test_bounds_that_are_none(bounds) -> None:
    with pytest.raises(OptionError, match="1 <= least <= most"):
        Knob("reads in flight", *bounds, 2)
