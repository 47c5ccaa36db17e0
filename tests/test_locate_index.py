"""The complete index: every record's place and key, made by a walk or loaded. The oracle is py-lmdb's cursor."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from lmdb_cases import CASES, FORMATS, index_of, make, opened, oracle, right, same

from pario.errors import CorruptedError, OptionError
from pario.locate.sidecar import sidecar_places


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_made_and_loaded(tmp_path: Path, name: str, version: int) -> None:
    path, db = make(tmp_path, name, version)
    made = index_of(path, db)
    loaded = index_of(path, db)
    unsaved = index_of(path, db, save=False)
    assert made.bytes_read > 0
    assert loaded.bytes_read == unsaved.bytes_read == 0
    assert made.sidecar == loaded.sidecar == next(sidecar_places(path, db))
    for index in (made, loaded):
        right(index, path, db)
        same(index, made)
        assert not index.extents.flags.writeable
    for index in (made, loaded):
        index.close()
        index.close()
        assert len(index.extents) == 0


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A small database with keys of different lengths, whose file order is not key order."""
    with opened(tmp_path / "set", 1) as env:
        rng = np.random.default_rng(8)
        for part in np.split(rng.permutation(1200), 4):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%d" % (i * i), rng.bytes(int(rng.integers(0, 3000))))
    return os.fspath(tmp_path / "set" / "data.mdb")


def test_keys_in_any_order(path: str) -> None:
    index = index_of(path)
    expected = [key for key, _ in oracle(path)]
    ids = np.random.default_rng(0).integers(0, index.n, 3000)
    assert index.keys(ids) == [expected[i] for i in ids]
    assert index.keys([]) == []
    assert index.keys([index.n - 1]) == expected[-1:]
    for wrong in (-1, index.n):
        with pytest.raises(OptionError, match=f"0..{index.n - 1}"):
            index.keys([0, wrong])


def test_keys_far_apart(tmp_path: Path) -> None:
    """Further apart than one read of the side-car goes."""
    path, _ = make(tmp_path, "appended", 1)
    index = index_of(path)
    ids = [5999, 0, 3000, 3001, 1, 5000]
    assert index.keys(ids) == [b"%020d" % i for i in ids]


def test_shared_bytes_are_damage(tmp_path: Path) -> None:
    """Two records on the same overflow pages."""
    with opened(tmp_path, 1) as env, env.begin(write=True) as txn:
        for i in range(10):
            txn.put(b"%d" % i, b"x" * 5000)
    path = os.fspath(tmp_path / "data.mdb")
    raw = bytearray(Path(path).read_bytes())
    offset = int(index_of(path, save=False).extents["offset"][3])
    here, there = (offset // 4096).to_bytes(8, "little"), (offset // 4096 + 2).to_bytes(8, "little")
    at = raw.index(b"3" + here)  # the key, then the page number
    raw[at + 1 : at + 9] = there
    Path(path).write_bytes(raw)
    with pytest.raises(CorruptedError, match=r"values of records . and . overlap") as caught:
        index_of(path)
    assert caught.value.path == path
