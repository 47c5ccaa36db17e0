"""Random walks over every kind of database: pario.lmdb answers every call as py-lmdb does (tests/lmdb_walks.py)."""

from __future__ import annotations

from pathlib import Path

import lmdb as real
import lmdb_walks
import pytest
from lmdb_walks import ENGINES, PLACES, Difference, make, walked

import pario.lmdb as ours

CALLS = 170  # x 3 seeds x 42 databases: more than 20,000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walks")


@pytest.mark.parametrize("version", ENGINES)
@pytest.mark.parametrize(("file", "db"), PLACES, ids=[(db or file.encode()).decode() for file, db in PLACES])
def test_walks(folder: Path, file: str, db: bytes | None, version: int) -> None:
    path = make(folder, file, version)
    assert sum(walked(path, db, version, seed, CALLS).total() for seed in range(3)) >= 3 * CALLS


def test_the_databases_are_what_they_are_meant_to_be(folder: Path) -> None:
    for version in ENGINES:
        with real.open(make(folder, "main_deep", version), subdir=False, readonly=True, lock=False) as env:
            assert env.stat()["depth"] >= 3
        with real.open(make(folder, "mixed", version), subdir=False, readonly=True, lock=False, max_dbs=32) as env:
            deep = env.open_db(b"deep", create=False)
            backwards = env.open_db(b"reversedup", create=False)
            with env.begin() as txn:
                assert txn.stat(deep)["depth"] >= 3
                cursor = txn.cursor(backwards)
                # The last byte counts first; the values begin and end with bytes below 40.
                assert cursor.set_range_dup(b"k2", bytes((200, 200, 0)))
                assert not cursor.set_range_dup(b"k2", bytes((0, 0, 250)))


@pytest.mark.parametrize(
    ("fault", "only"),
    [
        # prev_dup walks into the previous key: py-lmdb's own tests do not see it.
        (("prev_dup", ours.Cursor.prev), "dupfixed_3"),
        (("set_range", ours.Cursor.set_key), "small"),
        (("count", lambda cursor: 1), "integerdup_4"),
        (("last_dup", ours.Cursor.first_dup), "reversedup"),
    ],
)
def test_a_fault_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, object], only: str) -> None:
    monkeypatch.setattr(ours.Cursor, *fault)
    with pytest.raises(Difference, match=fault[0]):
        lmdb_walks.run(folder, 4000, only=only)
