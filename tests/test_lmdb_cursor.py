"""Cursors of pario.lmdb: every call on a random walk answered as py-lmdb answers it, on all kinds of database."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb as real
import pytest
from lmdb_cases import CASES, FORMATS, make, oracle

import pario.lmdb as ours

MOVES = (
    "first", "last", "next", "prev", "next", "prev", "next_dup", "prev_dup", "next_nodup", "prev_nodup", "first_dup",
    "last_dup",
)  # fmt: skip
SEEKS = ("set_key", "set_range", "set_key_dup", "set_range_dup", "get")
ITERATORS = ("iternext", "iterprev", "iternext_dup", "iterprev_dup", "iternext_nodup", "iterprev_nodup")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmdb")


def answer(call: Callable[[], Any]) -> Any:
    """A value, or the name of the error."""
    try:
        return call()
    except Exception as e:
        return type(e).__name__


class Walk:
    """The same calls on both; after a miss, whose place py-lmdb leaves undefined, both start again."""

    def __init__(self, path: str, db: bytes | None, seed: int, **options: Any) -> None:
        self.pairs = oracle(path, db)
        self.envs = [
            module.open(path, subdir=False, readonly=True, lock=False, max_dbs=4, **options) for module in (real, ours)
        ]
        self.dbs = [env.open_db(db, create=False) if db else None for env in self.envs]
        self.txns = [env.begin(db=db) for env, db in zip(self.envs, self.dbs, strict=True)]
        self.cursors = [txn.cursor() for txn in self.txns]
        self.rng = random.Random(seed)
        self.log: list[Any] = []
        self.found = False

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def both(self, what: str, *arguments: Any) -> Any:
        self.log.append((what, *arguments))
        theirs, mine = (answer(lambda c=c: getattr(c, what)(*arguments)) for c in self.cursors)
        assert mine == theirs, self.log[-12:]
        return mine

    def look(self) -> None:
        self.both("item")
        if self.rng.random() < 0.2:
            self.both("key")
            self.both("value")
            self.both("count")

    def some_key(self) -> bytes:
        key, _ = self.rng.choice(self.pairs)
        if self.rng.random() < 0.75:
            return key
        return key[:-1] + bytes([self.rng.randrange(256)])

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.6:
            # After a move that found nothing, py-lmdb's first_dup and last_dup give the value with an empty key.
            # LMDB 1.0.2 finds nothing behind `last(), first_dup()`, LMDB 0.9 and we do.
            moves = MOVES if self.found and ("last",) not in self.log[-6:] else MOVES[:-2]
            found = self.both(self.rng.choice(moves))
            self.found = found is True
        elif kind < 0.85:
            what = self.rng.choice(SEEKS)
            key = self.some_key()
            if what.endswith("_dup"):
                _, value = self.rng.choice(self.pairs)
                found = self.both(what, key, value if self.rng.random() < 0.9 else value[:-1] + b"\x80")
            else:
                found = self.both(what, key)
            if found in (False, None) or isinstance(found, str):
                self.both(self.rng.choice(("first", "last")))
            self.found = True
        else:
            self.iterate()
        self.look()

    def iterate(self) -> None:
        what = self.rng.choice(ITERATORS)
        keys, values = self.rng.random() < 0.6, self.rng.random() < 0.6
        self.log.append((what, keys, values))
        theirs, mine = (getattr(c, what)(keys=keys, values=values) for c in self.cursors)
        for _ in range(self.rng.choice((0, 1, 2, 3, 20, 100, 700))):
            a, b = next(theirs, "end"), next(mine, "end")
            assert a == b, self.log[-12:]
            self.found = a != "end"
            if not self.found:
                break
            if self.rng.random() < 0.05:
                # In the midst of it, somebody moves the cursor.
                self.found = self.both(self.rng.choice(MOVES[:6]))
                self.look()


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_random_walk(made: Path, name: str, version: int) -> None:
    path, db = make(made, name, version)
    walk = Walk(path, db, seed=100 * len(name) + version)
    try:
        for _ in range(400):
            walk.step()
    finally:
        walk.close()


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_everything(made: Path, name: str, version: int) -> None:
    """Every record forwards, backwards, by its key; statistics."""
    path, db = make(made, name, version)
    pairs = oracle(path, db)
    env = ours.open(path, subdir=False, readonly=True, lock=False, max_dbs=4)
    handle = env.open_db(db, create=False) if db else None
    with env.begin(db=handle) as txn, real.open(path, subdir=False, readonly=True, lock=False, max_dbs=4) as theirs:
        assert list(txn.cursor()) == pairs
        assert list(txn.cursor().iterprev()) == pairs[::-1]
        assert list(txn.cursor().iternext(values=False)) == [key for key, _ in pairs]
        firsts = dict(reversed(pairs))
        assert {key: txn.get(key) for key in firsts} == firsts
        assert txn.cursor().getmulti(firsts) == list(firsts.items())
        with theirs.begin(db=theirs.open_db(db, create=False) if db else None) as other:
            assert txn.stat() == other.stat()
        assert env.stat() == theirs.stat()
        mine, its = env.info(), theirs.info()
        assert all(mine[name] == its[name] for name in ("last_pgno", "last_txnid", "map_size"))
        assert env.dbs() == theirs.dbs()
        assert env.max_key_size() == theirs.max_key_size()


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", ["shuffled_small", "duplicates", "dupfixed_3"])
def test_small_cache(made: Path, name: str, version: int) -> None:
    """A cache of 128 pages for more of them: the same answers."""
    path, db = make(made, name, version)
    pairs = oracle(path, db)
    env = ours.open(path, subdir=False, readonly=True, lock=False, max_dbs=4, cache_bytes=0)
    handle = env.open_db(db, create=False) if db else None
    with env.begin(db=handle) as txn:
        firsts = dict(reversed(pairs))
        keys = list(firsts)
        random.Random(5).shuffle(keys)
        for _ in range(2):
            assert {key: txn.get(key) for key in keys} == firsts
            assert list(txn.cursor()) == pairs


def test_two_iterators_share_the_place(made: Path) -> None:
    path, _ = make(made, "appended", 1)
    keys = [key for key, _ in oracle(path)]
    with ours.open(path, subdir=False, readonly=True) as env, env.begin() as txn:
        cursor = txn.cursor()
        one, two = cursor.iternext(values=False), cursor.iternext(values=False)
        assert [next(one), next(one)] == keys[:2]
        assert [next(two), next(two)] == keys[1:3]
        assert next(one) == keys[3]
        assert cursor.key() == keys[3]
        assert cursor.prev()
        assert next(two) == keys[3]


def test_iterators_end_with_the_transaction(made: Path) -> None:
    path, _ = make(made, "appended", 1)
    env = ours.open(path, subdir=False, readonly=True)
    txn = env.begin()
    running = txn.cursor().iternext()
    for _ in range(30):
        next(running)
    txn.abort()
    with pytest.raises(ours.Error, match="closed"):
        next(running)
    txn = env.begin()
    running = iter(txn.cursor())
    next(running)
    next(running)
    env.close()
    with pytest.raises(ours.Error, match="closed"):
        next(running)


def test_missed_seek_leaves_the_cursor_nowhere(made: Path) -> None:
    path, _ = make(made, "caffe", 1)
    with ours.open(path, subdir=False, readonly=True) as env, env.begin() as txn:
        cursor = txn.cursor()
        for miss in (lambda: cursor.set_key(b"00000700x"), lambda: cursor.set_range(b"z")):
            assert not miss()
            assert cursor.item() == (b"", b"")
            assert cursor.next()
            assert cursor.key() == b"00000000"
            assert not miss()
            assert cursor.prev()
            assert cursor.key() == b"00002499"


def test_getmulti(made: Path) -> None:
    path, db = make(made, "dupfixed_3", 1)
    keys = [b"7", b"none", b"1", b"7", b"0"]
    found = []
    for module in (real, ours):
        env = module.open(path, subdir=False, readonly=True, lock=False, max_dbs=2)
        with env.begin(db=env.open_db(db, create=False)) as txn:
            cursor = txn.cursor()
            found.append(
                [
                    cursor.getmulti(keys),
                    cursor.getmulti(keys, values=False),
                    cursor.getmulti(keys, dupdata=True),
                    cursor.getmulti(iter(keys), dupdata=True, dupfixed_bytes=3),
                    bytes(cursor.getmulti(keys, dupdata=True, dupfixed_bytes=3, keyfixed=True)),
                    answer(lambda c=cursor: c.getmulti([b"7", b"12"], dupdata=True, dupfixed_bytes=3, keyfixed=True)),
                    answer(lambda c=cursor: c.getmulti(keys, dupfixed_bytes=3)),
                    answer(lambda c=cursor: c.getmulti(keys, keyfixed=True, dupdata=True)),
                    answer(lambda c=cursor: c.getmulti(keys, values=False, dupdata=True)),
                    answer(lambda c=cursor: c.getmulti(keys, dupdata=True, dupfixed_bytes=-1)),
                    answer(lambda c=cursor: c.getmulti(["7"])),
                    answer(lambda c=cursor: c.getmulti([b""])),
                ]
            )
        env.close()
    assert found[1] == found[0]
