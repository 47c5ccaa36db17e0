"""The shape of a ring, and the work of an epoch in groups that suit it."""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.options import BLOCK_SLOTS, RECIPES, Options
from pario.plan.stream import RingShape, Stream, Work, fit_memory, pool_shape, step_shape

AUTO, COAL, PROV = RECIPES["auto"], RECIPES["coal"], RECIPES["prov"]
OPTIONS = Options(slot_bytes=8 << 20, slots=6)


def test_as_many_steps_as_fill_a_slot():
    assert step_shape(1000.0, 10, OPTIONS, AUTO, by_rows=True) == RingShape(slots=6, per_group=8388, pieces=1)
    assert step_shape(1000.0, 10, OPTIONS, COAL, by_rows=True) == RingShape(slots=1, per_group=8388, pieces=1)
    assert step_shape(1000.0, 10, OPTIONS, PROV, by_rows=True) == RingShape(slots=1, per_group=1, pieces=1)
    with pytest.raises(OptionError):
        step_shape(0, 1, OPTIONS, AUTO, by_rows=True)


def test_a_step_larger_than_a_slot_comes_in_pieces_where_the_decoder_takes_them():
    large = 4.0 * OPTIONS.slot_bytes
    assert step_shape(large, 10, OPTIONS, AUTO, by_rows=True) == RingShape(slots=6, per_group=1, pieces=4)
    assert step_shape(large, 3, OPTIONS, AUTO, by_rows=True).pieces == 3
    assert step_shape(large, 10, OPTIONS, AUTO, by_rows=False).pieces == 1
    assert step_shape(large, 10, OPTIONS, COAL, by_rows=True).pieces == 1


@pytest.mark.parametrize("batch_size", [1, 7, 100, 400])
@pytest.mark.parametrize("mix_blocks", [1, 2, 8])
def test_no_step_of_a_block_order_needs_more_than_the_slots_there_are(batch_size, mix_blocks):
    stream = Stream(1000, batch_size, 2, "block", 3, block_records=5, mix_blocks=mix_blocks, drop_last=False)
    pool = 5 * mix_blocks
    shape = pool_shape(pool * 100.0, pool, stream.step_records, Options(slot_bytes=64 << 10), AUTO)
    assert shape.slots == BLOCK_SLOTS
    for epoch in range(3):
        schedule = Work(stream, shape, epoch, start=0).schedule
        assert max(stop - first for first, stop in map(schedule.step_groups, range(schedule.steps))) <= BLOCK_SLOTS


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_the_rest_of_an_epoch_is_what_its_order_says(shuffle):
    stream = Stream(1000, 10, 3, shuffle, 7, block_records=5, mix_blocks=4, drop_last=True)
    whole = Work(stream, RingShape(slots=3, per_group=7), 2, 0)
    rest = Work(stream, RingShape(slots=3, per_group=7), 2, 300)
    np.testing.assert_array_equal(whole.order.take(np.arange(1000)), rest.order.take(np.arange(1000)))
    assert stream.steps(0, 2) == whole.schedule.steps == 33
    assert stream.steps(300, 2) == rest.schedule.steps == 23
    assert rest.schedule.next_position(0) == 330
    assert rest.table_steps == rest.schedule.max_steps_in_flight(3)


def test_a_ring_of_scattered_records_gets_fewer_slots():
    shape, mib = RingShape(slots=6, per_group=141), 1 << 20
    assert fit_memory(shape, 12 * mib, OPTIONS) == shape
    assert fit_memory(shape, 24 * mib, OPTIONS).slots == 4
    assert fit_memory(shape, 300 * mib, OPTIONS).slots == 2
    for kept in (RingShape(slots=BLOCK_SLOTS, per_group=9), RingShape(slots=1, per_group=1)):
        assert fit_memory(kept, 300 * mib, OPTIONS) == kept
