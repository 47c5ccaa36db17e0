"""Batches by cost: the arithmetic. The oracle is a loop over the records that knows nothing of heaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.errors import ClosedError, OptionError
from pario.plan.budget import Budget, Costs, CutSchedule, cost_of
from pario.plan.epoch import Order, epoch_order
from pario.plan.schedule import node_share
from pario.plan.seats import Seats, seats_share


def costs_of(of: Any, limit: int, most: int = 1000) -> Costs:
    return Costs(np.asarray(of, np.uint32), limit, most, True)


def batches(costs: Costs, order: Order, seats: int, start: int = 0) -> list[list[list[int]]]:
    """Numbers by step and seat, through the schedule."""
    cuts = costs.cut(order, seats, start)
    schedule = CutSchedule(order.n, costs.most, seats, start, pools=order.pools, cuts=cuts)
    found: list[list[list[int]]] = [[[] for _ in range(seats)] for _ in range(cuts.steps)]
    for group in range(schedule.groups):
        numbers, steps, rows = node_share(schedule, order, group, 0, seats)
        for number, step, row in zip(numbers.tolist(), steps.tolist(), rows.tolist(), strict=True):
            seat, item = divmod(row, costs.most)
            found[step][seat].append((item, number))
    for step, seats_of_step in enumerate(found):
        for seat, pairs in enumerate(seats_of_step):
            assert sorted(item for item, _ in pairs) == list(range(schedule.rows(step, seat)))
            seats_of_step[seat] = [number for _, number in sorted(pairs)]
    return found


def plainly(values: list[int], limit: int, most: int, seats: int) -> int:
    """How many records a step has at least: each goes to the batch that costs least so far, until one does not fit."""
    sums, counts = [0] * seats, [0] * seats
    for i, value in enumerate(values):
        seat = min(range(seats), key=lambda s: (sums[s], counts[s]))
        if counts[seat] and (sums[seat] + value > limit or counts[seat] >= most):
            return i
        sums[seat] += value
        counts[seat] += 1
    return len(values)


CASES = st.tuples(
    st.lists(st.integers(0, 40), min_size=1, max_size=150),
    st.integers(1, 90),
    st.integers(1, 12),
    st.integers(1, 6),
    st.sampled_from([False, "global", "block"]),
)


@settings(max_examples=60, deadline=None)
@given(CASES, st.integers(0, 1 << 30))
def test_batches_keep_to_the_budget_and_have_every_record_once(case: Any, seed: int) -> None:
    values, limit, most, seats, shuffle = case
    n = len(values)
    order = epoch_order(shuffle, n, seed=seed, block_records=4, mix_blocks=4)
    costs = costs_of(values, limit, most)
    steps = batches(costs, order, seats)
    numbers = order.ids(0, n).tolist()
    at = 0
    for step in steps:
        end = at + sum(map(len, step))
        assert end - at >= plainly([values[number] for number in numbers[at:]], limit, most, seats)
        # A step is a run of positions; rows of a batch are in the epoch's order.
        run = numbers[at:end]
        assert sorted(number for batch in step for number in batch) == sorted(run)
        for batch in step:
            assert [run.index(number) for number in batch] == sorted(run.index(number) for number in batch)
            assert len(batch) <= most
            assert sum(values[number] for number in batch) <= limit or len(batch) == 1
        assert end == n or all(step)
        at = end
    assert at == n


@settings(max_examples=30, deadline=None)
@given(CASES, st.integers(0, 1 << 30), st.integers(1, 6))
def test_resuming_gives_the_steps_that_would_have_followed(case: Any, seed: int, others: int) -> None:
    values, limit, most, seats, shuffle = case
    order = epoch_order(shuffle, len(values), seed=seed, block_records=4, mix_blocks=4)
    costs = costs_of(values, limit, most)
    whole = batches(costs, order, seats)
    bounds = costs.cut(order, seats).bounds
    for step in range(0, len(whole), 3):
        assert batches(costs, order, seats, int(bounds[step])) == whole[step:]
        rest = batches(costs, order, others, int(bounds[step]))  # on another number of seats: the same records
        assert sorted(i for one in rest for batch in one for i in batch) == sorted(
            i for one in whole[step:] for batch in one for i in batch
        )


@settings(max_examples=40, deadline=None)
@given(CASES, st.integers(1, 3), st.data())
def test_memory_that_is_set_aside_is_enough_in_every_epoch(case: Any, per_group: int, data: Any) -> None:
    values, limit, most, seats, shuffle = case
    n, slots = len(values), 3
    costs = costs_of(values, limit, most)

    def schedule(epoch: int) -> tuple[CutSchedule, Order]:
        order = epoch_order(shuffle, n, seed=4, epoch=epoch, block_records=4, mix_blocks=2)
        cuts = costs.cut(order, seats)
        return CutSchedule(n, most, seats, pools=order.pools, per_group=per_group, cuts=cuts), order

    first, _ = schedule(0)
    table, records = first.max_steps_in_flight(slots), first.max_group_records(1)
    for epoch in range(3):
        one, order = schedule(epoch)
        seat = data.draw(st.integers(0, seats - 1))
        for group in range(one.groups):
            numbers, _, _ = node_share(one, order, group, seat, 1)
            assert len(numbers) <= records
            room = first.max_group_bytes(1)
            assert room is None or costs.of[numbers].sum() <= room
            oldest = one.group_steps(max(0, group - slots + 1))[0]
            assert one.group_steps(group)[1] - oldest <= table
            # What a rank waits for: the groups of its step, which are there when the step is ready.
            assert one.group_ready_steps(group) <= one.group_release_step(group)
        assert [one.step_groups(step)[1] - 1 for step in range(one.steps)] == [
            min(g for g in range(one.groups) if one.group_ready_steps(g) > step) for step in range(one.steps)
        ]


@pytest.mark.parametrize("seats", [2, 8, 64])
def test_batches_of_a_step_cost_nearly_the_same(seats: int) -> None:
    """Maximum over mean of a step: texts of lognormal lengths, 40 a batch."""
    values = np.random.default_rng(1).lognormal(6, 0.8, 60_000).astype(np.uint32)
    costs = costs_of(values, int(40 * values.mean()), 160)
    order = epoch_order("global", len(values), seed=1)
    cuts = costs.cut(order, seats)
    _, rows, sums = costs.deal(costs.along(order, 0, order.n), cuts.bounds, seats)
    full = sums[:-1]
    assert (rows == cuts.rows).all()
    assert full.max() <= costs.limit
    assert full.mean() > 0.95 * costs.limit  # the budget is used
    unevenness = full.max(axis=1) / full.mean(axis=1)
    assert np.median(unevenness) < 1.01
    assert unevenness.max() < 1.06
    # Not always the same seat has the largest record.
    assert len(set(np.argmax(full, axis=1).tolist())) > min(seats, len(full)) // 2


def test_long_epochs_are_cut_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).integers(1, 50, 3000)
    order = epoch_order("global", 3000, seed=5)
    costs = costs_of(values, 400, 100)
    whole = costs.cut(order, 3)
    for chunk in (1, 7, 700):
        monkeypatch.setattr("pario.plan.budget._CHUNK", chunk)
        parts = costs.cut(order, 3)
        assert (parts.bounds == whole.bounds).all()
        assert (parts.rows == whole.rows).all()


def test_drop_last_leaves_out_the_step_that_the_end_cuts_short() -> None:
    costs, order = costs_of([5] * 10, 10), epoch_order(False, 10)
    assert costs.cut(order, 2).bounds.tolist() == [0, 4, 8, 10]
    assert costs.cut(order, 2, drop_last=True).bounds.tolist() == [0, 4, 8]
    assert costs.cut(order, 2, 10).steps == 0


def test_a_record_above_the_budget_is_a_batch_of_its_own() -> None:
    costs, order = costs_of([3, 99, 3, 3], 10), epoch_order(False, 4)
    assert batches(costs, order, 1) == [[[0]], [[1]], [[2, 3]]]


def test_seats_that_are_no_neighbours() -> None:
    order = epoch_order("global", 200, seed=1)
    costs = costs_of(np.random.default_rng(0).integers(1, 9, 200), 20, 10)
    schedule = CutSchedule(200, 10, 4, cuts=costs.cut(order, 4))
    by_seat = [node_share(schedule, order, 2, seat, 1)[0].tolist() for seat in range(4)]
    found = seats_share(schedule, order, 2, Seats(4, 3, ((0, 1), (3, 1))))
    assert sorted(found[0].tolist()) == sorted(by_seat[0] + by_seat[3])
    assert node_share(schedule, order, 2, 1, 3, only=3)[0].tolist() == by_seat[3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "one of them"),
        ({"bytes": 1, "tokens": 1, "cost": [1]}, "one of them"),
        ({"bytes": 0}, "at least 1"),
        ({"bytes": True}, "at least 1"),
        ({"bytes": 10, "records": 0}, "at least 1"),
        ({"tokens": 10}, "needs cost"),
        ({"bytes": 10, "cost": [1]}, "takes none"),
        ({"tokens": 10, "cost": [1.5]}, "must be integers"),
        ({"tokens": 10, "cost": [[1]]}, "must be integers"),
    ],
)
def test_what_is_no_budget(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Budget(**given)


def test_costs_of_an_array_and_of_a_function() -> None:
    ids, nbytes = np.array([3, 1]), np.array([30, 10])
    assert cost_of(np.array([5, 6, 7, 8]), ids, nbytes, 4).tolist() == [8, 6]
    assert cost_of(lambda ids, nbytes: nbytes // 2, ids, nbytes, 4).tolist() == [15, 5]
    for wrong, message in (
        (np.array([1, 2]), "has 2 integers, the dataset 4 records"),
        (lambda ids, nbytes: 1, "not as many integers"),
        (lambda ids, nbytes: nbytes / 2, "not as many integers"),
        (np.array([1, -2, 3, 4]), "is -2 for record 1"),
    ):
        with pytest.raises(OptionError, match=message):
            cost_of(wrong, ids, nbytes, 4)


def test_budgets_are_the_same_on_two_ranks_if_they_say_the_same() -> None:
    assert Budget(bytes=5).mark == Budget(bytes=5).mark != Budget(bytes=6).mark
    assert Budget(tokens=5, cost=[1, 2]).mark == Budget(tokens=5, cost=np.array([1, 2])).mark
    assert Budget(tokens=5, cost=[1, 2]).mark != Budget(tokens=5, cost=[1, 3]).mark
    assert repr(Budget(tokens=5, cost=[1, 2], records=9)) == "Budget(tokens=5, records=9, cost=2 integers)"


def test_closed_costs_say_so() -> None:
    costs = costs_of([1, 2], 2)
    costs.close()
    with pytest.raises(ClosedError):
        costs.cut(epoch_order(False, 2), 1)
