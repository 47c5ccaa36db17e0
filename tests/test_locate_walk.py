"""The exact walk: every record once, in py-lmdb's order, every byte right; and what it reads."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np
import pytest
from lmdb_cases import CASES, FORMATS, NotingFetcher, located, make, opened, oracle, pairs_of

from pario.comm.solo import Solo
from pario.errors import CorruptedError, DatabaseError, EmptyError, OptionError, SnapshotError
from pario.fetch.direct import DirectFetcher
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.locate.database import Database
from pario.locate.leaves import LeafScan
from pario.locate.walk import build


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases")


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_record_as_py_lmdb(cases: Path, name: str, version: int) -> None:
    path, db = make(cases, name, version)
    expected = oracle(path, db)
    assert expected
    by_kernel = located(path, db, native=True)
    by_python = located(path, db, native=False)
    assert pairs_of(path, by_kernel) == expected
    assert by_kernel.n == by_python.n == len(expected)
    for array in ("extents", "key_data", "key_nbytes", "key_counts"):
        np.testing.assert_array_equal(getattr(by_kernel, array), getattr(by_python, array))


@pytest.mark.parametrize("version", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_does_the_work(cases: Path, name: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads only pages with trees of duplicates: a kernel that declines everything would pass otherwise."""
    path, db = make(cases, name, version)
    scans = []
    start = LeafScan.__init__

    def watched(self: LeafScan, *a: object, **k: object) -> None:
        start(self, *a, **k)  # type: ignore[arg-type]
        scans.append(self)

    monkeypatch.setattr(LeafScan, "__init__", watched)
    found = located(path, db)
    slow = sum(scan.slow_pages for scan in scans)
    most = 4 if "dup" in name else 0  # keys with enough duplicates for a tree
    assert slow <= most
    assert found.bytes_read > 2 * slow * 4096


@pytest.mark.parametrize("version", FORMATS)
def test_reads_branch_and_leaf_pages_once(cases: Path, version: int) -> None:
    path, _ = make(cases, "caffe", version)
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env:
        stat = env.stat()
    found = located(path)
    assert found.bytes_read == (stat["branch_pages"] + stat["leaf_pages"]) * stat["psize"]
    assert found.bytes_read < 0.012 * os.path.getsize(path)  # 1.0 % at 97 records per leaf page (format 3)


@pytest.mark.parametrize("version", FORMATS)
def test_trees_of_duplicates_are_read_once(cases: Path, version: int) -> None:
    path, db = make(cases, "dupfixed_8", version)
    fetcher = NotingFetcher(path)
    found = located(path, db, fetcher=fetcher)
    assert len(set(fetcher.pages)) == len(fetcher.pages) > 30
    assert found.bytes_read == len(fetcher.pages) * 4096


@pytest.mark.parametrize("version", FORMATS)
def test_named_databases(tmp_path: Path, version: int) -> None:
    with opened(tmp_path, version) as env:
        for name in (b"train", b"test", b"nothing"):
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                for i in range(0 if name == b"nothing" else 500):
                    txn.put(b"%05d" % i, name * (i % 900))
    path = os.fspath(tmp_path / "data.mdb")
    for name in (b"train", b"test"):
        assert pairs_of(path, located(path, name)) == oracle(path, name)
    with pytest.raises(EmptyError, match="nothing"):
        located(path, b"nothing")
    with pytest.raises(DatabaseError, match=r"'nothing', 'test', 'train'.*db=") as caught:
        located(path)
    assert caught.value.path == path
    with pytest.raises(DatabaseError, match=r"no database 'trian'.*'train'"):
        located(path, b"trian")


@pytest.mark.parametrize("version", FORMATS)
def test_records_beside_named_databases(tmp_path: Path, version: int) -> None:
    with opened(tmp_path, version) as env:
        env.open_db(b"inner")
        with env.begin(write=True) as txn:
            for i in range(2000):
                txn.put(b"%05d" % i, b"x" * 100)
    path = os.fspath(tmp_path / "data.mdb")
    with pytest.raises(DatabaseError, match="1 named database: 'inner'"):
        located(path)
    with pytest.raises(DatabaseError, match="is the key of a record"):
        located(path, b"00007")


