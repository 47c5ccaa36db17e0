"""The drop-in behind a control plane: what it reads from the store is within the job's share, in the processes that it
starts, too, and what memory holds costs nothing. The oracle is the clock, and what the file's pages in memory say."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb as real
import numpy as np
import pytest
from control_plane import SECRET, running, until

import pario.lmdb as lmdb
from pario.plane import joining
from pario.plane.bucket import BURST_S
from pario.plane.plane import Plane
from pario.plane.rules import Rules

N, EACH = 200, 30_000
RATE = 12e6
NAMES = [b"%06d" % i for i in range(N)]


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(EACH - i)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("limited") / "x.lmdb")
    with real.open(folder, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i, name in enumerate(NAMES):
            txn.put(name, value(i))
    return folder


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Plane]:
    (tmp_path / "token").write_bytes(SECRET)
    (tmp_path / "token").chmod(0o600)
    rules = Rules((RATE, None), lease_s=2.0, cycle_s=0.02, secrets={joining.user_name(): SECRET})
    with running(rules) as made:
        monkeypatch.setenv("PARIO_CONTROL", str(made.address))
        monkeypatch.setenv("PARIO_CONTROL_TOKEN", str(tmp_path / "token"))
        yield made


def forget(path: str) -> None:
    """Takes the file out of the page cache."""
    fd = os.open(f"{path}/data.mdb", os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def joined(env: Any) -> Any:
    """The agent, when the plane has told it the rate."""
    agent = env._file.limits
    agent.take(0, 1)
    until(lambda: agent.bucket.rates[0] is not None)
    return agent


def one_by_one(env: Any) -> list[bytes]:
    with env.begin() as txn:
        return [txn.get(name) for name in NAMES]


def by_cursor(env: Any) -> list[bytes]:
    with env.begin() as txn:
        return [bytes(each) for each in txn.cursor().iternext(keys=False)]


def all_at_once(env: Any) -> list[bytes]:
    with env.begin() as txn:
        return [found for _, found in txn.cursor().getmulti(NAMES)]


def announced(env: Any) -> list[bytes]:
    env.will_read(NAMES)
    return one_by_one(env)


@pytest.mark.parametrize("read", [one_by_one, by_cursor, all_at_once, announced], ids=lambda read: read.__name__)
def test_what_the_store_gives_is_within_the_share(
    plane: Plane, path: str, read: Callable[[Any], list[bytes]]
) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        agent = joined(env)
        forget(path)
        begun, before = time.monotonic(), agent.bucket.used[0]
        values = read(env)
        seconds, used = time.monotonic() - begun, agent.bucket.used[0] - before
    assert values == [value(i) for i in range(N)]
    assert used >= sum(map(len, values))
    assert used <= 1.3 * N * EACH
    # The last reads are let in when those before them are paid for.
    assert seconds >= (0.9 * used - RATE * BURST_S - (4 << 20)) / RATE


def test_what_memory_holds_costs_nothing(plane: Plane, path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        agent = joined(env)
        one_by_one(env)
        before = list(agent.bucket.used)
        for read in (one_by_one, by_cursor, all_at_once):
            assert read(env) == [value(i) for i in range(N)]
        assert agent.bucket.used == before


def _child(env: Any, path: str, names: list[bytes], told: Any) -> None:
    env = env if env is not None else lmdb.open(path, readonly=True, lock=False)
    agent = joined(env)
    told.put("ready")
    told.get()
    before = agent.bucket.used[0]
    with env.begin() as txn:
        values = [txn.get(name) for name in names]
    told.put((agent.bucket.used[0] - before, sum(map(len, values))))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_processes_that_it_starts(plane: Plane, path: str, method: str) -> None:
    context = multiprocessing.get_context(method)
    with lmdb.open(path, readonly=True, lock=False) as env:
        joined(env)
        mine = env if method == "fork" else None
        ends = [context.Pipe() for _ in range(2)]
        given = [(mine, path, NAMES[k::2], _Ends(end)) for k, (_, end) in enumerate(ends)]
        workers = [context.Process(target=_child, args=each) for each in given]
        for worker in workers:
            worker.start()
        for end, _ in ends:
            assert end.poll(60)
            assert end.recv() == "ready"
        until(lambda: plane.book.members >= 3)
        forget(path)
        begun = time.monotonic()
        for end, _ in ends:
            end.send("go")
        counted = [end.recv() for end, _ in ends]
        seconds = time.monotonic() - begun
        for worker in workers:
            worker.join(30)
    used, nbytes = map(sum, zip(*counted, strict=True))
    assert nbytes == sum(EACH - i for i in range(N))
    assert used >= nbytes
    assert seconds >= (0.9 * used - 3 * RATE * BURST_S) / RATE


class _Ends:
    """One end of a pipe, like a queue."""

    def __init__(self, end: Any) -> None:
        self._end = end

    def put(self, thing: Any) -> None:
        self._end.send(thing)

    def get(self) -> Any:
        return self._end.recv()


def test_ctrl_c_reaches_a_script_that_waits_for_its_share(plane: Plane, path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        agent = joined(env)
        forget(path)
        agent.take(int(3 * RATE), 1)  # seconds of debt
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            one_by_one(env)
        assert time.monotonic() - begun < 2.0


def test_it_ends_with_the_last_environment(plane: Plane, path: str) -> None:
    env = lmdb.open(path, readonly=True, lock=False)
    agent = joined(env)
    other = lmdb.open(path, readonly=True, lock=False)
    env.close()
    assert other._file.limits is agent
    assert agent.hold()
    agent.release()
    other.close()
    del env, other
    until(lambda: not agent.hold())


def test_without_a_plane_there_is_no_gate(path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        assert env._file.gate is None
