"""Which batches are prepared ahead, by which threads, and when. The oracle for the bytes is what was written."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import lmdb
import pytest

import pario
from pario.decode import Raw
from pario.errors import ParioError
from pario.loader.epoch import FIRST, Epoch
from pario.options import KNOBS, Turns
from pario.tune.knobs import Knob

N, BYTES = 96, 1000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("epoch") / "x.lmdb"
    with lmdb.open(str(place), subdir=False, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%04d" % i, bytes([i]) * BYTES)
    with pario.Reader(place):
        pass  # saves the index: without one, the first epoch takes the ring
    return str(place)


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is prepared alone, but where a test is about that."""
    monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", 0.0)


def own(path: str, batch_size: int = 8, ahead: int | None = None, **options) -> pario.Loader:
    """Without the ring, 12 steps. ahead : batches prepared ahead; None: as measured"""
    chosen = pario.Options(**options)
    with pytest.MonkeyPatch.context() as patch:
        if ahead is not None:
            patch.setitem(KNOBS, "decode_ahead", Turns("batches prepared ahead", 1, ahead, ahead, ahead))
        return pario.Loader(path, batch_size, Raw(dtype="uint8", shape=(BYTES,)), options=chosen)


def right(batch: pario.Batch) -> None:
    assert [row.tobytes() for row in batch["data"]] == [bytes([i]) * BYTES for i in batch.ids.tolist()]


def at_once(function, *arguments) -> Future:
    done: Future = Future()
    done.set_result(function(*arguments))
    return done


def test_a_batch_that_is_ready_is_taken_before_the_next_are_asked_for(path: str) -> None:
    with own(path) as loader:
        epoch = iter(loader)._epoch
        waiting: list[int] = []

        def submit(*call) -> Future:
            waiting.append(len(epoch._under_way))
            return at_once(*call)

        epoch._ahead = replace(epoch._ahead, submit=submit, depth=Knob("ahead", 1, 1, 1), least=1, eager=True)
        for batch in epoch:
            right(batch)
    # The first call finds nothing and asks for two; each later one has taken its batch when it asks for one more.
    assert waiting == [0, 1, *[0] * (12 - 2)]


@pytest.mark.parametrize("ahead", [1, 3, 5])
def test_as_many_are_ahead_as_the_knob_says(path: str, ahead: int) -> None:
    with own(path, ahead=ahead) as loader:
        epoch = iter(loader)._epoch
        epoch._ahead = replace(epoch._ahead, submit=at_once, eager=True)
        right(next(epoch))
        assert len(epoch._under_way) == ahead
        assert loader.stats()["knobs"]["decode_ahead"]["value"] == ahead
        for batch in epoch:
            right(batch)


