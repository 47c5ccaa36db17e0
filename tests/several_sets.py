"""Three LMDBs for tests of several as one: other numbers and sizes of records, the same keys, a meta record in each.
The truth is what py-lmdb's cursor reads."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import numpy as np

#: records and the largest value of each file
SHAPES = ((101, 6000), (57, 200), (33, 30000))
Pairs = list[tuple[bytes, bytes]]


def name(k: int) -> str:
    return f"data.{k:04d}.lmdb"


def write(folder: Path) -> None:
    """data.0000.lmdb to data.0002.lmdb, inserted in random order, and a file that is none of them."""
    folder.mkdir(parents=True)
    for k, (n, most) in enumerate(SHAPES):
        rng = np.random.default_rng(k)
        with lmdb.open(os.fspath(folder / name(k)), subdir=False, map_size=1 << 26, sync=False) as env:
            for part in np.array_split(rng.permutation(n), 3):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"%d" % i, np.random.default_rng((k, i)).bytes(8 + i * 7919 % most))
            with env.begin(write=True) as txn:
                txn.put(b"length", b"%d" % n)
    (folder / "metadata.npz").write_bytes(b"of other programs")


def paths_in(folder: Path) -> list[str]:
    return [os.fspath(folder / name(k)) for k in range(len(SHAPES))]


def truth(paths: list[str]) -> Pairs:
    """The records of one file after the other."""
    pairs: Pairs = []
    for path in paths:
        with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
            pairs += [(bytes(key), bytes(value)) for key, value in txn.cursor()]
    return pairs


def samples(pairs: Pairs) -> list[int]:
    """The ids of all records but the meta records."""
    return [i for i, (key, _) in enumerate(pairs) if key != b"length"]


def break_record(path: str, offset: int) -> None:
    """Another page number in the header of the page before this value (at `offset`), so that it is no longer its."""
    with open(path, "r+b") as file:
        file.seek(offset - 16)
        file.write((1 << 40).to_bytes(8, "little"))
