"""`pario.split` on one process: disjoint, complete, the same every time, and stable when records are added. The oracle
is what was written."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import MissingError, OptionError, StateError

N = 500


def write(folder: Path, keys: list[bytes]) -> str:
    with lmdb.open(os.fspath(folder), map_size=1 << 24, sync=False) as env, env.begin(write=True) as txn:
        for key in keys:
            txn.put(key, key * 20)
    return os.fspath(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("split") / "x", [*(b"%06d" % i for i in range(N)), b"__len__"])


def keys(path: str, part: Any, **more: Any) -> list[bytes]:
    """Of the records that a Loader delivers."""
    with pario.Loader(path, 32, select=part, **more) as loader:
        return sorted(loader.keys([i for batch in loader for i in batch.ids.tolist()]))


@pytest.mark.parametrize("by", ["id", "key"])
@pytest.mark.parametrize("fractions", [(0.9, 0.1), pytest.param((1,), marks=pytest.mark.full), (1 / 3, 1 / 3, 1 / 3)])
def test_parts_are_disjoint_and_complete(by: Any, fractions: tuple[float, ...], path: str) -> None:
    parts = pario.split(path, fractions, seed=7, by=by)
    found = [keys(path, part) for part in parts]
    assert sorted(chain.from_iterable(found)) == [b"%06d" % i for i in range(N)]  # without the meta record
    for share, one in zip(fractions, found, strict=True):
        assert abs(len(one) - share * N) <= (1 if by == "id" else 4 * (share * (1 - share) * N) ** 0.5 + 1)
        spread = np.diff([int(key) for key in one])
        assert share == 1 or len(set(spread.tolist())) > 1


@pytest.mark.parametrize("by", ["id", "key"])
def test_it_is_a_function_of_the_seed(by: Any, path: str) -> None:
    def first(seed: int) -> list[bytes]:
        return keys(path, pario.split(path, (0.3, 0.7), seed=seed, by=by)[0])

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(2**64 - 1) != first(0)


def test_parts_never_change_from_one_version_to_the_next(path: str) -> None:
    """Of ids 0..499 and seed 3; somebody has trained on them."""
    by_id, by_key = (pario.split(path, (0.02, 0.98), seed=3, by=by)[0] for by in ("id", "key"))
    assert [int(key) for key in keys(path, by_id)] == [14, 92, 94, 124, 144, 164, 203, 304, 316, 346]
    assert [int(key) for key in keys(path, by_key)] == [13, 62, 124, 133, 246, 311, 322, 332, 369]


def test_records_that_are_added_move_no_other(tmp_path: Path) -> None:
    small = write(tmp_path / "a", [b"%06d" % (7 * i) for i in range(200)])
    large = write(tmp_path / "b", [b"%06d" % i for i in range(1400)])
    before = [keys(small, part) for part in pario.split(small, (0.8, 0.2), by="key")]
    after = [keys(large, part) for part in pario.split(large, (0.8, 0.2), by="key")]
    for old, new in zip(before, after, strict=True):
        assert set(old) <= set(new)
    # The parts are of keys, not of a file.
    assert [keys(large, part) for part in pario.split(small, (0.8, 0.2), by="key")] == after
    # By ids they are of a number of records.
    with pytest.raises(OptionError, match="1,400 records are to be divided, and 200 were"):
        keys(large, pario.split(small, (0.8, 0.2))[0])


@pytest.mark.parametrize("by", ["id", "key"])
def test_of_a_selection(by: Any, path: str) -> None:
    parts = pario.split(path, (0.5, 0.5), by=by, select=b"0001")
    found = [keys(path, part) for part in parts]
    assert sorted(chain.from_iterable(found)) == [b"%06d" % i for i in range(100, 200)]
    everything = [keys(path, part) for part in pario.split(path, (0.5, 0.5), by=by, select="all")]
    assert sorted(chain.from_iterable(everything)) == [*(b"%06d" % i for i in range(N)), b"__len__"]
    again = pario.split(path, (0.5, 0.5), by=by, select=parts[0], seed=1)
    assert sorted(chain.from_iterable(keys(path, part) for part in again)) == found[0]


def test_values_of_one_key_stay_together(tmp_path: Path) -> None:
    with lmdb.open(os.fspath(tmp_path), map_size=1 << 24, max_dbs=1, sync=False) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for i in range(300):
                txn.put(b"%03d" % (i // 5), b"value %d" % i)
    parts = pario.split(tmp_path, (0.5, 0.5), by="key", db="d")
    found = [keys(os.fspath(tmp_path), part, db="d") for part in parts]
    assert not set(found[0]) & set(found[1])
    assert len(found[0]) + len(found[1]) == 300


def test_states_know_their_part(path: str) -> None:
    train, test = pario.split(path, (0.5, 0.5))
    with pario.Loader(path, 8, select=train) as loader:
        state = loader.state_dict()
    with pario.Loader(path, 8, select=pario.split(path, (0.5, 0.5))[0]) as loader:
        loader.load_state_dict(state)
    with pario.Loader(path, 8, select=test) as loader, pytest.raises(StateError, match="selection is"):
        loader.load_state_dict(state)


def test_a_part_takes_no_memory_of_its_own(path: str) -> None:
    (part, _) = pario.split(path, (0.5, 0.5))
    assert not any(isinstance(value, np.ndarray) for value in vars(part).values())
    assert repr(part) == "a part of pario.split with 250 of 500 records"
    assert "0.5 of all keys" in repr(pario.split(path, (0.5, 0.5), by="key")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fractions": (0.9, 0.2)}, "sum 1"),
        ({"fractions": (0.5, 0.4)}, "sum 1"),
        ({"fractions": (1.1, -0.1)}, "above 0"),
        ({"fractions": ()}, "fractions must be"),
        ({"fractions": 0.9}, "fractions must be"),
        ({"fractions": ("a",)}, "fractions must be"),
        ({"fractions": (0.9995, 0.0005)}, "leave a part without any"),
        ({"by": "hash"}, "by must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"select": "train"}, "only one that it can be"),
        ({"select": b"x"}, "picks none"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], message: str, path: str) -> None:
    given: dict[str, Any] = {"fractions": (0.9, 0.1), **change}
    with pytest.raises(OptionError, match=message):
        pario.split(path, **given)


def test_a_dataset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        pario.split(tmp_path / "nothing", (0.5, 0.5))


def test_a_part_of_which_no_key_is(tmp_path: Path) -> None:
    path = write(tmp_path / "x", [b"only"])
    parts = pario.split(path, (0.5, 0.5), by="key")
    assert keys(path, parts[1]) == [b"only"]
    with pytest.raises(OptionError, match=r"a part of pario.split with 0.5 of all keys picks none of the 1 records"):
        keys(path, parts[0])
