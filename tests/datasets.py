"""Small LMDBs of every kind, written by py-lmdb, each with the truth: what py-lmdb's own cursor then reads from it.

Every maker takes a folder that does not exist yet and returns a `Made`. Deterministic: the same bytes on every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

__all__ = ["MAKERS", "Made", "datum", "truth_of"]

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Made:
    """A folder with data.mdb, the database of the records (None: the main one), and the truth in cursor order."""

    path: str
    db: bytes | None
    truth: list[Pair]

    @property
    def file(self) -> str:
        return os.path.join(self.path, "data.mdb")


def varint(value: int) -> bytes:
    """Protocol buffers' base-128 integer, the lowest seven bits first; negative numbers as 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def datum(image: np.ndarray, label: int) -> bytes:
    """A Caffe Datum message of u8[channels, height, width]: fields 1-3 shape, 4 data, 5 label."""
    head = b"".join(varint(field << 3) + varint(n) for field, n in zip((1, 2, 3), image.shape, strict=True))
    return head + varint(4 << 3 | 2) + varint(image.size) + image.tobytes() + varint(5 << 3) + varint(label)


def truth_of(path: str, db: bytes | None = None) -> list[Pair]:
    """Every (key, value) in the order of py-lmdb's cursor."""
    with lmdb.open(path, readonly=True, lock=False, max_dbs=8) as env:
        handle = env.open_db(db, create=False) if db is not None else None
        with env.begin(db=handle) as txn:
            return [(bytes(key), bytes(value)) for key, value in txn.cursor()]


def _open(folder: str | Path, lib_version: int | None = None) -> lmdb.Environment:
    more = {} if lib_version is None else {"lib_version": lib_version}
    return lmdb.open(str(folder), map_size=256 << 20, max_dbs=8, sync=False, **more)


def _write(env: lmdb.Environment, pairs: Iterable[Pair], commit_every: int = 1000, db: object = None) -> None:
    pairs = list(pairs)
    for start in range(0, len(pairs), commit_every):
        with env.begin(write=True, db=db) as txn:
            for key, value in pairs[start : start + commit_every]:
                txn.put(key, value)


def _made(folder: str | Path, db: bytes | None = None) -> Made:
    return Made(str(folder), db, truth_of(str(folder), db))


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def _values(rng: np.random.Generator, sizes: Iterable[int]) -> list[bytes]:
    return [rng.bytes(int(size)) for size in sizes]


def caffe_datum(folder: str | Path, n: int = 3500, lib_version: int | None = None) -> Made:
    """CIFAR-like Datums of 3 KB with labels from one to ten bytes long, a commit every 1,000 records."""
    rng = _rng("caffe_datum")
    labels = [(-1, 1 << 20, 300)[i % 3] if i % 50 == 0 else i % 10 for i in range(n)]
    images = rng.integers(0, 256, (n, 3, 32, 32), np.uint8)
    with _open(folder, lib_version) as env:
        _write(env, ((b"%08d" % i, datum(images[i], labels[i])) for i in range(n)))
    return _made(folder)


def format_3(folder: str | Path) -> Made:
    """The same as LMDB 1.0 writes it (data format 3)."""
    return caffe_datum(folder, n=1500, lib_version=1)


def variable_sizes(folder: str | Path) -> Made:
    """Values of 0 bytes to 60 KB, on both sides of the limit between leaf pages and pages of their own."""
    rng = _rng("variable_sizes")
    sizes = (10 ** rng.uniform(0, 4.78, 1200)).astype(int) - 1
    with _open(folder) as env:
        _write(env, ((b"%06d" % i, value) for i, value in enumerate(_values(rng, sizes))), commit_every=100)
    return _made(folder)


def small_records(folder: str | Path) -> Made:
    """Values below 2 KB, which lie in the leaf pages."""
    rng = _rng("small_records")
    sizes = rng.integers(0, 1900, 4000)
    with _open(folder) as env:
        _write(env, ((b"%d" % i, value) for i, value in enumerate(_values(rng, sizes))))
    return _made(folder)


def random_insertion(folder: str | Path) -> Made:
    """Inserted in random order: neighbours in key order lie far apart."""
    rng = _rng("random_insertion")
    values = _values(rng, rng.integers(1500, 9000, 1500))
    with _open(folder) as env:
        _write(env, ((b"%08d" % i, values[i]) for i in rng.permutation(len(values))), commit_every=200)
    return _made(folder)


def deletions(folder: str | Path) -> Made:
    """A third deleted, some written again with another size: freed pages are reused."""
    rng = _rng("deletions")
    with _open(folder) as env:
        _write(env, ((b"%08d" % i, v) for i, v in enumerate(_values(rng, rng.integers(100, 7000, 2000)))), 250)
        for part in np.array_split(rng.permutation(2000)[:700], 4):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    assert txn.delete(b"%08d" % i)
        _write(env, ((b"%08d" % i, rng.bytes(int(rng.integers(0, 12000)))) for i in rng.permutation(2000)[:300]), 75)
    return _made(folder)


def dupsort(folder: str | Path) -> Made:
    """Several values per key: one, a sub-page, a tree of their own."""
    rng = _rng("dupsort")
    counts = [1, 3, 40, 900]
    pairs = [(b"key%04d" % i, rng.bytes(int(rng.integers(8, 200)))) for i in range(200) for _ in range(counts[i % 4])]
    with _open(folder) as env:
        _write(env, pairs, db=env.open_db(b"dup", dupsort=True))
    return _made(folder, b"dup")


def dupfixed(folder: str | Path) -> Made:
    """Values of one size per key: LEAF2 pages."""
    rng = _rng("dupfixed")
    pairs = [(b"key%04d" % i, rng.bytes(16)) for i in range(100) for _ in range((1, 5, 600)[i % 3])]
    with _open(folder) as env:
        _write(env, pairs, db=env.open_db(b"fixed", dupsort=True, dupfixed=True))
    return _made(folder, b"fixed")


def named_databases(folder: str | Path) -> Made:
    """Two named databases in one file; the truth is the second one's."""
    rng = _rng("named_databases")
    with _open(folder) as env:
        for name, n in ((b"first", 300), (b"second", 700)):
            pairs = [(b"%05d" % i, value) for i, value in enumerate(_values(rng, rng.integers(0, 6000, n)))]
            _write(env, pairs, commit_every=150, db=env.open_db(name))
    return _made(folder, b"second")


def empty(folder: str | Path) -> Made:
    """No record, though one was there."""
    with _open(folder) as env:
        _write(env, [(b"gone", b"soon")])
        with env.begin(write=True) as txn:
            txn.delete(b"gone")
    return _made(folder)


def one_giant(folder: str | Path) -> Made:
    """Records of 4 KB, and one in the middle that is a hundred times larger."""
    rng = _rng("one_giant")
    sizes = [4000] * 400
    sizes[200] = 400_000
    with _open(folder) as env:
        _write(env, ((b"%08d" % i, value) for i, value in enumerate(_values(rng, sizes))), commit_every=100)
    return _made(folder)


MAKERS: dict[str, Callable[[str | Path], Made]] = {
    maker.__name__: maker
    for maker in (
        caffe_datum,
        format_3,
        variable_sizes,
        small_records,
        random_insertion,
        deletions,
        dupsort,
        dupfixed,
        named_databases,
        empty,
        one_giant,
    )
}
