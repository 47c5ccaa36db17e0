"""A cold file is read from beginning to end, or not; what is delivered is what py-lmdb reads."""

from __future__ import annotations

from pathlib import Path

import lmdb
import numpy as np
import pytest

import pario
from pario.bench.cache import drop_file
from pario.decode import Raw
from pario.fetch.posix import PosixFetcher
from pario.plan.sweep import Figures
from pario.supply import sweep as module
from pario.supply.sweep import KNOB, Sweep

N, BYTES = 600, 3072


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
    drop_file(path)
    if not PosixFetcher(path).read_ahead_bytes or cached(path) > 0.1:
        pytest.skip("the folder for temporary files is on no disk, or its pages stay in memory")
    drop_file(path)
    return path


def cached(path: str) -> float:
    store = PosixFetcher(path)
    try:
        return store.cached_share(np.arange(0, store.nbytes, 64 << 10)) or 0.0
    finally:
        store.close()


def costs(monkeypatch: pytest.MonkeyPatch, record_s: float, byte_s: float) -> list[Figures]:
    """The measured figures are these; returns what was decided upon."""
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
    chosen = pario.Options(tiers=(), **options)
    return pario.Loader(path, 16, Raw(dtype="uint8", shape=(BYTES,)), shuffle=shuffle, seed=3, options=chosen)


def decided(one: pario.Loader) -> dict | None:
    return one.stats()["knobs"].get(KNOB)


@pytest.mark.parametrize("own_rows", ["never", "always"])
def test_every_record_once_and_right_while_the_file_is_swept(cold, monkeypatch, own_rows) -> None:
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(cold, own_rows=own_rows) as one:
        for _ in range(2):
            ids = []
            for batch in one:
                right(cold, batch)
                ids += batch.ids.tolist()
            assert sorted(ids) == list(range(N))
        found = decided(one)
        assert found is not None
        assert found["value"] == Path(cold).stat().st_size
        assert f"{N} records at random" in found["reason"]
        assert f"{KNOB} is " in str(one.report())
        thread = one._supply._sweep._thread
        thread.join(30)
        assert not thread.is_alive()
    assert cached(cold) == 1.0
    assert len(seen) == 1  # only before the first epoch


def test_the_figures_are_measured(cold) -> None:
    with loader(cold) as one:
        for batch in one:
            right(cold, batch)
        found = decided(one)
    assert found is not None  # whatever was decided
    assert "records at random" in found["reason"]


def test_a_sweep_that_costs_more_is_left_out(cold, monkeypatch) -> None:
    costs(monkeypatch, 1e-9, 1.0)
    with loader(cold) as one:
        right(cold, next(iter(one)))
        assert decided(one)["value"] == 0
        assert one._supply._sweep._thread is None


def test_the_end_of_an_epoch_counts_what_is_left(cold, monkeypatch) -> None:
    seen = costs(monkeypatch, 1.0, 1e-9)
    with loader(cold) as one:
        state = {**one.state_dict(), "position": N - 80}
        one.load_state_dict(state)
        for batch in one:
            right(cold, batch)
    assert [found.records for found in seen] == [80]


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
        right(cold, next(iter(one)))
        assert decided(one)["value"] == 0
        assert "do not fit" in decided(one)["reason"]


def test_closing_ends_the_sweep(cold, monkeypatch) -> None:
    costs(monkeypatch, 1.0, 1e-9)
    one = loader(cold)
    right(cold, next(iter(one)))
    sweep = one._supply._sweep
    one.close()
    assert not sweep._thread.is_alive()
