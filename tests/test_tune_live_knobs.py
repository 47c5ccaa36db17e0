"""The table of knobs: bounds from the options, and what is published."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pario.errors import OptionError
from pario.options import KNOBS, Options
from pario.tune.live_knobs import Knobs


def test_auto() -> None:
    knobs = Knobs(Options(), reads=True)
    knobs.decode(4)
    found = knobs.published()
    assert set(found) == set(KNOBS)
    values = {name: (each["value"], each["least"], each["most"]) for name, each in found.items()}
    assert values["inflight"] == (2, 1, 64)
    assert values["decode_threads"] == (4, 1, 4)
    assert values["decode_ahead"] == (2, 1, 16)
    assert all(each["reason"] and not each["pinned"] for each in found.values())
    assert knobs.decoding.threads is knobs["decode_threads"]


@pytest.mark.parametrize("name", ["inflight", "decode_threads"])
def test_pins_and_bounds(name) -> None:
    for given, least, most in ((200_000, 200_000, 200_000), ((70_000, 90_000), 70_000, 90_000)):
        knobs = Knobs(Options(**{name: given}), reads=True)
        knobs.decode(4)
        found = knobs.published()[name]
        assert (found["least"], found["most"], found["pinned"]) == (least, most, least == most)
        assert least <= found["value"] <= most
        if least == most:
            assert found["reason"] == "set by the user"
            assert not knobs[name].turn(1, "fewer")


def test_only_those_that_act() -> None:
    assert Knobs(Options(), reads=False).published() == {}
    one = Knobs(Options(decode_threads=0), reads=False)
    one.decode(2)
    assert set(one.published()) == {"decode_threads", "decode_ahead"}
    assert one["decode_threads"].value == 2


@pytest.mark.parametrize("name", ["inflight", "decode_threads"])
@pytest.mark.parametrize("given", [-1, True, "many", (0, 4), (5e6, 6e6), (9 << 20, 8 << 20), [1, 4], None, 1.5])
def test_what_is_no_value(name, given) -> None:
    with pytest.raises(OptionError, match=f"{name} must be"):
        Options(**{name: given})


def test_a_knob_that_is_no_option() -> None:
    assert set(KNOBS) - {field.name for field in fields(Options)} == {"decode_ahead"}
    assert Options().bounds("decode_ahead") is None
