"""A cold file is read from beginning to end, or not; what is delivered is what py-lmdb reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from cold_file import cached, why_not_cold

import pario
from pario.decode import Raw
from pario.plan.sweep import Figures
from pario.supply import sweep as module
from pario.supply.sweep import KNOB, Sweep

N, BYTES = 3000, 3072
#: of the ring, so that it does not bring the whole file before the loop is seen to wait
SMALL = {"slot_bytes": 64 << 10, "slots": 3, "next_epoch": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("sweep") / "x.lmdb"
    rng = np.random.default_rng(1)
    with lmdb.open(str(place), subdir=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, rng.bytes(BYTES))
    return str(place)


@pytest.fixture
def cold(path: str) -> str:
    """Nothing of the file in the page cache."""
    why = why_not_cold(path)
    if why:
        pytest.skip(why)
    return path


def costs(monkeypatch: pytest.MonkeyPatch, record_s: float, byte_s: float) -> list[Figures]:
    """The measured figures are these, and any waiting is enough to decide; returns what was decided upon."""
    monkeypatch.setattr(module, "_WAITS", 0.0)
    seen: list[Figures] = []
    choose = module.choose

    def looking(found: Figures):
        seen.append(found)
        return choose(found)

    monkeypatch.setattr(Sweep, "_measure", lambda self, places: (record_s, byte_s))
    monkeypatch.setattr(module, "choose", looking)
    return seen


def right(path: str, batch: pario.Batch) -> None:
    with lmdb.open(path, subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        for row, i in zip(batch["data"], batch.ids, strict=True):
            assert row.tobytes() == txn.get(b"%06d" % i)


def loader(path: str, shuffle="global", **options) -> pario.Loader:
    chosen = pario.Options(tiers=(), **SMALL, **options)
    return pario.Loader(path, 16, Raw(dtype="uint8", shape=(BYTES,)), shuffle=shuffle, seed=3, options=chosen)


def decided(one: pario.Loader) -> dict | None:
    return one.stats()["knobs"].get(KNOB)


def take(one: pario.Loader, path: str, batches: int) -> list[int]:
    """The ids of an epoch's first batches; when it was decided, and whatever was decided is done. The values are
    compared afterwards: py-lmdb would bring the file."""
    taken = [batch for _, batch in zip(range(batches), one, strict=False)]
    thread = one._supply._sweep._thread
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()
    for batch in taken:
        right(path, batch)
    return [number for batch in taken for number in batch.ids.tolist()]


@pytest.mark.parametrize("own_rows", ["never", "always"])
def test_every_record_once_and_right_while_the_file_is_swept(cold, monkeypatch, own_rows) -> None:
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(cold, own_rows=own_rows) as one:
        for _ in range(2):
            assert sorted(take(one, cold, N)) == list(range(N))
        found = decided(one)
        assert found is not None
        assert found["value"] == Path(cold).stat().st_size
        assert f"{N - 4 * 16:,} records at random" in found["reason"]
        assert f"{KNOB} is " in str(one.report())
    assert cached(cold) == 1.0
    assert len(seen) == 1  # only in the first epoch


def test_the_figures_are_measured(cold, monkeypatch) -> None:
    monkeypatch.setattr(module, "_WAITS", 0.0)
    with loader(cold) as one:
        take(one, cold, 8)
        found = decided(one)
    assert found is not None  # whatever was decided
    assert "records at random" in found["reason"]


def test_a_sweep_that_costs_more_is_left_out(cold, monkeypatch) -> None:
    costs(monkeypatch, 1e-9, 1.0)
    with loader(cold) as one:
        take(one, cold, 8)
        assert decided(one)["value"] == 0
        assert "at random" in decided(one)["reason"]


def test_the_end_of_an_epoch_counts_what_is_left(cold, monkeypatch) -> None:
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(cold) as one:
        one.load_state_dict({**one.state_dict(), "position": N - 800})
        take(one, cold, N)
    assert [found.records for found in seen] == [800 - 4 * 16]


@pytest.mark.parametrize(("waiting", "begins"), [(1e-3, False), (5e-3, True)])
def test_only_a_loop_that_waits_is_swept(monkeypatch, waiting, begins) -> None:
    """Ten milliseconds of the caller between two batches."""
    stats = SimpleNamespace(waiting=0.0, consumer=0.0)
    begun: list[int] = []
    monkeypatch.setattr(Sweep, "_run", lambda self, work, position: begun.append(position))
    file = SimpleNamespace(pool=SimpleNamespace(fetcher=None))
    sweep = Sweep(SimpleNamespace(stats=stats, reader=SimpleNamespace(file=file)))
    sweep._work = SimpleNamespace()
    for batch in range(20):
        sweep.look(100 * (batch + 1))
        stats.waiting += 1.0 if batch == 0 else waiting  # the first batch comes from a cold store
        stats.consumer += 10e-3
    assert sweep.end(30)
    assert begun == ([400] if begins else [])


def test_a_loop_that_does_not_wait_says_so(cold, monkeypatch) -> None:
    monkeypatch.setattr(module, "_WAITS", 1.0)
    with loader(cold) as one:
        take(one, cold, 8)
        assert decided(one) == {**decided(one), "value": 0, "reason": "the loop does not wait for bytes"}
        assert one._supply._sweep._thread is None


@pytest.mark.parametrize("shuffle", [False, "block"])
def test_other_orders_are_left_alone(cold, monkeypatch, shuffle) -> None:
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(cold, shuffle) as one:
        right(cold, next(iter(one)))
        assert decided(one) is None
    assert seen == []


def test_a_file_in_the_page_cache_is_left_alone(path, monkeypatch) -> None:
    Path(path).read_bytes()
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(path) as one:
        right(path, next(iter(one)))
        assert decided(one) is None
    assert seen == []


def test_memory_without_room(cold, monkeypatch) -> None:
    costs(monkeypatch, 1.0, 1e-9)
    monkeypatch.setattr(module.machine, "memory", lambda swap: (1 << 34, 1 << 31))
    with loader(cold) as one:  # held_bytes takes all of it
        take(one, cold, 8)
        assert decided(one)["value"] == 0
        assert "do not fit" in decided(one)["reason"]


def test_closing_ends_the_sweep(cold, monkeypatch) -> None:
    costs(monkeypatch, 1.0, 1e-9)
    one = loader(cold)
    for _, batch in zip(range(6), one, strict=False):
        right(cold, batch)
    sweep = one._supply._sweep
    one.close()
    assert not sweep._thread.is_alive()
