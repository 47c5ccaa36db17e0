"""How much of the node's ring one reading rank uses: no more than the ranks of its node need to bridge the store.

A group is begun when its slot is free, and when no more steps than `RingTuner.lead` wait for the rank that is furthest.
A rank that has taken everything that is there never waits for another one's slot: then the group is begun in any case.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pario.comm.memory import give_back
from pario.control.bridge import Filled
from pario.machine import MemoryGauge
from pario.plan.coalesce import Reads
from pario.plan.schedule import Schedule
from pario.supply.base import Context

__all__ = ["RingRoom"]

#: With several ranks the one that is furthest may change while the reader sleeps; it looks at least so often, in
#: seconds, or twice in the time for which enough is ahead.
_LOOK_S = 2e-3
#: How often it asks how much memory is free, in seconds: 50 us of a core each time.
_GAUGE_S = 1.0
#: A slot that was not used for so many rounds of the ring gives its memory back.
_UNUSED_ROUNDS = 2


@dataclass(slots=True)
class _Map:
    """Which slots are in use, of one epoch and the next.

    used : per slot, how many groups had been given one when it was last in use; groups : how many have
    slots : (the room of an epoch, group) -> slot
    """

    used: list[int]
    groups: int = 0
    slots: dict[tuple[RingRoom, int], int] = field(default_factory=dict)


class RingRoom:
    """One reading rank's use of the ring, in one epoch.

    base : number of the epoch's first group in the ring
    paced : False: all of the ring is used
    packed : False: group j fills slot (base + j) % slots

    more : groups of the next epoch that wait
    """

    def __init__(self, context: Context, schedule: Schedule, base: int, *, paced: bool, packed: bool) -> None:
        self._ring, self._schedule, self._base = context.ring, schedule, base
        self._slots = context.slots
        self._whole = context.ring.slots * context.slots.slot_bytes
        self._alive_seconds = context.options.alive_seconds
        self._tuner = context.reader.file.knobs.filling
        self._pool = context.reader.file.pool
        self._paced = paced
        # The slots are divided by their numbers where several ranks fill them.
        self._packs = packed and paced and context.reader.file.feeders == 1
        self._private = context.world.node_size == 1
        self._ticks = self._end / schedule.groups if schedule.groups else 1.0
        self._oldest = 0  # the first group that the furthest rank still needs
        self._done = 0  # of that rank
        self._begun: dict[int, tuple[float, bool]] = {}
        self._map = _Map([0] * context.ring.slots)
        self._before: RingRoom | None = None  # that of the epoch before, until this one begins
        self._is_over = False
        self.more: Callable[[], int] = int
        self._turning = threading.Lock()  # guards the tuner
        self._gauge: MemoryGauge | None = None
        self._gauged, self._free = -math.inf, 0

    # -- in the thread that begins the groups ----------------------------------------------------------------------

    def follow(self, before: RingRoom) -> None:
        """This is the room of the next epoch: until `start` the consumers are at the one of `before`."""
        self._before, self._map, self._turning = before, before._map, before._turning

    def start(self) -> None:
        """Its epoch begins."""
        if self._before is not None:
            self._before._is_over = True
            self._before = None

    def wait(self, j: int, stop: threading.Event) -> bool:
        """Wait until group j may be begun, whose slot is free. Returns False if `stop` was set."""
        return not self._paced or not j or self._wait_tick(self._schedule.group_ready_ticks(j - 1), stop)

    def wait_early(self, j: int, stop: threading.Event) -> bool:
        """The same for a group of the next epoch, while the epoch before goes on; False also if that ends too early."""
        assert self._before is not None  # called before `start`
        ready = self._schedule.group_ready_ticks(j - 1) if j else 0
        return self._before._wait_tick(self._before._end + ready, stop)

    def _wait_tick(self, tick: int, stop: threading.Event) -> bool:
        """Wait until so few steps are left before this one for the rank that is furthest that its bytes are to be
        read."""
        while not stop.is_set():
            furthest = self._look()
            if furthest is None:  # all have left
                return self._end + self._lead() >= tick
            if furthest + self._lead() >= tick:
                return True
            pause = self._alive_seconds
            if not self._private:
                pause = min(pause, max(_LOOK_S, self._tuner.seconds / 2))
            self._ring.check()
            self._ring.consumers.wait_further(furthest, pause)
        return False

    def may_begin(self, j: int) -> bool:
        """`wait`, without waiting."""
        furthest = self._look()
        if furthest is None or not self._paced or not j:
            return True
        return furthest + self._lead() >= self._schedule.group_ready_ticks(j - 1)

    def slot(self, j: int) -> int:
        """The slot of group j: of the free ones the first, so that memory which is not needed is not touched. The same
        for the same group until it has been taken."""
        count = self._slots.count
        if not self._packs:
            return (self._base + j) % count
        slots, used = self._map.slots, self._map.used
        if (self, j) in slots:
            return slots[self, j]
        for room, group in [(room, group) for room, group in slots if room._is_released(group)]:
            del slots[room, group]
        taken = set(slots.values())
        slot = slots[self, j] = next(k for k in range(count) if k not in taken)
        self._map.groups += 1
        used[slot] = self._map.groups
        if self._private:
            for k, last in enumerate(used):
                if k not in taken and self._map.groups - last > _UNUSED_ROUNDS * count:
                    give_back(self._slots.data[k])
                    used[k] = self._map.groups
        return slot

    def begin(self, j: int, now: float, *, alone: bool = False) -> None:
        """The reads of group j begin, or more of them; alone : no other group's are under way."""
        self._begun.setdefault(j, (now, alone))

    def forget(self, j: int) -> None:
        """Group j is not under way any more."""
        self._begun.pop(j, None)

    # -- in any thread ---------------------------------------------------------------------------------------------

    def filled(self, j: int, reads: Reads, seconds: float) -> None:
        """Group j is there, and about to be published; seconds : sum of its reads' times."""
        if not self._paced or j not in self._begun:
            return
        begun, alone = self._begun.pop(j)
        now = time.perf_counter()
        self._look()
        short = j > 0 and self._before is None and self._ring.consumers.wait  # somebody always waits for the first
        with self._turning:
            at_once = max(1, min(self._pool.inflight, len(reads.reads)))
            group = Filled(now - begun, seconds, reads.nbytes, at_once, alone)
            if self._tuner.filled(now, group, short=short):
                self._tuner.turn(now, self._ticks, self._memory())

    def is_full(self) -> bool:
        """Whether so much waits for the fastest rank of this node that faster reading would not help."""
        ring, schedule = self._ring, self._schedule
        while self._oldest < schedule.groups and ring.is_done(schedule.group_release_tick(self._oldest), by=any):
            self._oldest += 1
        if self._tuner.knob.value >= self._whole or not self._paced:
            # One is being taken; behind it, half of the others.
            return ring.full_slots(self._base + self._oldest) + self.more() > max(1, (ring.slots - 1) // 2)
        return not ring.consumers.wait  # less is there on purpose

    # -- details ---------------------------------------------------------------------------------------------------

    def _lead(self) -> int:
        whole = self._tuner.knob.value >= self._whole
        return 1 << 30 if whole else self._tuner.lead(math.ceil(self._ticks))

    def _look(self) -> int | None:
        """What the furthest rank has finished."""
        furthest = self._ring.consumers.furthest
        if furthest is not None and furthest > self._done and self._before is None:
            with self._turning:
                taken, self._done = furthest - self._done, max(furthest, self._done)
                self._tuner.took(time.perf_counter(), max(0, taken))
        return furthest

    @property
    def _end(self) -> int:
        """Ticks of the epoch."""
        schedule = self._schedule
        return schedule.group_ready_ticks(schedule.groups - 1) if schedule.groups else 0

    def _is_released(self, group: int) -> bool:
        """Nobody needs it, and no read of it is under way."""
        if self._is_over:
            return True
        if self._before is not None or group in self._begun:
            return False
        return self._ring.is_done(self._schedule.group_release_tick(group))

    def _memory(self) -> int | None:
        """Bytes of the ring that the node and the control group have memory for: what is used already, and half of what
        is free. None: memory that several ranks share was taken when it was allocated."""
        if not self._private:
            return None
        if self._gauge is None:
            self._gauge = MemoryGauge()
        now = time.perf_counter()
        if now >= self._gauged + _GAUGE_S:
            self._gauged, self._free = now, self._gauge.read()[1]
        used = (max(tuple(self._map.slots.values()), default=0) + 1) * self._slots.slot_bytes
        return used + self._free // 2
