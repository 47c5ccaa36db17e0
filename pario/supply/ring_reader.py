"""The source of a rank that takes its records from the ring of its node."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from pario.comm.window import LEFT
from pario.plan.stream import Work
from pario.records import Records
from pario.supply.base import Ahead, Context, RecordSource
from pario.supply.ring_writer import RingWriter

__all__ = ["RingReader"]


class RingReader(RecordSource):
    """One rank's side of the ring: steps in ascending order, piece by piece, each taken once and then released.

    Adds waiting times and bytes to the context's stats, once per group and not per step.

    writer : on a reading rank, what fills the ring; ends with this source
    base : number of the epoch's first group in the ring
    spills : the ring was allocated before sizes were known: the rank that takes a record that did not fit reads it
    """

    def __init__(
        self,
        context: Context,
        work: Work,
        writer: RingWriter | None,
        *,
        spills: bool,
        ahead: Ahead | None,
        base: int = 0,
    ) -> None:
        super().__init__(context, work)
        self._ring = context.ring
        self._slots = context.slots
        self._writer = writer
        self._spills = spills
        self.ahead = ahead
        self._seat_rows = work.schedule.batch_size * self.width
        self._row = context.seats.local * self._seat_rows
        self._flat = context.slots.data.reshape(-1)
        self._base = base
        self._next_group = 0
        self._ready = 0
        context.decode.held.held_bytes = context.options.held_bytes
        context.stats.reader, context.stats.own = writer is not None, False

    def take(self, step: int, piece: int, check: Callable[[], None]) -> tuple[int, Records]:
        while self._ready <= step * self.pieces + piece:
            self._next(check)
        if self.pieces == 1:
            first, stop = 0, self.rows(step)
        else:
            first, stop = self._schedule.piece_rows(step, self._context.seats.mine, piece)
        slots = self._slots
        table = step % len(slots.ids)
        rows = slice(self._row + first * self.width, self._row + stop * self.width)
        ids, starts = slots.ids[table, rows], slots.starts[table, rows]
        if self._spills and len(starts) and int(starts.min()) < 0:
            begin = time.perf_counter()
            records = self._context.reader.read_stored(ids.copy(), self._stats, verify=False)
            self._stats.spilled += len(ids)
            self._stats.share += time.perf_counter() - begin
            return first, records
        return first, Records(ids, self._flat, starts, slots.nbytes[table, rows])

    def _next(self, check: Callable[[], None]) -> None:
        """Wait for the next group."""
        ring, stats, group = self._ring, self._stats, self._next_group
        full = ring.full_slots(self._base + group)
        stats.groups += 1
        stats.ready += full
        begin = time.perf_counter()
        ready = self._wait(group, check)
        if not full:
            waited = time.perf_counter() - begin
            stats.share += waited
            if group:  # somebody always waits for the first
                stats.stalls += 1
                stats.stalled += waited
        stats.group_taken(group, self._slot)
        stats.node_bytes += self._bytes(self._ready, ready)
        self._ready = ready
        self._next_group = group + 1

    def _wait(self, group: int, check: Callable[[], None]) -> int:
        """Wait until the group is in its slot; returns the ticks that are complete then."""
        return self._ring.wait_group(self._base + group, check)

    def _slot(self) -> int:
        """The slot of the group that comes next; -1 if this rank's first record of it is in none."""
        step, piece = divmod(self._ready, self.pieces)
        row = 0 if self.pieces == 1 else self._schedule.piece_rows(step, self._context.seats.mine, piece)[0]
        slots = self._slots
        start = int(slots.starts[step % len(slots.ids), self._row + row * self.width])
        return start // slots.slot_bytes if start >= 0 else -1

    def _bytes(self, first: int, stop: int) -> int:
        """Bytes of this rank's records in ticks [first, stop)."""
        if stop <= first:
            return 0
        schedule, nbytes, row, seat = self._schedule, self._slots.nbytes, self._row, self._context.seats.mine
        width = self.width
        if self.pieces > 1:
            return sum(
                int(nbytes[step % len(nbytes), row + a * width : row + b * width].sum())
                for step, piece in (divmod(tick, self.pieces) for tick in range(first, stop))
                for a, b in [schedule.piece_rows(step, seat, piece)]
            )
        if not schedule.is_even:
            return sum(
                int(nbytes[step % len(nbytes), row : row + schedule.rows(step, seat) * width].sum())
                for step in range(first, stop)
            )
        last = stop - 1  # may be shorter than the others; the rest of its row is stale
        steps = np.arange(first, last) % len(nbytes)
        rest = nbytes[last % len(nbytes), row : row + schedule.rows(last, seat) * width]
        return int(nbytes[steps, row : row + self._seat_rows].sum()) + int(rest.sum())

    def release(self, step: int, piece: int) -> None:
        """This rank no longer needs the memory of the piece."""
        self._ring.finish(self._context.world.node_rank, step * self.pieces + piece + 1)

    def check(self) -> None:
        if self._writer is not None and self._writer.error is not None:
            raise self._writer.error

    def wake(self) -> None:
        self._ring.wake()

    def leave(self) -> None:
        self._ring.finish(self._context.world.node_rank, LEFT)

    def outlive(self, then: Callable[[], None]) -> bool:
        self._ring.finish(self._context.world.node_rank, LEFT)
        ended = None if self._writer is None else self._writer.ended
        if ended is None or ended.done() or self._ring.deserted():
            return False
        ended.add_done_callback(lambda _: then())
        return True

    def end(self, limit_s: float = math.inf) -> bool:
        return self._writer is None or self._writer.stop(limit_s)