@pytest.mark.parametrize("version", FORMATS)
def test_empty_database(tmp_path: Path, version: int) -> None:
    opened(tmp_path, version).close()
    path = os.fspath(tmp_path / "data.mdb")
    with pytest.raises(EmptyError, match="no record") as caught:
        located(path)
    assert caught.value.path == path
    with pytest.raises(DatabaseError, match="no named databases"):
        located(path, b"any")


@pytest.mark.parametrize("entries", [1999, 2001])
def test_another_number_of_records_than_the_tree_says(tmp_path: Path, entries: int) -> None:
    with opened(tmp_path, 1) as env, env.begin(write=True) as txn:
        for i in range(2000):
            txn.put(b"%05d" % i, b"x" * 100)
    path = tmp_path / "data.mdb"
    raw, count = path.read_bytes(), (2000).to_bytes(8, "little")
    assert raw[:8192].count(count) == 1  # in the meta page of that transaction
    path.write_bytes(raw.replace(count, entries.to_bytes(8, "little"), 1))
    with pytest.raises(CorruptedError, match=f"2,000 records.*says {entries:,}"):
        located(os.fspath(path))


@pytest.mark.parametrize("entries", [499, 501])
def test_another_number_of_duplicates_than_the_key_says(tmp_path: Path, entries: int) -> None:
    with lmdb.open(os.fspath(tmp_path), map_size=1 << 24, max_dbs=1) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True, db=db) as txn:
            for i in range(500):
                txn.put(b"many", b"%04d" % i * 20)
            txn.put(b"one", b"x")
    path = tmp_path / "data.mdb"
    raw, count = path.read_bytes(), (500).to_bytes(8, "little")
    assert raw.count(count) == 1  # in the node of that key
    path.write_bytes(raw.replace(count, entries.to_bytes(8, "little")))
    with pytest.raises(CorruptedError, match=f"key b'many' has 500 duplicates, its entry says {entries}"):
        located(os.fspath(path), b"d")


@pytest.mark.parametrize("version", FORMATS)
def test_a_writer_that_overtakes_the_walk(tmp_path: Path, version: int) -> None:
    rng = np.random.default_rng(0)
    with opened(tmp_path, version) as env:

        def commit() -> None:
            with env.begin(write=True) as txn:
                for i in range(300):
                    txn.put(b"%05d" % i, rng.bytes(500))

        commit()
        fetcher = PosixFetcher(os.fspath(tmp_path / "data.mdb"))
        pool = ReadPool(fetcher, 2)
        snapshot = read_snapshot(fetcher)
        commit()
        assert build(pool, Database(fetcher.path, snapshot), Solo()).n == 300  # one commit does no harm
        for _ in range(4):  # our pages are overwritten: whatever the walk finds, this is the cause
            commit()
        with pytest.raises(SnapshotError, match="writers committed") as caught:
            build(pool, Database(fetcher.path, snapshot), Solo())
        assert caught.value.path == fetcher.path
        pool.close()
        fetcher.close()


@pytest.mark.parametrize("version", FORMATS)
def test_past_the_page_cache(cases: Path, version: int) -> None:
    """O_DIRECT wants aligned reads; pages of 4 KiB are, smaller ones are read through the cache."""
    path, _ = make(cases, "appended", version)
    try:
        fetcher = DirectFetcher(path)
    except OptionError as e:
        pytest.skip(str(e))
    pool = ReadPool(fetcher, 2)
    found = build(pool, Database(fetcher.path, read_snapshot(fetcher)), Solo())
    fetcher.align = 8192  # as if the pages were smaller than a block
    again = build(pool, Database(fetcher.path, read_snapshot(fetcher)), Solo())
    pool.close()
    fetcher.close()
    assert pairs_of(path, found) == pairs_of(path, again) == oracle(path)


def test_progress_counts_leaf_pages(cases: Path) -> None:
    path, _ = make(cases, "shuffled_small", 1)
    fetcher = PosixFetcher(path)
    pool = ReadPool(fetcher, 2)
    seen: list[tuple[int, int]] = []
    found = build(pool, Database(fetcher.path, read_snapshot(fetcher)), Solo(), lambda *counts: seen.append(counts))
    pool.close()
    fetcher.close()
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env:
        leaf_pages = env.stat()["leaf_pages"]
    assert found.bytes_read > leaf_pages * 4096
    assert seen[-1] == (leaf_pages, leaf_pages)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
