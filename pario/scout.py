"""The feed of an epoch before there is an index: groups are read on a guess, settled in order, and then handed out.

    feeding rank, one thread       foresee group j -> wait for its slot -> hand its reads to the pool       (several)
                                   group i is there: scan its leaves -> exact places -> read what is missing
    pool threads                   read straight into the slot; the last one checks and publishes the group

A record that does not fit into the slot, because the sizes were not known when the ring was made, is left out of it:
its place in the table is -1, and so are those of all records that its rank has in this step. That rank reads them
itself. Once the places are known all of this is exact: the first epoch needs no guess twice.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pario.feed import Feed, Group
from pario.locate.speculate import Fetched, Later, Outlook, Speculator
from pario.plan.coalesce import Reads, coalesce
from pario.plan.schedule import node_share

__all__ = ["Scout"]

#: What is read after a group was settled begins at a multiple of this in its slot, as reads past the page cache want.
_ALIGN = 4096
#: Seconds after which a feed that waits for a group looks whether a slot is free for another one.
_PAUSE_S = 5e-3
#: Values lie in memory as in the file modulo this (see plan/coalesce.py).
_UNIT = 8


@dataclass(frozen=True, slots=True)
class _Scouted:
    """Group `number`, under way: its records' places in the tables, what is read, and whether it is there."""

    number: int
    steps: np.ndarray
    rows: np.ndarray
    outlook: Outlook
    reads: Reads
    there: threading.Event
    errors: list[BaseException]


class Scout(Feed):
    """A `Feed` of records whose places become known meanwhile; in key order only.

    guess : read page ranges that probably hold the records; False: leaves ahead, and then the records exactly
    """

    def __init__(self, *, guess: bool, **feed: Any) -> None:
        super().__init__(**feed)
        growth = self._index.growth
        assert growth is not None  # else there is nothing to find out
        self._growth = growth
        self._speculator = Speculator(growth, self.stats, guess=guess)

    # -- in the background -----------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        feeder, feeders = self._shares
        todo = deque(range(feeder, self._schedule.groups, feeders))
        scouted: deque[_Scouted] = deque()
        while (todo or scouted) and not self._stop.is_set() and self.error is None:
            if todo and len(scouted) < self._speculator.ahead and (not scouted or self._is_free(todo[0])):
                if not self._wait_slot(todo[0], None) or self._is_deserted():
                    return
                scouted.append(self._submit_scouted(todo.popleft()))
            elif scouted[0].there.wait(_PAUSE_S if todo else self._options.alive_seconds):
                one = scouted.popleft()
                if one.errors:
                    raise one.errors[0]
                group = self._settle(one, scouted[0] if scouted else None)
                self._submit_group(group, self._lay_out(group), urgent=True)  # others are under way behind it

    def _is_free(self, j: int) -> bool:
        """Without waiting: was group j's slot released by all?"""
        return self._ring.is_done(self._free_after(j))

    def _submit_scouted(self, j: int) -> _Scouted:
        one = self._foresee(j)

        def done(error: BaseException | None, seconds: float) -> None:
            if error is not None:
                one.errors.append(error)
            self._end_read(seconds)
            one.there.set()
            self._forget_read()

        self._begin_read()
        try:
            self._pool.submit(one.reads.reads, self._slot(j), one.reads.starts, done)
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)
        return one

    # -- when asked --------------------------------------------------------------------------------------------------

    def _bring(self, j: int, check: Callable[[], None]) -> None:
        self._wait_slot(j, check)
        one = self._foresee(j)
        begin = self._begin_read()
        read = self._pool.fetcher.read
        read(one.reads.reads, self._slot(j), one.reads.starts)
        group = self._settle(one, None)
        data = self._lay_out(group)
        read(group.reads.reads, data, group.reads.starts)
        seconds = time.perf_counter() - begin
        self._check(group, data)
        self._publish(group, seconds)

    # -- what both have in common --------------------------------------------------------------------------------------

    def _slot(self, j: int) -> np.ndarray:
        return self._ring.data[j % self._ring.slots]

    def _foresee(self, j: int) -> _Scouted:
        begin = time.perf_counter()
        ids, steps, rows = node_share(self._schedule, self._order, j, *self._seats)
        outlook = self._speculator.foresee(ids)
        offsets, nbytes = outlook.offsets, outlook.nbytes
        reads = self._merge(offsets, nbytes, 0)
        while reads.nbytes > self._ring.slot_bytes:  # the rest is read when the group is settled
            offsets, nbytes = offsets[: len(offsets) // 2], nbytes[: len(nbytes) // 2]
            reads = self._merge(offsets, nbytes, 0)
        self._count(reads)
        self.stats.locate += time.perf_counter() - begin
        return _Scouted(j, steps, rows, outlook, reads, threading.Event(), [])

    def _settle(self, one: _Scouted, following: _Scouted | None) -> Group:
        """Exact places, and the reads that are missing still."""
        begin = time.perf_counter()
        growth, data = self._growth, self._slot(one.number)
        before = growth.bytes_read, growth.reads
        found = Fetched(data, one.reads, growth.snapshot)
        settled = self._speculator.settle(one.outlook, found, self._later(following))
        self.stats.count(growth.reads - before[1], growth.bytes_read - before[0])
        offsets = np.ascontiguousarray(settled.extents["offset"])
        nbytes = np.ascontiguousarray(settled.extents["nbytes"])
        places, lead = settled.places, self._index.header_bytes
        base = one.reads.nbytes
        for i, some in settled.spare:
            at = base + (int(offsets[i]) - lead - base) % _UNIT
            if at + len(some) <= len(data):
                data[at : at + len(some)] = some
                places[i], base = at + lead, at + len(some)
        base = -(-base // _ALIGN) * _ALIGN
        # One piece of a step on one rank is in the slot as a whole, or that rank reads it.
        piece = one.steps * self._seats[1] + one.rows // self._schedule.batch_size
        missing = np.flatnonzero(places < 0)
        pieces = np.unique(piece[missing])
        rest = self._merge(offsets[missing], nbytes[missing], lead)
        while base + rest.nbytes > self._ring.slot_bytes and len(pieces):
            spilled, pieces = pieces[len(pieces) // 2 :], pieces[: len(pieces) // 2]
            places[np.isin(piece, spilled)] = -1
            missing = missing[~np.isin(piece[missing], spilled)]
            rest = self._merge(offsets[missing], nbytes[missing], lead)
        places[missing] = rest.record_starts + base
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

        return Later(Fetched(self._slot(following.number), following.reads, self._growth.snapshot), wait)

    def _merge(self, offsets: np.ndarray, nbytes: np.ndarray, lead_bytes: int) -> Reads:
        options, fetcher = self._options, self._pool.fetcher
        return coalesce(
            offsets,
            nbytes,
            lead_bytes=lead_bytes,
            align=fetcher.align,
            gap_bytes=options.gap_bytes,
            read_bytes=options.read_bytes,
            file_bytes=fetcher.nbytes,
        )

    def _lay_out(self, group: Group) -> np.ndarray:
        data = super()._lay_out(group)
        spilled = group.reads.record_starts < 0
        if spilled.any():
            ring = self._ring
            ring.starts[group.steps[spilled] % len(ring.ids), group.rows[spilled]] = -1
        return data

    def _check(self, group: Group, data: np.ndarray) -> None:
        there = group.reads.record_starts >= 0
        if not there.all():
            reads = replace(group.reads, record_starts=group.reads.record_starts[there])
            some = {name: getattr(group, name)[there] for name in ("ids", "offsets", "nbytes")}
            group = replace(group, reads=reads, **some)
        super()._check(group, data)
