"""Random walks over every kind of database: pario.lmdb answers every call as py-lmdb does (tests/lmdb_walks.py)."""

from __future__ import annotations

import itertools
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


@pytest.fixture(scope="module", params=ENGINES)
def letters(request: pytest.FixtureRequest, folder: Path) -> str:
    """Keys a to d with three duplicates each."""
    path = str(folder / f"letters-{request.param}")
    with real.open(path, subdir=False, max_dbs=1, lib_version=ENGINES[request.param]) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for key in b"abcd":
                for value in b"123":
                    txn.put(bytes([key]), bytes([value]))
    return path


@pytest.mark.parametrize("iterator", ["iternext_nodup", "iternext", "iternext_dup"])
def test_an_iterator_that_is_not_asked_for_more(letters: str, iterator: str) -> None:
    """What lies behind its last item has no effect on the cursor, as long as nobody asks."""
    answers = []
    for module in (real, ours):
        env = module.open(letters, subdir=False, readonly=True, lock=False, max_dbs=1)
        with env, env.begin(db=env.open_db(b"d", create=False)) as txn:
            for n in range(1, 14):
                cursor = txn.cursor()
                cursor.set_key(b"d" if iterator == "iternext_dup" else b"a")
                it = getattr(cursor, iterator)(keys=True)
                taken = list(itertools.islice(it, n))
                answers.append((module.__name__, taken, cursor.next(), cursor.item()))
    half = len(answers) // 2
    assert [a[1:] for a in answers[:half]] == [a[1:] for a in answers[half:]]
    assert answers[0][1:] != answers[half - 1][1:]


@pytest.mark.parametrize("between", [(), ("count",), ("count", "next_nodup"), ("count", "prev")])
def test_counting_at_the_end(letters: str, between: tuple[str, ...]) -> None:
    answers = []
    for module in (real, ours):
        env = module.open(letters, subdir=False, readonly=True, lock=False, max_dbs=1)
        with env, env.begin(db=env.open_db(b"d", create=False)) as txn:
            cursor = txn.cursor()
            done = [cursor.set_key(b"d"), cursor.next_nodup()]
            done += [getattr(cursor, what)() for what in (*between, "next")]
            answers.append((done, cursor.item()))
    assert answers[0] == answers[1]


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