def test_no_more_are_ahead_than_the_ring_would_hold(path: str) -> None:
    with own(path, ahead=16, slots=2, slot_bytes=64 << 10) as loader:
        epoch = iter(loader)._epoch
        most = 2 * (64 << 10) // (8 * BYTES)
        assert epoch._ahead.most == min(16, most)
        assert epoch._ahead.steps == min(16, most)
    with own(path, N, ahead=16, slots=2, slot_bytes=64 << 10) as loader:
        assert iter(loader)._epoch._ahead.steps == 1


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("at_once_s", "most"), [(0.0, 99), (60.0, 1), (60.0, 3), (60.0, 99)])
def test_short_steps_are_prepared_at_once(
    path: str, at_once_s: float, most: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More and more of them, and no more than the source allows. All may be kept."""
    monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", at_once_s)
    with own(path) as loader:
        epoch, asked = iter(loader)._epoch, []
        source, prepare = epoch._source, epoch._source.prepare
        assert source.most_steps == 8
        source.most_steps = most

        def noting(step, check, steps):
            asked.append(steps)
            return prepare(step, check, steps)

        monkeypatch.setattr(source, "prepare", noting)
        epoch._ahead = replace(epoch._ahead, submit=at_once, eager=True) if eager else None
        kept = []
        for batch in epoch:
            kept.append(batch)
            epoch._handed_out = time.perf_counter() + 1  # the caller asks at once
    assert [i for batch in kept for i in batch.ids.tolist()] == list(range(N))
    assert [batch.step for batch in kept] == list(range(12))
    for batch in kept:
        right(batch)
    expected = {1: [1] * 12, 3: [1, 1, 2, 3, 3, 2], 99: [1, 1, 2, 4, 4]}
    if not eager:
        assert asked == expected[most if at_once_s else 1]
    assert (max(asked) > 1) == (most > 1 and at_once_s > 0)
    assert max(asked) <= most


def test_steps_that_take_long_are_prepared_one_by_one_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many each time: a thread that has lost its core for a moment is not slow."""
    with own(path, 2) as loader:
        epoch, asked = iter(loader)._epoch, []
        epoch._ahead, prepare = None, epoch._source.prepare

        def noting(step, check, steps):
            asked.append(steps)
            monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", 60.0 if len(asked) < 5 else 0.0)
            return prepare(step, check, steps)

        monkeypatch.setattr(epoch._source, "prepare", noting)
        for batch in epoch:
            right(batch)
            epoch._handed_out = time.perf_counter() + 1  # the caller asks at once
    assert asked == [1, 1, 2, 4, 8, 4, 2, *[1] * 26]


def test_for_a_caller_that_is_slower_steps_are_prepared_one_by_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", 60.0)
    with own(path) as loader:
        epoch = iter(loader)._epoch
        for batch in epoch:
            right(batch)
            assert epoch._at_once == 1
            epoch._handed_out -= 60  # so long ago


def taken_slowly(epoch: Epoch) -> None:
    for batch in epoch:
        right(batch)
        time.sleep(1e-3)


@pytest.mark.parametrize("eager", [False, True])
def test_another_thread_closes_the_loader(path: str, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever that is, the one that takes batches hears of it."""
    monkeypatch.setattr("pario.loader.epoch.AT_ONCE_S", 2e-3)
    for k in range(10):
        with own(path, 1) as loader:
            epoch = iter(loader)._epoch
            epoch._ahead = replace(epoch._ahead, eager=eager)
            right(next(epoch))
            closing = threading.Timer(k * 1e-3, loader.close)
            closing.start()
            with pytest.raises(ParioError, match=r"closed|ended|left"):
                taken_slowly(epoch)
            closing.join(10)
            assert not closing.is_alive()


@pytest.mark.parametrize(("long_s", "least", "others"), [(0.0, 2, True), (60.0, 2, False), (0.0, 1, False)])
def test_other_threads_prepare_steps_that_take_long(
    path: str, long_s: float, least: int, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a caller that asks at once; but not the first ones, which show how long they take."""
    monkeypatch.setattr("pario.loader.epoch.LONG_S", long_s)
    with own(path) as loader:
        epoch = iter(loader)._epoch
        here: list[bool] = []
        prepare = epoch._prepare

        def noting(*arguments):
            here.append(threading.current_thread() is threading.main_thread())
            return prepare(*arguments)

        epoch._prepare = noting
        epoch._ahead = replace(epoch._ahead, eager=False, least=least)
        for batch in epoch:
            right(batch)
            epoch._handed_out = time.perf_counter() + 1  # the caller asks at once
    assert here[:FIRST] == [True] * FIRST
    assert all(here) != others


def test_at_most_a_thread_per_core_prepares(path: str) -> None:
    with own(path, ahead=8) as loader:
        epoch = iter(loader)._epoch
        cores = loader._supply.context.share.threads
        seen: set[str] = set()
        prepare = epoch._prepare

        def noting(*arguments):
            seen.add(threading.current_thread().name)
            return prepare(*arguments)

        epoch._prepare = noting
        epoch._ahead = replace(epoch._ahead, eager=True)
        for batch in epoch:
            right(batch)
        assert seen <= {f"pario-ahead-{k}" for k in range(cores)}
        assert seen
