"""The ring under stress: every group's bytes and tables by value, with delays everywhere."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

mpi4py_MPI = pytest.importorskip("mpi4py.MPI")

from pario.comm.slots import Slots  # noqa: E402
from pario.comm.window import LEFT, Ring  # noqa: E402
from pario.comm.world import get_world  # noqa: E402
from pario.errors import ParioError  # noqa: E402

MPI = mpi4py_MPI
pytestmark = pytest.mark.mpi

SLOTS, ROWS = 3, 6


@pytest.fixture(params=[pytest.param("self", marks=pytest.mark.full), "world"])
def world(request):
    made = get_world(MPI.COMM_SELF if request.param == "self" else MPI.COMM_WORLD)
    yield made
    made.close()


def content(node: int, run: int, group: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([node, run, group]).integers(0, 256, nbytes, dtype=np.uint8)


def pause(random_: random.Random) -> None:
    if random_.random() < 0.3:
        time.sleep(random_.random() * 0.004)


def steps_of(group: int) -> range:
    """Groups hold one, two or three steps."""
    before = sum(1 + g % 3 for g in range(group))
    return range(before, before + 1 + group % 3)


def feed(ring, slots, world, run: int, groups: range, stop, errors: list) -> None:
    """Fill every group of `groups`, each when its slot's last group was finished by all."""
    random_ = random.Random(f"feed {world.rank} {run}")
    try:
        for group in groups:
            freed = steps_of(group - SLOTS).stop if group >= SLOTS else 0
            if not ring.wait_done(freed, ring.check, stop):
                return
            pause(random_)
            nbytes = slots.slot_bytes - group % 100
            slots.data[group % SLOTS, :nbytes] = content(world.node, run, group, nbytes)
            for step in steps_of(group):
                row = step % len(slots.ids)
                slots.ids[row] = np.arange(ROWS) + 1000 * step
                slots.starts[row] = group % SLOTS * slots.slot_bytes + np.arange(ROWS)
                slots.nbytes[row] = nbytes
            ring.publish(group, steps_of(group).stop)
    except BaseException as error:
        errors.append(error)


def test_stress(world) -> None:
    """Three runs over one ring."""
    groups = 80
    ring = Ring(world, SLOTS, alive_seconds=0.5)
    slots = Slots(world, SLOTS, 5000, 3 * (SLOTS + 1), ROWS)
    slots.allocate()
    assert slots.slot_bytes == 8192
    assert slots.data.ctypes.data % 4096 == 0
    for run in range(3):
        world.node_barrier()
        if world.is_leader:
            ring.reset()
        world.node_barrier()
        stop, errors, thread = threading.Event(), [], None
        if world.is_leader:
            thread = threading.Thread(target=feed, args=(ring, slots, world, run, range(groups), stop, errors))
            thread.start()
        random_ = random.Random(f"take {world.rank} {run}")
        flat = slots.data.reshape(-1)
        leaves = run == 1 and world.node_rank == world.node_size - 1  # this rank leaves the second run early
        for group in range(groups // 2 if leaves else groups):
            assert ring.wait_group(group, ring.check) == steps_of(group).stop
            pause(random_)
            expected = content(world.node, run, group, slots.slot_bytes - group % 100)
            for step in steps_of(group):
                row = step % len(slots.ids)
                assert slots.ids[row].tolist() == [1000 * step + i for i in range(ROWS)]
                for i in range(ROWS):
                    start, nbytes = slots.starts[row, i], slots.nbytes[row, i] - i
                    np.testing.assert_array_equal(flat[start : start + nbytes], expected[i:])
                ring.finish(world.node_rank, step + 1)
        if leaves:
            ring.finish(world.node_rank, LEFT)
        if thread is not None:
            thread.join(60)
            assert not thread.is_alive()
        assert errors == []
    ring.close()
    ring.close()


def test_a_run_is_left_in_the_middle(world) -> None:
    """A feeder that waits for free slots is stopped at once, and the next run starts clean, at a later step."""
    ring = Ring(world, SLOTS, alive_seconds=30)
    slots = Slots(world, SLOTS, 4096, 12, ROWS)
    slots.allocate()
    for run in range(5):
        world.node_barrier()
        if world.is_leader:
            ring.reset()
        world.node_barrier()
        stop, errors, thread = threading.Event(), [], None
        if world.is_leader:
            thread = threading.Thread(target=feed, args=(ring, slots, world, run, range(1000), stop, errors))
            thread.start()
        ring.wait_group(0)
        ring.wait_group(SLOTS - 1)
        if thread is not None:
            if run % 2:
                time.sleep(0.02)  # the feeder sleeps for sure
            begin = time.monotonic()
            ring.stop_feeder(stop, thread)
            assert time.monotonic() - begin < 5  # far below alive_seconds
        assert errors == []
    world.node_barrier()
    if world.is_leader:
        ring.reset(done_steps=17)
    world.node_barrier()
    assert ring.wait_done(17)
    assert ring.full_slots(0) == 0, "nothing is published"
    world.node_barrier()
    ring.close()


def test_full_slots_are_counted_up_to_the_first_gap(world) -> None:
    ring = Ring(world, SLOTS)
    assert ring.full_slots(0) == 0
    world.node_barrier()
    if world.is_leader:
        for group in range(SLOTS - 1):
            ring.publish(group, group + 1)
        ring.publish(SLOTS, 1)  # in the slot of group 0, before the one below it
    world.node_barrier()
    assert ring.full_slots(0) == 0
    assert ring.full_slots(1) == SLOTS - 2
    assert ring.full_slots(SLOTS - 1) == 0
    assert ring.full_slots(SLOTS) == 1
    world.node_barrier()
    ring.close()


def test_a_lost_group_is_an_error_and_no_wait_for_ever(world) -> None:
    ring = Ring(world, SLOTS)
    if world.is_leader:
        ring.publish(SLOTS, 1)
    world.node_barrier()
    with pytest.raises(ParioError, match=f"group 0 was overwritten by group {SLOTS}"):
        ring.wait_group(0)
    world.node_barrier()
    ring.close()


def test_waiting_costs_nothing(world) -> None:
    ring = Ring(world, SLOTS, alive_seconds=0.2)
    looked = []

    def check() -> None:  # every alive_seconds
        looked.append(1)
        if len(looked) > 5:
            raise TimeoutError

    begin = time.process_time()
    with pytest.raises(TimeoutError):
        ring.wait_group(0, check)
    assert time.process_time() - begin < 0.2
    world.node_barrier()
    ring.close()
