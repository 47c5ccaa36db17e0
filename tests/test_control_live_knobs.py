"""The table of knobs: bounds from the options, and what is published."""

from __future__ import annotations

import pytest

from pario.control.live_knobs import Knobs
from pario.errors import OptionError
from pario.options import KNOBS, MiB, Options


def test_auto() -> None:
    knobs = Knobs(Options(), reads=True)
    knobs.ring(6, 8 * MiB)
    knobs.decode(4)
    found = knobs.published()
    assert set(found) == set(KNOBS)
    values = {name: (each["value"], each["least"], each["most"]) for name, each in found.items()}
    assert values["inflight"] == (2, 1, 64)
    assert values["ring_bytes"] == (16 * MiB, 64 << 10, 48 * MiB)
    assert values["read_bytes"] == (MiB, MiB, MiB)
    assert values["readers_per_node"] == (1, 1, 1)
    assert values["decode_threads"] == (4, 1, 4)
    assert values["decode_ahead"] == (2, 1, 16)
    assert all(each["reason"] and not each["pinned"] for each in found.values())
    assert knobs.filling.knob is knobs["ring_bytes"]
    assert knobs.decoding.threads is knobs["decode_threads"]


@pytest.mark.parametrize("name", KNOBS)
def test_pins_and_bounds(name) -> None:
    for given, least, most in ((200_000, 200_000, 200_000), ((70_000, 90_000), 70_000, 90_000)):
        knobs = Knobs(Options(**{name: given}), reads=True)
        knobs.ring(6, 8 * MiB)
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


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("given", [-1, True, "many", (0, 4), (5e6, 6e6), (9 << 20, 8 << 20), [1, 4], None, 1.5])
def test_what_is_no_value(name, given) -> None:
    with pytest.raises(OptionError, match=f"{name} must be"):
        Options(**{name: given})
