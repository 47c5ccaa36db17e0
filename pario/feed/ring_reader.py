"""The source of a rank that takes its records from the ring of its node."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from pario.comm.window import LEFT
from pario.feed.ring_writer import RingWriter
from pario.feed.source import Ahead, Context, Piece, Source
from pario.plan.stream import Work
from pario.records import Records
from pario.threads import Condition

#: A thread that waits for another one to take its records looks this often whether the epoch was left, in seconds.
_TURN_S = 0.2


class RingReader(Source):
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
        self._turn = Condition()  # guards those below: threads take records one after the other
        self._next_step = 0  # the one whose records are taken next
        self._decoded: set[int] = set()  # ticks that wait for earlier ones to be released
        self._next_release = 0
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
        context.stats.reader = writer is not None

    def pieces(self, step: int, steps: int = 1) -> list[Piece]:
        schedule, seat, count = self._schedule, self._context.seats.mine, self._schedule.pieces
        if count == 1:
            return [Piece(step, 0, 0, schedule.rows(step, seat), True)]
        rows = [schedule.piece_rows(step, seat, number) for number in range(count)]
        return [Piece(step, number, *row, number == count - 1) for number, row in enumerate(rows)]

    def take(self, piece: Piece, check: Callable[[], None]) -> Records:
        if not piece.number:
            self._wait_turn(piece.step, check)
        taken = False
        try:
            records = self._take(piece, check)
            taken = True
            return records
        finally:
            # One thread takes records while another one decodes those of the step before: the time between two batches
            # is mostly the interpreter's, and was a quarter of all for packed records of 3 KB.
            if piece.last or not taken:
                with self._turn:
                    self._next_step = piece.step + 1
                    self._turn.notify_all()

    def _wait_turn(self, step: int, check: Callable[[], None]) -> None:
        with self._turn:
            while self._next_step < step:
                self._turn.wait(_TURN_S)
                check()

    def _take(self, piece: Piece, check: Callable[[], None]) -> Records:
        while self._ready <= piece.step * self._schedule.pieces + piece.number:
            self._next(check)
        slots = self._slots
        table = piece.step % len(slots.ids)
        rows = slice(self._row + piece.first * self.width, self._row + piece.stop * self.width)
        ids, starts = slots.ids[table, rows], slots.starts[table, rows]
        if self._spills and len(starts) and int(starts.min()) < 0:
            begin = time.perf_counter()
            records = self._context.reader.read_stored(ids.copy(), self._stats, verify=False)
            self._stats.spilled += len(ids)
            self._stats.share += time.perf_counter() - begin
            return records
        return Records(ids, self._flat, starts, slots.nbytes[table, rows])

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
        stats.node_bytes += self._bytes(self._ready, ready)
        self._ready = ready
        self._next_group = group + 1

    def _wait(self, group: int, check: Callable[[], None]) -> int:
        """Wait until the group is in its slot; returns the ticks that are complete then."""
        return self._ring.wait_group(self._base + group, check)

    def _bytes(self, first: int, stop: int) -> int:
        """Bytes of this rank's records in ticks [first, stop)."""
        if stop <= first:
            return 0
        schedule, nbytes, row, seat = self._schedule, self._slots.nbytes, self._row, self._context.seats.mine
        width = self.width
        if schedule.pieces > 1 or not schedule.is_even:
            return sum(
                int(nbytes[step % len(nbytes), row + a * width : row + b * width].sum())
                for step, piece in (divmod(tick, schedule.pieces) for tick in range(first, stop))
                for a, b in [schedule.piece_rows(step, seat, piece)]
            )
        last = stop - 1  # may be shorter than the others; the rest of its row is stale
        steps = np.arange(first, last) % len(nbytes)
        rest = nbytes[last % len(nbytes), row : row + schedule.rows(last, seat) * width]
        return int(nbytes[steps, row : row + self._seat_rows].sum()) + int(rest.sum())

    def release(self, piece: Piece) -> bool:
        with self._turn:
            self._decoded.add(piece.step * self._schedule.pieces + piece.number)
            while self._next_release in self._decoded:
                self._decoded.remove(self._next_release)
                self._next_release += 1
            self._ring.finish(self._context.world.node_rank, self._next_release)
        return True

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

    def close(self, limit_s: float = math.inf) -> bool:
        return self._writer is None or self._writer.cancel(limit_s)
