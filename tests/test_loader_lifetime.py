"""How a loader ends: what the ring of its node hears of an error, and that nothing keeps it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.comm.solo import Solo
from pario.errors import DeadRankError, ParioError, PeerError
from pario.loader.lifetime import Lifetime


@pytest.mark.parametrize(
    ("error", "known", "told"),
    [
        (ParioError("of this rank alone"), False, True),
        (ParioError("agreed on"), True, False),
        (PeerError("of another rank", rank=1), True, False),
        (DeadRankError("its neighbours alone know", rank=1), True, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_ring_tells_only_what_others_do_not_know(error: ParioError, known: bool, told: bool) -> None:
    """A rank that is about to raise an agreed error must not raise a PeerError about it, as if alone."""
    error._pario_known = known  # type: ignore[attr-defined]  # as `spread` notes it in a world of several ranks
    posted: list[Any] = []
    reader: Any = SimpleNamespace(abandon=lambda limit_s: None)
    life = Lifetime(Solo(), reader)
    life.ring = SimpleNamespace(fail=lambda *words: posted.append(words), close=lambda: None)  # type: ignore[assignment]
    life.abandon(error)
    assert bool(posted) == told


def test_an_error_does_not_wait_for_a_function_of_the_user(tmp_path: Path) -> None:
    """Nor for anything else that keeps a thread: a stalled store does the same."""
    path = os.fspath(tmp_path / "x.lmdb")
    with lmdb.open(path, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(64):
            txn.put(b"%03d" % i, bytes([i]) * 5000)
    begun, go = threading.Event(), threading.Event()

    def decode(record: np.ndarray) -> dict[str, int]:
        if record[0] == 12:
            begun.set()
            go.wait()
        return {"first": record[0]}

    def train() -> None:
        with pario.Loader(path, 8, decode) as loader:
            for _ in loader:
                assert begun.wait(20)
                raise ValueError("diverged")

    try:
        with pytest.raises(ValueError, match="diverged"):
            train()
        assert not go.is_set()
    finally:
        go.set()


def test_a_loader_that_nobody_closes_warns(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "x.lmdb")
    with lmdb.open(path, map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pario.Loader(path, 1) as closed:
            list(closed)
        dropped = pario.Loader(path, 1)
        list(dropped)
        del closed, dropped
    told = [each for each in said if issubclass(each.category, ResourceWarning) and "Loader" in str(each.message)]
    assert [path in str(each.message) for each in told] == [True]


def test_a_ctrl_c_while_a_loader_is_dropped_is_not_lost() -> None:
    """What is raised in a destructor goes nowhere."""
    given = [KeyboardInterrupt()]

    def abandon(limit_s: float) -> None:
        if given:
            raise given.pop()

    life = [Lifetime(Solo(), SimpleNamespace(abandon=abandon, path="x"))]  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        life.clear()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(10)
    assert not given
