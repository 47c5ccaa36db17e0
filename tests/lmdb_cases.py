"""LMDBs of every kind, written by py-lmdb in both of its formats, and what py-lmdb reads from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from pario.comm.solo import Solo
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.locate.base import Index
from pario.locate.database import Database
from pario.locate.open import open_index
from pario.locate.walk import Located, build

#: py-lmdb's engines: LMDB 0.9 writes data format 1, LMDB 1.0 data format 3.
ENGINES = {1: 0, 3: 1}
FORMATS = sorted(ENGINES)

Pairs = list[tuple[bytes, bytes]]


def values(rng: np.random.Generator, sizes: np.ndarray | list[int]) -> list[bytes]:
    return [rng.bytes(int(n)) for n in sizes]


def caffe(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """3 KB records with padded decimal keys, a commit every 1,000."""
    for start in range(0, 2500, 1000):
        with env.begin(write=True) as txn:
            for i in range(start, min(start + 1000, 2500)):
                txn.put(b"%08d" % i, rng.bytes(3085))


def shuffled_small(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """Records below 2 KB, some of them empty, in random order; many deleted and replaced later."""
    names = [b"key-%d" % i for i in range(3000)]
    order = rng.permutation(3000)
    for part in np.split(order, 5):
        with env.begin(write=True) as txn:
            for i in part.tolist():
                txn.put(names[i], rng.bytes(int(rng.integers(0, 1500)) if i % 7 else 0))
    with env.begin(write=True) as txn:
        for i in rng.permutation(3000)[:1200].tolist():
            txn.delete(names[i])
    with env.begin(write=True) as txn:
        for i in rng.permutation(3000)[:300].tolist():
            txn.put(names[i], rng.bytes(int(rng.integers(0, 6000))))


def around_the_limit(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """Sizes about the one from which on a value gets overflow pages, about the sizes of pages, odd and even keys."""
    sizes = [*range(1980, 2060), *range(4060, 4100), *range(8150, 8200), 0, 1, 2, 3, 100_000, 1_000_000]
    with env.begin(write=True) as txn:
        for i, value in enumerate(values(rng, sizes)):
            txn.put(b"k" * (1 + i % 5) + b"%05d" % i, value)


def shrunk(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """Large values overwritten by small ones in the same transaction: overflow runs longer than needed."""
    with env.begin(write=True) as txn:
        for i in range(50):
            txn.put(b"%03d" % i, rng.bytes(20_000))
            txn.put(b"%03d" % i, rng.bytes(5 + 100 * i))


def long_keys(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """Keys of all lengths up to 511 bytes: a deep tree."""
    with env.begin(write=True) as txn:
        for i in range(1500):
            key = rng.bytes(int(rng.integers(1, 512)) if i % 3 else 511)
            txn.put(key, rng.bytes(int(rng.integers(0, 40))))


def appended(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """In key order with MDB_APPEND: full pages, and branches that have just been split."""
    with env.begin(write=True) as txn:
        for i in range(6000):
            txn.put(b"%020d" % i, rng.bytes(int(rng.integers(0, 80))), append=True)


def one_record(env: lmdb.Environment, rng: np.random.Generator) -> None:
    with env.begin(write=True) as txn:
        txn.put(b"only", b"")


def duplicates(env: lmdb.Environment, rng: np.random.Generator) -> None:
    """One, some (sub-pages) and many (trees) duplicates of a key."""
    db = env.open_db(b"d", dupsort=True)
    with env.begin(write=True, db=db) as txn:
        for i in range(200):
            many = 1500 if i % 50 == 7 else 1 if i % 3 == 0 else int(rng.integers(2, 30))
            for _ in range(many):
                txn.put(b"key %d" % i, rng.bytes(int(rng.integers(1, 60))))


def fixed_duplicates(width: int) -> Callable[[lmdb.Environment, np.random.Generator], None]:
    def write(env: lmdb.Environment, rng: np.random.Generator) -> None:
        """Duplicates of one width: LEAF2 pages and sub-pages."""
        db = env.open_db(b"d", dupsort=True, dupfixed=True)
        with env.begin(write=True, db=db) as txn:
            for i in range(120):
                many = 3000 if i % 40 == 7 else 1 if i % 3 == 0 else int(rng.integers(2, 100))
                for _ in range(many):
                    txn.put(b"%d" % i, rng.bytes(width))

    return write


def integer_duplicates(env: lmdb.Environment, rng: np.random.Generator) -> None:
    db = env.open_db(b"d", dupsort=True, dupfixed=True, integerdup=True, integerkey=True)
    with env.begin(write=True, db=db) as txn:
        for i in rng.permutation(300).tolist():
            for j in rng.permutation(2000 if i == 5 else 1 + i % 20).tolist():
                txn.put(int(i * 7919).to_bytes(8, "little"), int(j * 104729).to_bytes(8, "little"))


def integer_keys(env: lmdb.Environment, rng: np.random.Generator) -> None:
    db = env.open_db(b"d", integerkey=True)
    with env.begin(write=True, db=db) as txn:
        for i in rng.permutation(3000).tolist():
            txn.put(int(i * 7919).to_bytes(4, "little"), rng.bytes(int(rng.integers(0, 3000))))


def reverse_keys(env: lmdb.Environment, rng: np.random.Generator) -> None:
    db = env.open_db(b"d", reverse_key=True)
    with env.begin(write=True, db=db) as txn:
        for i in range(2000):
            txn.put(b"%d" % i, rng.bytes(i % 50))


#: name -> (writer, database that holds the records)
CASES: dict[str, tuple[Callable[[lmdb.Environment, np.random.Generator], None], bytes | None]] = {
    "caffe": (caffe, None),
    "shuffled_small": (shuffled_small, None),
    "around_the_limit": (around_the_limit, None),
    "shrunk": (shrunk, None),
    "long_keys": (long_keys, None),
    "appended": (appended, None),
    "one_record": (one_record, None),
    "duplicates": (duplicates, b"d"),
    "dupfixed_1": (fixed_duplicates(1), b"d"),
    "dupfixed_3": (fixed_duplicates(3), b"d"),
    "dupfixed_8": (fixed_duplicates(8), b"d"),
    "integer_duplicates": (integer_duplicates, b"d"),
    "integer_keys": (integer_keys, b"d"),
    "reverse_keys": (reverse_keys, b"d"),
}


def opened(directory: str | os.PathLike[str], version: int, **arguments: object) -> lmdb.Environment:
    """A writing environment of data format `version`."""
    return lmdb.open(
        os.fspath(directory), map_size=1 << 28, max_dbs=16, sync=False, lib_version=ENGINES[version], **arguments
    )


def make(directory: Path, name: str, version: int) -> tuple[str, bytes | None]:
    """(data file, database) of a case, written once per directory."""
    write, db = CASES[name]
    place = directory / f"{name}-{version}"
    if not place.exists():
        half = directory / f"{name}-{version}.half"
        with opened(half, version) as env:
            write(env, np.random.default_rng(len(name)))
        half.rename(place)
    return os.fspath(place / "data.mdb"), db


def oracle(path: str, db: bytes | None = None) -> Pairs:
    """Every (key, value) in py-lmdb's cursor order."""
    with lmdb.open(path, subdir=False, readonly=True, lock=False, max_dbs=16) as env:
        handle = env.open_db(db, create=False) if db is not None else None
        with env.begin(db=handle) as txn:
            return [(bytes(k), bytes(v)) for k, v in txn.cursor()]


