"""What is read ahead of the next epoch: used if that epoch begins, forgotten otherwise, never more than the ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import ReadError
from pario.feed.choose import Way
from pario.feed.next_epoch import ContinuingWriter
from pario.fetch.posix import FileFetcher
from pario.plan.stream import Work

pytestmark = pytest.mark.usefixtures("through_the_ring")

N = 400
SMALL: dict[str, Any] = {"slot_bytes": 128 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 8, "inflight": 2}


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(10 + (i * 37) % 6000)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("next") / "x.lmdb"
    with lmdb.open(str(folder), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    with pario.Reader(folder):
        pass
    return folder


class Store:
    """Reads wait at the gate; fail if told to."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.waiting = 0
        self.nbytes = 0
        self.calls = 0


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made, read = Store(), FileFetcher.read
    counting = threading.Lock()

    def gated(self: FileFetcher, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        with counting:
            made.waiting += 1
        assert made.gate.wait(20)
        with counting:
            made.waiting -= 1
            made.calls += 1
            made.nbytes += int(reads["nbytes"].sum())
        if made.fails:
            raise ReadError("the store is down", path=self.path)
        read(self, reads, out, starts)

    monkeypatch.setattr(FileFetcher, "read", gated)
    yield made
    made.gate.set()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(1e-3)


def open_loader(path: Path, **more: Any) -> pario.Loader:
    return pario.Loader(path, 16, seed=2, recipe="ring", options=pario.Options(**SMALL), **more)


def ahead(loader: pario.Loader) -> ContinuingWriter:
    """What reads the next epoch's first groups, when it has read all that it can."""
    before: Any = loader._life.source
    before = before._writer
    before.ended.result(20)
    assert before.following._in_flight.wait(20)
    found: ContinuingWriter = before.following
    return found


def early(loader: pario.Loader) -> int:
    """Groups of the next epoch that are there."""
    source: Any = loader._life.source
    following = source._writer.following
    return len(following._there) if following is not None else 0


def check(loader: pario.Loader, epoch: int, batch: pario.Batch) -> None:
    """Against the order itself, whose definition other tests check."""
    assert batch.epoch == epoch
    context = loader._supply.context
    work = Work(context.stream, loader._progress._shape, epoch, 0)
    expected = context.ids_of(work.order.take(np.arange(*work.schedule.step_positions(batch.step))), work.order)
    assert sorted(batch.ids.tolist()) == sorted(expected.tolist())
    for k, i in enumerate(batch.ids.tolist()):
        start, stop = batch["offsets"][k : k + 2]
        assert batch["data"][start:stop].tobytes() == value(i)


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_the_first_batch_of_the_next_epoch_does_not_wait_for_the_store(path: Path, store: Store, shuffle: Any) -> None:
    with open_loader(path, shuffle=shuffle) as loader:
        for epoch in range(3):
            taken = 0
            for batch in loader:
                check(loader, epoch, batch)
                store.gate.set()
                taken += 1
            assert taken == len(loader)
            following = ahead(loader)
            assert len(following._there) == min(following._schedule.groups, 3)
            store.gate.clear()
        store.gate.set()


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_loops_that_are_left_early(path: Path, store: Store, shuffle: Any) -> None:
    with open_loader(path, shuffle=shuffle) as loader:
        for epoch, most in enumerate((3, 1, 25, 24, 2, 25)):  # of 25 batches; with all of them it is not left
            for batch in loader:
                check(loader, epoch, batch)
                if batch.step + 1 == most < 25:
                    break


def test_it_is_read_while_the_last_batches_are_still_in_use(path: Path, store: Store) -> None:
    """Two of the three slots are free then."""
    with open_loader(path) as loader:
        loop = iter(loader)
        for _ in range(len(loader) - 1):
            next(loop)
        until(lambda: early(loader) == 2)
        check(loader, 0, next(loop))
        assert next(loop, None) is None
        check(loader, 1, next(iter(loader)))


@pytest.mark.parametrize("where", ["another epoch", "the middle", "the same again"])
def test_a_loop_that_begins_elsewhere_forgets_it(path: Path, store: Store, where: str) -> None:
    with open_loader(path, shuffle="global") as loader:
        states = [loader.state_dict() for _ in loader]
        following = ahead(loader)
        if where == "another epoch":
            loader.set_epoch(7)
        elif where == "the middle":
            loader.load_state_dict(states[3])
        else:
            loader.set_epoch(0)
        for number, batch in enumerate(loader):
            if where == "the middle":
                work = Work(loader._supply.context.stream, loader._progress._shape, 0, 0)
                first = states[3]["position"] + 16 * number
                assert batch.ids.tolist() == work.order.ids(first, min(N, first + 16)).tolist()
            else:
                check(loader, 7 if where == "another epoch" else 0, batch)
        assert following._dropped


@pytest.mark.parametrize("for_good", [False, True])
def test_an_error_is_one_when_its_epoch_begins(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    read_ahead = ContinuingWriter._read_ahead

    def failing(self: ContinuingWriter, before: ContinuingWriter) -> None:
        assert before._in_flight.wait(20)
        store.fails = True
        read_ahead(self, before)

    monkeypatch.setattr(ContinuingWriter, "_read_ahead", failing)
    with open_loader(path) as loader:
        for batch in loader:
            check(loader, 0, batch)
        assert ahead(loader)._planned == {}
        loader.report()  # nothing is wrong with this epoch
        store.fails = for_good
        if for_good:
            with pytest.raises(ReadError, match="the store is down"):
                next(iter(loader))
        else:
            for batch in loader:
                check(loader, 1, batch)
        store.fails = True
    store.fails = False


def test_close_waits_for_the_reads_in_flight_only(path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read_ahead = ContinuingWriter._read_ahead

    def slowly(self: ContinuingWriter, before: ContinuingWriter) -> None:
        assert before._in_flight.wait(20)
        store.gate.clear()
        store.calls = 0
        read_ahead(self, before)

    monkeypatch.setattr(ContinuingWriter, "_read_ahead", slowly)
    loader = open_loader(path, shuffle="global")
    for _ in loader:
        pass
    writer: Any = loader._life.source
    writer._writer.ended.result(20)
    until(lambda: store.waiting == 2)  # of many: SMALL has two in flight
    closing = threading.Thread(target=loader.close)
    closing.start()
    until(lambda: writer._writer.following is None)
    store.gate.set()
    closing.join(20)
    assert not closing.is_alive()
    assert store.calls == 2


def test_the_last_epoch_wastes_a_ring_at_most(path: Path, store: Store) -> None:
    with open_loader(path) as loader:
        for batch in loader:
            if batch.step == len(loader) - 2:
                until(lambda: early(loader) == 2)
        assert len(ahead(loader)._there) == 3
        stats, size = loader.stats(), (path / "data.mdb").stat().st_size
        assert 0.9 * size < store.nbytes <= size + stats["slots"] * stats["slot_bytes"]


def test_a_loader_that_is_used_once_reads_nothing_ahead(path: Path, store: Store) -> None:
    options = pario.Options(**SMALL, once=True)
    with pario.Loader(path, 16, seed=2, options=options) as loader:
        for _ in loader:
            pass
        source: Any = loader._life.source
        source._writer.ended.result(20)
        assert source._writer.following is None
        assert store.nbytes <= 1.2 * (path / "data.mdb").stat().st_size  # with pages of keys


def test_nothing_is_read_ahead_where_the_next_epoch_goes_another_way(
    path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_loader(path) as loader:
        loop = iter(loader)
        monkeypatch.setattr("pario.feed.automatic.choose", lambda _: Way.SEAT)
        for _ in loop:
            pass
        source: Any = loader._life.source
        source._writer.ended.result(20)
        assert source._writer.following is None
