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
from benchmarks.cache import drop_file
from pario.plane import joining
from pario.plane.bucket import BURST_S
from pario.plane.plane import Plane
from pario.plane.rules import Rules

N, EACH = 150, 40_000  # some of a kind that is read with the interpreter's lock held, most not
RATE = 12e6
NAMES = [b"%06d" % i for i in range(N)]


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(EACH - 20_000 * (i % 10 == 0) - i)


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
    for agent in joining._agents.values():  # a process keeps its own until it ends
        agent.close()


def forget(path: str) -> None:
    """Takes the file out of the page cache, to the last page."""
    drop_file(f"{path}/data.mdb", allow=0)


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
    assert used <= 1.3 * N * EACH  # looks at the snapshot, pages of keys
    # The last reads are let in when those before them are paid for.
    assert seconds >= (0.9 * used - RATE * BURST_S - (4 << 20)) / RATE


def test_what_memory_holds_costs_nothing(plane: Plane, path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        agent = joined(env)
        one_by_one(env)
        costs = []
        for read in (one_by_one, by_cursor, all_at_once):
            for _ in range(3):  # a busy kernel refuses now and then what it need not wait for (RWF_NOWAIT)
                before = list(agent.bucket.used)
                assert read(env) == [value(i) for i in range(N)]
                if agent.bucket.used == before:
                    break
            else:
                costs.append(read.__name__)
        assert not costs


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
        workers = [context.Process(target=_child, args=each, daemon=True) for each in given]
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
        assert all(end.poll(60) for end, _ in ends)
        counted = [end.recv() for end, _ in ends]
        seconds = time.monotonic() - begun
        for worker in workers:
            worker.join(30)
    used, nbytes = map(sum, zip(*counted, strict=True))
    assert nbytes == sum(len(value(i)) for i in range(N))
    # What the kernel's read-ahead for one of them brought, another may find in the page cache: it counts for nobody.
    assert used >= 0.98 * nbytes
    assert seconds >= (0.9 * used - 3 * RATE * BURST_S) / RATE


class _Ends:
    """One end of a pipe, like a queue."""

    def __init__(self, end: Any) -> None:
        self._end = end

    def put(self, thing: Any) -> None:
        self._end.send(thing)

    def get(self) -> Any:
        return self._end.recv()


class Enough(Exception):
    pass


@pytest.mark.parametrize("read", [one_by_one, by_cursor, all_at_once], ids=lambda read: read.__name__)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_what_a_handler_raises_reaches_a_script_that_waits(
    plane: Plane, path: str, read: Callable[[Any], list[bytes]], number: int
) -> None:
    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else Enough("of this")

    before = signal.signal(number, handler)
    try:
        with lmdb.open(path, readonly=True, lock=False) as env:
            agent = joined(env)
            read(env)  # compiles
            forget(path)
            agent.take(int(3 * RATE), 1)  # seconds of debt
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            begun = time.monotonic()
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Enough):
                read(env)
            assert time.monotonic() - begun < 2.5 + 3.0 * (read is all_at_once)  # whose threads read to the end
            assert read(env) == [value(i) for i in range(N)]
    finally:
        signal.signal(number, before)


def test_a_handler_may_read_while_the_script_waits(plane: Plane, path: str) -> None:
    """On top of the call that waits, by another thread: as a Checkpointer's threads do."""
    found: list[bytes] = []

    def handler(number: int, frame: object) -> None:
        thread = threading.Thread(target=lambda: found.extend(one_by_one(other)[:1]))
        thread.start()
        thread.join()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with lmdb.open(path, readonly=True, lock=False) as env, lmdb.open(path, readonly=True, lock=False) as other:
            agent = joined(env)
            one_by_one(env)  # compiles
            forget(path)
            agent.take(int(RATE), 1)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGALRM)).start()
            assert one_by_one(env) == [value(i) for i in range(N)]
    finally:
        signal.signal(signal.SIGALRM, before)
    assert found == [value(0)]


def test_who_opens_anew_for_each_read_is_within_the_share(plane: Plane, path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        agent = joined(env)
    forget(path)
    begun, before = time.monotonic(), agent.bucket.used[0]
    for i, name in enumerate(NAMES):
        with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
            assert env._file.limits is agent
            assert txn.get(name) == value(i)
    used = agent.bucket.used[0] - before
    assert time.monotonic() - begun >= (0.9 * used - RATE * BURST_S) / RATE


def test_without_a_plane_there_is_no_gate(path: str) -> None:
    with lmdb.open(path, readonly=True, lock=False) as env:
        assert env._file.gate is None
