"""When a group may be begun: rooms without a ring, whose consumers stand still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pario.control.bridge import RingTuner
from pario.control.knobs import Knob
from pario.plan.schedule import Schedule
from pario.supply.ring_room import RingRoom

SLOT = 1 << 20


def room(schedule: Schedule, nbytes: int) -> RingRoom:
    """Nobody has finished a step yet; so many bytes of six slots may be in use."""
    tuner = RingTuner(Knob("ring", 1, 6 * SLOT, nbytes), SLOT)
    file = SimpleNamespace(knobs=SimpleNamespace(filling=tuner), pool=None, feeders=1)
    context: Any = SimpleNamespace(
        ring=SimpleNamespace(slots=6, consumers=SimpleNamespace(furthest=0)),
        slots=SimpleNamespace(slot_bytes=SLOT, count=6),
        options=SimpleNamespace(alive_seconds=1.0),
        reader=SimpleNamespace(file=file),
        world=SimpleNamespace(node_size=1),
    )
    return RingRoom(context, schedule, 0, paced=True, packed=True)


@pytest.mark.parametrize("steps", [60, 61, 64])
def test_the_second_group_is_begun_with_the_first(steps) -> None:
    """Two slots have room for two groups of five steps, also where the last group is shorter."""
    schedule = Schedule(n=8 * steps, batch_size=8, seats=1, per_group=5)
    assert [room(schedule, 2 * SLOT).may_begin(j) for j in range(4)] == [True, True, False, False]
    assert [room(schedule, SLOT).may_begin(j) for j in range(3)] == [True, False, False]
