"""A map-style Dataset over pario.lmdb for test_frameworks.py, which spawned workers can import."""

from __future__ import annotations

from typing import Any

import numpy as np

import pario.lmdb


def key(i: int) -> bytes:
    return b"%05d" % i


def record(i: int) -> bytes:
    return np.random.default_rng(i).bytes(5000 + i)


class Records:
    """Opens in the constructor, or at the first record."""

    def __init__(self, path: str, n: int, *, early: bool) -> None:
        self._path, self._n = path, n
        self._env: Any = self._open() if early else None

    def _open(self) -> Any:
        return pario.lmdb.open(self._path, readonly=True, lock=False)

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> tuple[int, bytes]:
        if self._env is None:
            self._env = self._open()
        with self._env.begin() as txn:
            return i, txn.get(key(i))
