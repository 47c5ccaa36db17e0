"""Addresses, and messages out of hostile bytes."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.errors import OptionError
from pario.plane.words import (
    Grant,
    PlaneAddress,
    grant_of,
    packed,
    read_address,
    report_of,
    unpacked,
)
from pario.wire.frames import WireError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["at", "used", "demand", "grant", "safe", "lease", "every"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KEYS, JSON) | JSON)
@pytest.mark.full
def test_only_numbers_come_through(words: object) -> None:
    """Whatever somebody sends is a message of finite numbers from 0 on, or a WireError."""
    line = json.dumps(words).encode()
    for read in (report_of, grant_of):
        try:
            found = read(unpacked(line))
        except WireError:
            continue
        numbers = [found.at, *found.used, *found.demand] if read is report_of else [*found.rates, *found.safe]  # type: ignore[union-attr]
        assert all(each is None or 0 <= each <= 1e18 for each in numbers)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_message(line: bytes) -> None:
    with suppress(WireError):
        assert isinstance(unpacked(line), dict)


def test_a_grant_and_back() -> None:
    for rates in ((15e6, None), (1 / 3, 1e17), (7.0, 2)):
        grant = Grant(rates, (1e6, 10.0), 5, 0.25)
        assert grant_of(unpacked(packed(grant.words()))) == grant


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("head:7400", PlaneAddress("head", 7400)),
        ("10.0.0.1:0", PlaneAddress("10.0.0.1", 0)),
        ("lo:7400", PlaneAddress("127.0.0.1", 7400)),
        ("/run/pario/plane", PlaneAddress("", 0, "/run/pario/plane")),
    ],
)
def test_addresses(text: str, address: PlaneAddress) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["head", "head:", ":7400", "head:port", "head:70000", "head:-1", ""])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(OptionError, match="is no address of a control plane"):
        read_address(text)
