"""Steps, groups and shares against a slow arrangement written down from the definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.errors import OptionError
from pario.plan.epoch import epoch_order
from pario.plan.schedule import Schedule, even_split, node_share, slot_capacity
from pario.records import EXTENT

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def cases(draw):
    """(order, schedule) of any kind, small enough to look at every record."""
    n = draw(st.integers(1, 240))
    shuffle = draw(st.sampled_from([False, "global", "block", "block"]))
    order = epoch_order(
        shuffle,
        n,
        seed=draw(st.integers(0, 3)),
        epoch=draw(st.integers(0, 3)),
        block_records=draw(st.integers(1, 40)),
        mix_blocks=draw(st.sampled_from([1, 2, 4, 8])),
    )
    schedule = Schedule(
        n,
        draw(st.integers(1, 24)),
        draw(st.integers(1, 7)),
        start=draw(st.one_of(st.just(0), st.integers(0, n))),
        drop_last=draw(st.booleans()),
        pools=order.pools,
        per_group=draw(st.integers(1, 3)),
    )
    return order, schedule


def arranged(order, schedule, step, nodes=1):
    """The numbers of a step, arranged, from the words of plan/schedule.py."""
    first, stop = schedule.step_positions(step)
    numbers = order.ids(first, stop).tolist()
    if order.pools is None:
        return numbers
    seats = schedule.seats
    batches = [[] for _ in range(seats)]
    before = 0
    for pool in range(order.pools.count):
        a, b = order.pools.bounds(pool)
        piece = numbers[max(a, first) - first : max(0, min(b, stop) - first)]
        blocks = order.layout(pool)[0].tolist()
        piece.sort(key=lambda place: (blocks.index(place // order.pools.block_records), place))
        dealt = [sum(row % seats == seat for row in range(before, before + len(piece))) for seat in range(seats)]
        before += sum(dealt)
        for node in range(nodes):
            here = range(*even_split(seats, nodes, node))
            run = [piece.pop(0) for _ in range(sum(dealt[seat] for seat in here))]
            # As many full rounds as every seat may have at least, whatever the piece before left; then the others.
            left = {seat: dealt[seat] for seat in here}
            for _ in range(min(dealt)):
                for seat in here:
                    batches[seat].append(run.pop(0))
                    left[seat] -= 1
            for seat in here:
                if left[seat]:
                    batches[seat].append(run.pop(0))
            assert not run
    return [number for batch in batches for number in batch]


@SETTINGS
@given(cases())
def test_every_record_exactly_once_over_steps_and_seats(case):
    order, schedule = case
    G = schedule.batch_size * schedule.seats
    rest = schedule.n - schedule.start
    assert schedule.steps == (rest // G if schedule.drop_last else -(-rest // G))
    delivered = []
    for step in range(schedule.steps):
        numbers = arranged(order, schedule, step)
        at = 0
        for seat in range(schedule.seats):
            a, b = schedule.seat_rows(step, seat)
            assert a == at
            assert b - a == schedule.rows(step, seat) <= schedule.batch_size
            at = b
            delivered += numbers[a:b]
        assert at == len(numbers)
        rows = [schedule.rows(step, seat) for seat in range(schedule.seats)]
        assert max(rows) - min(rows) <= 1
        if step < schedule.steps - 1 or schedule.drop_last:
            assert set(rows) == {schedule.batch_size}
    expected = order.ids(schedule.start, schedule.n).tolist()
    if schedule.drop_last:
        expected = expected[: schedule.steps * G]
    assert sorted(delivered) == sorted(expected)
    assert len(set(delivered)) == len(delivered)


@SETTINGS
@given(cases(), st.integers(1, 3))
def test_node_shares_are_the_arranged_steps(case, nodes):
    check_shares(*case, min(nodes, case[1].seats))


@pytest.mark.parametrize("start", [0, 1, 2, 30, 31, 37])
def test_shares_of_steps_that_are_shorter_than_a_round(start) -> None:
    """Eight blocks of a pool take turns, and a step has three records; the epoch begins in the middle of a pool."""
    order = epoch_order("block", 70, seed=1, epoch=2, block_records=4, mix_blocks=8)
    for nodes in (1, 2):
        check_shares(order, Schedule(70, 1, 3, start=start, pools=order.pools), nodes)


def check_shares(order, schedule, nodes):
    b = schedule.batch_size
    for node in range(nodes):
        first, stop = even_split(schedule.seats, nodes, node)
        size = stop - first
        tables = np.full((schedule.steps, size * b), -1, np.int64)
        for group in range(schedule.groups):
            numbers, step, row = node_share(schedule, order, group, first, size)
            assert (numbers.dtype, step.dtype, row.dtype) == (np.int64, np.int64, np.int32)
            assert len(numbers) == len(step) == len(row) <= schedule.max_group_records(size)
            assert (tables[step, row] == -1).all()
            tables[step, row] = numbers
            lo, hi = schedule.group_steps(group)
            assert ((step >= lo) & (step < hi)).all()
            if order.pools is not None and schedule.per_group == 1:
                assert (np.diff(numbers) > 0).all()
            # Steps that are said to be complete are complete, and the next one is not.
            ready = schedule.group_ready_steps(group)
            here = [sum(schedule.rows(s, seat) for seat in range(first, stop)) for s in range(schedule.steps)]
            assert [(tables[s] >= 0).sum() for s in range(ready)] == here[:ready]
        for seat in range(first, stop):  # each seat of a node alone
            alone = np.full((schedule.steps, b), -1, np.int64)
            for group in range(schedule.groups):
                numbers, step, row = node_share(schedule, order, group, first, size, only=seat)
                assert (alone[step, row] == -1).all()
                alone[step, row] = numbers
            assert (alone == tables[:, (seat - first) * b : (seat - first + 1) * b]).all()
        for s in range(schedule.steps):
            numbers = arranged(order, schedule, s, nodes)
            for seat in range(first, stop):
                a, e = schedule.seat_rows(s, seat)
                table = tables[s, (seat - first) * b : (seat - first) * b + b]
                assert table[: e - a].tolist() == numbers[a:e]
                assert (table[e - a :] == -1).all()


@SETTINGS
@given(cases())
def test_groups_cut_the_positions_and_know_their_steps(case):
    _, schedule = case
    at = schedule.start
    released = 0
    for group in range(schedule.groups):
        a, b = schedule.group_positions(group)
        assert a == at < b
        at = b
        spans = [schedule.step_positions(s) for s in range(schedule.steps)]
        steps = [s for s, (first, stop) in enumerate(spans) if first < b and stop > a]
        assert list(range(*schedule.group_steps(group))) == steps
        assert schedule.group_ready_steps(group) == sum(schedule.next_position(s) <= b for s in range(schedule.steps))
        assert schedule.group_release_step(group) == steps[-1] + 1 >= released
        released = steps[-1] + 1
        for s in steps:
            first, stop = schedule.step_groups(s)
            assert first <= group < stop
    assert at == schedule.stop
    for slots in (2, 3, 6):
        live = [schedule.group_release_step(min(slots, schedule.groups) - 1)] if schedule.groups else [0]
        for group in range(schedule.groups - slots):
            live.append(schedule.group_release_step(group + slots) - schedule.group_release_step(group))
        assert max(live) <= schedule.max_steps_in_flight(slots)


@SETTINGS
@given(cases(), st.data())
def test_resume_at_every_step_delivers_the_rest_on_any_number_of_seats(case, data):
    order, schedule = case
    if not schedule.steps:
        return
    step = data.draw(st.integers(0, schedule.steps - 1))
    seats = data.draw(st.integers(1, 7))
    position = schedule.next_position(step)
    before = [x for s in range(step + 1) for x in arranged(order, schedule, s)]
    again = Schedule(
        schedule.n, schedule.batch_size, seats, start=position, pools=order.pools, per_group=schedule.per_group
    )
    after = [x for s in range(again.steps) for x in arranged(order, again, s)]
    assert sorted(before + after) == sorted(order.ids(schedule.start, schedule.n).tolist())
    if seats == schedule.seats:
        whole = Schedule(schedule.n, schedule.batch_size, seats, start=schedule.start, pools=order.pools)
        expected = [arranged(order, whole, s) for s in range(step + 1, whole.steps)]
        assert [arranged(order, again, s) for s in range(again.steps)] == expected


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_same_global_batches_for_every_number_of_seats(shuffle):
    order = epoch_order(shuffle, 1000, seed=5, epoch=1, block_records=13, mix_blocks=8)
    steps = []
    for seats in (1, 2, 3, 4, 6, 12):
        schedule = Schedule(1000, 48 // seats, seats, pools=order.pools)
        steps.append([set(arranged(order, schedule, s)) for s in range(schedule.steps)])
    assert all(other == steps[0] for other in steps)


def test_a_node_reads_whole_blocks_when_the_global_batch_is_a_multiple_of_the_blocks():
    n, block, mix = 16 * 8 * 20, 20, 8
    order = epoch_order("block", n, seed=1, block_records=block, mix_blocks=mix)
    schedule = Schedule(n, 8, 4, pools=order.pools)  # 32 records per step = 8 blocks x 4; no step crosses pools
    for node in range(2):
        for group in range(order.pools.cut_first, schedule.groups):
            numbers, _, _ = node_share(schedule, order, group, 2 * node, 2)
            blocks, counts = np.unique(numbers // block, return_counts=True)
            assert len(blocks) == mix // 2
            assert set(counts) == {block}


@pytest.mark.parametrize("per_group", [1, 2])
@pytest.mark.parametrize("mix", [8, 32])
@pytest.mark.parametrize("step_records", [1, 30, 41, 130, 320])
def test_a_step_needs_two_groups_at_most_though_the_first_pools_are_small(
    step_records: int, mix: int, per_group: int
) -> None:
    # Else a ring of BLOCK_SLOTS slots would be full before the step is there.
    per_group = max(per_group, -(-step_records // (10 * mix)))  # as plan/sizing does
    for blocks, start in itertools.product((mix + 1, 2 * mix + 3, 3 * mix), (0, 7, 45, 100, 10 * mix + 3)):
        n = 10 * blocks - 3
        if start >= n:
            continue
        order = epoch_order("block", n, seed=3, block_records=10, mix_blocks=mix)
        schedule = Schedule(n, step_records, 1, start=start, pools=order.pools, per_group=per_group)
        found = [schedule.group_positions(group) for group in range(schedule.groups)]
        assert [first for first, _ in found] == [start, *(stop for _, stop in found[:-1])]
        assert found[-1][1] == n
        for step in range(schedule.steps):
            first, stop = schedule.step_groups(step)
            assert stop - first <= 2
            assert schedule.group_ready_steps(stop - 1) > step
        for group in range(schedule.groups):
            pools = schedule.group_pools(group)
            assert order.pools.bounds(pools[0])[0] <= found[group][0] < order.pools.bounds(pools[0])[1]
            assert len(pools) <= per_group + order.pools.cut_first - 1


def test_more_seats_than_records():
    order = epoch_order("block", 3, block_records=2, mix_blocks=2)
    schedule = Schedule(3, 4, 5, pools=order.pools)
    assert schedule.steps == 1
    assert [schedule.rows(0, seat) for seat in range(5)] == [1, 1, 1, 0, 0]
    shares = [node_share(schedule, order, 0, seat, 1)[0].tolist() for seat in range(5)]
    assert sorted(x for share in shares for x in share) == [0, 1, 2]
    assert shares[3] == shares[4] == []
    assert Schedule(3, 4, 5, drop_last=True).steps == 0
    assert Schedule(3, 4, 5, start=3).groups == 0


@SETTINGS
@given(cases(), st.sampled_from([1, 4096]), st.integers(0, 2**32 - 1))
def test_slot_capacity_holds_any_group(case, align, seed):
    order, schedule = case
    random = np.random.default_rng(seed)
    n, lead = schedule.n, 16
    extents = np.empty(n, EXTENT)
    extents["nbytes"] = random.integers(0, 9000, n)
    extents["offset"] = 20000 + np.cumsum(extents["nbytes"] + random.integers(lead, 6000, n)) - extents["nbytes"]
    shuffled = random.permutation(n)  # record ids that do not follow the file
    ids_by_offset = np.argsort(shuffled)
    by_id = extents[shuffled]
    for size in {1, schedule.seats}:
        bound = slot_capacity(by_id, schedule, size, lead_bytes=lead, align=align, by_offset=ids_by_offset)
        for group in range(schedule.groups):
            numbers, _, _ = node_share(schedule, order, group, 0, size)
            some = extents[numbers] if order.space == "place" else by_id[numbers]
            first = (some["offset"] - lead) // align * align
            need = -(-(some["offset"] + some["nbytes"]) // align) * align - first + (7 if align == 1 else 0)
            assert need.sum() <= bound


def test_slot_capacity_in_pieces_is_the_capacity_in_one(monkeypatch):
    n = (1 << 20) + 70001  # more than one piece
    random = np.random.default_rng(3)
    extents = np.empty(n, EXTENT)
    extents["nbytes"] = random.integers(1, 1000, n)
    extents["offset"] = 4096 + np.cumsum(extents["nbytes"]) - extents["nbytes"]
    need = np.sort(extents["nbytes"] + 7)
    assert slot_capacity(extents, Schedule(n, 100, 4, per_group=3), 2, lead_bytes=0, align=1) == need[-600:].sum()
    order = epoch_order("block", n, block_records=1000, mix_blocks=2)
    sums = np.add.reduceat(extents["nbytes"] + 7, np.arange(0, n, 1000))
    schedule = Schedule(n, 100, 4, pools=order.pools)
    assert slot_capacity(extents, schedule, 4, lead_bytes=0, align=1) == np.sort(sums)[-2:].sum()


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"seats": 0}, {"start": 11}, {"start": -1}, {"per_group": 0}])
def test_wrong_arguments_are_named(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        Schedule(**{"n": 10, "batch_size": 1, "seats": 1, **wrong})


def test_even_split_against_array_split():
    for n in range(40):
        for size in range(1, 12):
            parts = np.array_split(np.arange(n), size)
            ours = [even_split(n, size, rank) for rank in range(size)]
            assert [list(range(*o)) for o in ours] == [p.tolist() for p in parts]
    for wrong in ((-1, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)):
        with pytest.raises(OptionError):
            even_split(*wrong)


@pytest.mark.parametrize("shuffle", [False, "global"])
@pytest.mark.parametrize(
    ("n", "batch", "seats", "pieces"), [(100, 7, 3, 3), (64, 8, 2, 8), (5, 4, 3, 2), (31, 10, 1, 4)]
)
def test_pieces_hold_each_seats_rows_once(shuffle, n, batch, seats, pieces):
    """The rows of a step, collected piece by piece, are those of the whole step; no slot is needed by two groups."""
    order = epoch_order(shuffle, n, seed=1)
    whole = Schedule(n, batch, seats)
    cut = Schedule(n, batch, seats, pieces=pieces)
    assert cut.groups == whole.steps * pieces
    for seat, size in [(0, seats), (seats - 1, 1)]:
        for step in range(whole.steps):
            expected = {}
            for number, _, row in zip(*node_share(whole, order, step, seat, size), strict=True):
                expected[int(row)] = int(number)
            found = {}
            for piece in range(pieces):
                group = step * pieces + piece
                assert cut.group_ready_ticks(group) == cut.group_release_tick(group) == group + 1
                numbers, steps, rows = node_share(cut, order, group, seat, size)
                assert len(numbers) <= cut.max_group_records(size)
                assert (steps == step).all()
                for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
                    local, item = divmod(row, batch)
                    low, high = cut.piece_rows(step, seat + local, piece)
                    assert low <= item < high
                    assert row not in found
                    found[row] = number
            assert found == expected
