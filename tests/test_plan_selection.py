"""Selections as numbers. The oracle is Python's sets and numpy's masks."""

from __future__ import annotations

import numpy as np
import pytest

from pario.plan.epoch import epoch_order
from pario.plan.schedule import Schedule, slot_capacity
from pario.plan.selection import (
    FEW_RUNS,
    Selection,
    all_but,
    common,
    digest_of,
    expanded,
    id_type,
    joined,
    prefers_runs,
    runs_of,
)
from pario.records import EXTENT

TOTAL = 20_000


def some_ids(share: float, seed: int = 0) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(seed).random(TOTAL) < share)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.97, 1.0])
def test_runs_and_table_are_the_same_ids(share: float) -> None:
    ids = some_ids(share)
    runs = runs_of(ids)
    assert [i for first, stop in runs.tolist() for i in range(first, stop)] == ids.tolist()
    assert (runs[1:, 0] > runs[:-1, 1]).all()
    assert expanded(runs, id_type(TOTAL)).tolist() == ids.tolist()
    ordinals = np.random.default_rng(1).integers(0, len(ids), 500)
    for one in (Selection(TOTAL, "", runs=runs), Selection(TOTAL, "", table=ids.astype(np.uint32))):
        assert one.n == len(ids)
        assert one.ids(ordinals).tolist() == ids[ordinals].tolist()
        assert one.ids(ordinals).dtype == np.int64
        assert one.density == pytest.approx(len(ids) / (ids[-1] - ids[0] + 1))
        assert [i for a, b in one.pieces() for i in range(a, b)] == list(range(len(ids)))


def test_pieces_of_a_long_selection_and_of_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.plan.selection._PIECE", 7)
    ids = some_ids(0.5)
    runs = runs_of(ids)
    assert expanded(runs, np.dtype(np.int64)).tolist() == ids.tolist()
    one = Selection(TOTAL, "", runs=runs)
    assert np.concatenate([one.ids(np.arange(a, b)) for a, b in one.pieces()]).tolist() == ids.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_common_and_joined(seed: int) -> None:
    a, b = some_ids(0.4, seed)[: 50 + seed], some_ids(0.6, seed + 100)[:80]
    both = sorted(set(a.tolist()) & set(b.tolist()))
    assert expanded(common(runs_of(a), runs_of(b)), np.dtype(np.int64)).tolist() == both
    assert common(runs_of(a), runs_of(b)).tolist() == runs_of(np.array(both, np.int64)).tolist()
    cut = len(a) // 2
    parts = np.concatenate([runs_of(a[:cut]), runs_of(a[cut:])])
    assert joined(parts).tolist() == runs_of(a).tolist()


def test_without_any_in_common() -> None:
    assert common(np.array([[0, 5], [9, 10]]), np.array([[5, 9]])).tolist() == []
    assert common(np.array([[0, 5]]), np.empty((0, 2), np.int64)).tolist() == []


def test_all_but() -> None:
    assert all_but([], 4).tolist() == [[0, 4]]
    assert all_but([0, 1, 3], 4).tolist() == [[2, 3]]
    assert all_but([9, 4], 10).tolist() == [[0, 4], [5, 9]]
    assert all_but([0], 1).tolist() == []


def test_the_digest_is_of_the_ids_and_of_nothing_else() -> None:
    ids = some_ids(0.3)
    assert digest_of(runs_of(ids), TOTAL) == digest_of(joined(np.stack([ids, ids + 1], axis=1)), TOTAL)
    assert digest_of(runs_of(ids), TOTAL) != digest_of(runs_of(ids[1:]), TOTAL)
    assert digest_of(runs_of(ids), TOTAL) != digest_of(runs_of(ids), TOTAL + 1)
    # Saved states hold it: it never changes.
    assert digest_of(np.array([[3, 7], [9, 10]]), 20) == "3b53b1de6930d9d02d22ae352a60be66"


def test_a_range_takes_no_memory_per_record_and_a_table_four_bytes() -> None:
    whole = 10**9
    assert Selection(whole, "", runs=np.array([[0, 9 * 10**8]])).nbytes == 16
    assert prefers_runs(np.zeros((FEW_RUNS, 2), np.int64), whole)
    many = np.arange(0, 40_000, 2)
    assert not prefers_runs(np.stack([many, many + 1], axis=1), whole)
    assert prefers_runs(np.stack([many * 1000, many * 1000 + 1999], axis=1), whole)  # long runs
    assert (id_type(1 << 32), id_type((1 << 32) + 1)) == (np.uint32, np.uint64)


def test_file_order() -> None:
    by_place = np.array([5, 2, 9], np.uint32)
    one = Selection(10, "", table=np.array([2, 5, 9], np.uint32), by_place=by_place)
    assert one.ids_of(np.array([0, 2]), "place").tolist() == [5, 9]
    assert one.ids_of(np.array([0, 2]), "id").tolist() == [2, 9]


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_slots_have_room_for_any_group_of_the_selection(shuffle: bool | str) -> None:
    rng = np.random.default_rng(4)
    extents = np.zeros(TOTAL, EXTENT)
    extents["nbytes"] = rng.integers(1, 50, TOTAL)
    extents["nbytes"][7] = 10**6  # left out: no slot needs its room
    extents["offset"] = np.cumsum(extents["nbytes"]) - extents["nbytes"]
    ids = some_ids(0.5)
    ids = ids[ids != 7]
    order = epoch_order(shuffle, len(ids), seed=1, block_records=30, mix_blocks=4)
    schedule = Schedule(len(ids), 32, 2, pools=order.pools, per_group=1)
    one = Selection(TOTAL, "", table=ids.astype(np.uint32))
    room = slot_capacity(extents, schedule, 2, lead_bytes=0, align=1, chosen=one)
    assert room < 10**5
    most = 0
    for group in range(schedule.groups):
        group_ids = one.ids_of(order.ids(*schedule.group_positions(group)), order.space)
        most = max(most, int(extents["nbytes"][group_ids].sum()))
    assert most <= room


@pytest.mark.parametrize("as_table", [False, True])
def test_how_many_are_below(as_table: bool) -> None:
    ids = np.array([2, 3, 4, 9, 10, 17])
    form = {"table": ids.astype(np.uint32)} if as_table else {"runs": runs_of(ids)}
    selection = Selection(20, "", **form)
    for record in range(22):
        assert selection.below(record) == int((ids < record).sum())
