"""pario.lmdb on packed databases: what the real lmdb says of the unpacked ones."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from packed_sets import pack_copy, values_like_text, write

import pario.lmdb as ours
from pario.codec.packing import reserved_key

N = 120
ITEMS = [(b"%05d" % (3 * i), value) for i, value in enumerate(values_like_text(N))]
RESERVED = reserved_key(ITEMS[-1][0])


#: of `pack_copy`: each record by itself; blocks, and records that stand alone among them; all in one block
COUNTS = {"alone": (), "blocks": (7, 1, 1, 30, 2), "one block": (N,)}


@pytest.fixture(scope="module", params=COUNTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """(the real lmdb's environment of the unpacked file, ours of the packed one)"""
    folder = tmp_path_factory.mktemp("packed")
    theirs = lmdb.open(os.fspath(write(folder / "raw", ITEMS)), readonly=True)
    packed = os.fspath(pack_copy(folder / "packed", ITEMS, dictionary=True, counts=COUNTS[request.param]))
    with theirs, ours.open(packed, readonly=True) as mine:
        yield theirs, mine


def both(pair: tuple[Any, Any], buffers: bool = False) -> list[Any]:
    return [env.begin(buffers=buffers) for env in pair]


def plain(thing: Any) -> Any:
    if isinstance(thing, memoryview):
        return bytes(thing)
    return tuple(map(plain, thing)) if isinstance(thing, tuple) else thing


def test_get_and_stat(pair: tuple[Any, Any]) -> None:
    assert [env.stat()["entries"] for env in pair] == [N, N]
    for buffers in (False, True):
        theirs, mine = both(pair, buffers)
        for key in [*(key for key, _ in ITEMS), b"00001", b"x"]:
            assert plain(mine.get(key)) == plain(theirs.get(key))
            assert plain(mine.get(key, db=pair[1].open_db())) == plain(theirs.get(key))
        assert mine.get(RESERVED) is None
        assert mine.get(RESERVED, b"nothing") == b"nothing"
        assert mine.stat()["entries"] == N
        theirs.abort()


@pytest.mark.parametrize("buffers", [False, True])
def test_iteration(pair: tuple[Any, Any], buffers: bool) -> None:
    theirs, mine = both(pair, buffers)
    for way in ("iternext", "iterprev", "iternext_nodup", "iterprev_nodup"):
        for flags in ((True, True), (True, False), (False, True)):
            found = [[plain(x) for x in getattr(txn.cursor(), way)(*flags)] for txn in (theirs, mine)]
            assert found[0] == found[1], (way, flags)
            assert len(found[0]) == N
    cursors = [txn.cursor() for txn in (theirs, mine)]
    for cursor in cursors:
        cursor.set_range(b"00200")
    assert [[plain(x) for x in cursor] for cursor in cursors] == [ITEMS[67:], ITEMS[67:]]
    theirs.abort()


def test_getmulti(pair: tuple[Any, Any]) -> None:
    theirs, mine = both(pair)
    keys = [b"00003", b"nothing", b"00000", RESERVED, b"00300", b"00003"]
    assert mine.cursor().getmulti(keys) == theirs.cursor().getmulti(keys)
    assert mine.cursor().getmulti(keys, values=False) == [b"00003", b"00000", b"00300", b"00003"]
    cursor = mine.cursor()
    cursor.getmulti([b"00003", RESERVED])
    assert cursor.key() == b""
    theirs.abort()


def test_any_walk_is_lmdb_s(pair: tuple[Any, Any]) -> None:
    """Random moves and looks, near the end more often than not: as on the unpacked file, for which test_lmdb_walk.py
    asks the real lmdb."""
    raw = ours.open(pair[0].path(), readonly=True)
    theirs, mine = both((raw, pair[1]))
    rng = random.Random(11)
    moves = ["first", "last", "next", "prev", "next", "prev", "next_nodup", "prev_nodup", "last", "next"]
    keys = [b"00000", b"00348", b"00355", b"00357", b"00358", b"99999", b"", b"0"]
    for _ in range(15):
        cursors = [txn.cursor() for txn in (theirs, mine)]
        said: list[str] = []
        for _ in range(25):
            what = rng.choice([*moves, "set_range", "set_key", "get", "walk"])
            said.append(what)
            if what in moves:
                done = [getattr(cursor, what)() for cursor in cursors]
            elif what == "walk":
                done = [[next(it, None) for _ in range(3)] for it in (cursor.iternext() for cursor in cursors)]
            else:
                key = rng.choice(keys[:-2] if what != "set_range" else keys)
                done = [getattr(cursor, what)(key) for cursor in cursors]
            assert done[0] == done[1], said
            assert cursors[0].item() == cursors[1].item(), said
    raw.close()


@pytest.mark.parametrize("counts", [(), (3, 1, 20)])
def test_reversed_and_integer_keys_and_named_databases(tmp_path: Path, counts: tuple[int, ...]) -> None:
    values = values_like_text(50)
    reverse = sorted(((b"%03d" % i, values[i]) for i in range(50)), key=lambda item: item[0][::-1])
    numbers = [(i.to_bytes(8, "little"), values[i]) for i in range(50)]
    path = pack_copy(tmp_path / "p", reverse, db=b"reverse", reverse=True, counts=counts)
    pack_copy(path, numbers, db=b"numbers", integer=8, counts=counts)
    both = sorted(numbers, key=lambda item: item[0][::-1])
    pack_copy(path, both, db=b"both", integer=8, reverse=True, counts=counts)
    with ours.open(os.fspath(path), readonly=True, max_dbs=4) as env:
        for name, items in ((b"reverse", reverse), (b"numbers", numbers), (b"both", both)):
            db = env.open_db(name)
            with env.begin(db=db) as txn:
                assert list(txn.cursor()) == items
                assert list(txn.cursor().iterprev()) == items[::-1]
                assert txn.stat(db)["entries"] == 50
                assert [txn.get(key) for key, _ in items] == [value for _, value in items]
                for number, item in enumerate(items[:-1]):
                    assert txn.cursor().set_range(item[0][:-1] + b"\0") or name != b"numbers"
                    cursor = txn.cursor()
                    assert cursor.set_range(item[0])
                    assert cursor.next()
                    assert cursor.item() == items[number + 1]
        with env.begin() as txn:  # of the main database, which is not packed
            assert txn.get(numbers[3][0], db=env.open_db(b"numbers")) == numbers[3][1]


def test_names_of_databases_beside_packed_records(tmp_path: Path) -> None:
    """They are entries of the main database, whose values were never packed."""
    raw, path = os.fspath(write(tmp_path / "raw", ITEMS)), os.fspath(pack_copy(tmp_path / "p", ITEMS))
    names = [b"00007 named", b"zebra"]
    for file in (raw, path):
        for name in names:
            write(Path(file), ITEMS[:3], db=name)
    with lmdb.open(path, readonly=True) as env, env.begin() as txn:
        records = [(name, txn.get(name)) for name in names]  # LMDB's own, of 48 bytes
    items = sorted([*ITEMS, *records])
    with lmdb.open(raw, readonly=True) as env, env.begin() as txn:
        assert list(txn.cursor().iternext(values=False)) == [key for key, _ in items]
    with ours.open(path, readonly=True, max_dbs=2) as mine:
        named = mine.open_db(names[1])
        for buffers in (False, True):
            with mine.begin(buffers=buffers) as txn:
                assert [plain(item) for item in txn.cursor()] == items
                assert [plain(value) for value in txn.cursor().iternext(keys=False)] == [value for _, value in items]
                assert [plain(item) for item in txn.cursor().iterprev()] == items[::-1]
                assert [plain(item) for item in txn.cursor().getmulti([*names, ITEMS[5][0]])] == [*records, ITEMS[5]]
                cursor = txn.cursor()
                for key, value in (*records, ITEMS[3]):
                    assert plain(txn.get(key)) == value
                    assert plain(cursor.get(key)) == value
                    assert plain(cursor.value()) == value
                    assert plain(cursor.item()) == (key, value)
                assert txn.stat()["entries"] == len(items)
                assert [plain(item) for item in txn.cursor(named)] == ITEMS[:3]


def test_a_damaged_value_and_a_damaged_entry(tmp_path: Path) -> None:
    path = pack_copy(tmp_path / "p", ITEMS, dictionary=True)
    file = path / "data.mdb"
    data = file.read_bytes()
    with lmdb.open(os.fspath(path), readonly=True) as env, env.begin() as txn:
        stored, entry = txn.get(ITEMS[4][0]), txn.get(RESERVED)
    at = data.index(stored) + len(stored) - 2
    file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    with ours.open(os.fspath(path), readonly=True) as env, env.begin() as txn:
        assert txn.get(ITEMS[3][0]) == ITEMS[3][1]
        with pytest.raises(ours.CorruptedError, match="packed value"):
            txn.get(ITEMS[4][0])
        with pytest.raises(ours.CorruptedError, match="packed value"):
            list(txn.cursor())
    at = data.index(entry[:200]) + 150
    file.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    with ours.open(os.fspath(path), readonly=True) as env, pytest.raises(ours.CorruptedError, match="reserved entry"):
        env.begin()


def test_with_a_damaged_last_page_no_packed_value_is_taken_for_a_plain_one(tmp_path: Path) -> None:
    for path, packed in ((write(tmp_path / "raw", ITEMS), False), (pack_copy(tmp_path / "p", ITEMS), True)):
        file = path / "data.mdb"
        data = file.read_bytes()
        at = (data.index(RESERVED if packed else ITEMS[-1][0]) // 4096) * 4096
        file.write_bytes(data[:at] + bytes(16) + data[at + 16 :])
        with ours.open(os.fspath(path), readonly=True) as env, env.begin() as txn:
            if packed:
                with pytest.raises(ours.CorruptedError, match="whether this value is packed"):
                    txn.get(ITEMS[0][0])
                with pytest.raises(ours.CorruptedError, match="whether this value is packed"):
                    next(iter(txn.cursor()))
            else:
                assert txn.get(ITEMS[0][0]) == ITEMS[0][1]
                assert next(iter(txn.cursor())) == ITEMS[0]