class NotingFetcher(PosixFetcher):
    """Notes the pages of 4,096 bytes that are read, but for the meta pages."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.pages: list[int] = []

    def _note(self, offset: int, nbytes: int) -> None:
        assert offset % 4096 == nbytes % 4096 == 0 or offset < 2 * 4096
        self.pages += [page for page in range(offset // 4096, -(-(offset + nbytes) // 4096)) if page > 1]

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        for one in reads:
            self._note(int(one["offset"]), int(one["nbytes"]))
        super().read(reads, out, starts)

    def pread(self, offset: int, nbytes: int) -> bytes:
        self._note(offset, nbytes)
        return super().pread(offset, nbytes)


def located(
    path: str, db: bytes | None = None, native: bool | None = None, fetcher: PosixFetcher | None = None
) -> Located:
    """The walk's result on this process alone."""
    fetcher = fetcher or PosixFetcher(path)
    pool = ReadPool(fetcher, 2)
    try:
        return build(pool, Database(path, read_snapshot(fetcher), db), Solo(), native=native)
    finally:
        pool.close()
        fetcher.close()


def pairs_of(path: str, found: Located) -> Pairs:
    """(key, value) of every record, the bytes taken from the file where the index says they lie."""
    raw = Path(path).read_bytes()
    assert found.extents is not None
    assert found.key_nbytes is not None
    assert found.key_data is not None
    ends = np.cumsum(found.key_nbytes.astype(np.int64))
    data = found.key_data.tobytes()
    keys = [data[end - n : end] for end, n in zip(ends.tolist(), found.key_nbytes.tolist(), strict=True)]
    if found.key_counts is not None:
        keys = [key for key, count in zip(keys, found.key_counts.tolist(), strict=True) for _ in range(count)]
    spans = found.extents.tolist()
    return [(key, raw[offset : offset + nbytes]) for key, (offset, nbytes) in zip(keys, spans, strict=True)]


def index_of(path: str, db: bytes | None = None, *, save: bool = True) -> Index:
    """The complete index, as this process alone opens it."""
    fetcher = PosixFetcher(path)
    pool = ReadPool(fetcher, 2)
    try:
        return open_index(Database(path, read_snapshot(fetcher), db), pool, Solo(), save=save)
    finally:
        pool.close()
        fetcher.close()


def same(a: Index, b: Index) -> None:
    np.testing.assert_array_equal(a.extents, b.extents)
    assert (a.by_offset is None) == (b.by_offset is None)
    if a.by_offset is not None:
        np.testing.assert_array_equal(a.by_offset, b.by_offset)
    for name in ("n", "content_id", "mean_bytes", "header_bytes", "page_size"):
        assert getattr(a, name) == getattr(b, name)
    assert a.database.fingerprint == b.database.fingerprint


def right(index: Index, path: str, db: bytes | None = None) -> None:
    expected = oracle(path, db)
    raw = Path(path).read_bytes()
    assert index.n == len(index) == len(expected)
    assert [raw[o : o + n] for o, n in index.extents.tolist()] == [value for _, value in expected]
    assert index.keys(np.arange(index.n)) == [key for key, _ in expected]
    order = np.arange(index.n) if index.by_offset is None else index.by_offset
    np.testing.assert_array_equal(order, np.argsort(index.extents["offset"], kind="stable"))
    assert index.mean_bytes == pytest.approx(np.mean([len(value) for _, value in expected]))
