"""LMDBs of some 18 MB whose leaf pages are enough for an index to grow, one of each kind of layout."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import lmdb
import numpy as np

import pario

SLOTS = pario.Options(slot_bytes=1 << 20, slots=4)
N = 6000


def write(place: Path, values: Iterable[bytes], commit_every: int = 1 << 30, order: Iterable[int] | None = None) -> str:
    """Keys of eight digits; a commit after every so many records, or one at the end."""
    kept = list(values)
    numbers = list(order) if order is not None else list(range(len(kept)))
    with lmdb.open(str(place), map_size=1 << 28, sync=False) as env:
        for start in range(0, len(numbers), commit_every):
            with env.begin(write=True) as txn:
                for i in numbers[start : start + commit_every]:
                    txn.put(b"%08d" % i, kept[i])
    return str(place)


def noise(seed: int, sizes: Iterable[int]) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(size)) for size in sizes]


SETS: dict[str, Callable[[Path], str]] = {
    "one commit": lambda place: write(place, noise(0, [3000] * N)),
    "commits": lambda place: write(place, noise(1, [3000] * N), 1000),
    "two pages": lambda place: write(place, noise(2, [6000] * N), 1000),
    "varying": lambda place: write(place, noise(3, np.random.default_rng(3).integers(2500, 12_000, N)), 700),
    "in leaves": lambda place: write(place, noise(4, np.random.default_rng(4).integers(100, 1900, 2 * N)), 1000),
    "any order": lambda place: write(
        place, noise(5, [3000] * N), 1000, np.random.default_rng(5).permutation(N).tolist()
    ),
}


def forget(path: str) -> None:
    for place in glob.glob(f"{path}/*.pario.index"):
        os.unlink(place)


def sidecars(path: str) -> list[str]:
    return glob.glob(f"{path}/*.pario.index")


def page_bytes(path: str) -> int:
    """Of the pages that hold anything of the database."""
    with lmdb.open(path, readonly=True, lock=False) as env:
        stat = env.stat()
    return (stat["overflow_pages"] + stat["leaf_pages"] + stat["branch_pages"]) * stat["psize"]
