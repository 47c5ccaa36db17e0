"""Fills the ring without an index: groups are read on a guess, settled in order, and then handed out.

    reading rank, one thread       foresee group j -> wait for its slot -> hand its reads to the pool       (several)
                                   group i is there: scan its leaves -> exact places -> read what is missing
    pool threads                   read straight into the slot; the last one checks and publishes the group

The ring is allocated before the sizes are known, so a record may not fit into its slot. It then stays out: its offset
in the table is -1, as are those of all records of its rank in this step, and that rank reads them itself. Once the
extents are known, everything is exact: no group is guessed twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from pario.feed.ring_writer import Group, RingWriter
from pario.feed.source import Context
from pario.locate.frontier import Fetched, Later
from pario.locate.guess import Outlook
from pario.plan.coalesce import Reads, coalesce
from pario.plan.stream import Work

#: Reads after a group was settled start at a multiple of this in its slot, as O_DIRECT requires.
_ALIGN = 4096
#: Seconds after which a writer that waits for a group checks whether another slot is free.
_PAUSE_S = 5e-3
#: Addresses are congruent to file offsets modulo this (see plan/coalesce.py).
_UNIT = 8


@dataclass(frozen=True, slots=True)
class _Scouted:
    """Group `number`, in flight: its records' rows in the tables, its reads, and whether they are complete."""

    number: int
    steps: np.ndarray
    rows: np.ndarray
    outlook: Outlook
    reads: Reads
    there: threading.Event
    errors: list[BaseException]


class FirstEpochWriter(RingWriter):
    """A `RingWriter` for records whose extents become known meanwhile; only in key order.

    guess : read page ranges that probably hold the records; False: prefetch leaves, then read the records exactly
    """

    def __init__(self, context: Context, work: Work, base: int = 0, *, guess: bool = True) -> None:
        super().__init__(context, work, base)
        speculator = self._index.speculator(self.stats, guess=guess)
        assert speculator is not None  # otherwise the extents are known
        self._speculator = speculator

    # -- in the background -----------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        todo = deque(range(self._schedule.groups))
        scouted: deque[_Scouted] = deque()
        while (todo or scouted) and not self._stop.is_set() and self.error is None:
            if todo and len(scouted) < self._speculator.ahead and (not scouted or self._is_free(todo[0])):
                if not self._wait_slot(todo[0], None):
                    return
                scouted.append(self._submit_scouted(todo.popleft()))
            elif scouted[0].there.wait(_PAUSE_S if todo else self._options.alive_seconds):
                one = scouted.popleft()
                if one.errors:
                    raise one.errors[0]
                group = self._settle(one, scouted[0] if scouted else None)
                self._write_tables(group)
                self._submit_group(group, urgent=True)  # later groups are in flight

    def _is_free(self, j: int) -> bool:
        """True if all ranks have released group j's slot. Does not wait."""
        return self._ring.is_done(self._free_after(j))

    def _submit_scouted(self, j: int) -> _Scouted:
        one = self._foresee(j)

        def done(error: BaseException | None, seconds: float) -> None:
            if error is not None:
                one.errors.append(error)
            self.stats.end_reads(seconds)
            one.there.set()
            self._in_flight.end()

        self._in_flight.begin()
        self.stats.begin_reads()
        try:
            self._pool.submit(one.reads.reads, self._slot(j), one.reads.starts, done)
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)
        return one

    # -- of one group ---------------------------------------------------------------------------------------------

    def _foresee(self, j: int) -> _Scouted:
        begin = time.perf_counter()
        ids, steps, rows = self._node_records(self._schedule, self._order, j)
        outlook = self._speculator.foresee(ids)
        offsets, nbytes = outlook.offsets, outlook.nbytes
        reads = self._merge(coalesce, offsets, nbytes)
        while reads.nbytes > self._slots.slot_bytes:  # the rest is read when the group is settled
            offsets, nbytes = offsets[: len(offsets) // 2], nbytes[: len(nbytes) // 2]
            reads = self._merge(coalesce, offsets, nbytes)
        self._count(reads)
        self.stats.locate += time.perf_counter() - begin
        return _Scouted(j, steps, rows, outlook, reads, threading.Event(), [])

    def _settle(self, one: _Scouted, following: _Scouted | None) -> Group:
        """Find the exact extents, and read what is still missing."""
        begin = time.perf_counter()
        data = self._slot(one.number)
        found = Fetched(data, one.reads, self._index.snapshot)
        settled = self._speculator.settle(one.outlook, found, self._later(following))
        offsets = np.ascontiguousarray(settled.extents["offset"])
        nbytes = np.ascontiguousarray(settled.extents["nbytes"])
        places, lead = settled.places, self._index.header_bytes
        base = one.reads.nbytes
        for i, value in settled.spare:
            at = base + (int(offsets[i]) - lead - base) % _UNIT
            if at + len(value) <= len(data):
                data[at : at + len(value)] = value
                places[i], base = at + lead, at + len(value)
        base = -(-base // _ALIGN) * _ALIGN
        # The slot holds either all records of a rank's piece of a step, or none: then that rank reads them.
        piece = one.steps * self._seats.here + one.rows // self._schedule.batch_size
        missing = np.flatnonzero(places < 0)
        pieces = np.unique(piece[missing])
        rest = self._merge(coalesce, offsets[missing] - lead, nbytes[missing] + lead)
        while base + rest.nbytes > self._slots.slot_bytes and len(pieces):
            spilled, pieces = pieces[len(pieces) // 2 :], pieces[: len(pieces) // 2]
            places[np.isin(piece, spilled)] = -1
            missing = missing[~np.isin(piece[missing], spilled)]
            rest = self._merge(coalesce, offsets[missing] - lead, nbytes[missing] + lead)
        places[missing] = rest.record_starts + base + lead
        reads = Reads(rest.reads, rest.starts + base, places, base + rest.nbytes)
        self.stats.locate += time.perf_counter() - begin
        return Group(one.number, one.outlook.ids, one.steps, one.rows, offsets, nbytes, reads)

    def _later(self, following: _Scouted | None) -> Later | None:
        if following is None:
            return None

        def wait() -> bool:
            while not following.there.wait(self._options.alive_seconds):
                if self._stop.is_set():
                    return False
            return not following.errors

        return Later(Fetched(self._slot(following.number), following.reads, self._index.snapshot), wait)

    def _write_tables(self, group: Group) -> None:
        super()._write_tables(group)
        spilled = group.reads.record_starts < 0
        if spilled.any():
            slots = self._slots
            slots.starts[group.steps[spilled] % len(slots.ids), group.rows[spilled]] = -1

    def _check(self, group: Group, data: np.ndarray) -> None:
        there = group.reads.record_starts >= 0
        if not there.all():
            reads = replace(group.reads, record_starts=group.reads.record_starts[there])
            fields = {name: getattr(group, name)[there] for name in ("ids", "offsets", "nbytes")}
            group = replace(group, reads=reads, **fields)
        super()._check(group, data)
