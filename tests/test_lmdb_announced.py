"""Announced records. The oracle for what a record is: how it was made; for what was read ahead: the file's reads."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import lmdb
import numpy as np
import pytest
from test_lmdb_served import serve, wait_until_whole  # noqa: F401

import pario.lmdb
from pario import machine
from pario.dataset.host import Host
from pario.lmdb import announced
from pario.lmdb.store import DataFile

N, HEADER = 200, 16
EVEN = list(range(0, N, 2))


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(3000 + (i * 611) % 20000)


def key(i: int) -> bytes:
    return b"%06d" % i


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("announced") / "x.lmdb")
    with lmdb.open(folder, map_size=1 << 26, max_dbs=1) as env:
        other = env.open_db(b"other")
        with env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(N).tolist():
                txn.put(key(i), value(i), db=other if i % 2 else None)
    return folder


class Reads:
    """The extents that were read ahead; `cached` is what the page cache is said to have."""

    def __init__(self) -> None:
        self.extents: list[tuple[int, int]] = []
        self.cached: float | None = None


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    seen, read = Reads(), DataFile.read

    def note(self: DataFile, extents: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        read(self, extents, out, starts)
        seen.extents += extents.tolist()

    monkeypatch.setattr(DataFile, "read", note)
    monkeypatch.setattr(DataFile, "cached_share", lambda *_: seen.cached)
    return seen


@pytest.fixture
def env(path: str) -> Iterator[pario.lmdb.Environment]:
    with pario.lmdb.open(path, readonly=True, lock=False, max_dbs=1) as opened:
        yield opened


def runs(path: str, ids: list[int]) -> list[tuple[int, int]]:
    content = Path(path, "data.mdb").read_bytes()
    return sorted((content.index(value(i)) - HEADER, HEADER + len(value(i))) for i in ids)


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def settle(env: pario.lmdb.Environment) -> None:
    """All that was announced has been looked at."""
    until(lambda: not env._announced or not env._announced._lookers._under_way)


def test_each_is_read_once_and_nothing_else(env: pario.lmdb.Environment, path: str, reads: Reads) -> None:
    order = np.random.default_rng(1).permutation(EVEN).tolist()[:70]
    env.will_read(key(i) for i in order)
    settle(env)
    assert sorted(reads.extents) == runs(path, order)
    txn = env.begin()
    assert all(txn.get(key(i)) == value(i) for i in EVEN)


def test_what_is_in_the_page_cache_is_left_there(env: pario.lmdb.Environment, reads: Reads) -> None:
    reads.cached = 1.0
    env.will_read([key(2), key(4)])
    settle(env)
    assert reads.extents == []


@pytest.mark.parametrize("wrong", ["text", 7, b"", b"nothing"])
def test_what_is_wrong_with_a_key_is_told_to_whoever_reads_it(
    env: pario.lmdb.Environment, path: str, reads: Reads, wrong: object
) -> None:
    env.will_read([bytearray(key(2)), wrong, memoryview(key(4))])
    settle(env)
    assert sorted(reads.extents) == runs(path, [2, 4])


def test_keys_of_a_named_database(env: pario.lmdb.Environment, path: str, reads: Reads) -> None:
    env.will_read([key(1), key(2), key(3)], env.open_db(b"other"))
    settle(env)
    assert sorted(reads.extents) == runs(path, [1, 3])


def test_long_values_are_read_in_pieces(
    env: pario.lmdb.Environment, path: str, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announced, "_PIECE_BYTES", 4096)
    env.will_read([key(12)])
    settle(env)
    ((begin, nbytes),) = runs(path, [12])
    assert [offset for offset, _ in sorted(reads.extents)] == list(range(begin, begin + nbytes, 4096))
    assert sum(size for _, size in reads.extents) == nbytes


def test_no_more_than_a_part_of_the_memory(
    env: pario.lmdb.Environment, reads: Reads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pario")
    monkeypatch.setattr(machine, "memory", lambda **_: (1 << 40, 4 * 60_000))
    for _ in range(2):
        reads.extents.clear()
        env.will_read(key(i) for i in EVEN)
        settle(env)
        assert 0 < sum(size for _, size in reads.extents) <= 60_000
    assert caplog.text.count("Announce fewer at once") == 2


def test_where_there_is_no_page_cache(
    env: pario.lmdb.Environment, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    reads.cached = 0.0
    env.will_read([key(2)])
    until(lambda: "PARIO_TIERS" in caplog.text)
    reads.extents.clear()
    env.will_read([key(4)])
    settle(env)
    assert reads.extents == []
    assert env.begin().get(key(4)) == value(4)


def test_a_failed_read_is_met_by_whoever_asks(env: pario.lmdb.Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise pario.ReadError("no", path="x")

    monkeypatch.setattr(DataFile, "cached_share", lambda *_: None)
    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "read", refused)
        env.will_read([key(2), key(4)])
        settle(env)
    assert env.begin().get(key(2)) == value(2)


def test_a_read_that_hangs_is_not_waited_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(DataFile, "cached_share", lambda *_: None)
    monkeypatch.setattr(DataFile, "read", stuck)
    env = pario.lmdb.open(path, readonly=True, lock=False)
    env.will_read(key(i) for i in EVEN)
    assert begun.wait(20)
    assert env.begin().get(key(2)) == value(2)
    env.close()
    assert not goes_on.is_set()
    goes_on.set()
    until(are_gone)


def are_gone() -> bool:
    return not any(thread.name.startswith("pario-announced") for thread in threading.enumerate())


@pytest.mark.parametrize("closed", [True, False])
def test_it_ends_with_the_environment(path: str, reads: Reads, closed: bool) -> None:
    env = pario.lmdb.open(path, readonly=True, lock=False)
    env.will_read([key(2), key(4)])
    settle(env)
    if closed:
        env.close()
        with pytest.raises(lmdb.Error):
            env.will_read([key(2)])
    del env
    gc.collect()
    until(are_gone)


def test_a_new_state_of_the_file(tmp_path: Path, reads: Reads) -> None:
    own = str(tmp_path / "own")
    with lmdb.open(own, map_size=1 << 26) as writer:
        for content in (value(2), value(3)):
            with writer.begin(write=True) as txn:
                txn.put(key(2), content)
            with pario.lmdb.open(own, readonly=True, lock=False) as env:
                reads.extents.clear()
                env.will_read([key(2)])
                settle(env)
                assert [size for _, size in reads.extents] == [HEADER + len(content)]
                assert env.begin().get(key(2)) == content


def _announces(env: pario.lmdb.Environment, reads: Reads, answers: object) -> None:
    env.will_read([key(4)])
    settle(env)
    answers.put((reads.extents, env.begin().get(key(4))))  # type: ignore[attr-defined]


def test_a_forked_child_may_announce_itself(env: pario.lmdb.Environment, path: str, reads: Reads) -> None:
    env.will_read([key(2)])
    settle(env)
    reads.extents.clear()
    context = get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_announces, args=(env, reads, answers))
    child.start()
    assert answers.get(timeout=30) == (runs(path, [4]), value(4))
    child.join(30)
    assert child.exitcode == 0


def test_what_the_service_of_the_node_has_is_not_read(
    path: str, serve: Callable[..., Host], reads: Reads  # noqa: F811
) -> None:
    host = serve()
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        wait_until_whole(host)
        env.will_read(key(i) for i in EVEN)
        settle(env)
        assert reads.extents == []
