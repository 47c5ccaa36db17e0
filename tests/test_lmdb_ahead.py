"""Announced records. The oracle for where a value lies is the file: values are random, so each occurs once."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import lmdb
import numpy as np
import pytest
from test_lmdb_served import serve  # noqa: F401

import pario.lmdb
from pario import machine
from pario.dataset.host import Host
from pario.lmdb import ahead
from pario.lmdb.store import DataFile

N = 200
HEADER = 16


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(3000 + (i * 611) % 20000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("ahead") / "x.lmdb")
    with lmdb.open(folder, map_size=1 << 26, max_dbs=1) as env:
        other = env.open_db(b"other")
        with env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(N).tolist():
                txn.put(b"%06d" % i, value(i), db=other if i % 2 else None)
    return folder


class Advised:
    """What the kernel was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[int, int]] = []
        self._more = threading.Condition()
        monkeypatch.setattr(DataFile, "advise", self._advise)

    def _advise(self, begins: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        with self._more:
            self.runs += zip(begins.tolist(), nbytes.tolist(), strict=True)
            self._more.notify_all()

    def wait_for(self, count: int) -> None:
        with self._more:
            assert self._more.wait_for(lambda: len(self.runs) >= count, 20), f"{len(self.runs)} of {count}"


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Advised:
    return Advised(monkeypatch)


def runs(path: str, ids: list[int]) -> list[tuple[int, int]]:
    content = Path(path, "data.mdb").read_bytes()
    return [(content.index(value(i)) - HEADER, HEADER + len(value(i))) for i in ids]


def test_the_runs_of_the_values_in_the_order_of_the_keys(path: str, advised: Advised) -> None:
    order = [i for i in np.random.default_rng(1).permutation(N).tolist() if i % 2 == 0]
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        env.will_read(b"%06d" % i for i in order)
        advised.wait_for(len(order))
    cuts = range(0, len(order), ahead._KEYS)
    expected = [sorted(runs(path, order[at : at + ahead._KEYS])) for at in cuts]
    assert advised.runs == [run for part in expected for run in part]


def test_keys_of_a_named_database_in_any_form_and_missing_ones(path: str, advised: Advised) -> None:
    with pario.lmdb.open(path, readonly=True, lock=False, max_dbs=1) as env:
        env.will_read([b"000001", b"nothing", bytearray(b"000003"), memoryview(b"000005")], env.open_db(b"other"))
        advised.wait_for(3)
    assert sorted(advised.runs) == sorted(runs(path, [1, 3, 5]))


def test_what_memory_has_no_room_for_is_not_brought(
    path: str, advised: Advised, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = list(range(0, N, 2))
    sizes = np.cumsum([nbytes for _, nbytes in runs(path, ids)])
    room = int(sizes[ahead._KEYS - 1]) + 1  # for the first keys that are looked up together
    monkeypatch.setattr(machine, "memory", lambda **_: (1 << 40, 4 * room))
    with caplog.at_level(logging.INFO, "pario"), pario.lmdb.open(path, readonly=True, lock=False) as env:
        env.will_read(b"%06d" % i for i in ids)
        end = time.monotonic() + 20
        while "Announce fewer" not in caplog.text and time.monotonic() < end:
            time.sleep(0.005)
    assert f"from number {ahead._KEYS} on" in caplog.text
    assert len(advised.runs) == ahead._KEYS


@pytest.mark.parametrize("keys", [["text"], [b"000000", 7], [b""]])
def test_what_is_wrong_with_a_key_is_told_to_whoever_reads_it(
    path: str, advised: Advised, keys: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pario"), pario.lmdb.open(path, readonly=True, lock=False) as env:
        env.will_read(keys)
        env.will_read([b"000002"])
        advised.wait_for(1)
        assert env.begin().get(b"000002") == value(2)
    assert runs(path, [2])[0] in advised.runs, "the thread goes on"


def test_it_ends_with_the_environment(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = pario.lmdb.open(path, readonly=True, lock=False)
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(DataFile, "advise", slow)
    env.will_read([b"%06d" % i for i in range(0, N, 2)])
    env.will_read([b"000002"])
    assert begun.wait(20)
    env.close()
    with pytest.raises(lmdb.Error):
        env.will_read([b"000000"])
    goes_on.set()
    end = time.monotonic() + 20
    while any(t.name.startswith("pario-ahead") for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.005)
    assert not any(t.name.startswith("pario-ahead") for t in threading.enumerate())


def _in_a_child(env: pario.lmdb.Environment, answers: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        advised = Advised(patch)
        env.will_read([b"000004"])
        advised.wait_for(1)
        answers.put(advised.runs)  # type: ignore[attr-defined]


def test_a_forked_child_has_a_thread_of_its_own(path: str, advised: Advised) -> None:
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        env.will_read([b"000002"])
        advised.wait_for(1)
        context = get_context("fork")
        answers = context.Queue()
        child = context.Process(target=_in_a_child, args=(env, answers))
        child.start()
        assert answers.get(timeout=30) == runs(path, [4])
        child.join(30)
        assert child.exitcode == 0


def test_the_service_brings_what_was_announced_first(
    path: str, serve: Callable[..., Host], monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setattr(Host, "_fill", lambda *_: None)  # which would bring all of it
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        tier = env.begin()._store.copy
        assert tier is not None
        assert not tier.held().any()
        env.will_read([b"000010"])
        offset, nbytes = runs(path, [10])[0]
        wanted = tier.grid.chunks_at(np.array([offset]), np.array([nbytes])).tolist()
        end = time.monotonic() + 20
        while not tier.held()[wanted].all() and time.monotonic() < end:
            time.sleep(0.005)
        assert np.flatnonzero(tier.held()).tolist() == wanted
        with open(os.path.join(path, "data.mdb"), "rb") as file:
            file.seek(offset + HEADER)
            assert tier.view[offset + HEADER : offset + nbytes].tobytes() == file.read(nbytes - HEADER) == value(10)
    assert host.state()
