"""States survive JSON, and refuse what they do not fit."""

from __future__ import annotations

import dataclasses
import json
import pickle

import lmdb
import pytest

import pario
from pario.errors import StateError
from pario.loader.state import VERSION, LoaderState

STATE = LoaderState(
    version=VERSION,
    fingerprint="0123456789abcdef" * 2,
    n=10**10,
    seed=2**63 + 5,
    shuffle="block",
    block_records=683,
    mix_blocks=32,
    epoch=89,
    position=9_999_999_744,
    drop_last=False,
)


def test_through_json_and_small():
    text = json.dumps(STATE.to_dict())
    assert len(text) < 300
    assert LoaderState.from_dict(json.loads(text)) == STATE
    assert pickle.loads(pickle.dumps(STATE)) == STATE
    STATE.check(dataclasses.replace(STATE, epoch=0, position=0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fingerprint", "ffff"),
        ("n", 10**10 + 1),
        ("seed", 6),
        ("shuffle", "global"),
        ("block_records", 10),
        ("mix_blocks", 16),
        ("drop_last", True),
    ],
)
def test_every_difference_is_named_with_both_values_and_a_way_on(name, value):
    with pytest.raises(StateError) as caught:
        STATE.check(dataclasses.replace(STATE, **{name: value}))
    assert f"{name} is {value!r}, the state has {getattr(STATE, name)!r}" in str(caught.value)
    assert "To go on from it: " in str(caught.value)


def test_all_differences_at_once():
    with pytest.raises(StateError, match=r"n is 7.*seed is 1"):
        STATE.check(dataclasses.replace(STATE, n=7, seed=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}, expected {VERSION}"),
        ({"version": None}, "version None"),
        ({"position": 10**10 + 1}, "position"),
        ({"position": -1}, "position must be an integer of at least 0, got -1"),
        ({"epoch": 1.5}, "epoch must be an integer"),
        ({"epoch": True}, "epoch must be an integer"),
        ({"shuffle": "quasi"}, "shuffle must be"),
        ({"drop_last": 1}, "drop_last must be a bool"),
        ({"fingerprint": 5}, "fingerprint must be a str"),
        ({"color": 1}, r"unknown \['color'\]"),
    ],
)
def test_what_is_no_state(change, message):
    with pytest.raises(StateError, match=message):
        LoaderState.from_dict({**STATE.to_dict(), **change})


@pytest.mark.parametrize("shuffle", ["none", "global", "block"])
def test_states_of_version_2_go_on_unless_their_order_has_changed(shuffle):
    old = {**STATE.to_dict(), "version": 2, "shuffle": shuffle}
    if shuffle == "block":
        with pytest.raises(StateError, match="version 2, expected 3"):
            LoaderState.from_dict(old)
    else:
        assert LoaderState.from_dict(old) == dataclasses.replace(STATE, shuffle=shuffle)


def test_missing_fields_and_other_types():
    state = STATE.to_dict()
    del state["seed"]
    with pytest.raises(StateError, match="seed"):
        LoaderState.from_dict(state)
    with pytest.raises(StateError, match="list"):
        LoaderState.from_dict([1])
    with pytest.raises(StateError, match="version None"):
        LoaderState.from_dict({})


def test_whatever_says_drop_last(tmp_path):
    path = str(tmp_path / "x.lmdb")
    with lmdb.open(path, map_size=1 << 20) as env, env.begin(write=True) as txn:
        for i in range(7):
            txn.put(b"%d" % i, bytes(5))
    with pario.Loader(path, 2, drop_last=1) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["drop_last"] is True
        loader.load_state_dict(state)
