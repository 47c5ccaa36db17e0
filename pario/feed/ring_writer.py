"""Fills the node's ring, group by group.

    reading rank, one thread       plan group j -> wait for its slot -> hand its reads to the pool
    pool threads                   read straight into the slot; the last one checks and publishes the group
    every rank of the node         wait for the groups of its step -> views of its records -> decode -> done

This module does not call MPI: it uses memory shared by the node, and futexes in it. `ring_reader.py` takes the groups
out.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from pario.comm.farewell import describe
from pario.errors import ParioError, RankError
from pario.feed.source import Context
from pario.fetch.pool import Job
from pario.options import READ_BYTES
from pario.plan.coalesce import Reads, coalesce
from pario.plan.stream import Work
from pario.records import Records
from pario.threads import Condition, start_thread

#: Of the wanted pages, what may be read along where a selection leaves out neighbours: a request costs more than a few
#: pages. (Half of 8 KB records, at random, from a store that answers in 20 ms: 1 % 1.53 s, 100 % 0.63 s.)
_GAP_PERCENT = 100


@dataclass(frozen=True, slots=True)
class Group:
    """Group `number` of this node, planned.

    ids : i64[k], record ids; steps i64[k] and rows i32[k], their positions in the ring's tables
    offsets, nbytes : i64[k], extents of the values in the file
    reads : the reads, and their offsets in a slot
    """

    number: int
    ids: np.ndarray
    steps: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    reads: Reads


class InFlight:
    """The groups of a writer that are under way, until they are published."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._count = 0

    def begin(self) -> None:
        with self._changed:
            self._count += 1

    def end(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def wait(self, limit_s: float = math.inf) -> bool:
        """Wait until there are none, at most this long; returns whether there are none."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, None if limit_s == math.inf else limit_s)


class RingWriter:
    """Reads the groups of one epoch for this node, in the background between `start()` and `stop()`.

    Counts its work in the context's stats. `error` is the error that ended it early.

    base : number of the epoch's first group in the ring
    """

    #: groups that were read before the epoch began
    _early: Collection[int] = ()

    def __init__(self, context: Context, work: Work, base: int = 0) -> None:
        reader, world = context.reader, context.world
        self._schedule = work.schedule
        self._order = work.order
        self._node_records = context.node_records
        chosen, ordered = work.stream.chosen, work.stream.shuffle != "global"
        self._gap_percent = _GAP_PERCENT if ordered and chosen is not None and chosen.has_gaps else None
        self._index = reader.index
        self._ring = context.ring
        self._base = base
        self._slots = context.slots
        self._pool = reader.file.pool
        self._options = context.options
        self._read_bytes = max(READ_BYTES, self._pool.fetcher.long_bytes)
        self._checked = reader.checked
        self._seats = context.seats
        self._rank = world.rank
        self.stats = context.stats
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._in_flight = InFlight()
        self._oldest = 0  # the first group that the fastest rank still needs
        self._ahead: Collection[int] = ()  # groups of the next epoch that wait
        self._jobs: deque[Job] = deque(maxlen=self._slots.count)  # more are never under way
        self._thread: threading.Thread | None = None
        self.ended: Future[None] | None = None  # done when the thread has read everything that is needed

    # -- in the background -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a thread that reads the whole epoch."""
        ended = self.ended = Future()
        self._pool.follow(self.is_full)
        try:
            self._thread = start_thread("pario-fill", self._run, ended, stop=partial(self.cancel, 0))
        except ParioError:
            self.ended = None
            self._pool.unfollow(self.is_full)
            raise

    def cancel(self, limit_s: float = math.inf) -> bool:
        """Stop reading; returns whether all reads and the thread ended within `limit_s`. Idempotent."""
        self._stop.set()
        self._ring.wake()
        if self._thread is None or (limit_s and self._ring.stop_feeder(self._stop, self._thread, limit_s)):
            self._thread = None
        return self._thread is None

    def _run(self, ended: Future[None]) -> None:
        try:
            self._read_all()
        except BaseException as e:
            self._fail(e)
        self._in_flight.wait()
        self._jobs.clear()  # they refer to this writer
        self._pool.unfollow(self.is_full)
        ended.set_result(None)

    def _read_all(self) -> None:
        for j in range(self._schedule.groups):
            if j in self._early:
                continue
            if self._stop.is_set() or self.error is not None:
                break
            group = self._plan(j)
            if not self._wait_slot(j, None):
                break
            self._write_tables(group)
            self._submit_group(group)

    def _submit_group(self, group: Group, urgent: bool = False) -> None:
        """Pass its reads to the pool; the thread that finishes last checks and publishes it."""

        def done(error: BaseException | None, seconds: float) -> None:
            self.stats.end_reads(seconds)
            try:
                if error is None:
                    self.stats.slot_filled(slot, group.number, begun, group.reads.nbytes)
                    self._check(group, data)
                    self._publish(group)
            except BaseException as e:
                error = e
            if error is not None:
                self._lose(group, error)
            self._in_flight.end()

        data = self._slot(group.number)
        self._in_flight.begin()
        slot, begun = (self._base + group.number) % self._slots.count, self.stats.begin_reads()
        try:
            self._jobs.append(self._pool.submit(group.reads.reads, data, group.reads.starts, done, urgent))
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)

    def is_full(self) -> bool:
        """Whether this much waits for the fastest rank of this node that faster reading would not help."""
        ring, schedule = self._ring, self._schedule
        while self._oldest < schedule.groups and ring.is_done(schedule.group_release_tick(self._oldest), by=any):
            self._oldest += 1
        # One is being taken; behind it, half of the others.
        return ring.full_slots(self._base + self._oldest) + len(self._ahead) > max(1, (ring.slots - 1) // 2)

    # -- of one group ---------------------------------------------------------------------------------------------

    def _plan(self, j: int) -> Group:
        """Plan a group: its records, their extents, its reads."""
        begin = time.perf_counter()
        ids, steps, rows = self._node_records(self._schedule, self._order, j)
        offsets, nbytes = self._index.extents_of(ids)
        begins, lengths = self._checked.spans(offsets, nbytes)
        reads = self._merge_steps(begins, lengths, steps).behind(offsets - begins)
        self.stats.locate += time.perf_counter() - begin
        return Group(j, ids, steps, rows, offsets, nbytes, reads)

    def _merge_steps(self, begins: np.ndarray, nbytes: np.ndarray, steps: np.ndarray) -> Reads:
        """Merge ranges of the file into reads that fit into a slot. steps : i64[k], the step of each range"""
        coalesced = coalesce if self._gap_percent is None else partial(coalesce, gap_percent=self._gap_percent)
        return self._merge(coalesced, begins, nbytes, capacity=self._slots.slot_bytes)

    def _merge(self, merge: Callable[..., Reads], *ranges: np.ndarray, capacity: int | None = None) -> Reads:
        """`merge` is a function of plan/coalesce.py."""
        fetcher = self._pool.fetcher
        return merge(
            *ranges,
            align=fetcher.align,
            gap_bytes=self._options.gap_bytes,
            read_bytes=self._read_bytes,
            file_bytes=fetcher.nbytes,
            capacity=capacity,
        )

    def _wait_slot(self, j: int, check: Callable[[], None] | None) -> bool:
        """Wait until all ranks of the node have released group j's slot. Returns False if `cancel` was called, or if
        all have left: then nobody has waited for the group before it, which may even be under way still."""
        begin = time.perf_counter()
        free = self._ring.wait_done(self._free_after(j), check, self._stop)
        self.stats.turn += time.perf_counter() - begin
        return free and not self._ring.deserted()

    def _free_after(self, j: int) -> int:
        """Ticks that all ranks of the node must have finished before group j may fill its slot."""
        slots = self._ring.slots
        return self._schedule.group_release_tick(j - slots) if j >= slots else 0

    def _slot(self, j: int) -> np.ndarray:
        """u8[slot_bytes], the memory of group j's slot."""
        return self._slots.data[(self._base + j) % self._slots.count]

    def _write_tables(self, group: Group) -> None:
        """Write the group's rows of the tables."""
        begin = time.perf_counter()
        slots, slot = self._slots, (self._base + group.number) % self._slots.count
        table = (group.steps % len(slots.ids), group.rows)
        slots.ids[table] = group.ids
        slots.starts[table] = group.reads.record_starts + slot * slots.slot_bytes
        slots.nbytes[table] = group.nbytes
        self.stats.locate += time.perf_counter() - begin

    def _count(self, reads: Reads) -> None:
        self.stats.count(len(reads.reads), int(reads.reads["nbytes"].sum()))

    def _publish(self, group: Group) -> None:
        self._count(group.reads)  # first: the rank that takes the bytes may read the stats next
        self._pool.note_full()
        self._hand_out(group.number)

    def _hand_out(self, j: int) -> None:
        self._ring.publish(self._base + j, self._schedule.group_ready_ticks(j))

    def _check(self, group: Group, data: np.ndarray) -> None:
        t0 = time.perf_counter()
        self._checked.records(Records(group.ids, data, group.reads.record_starts, group.nbytes), group.offsets)
        self.stats.add(check=time.perf_counter() - t0)

    def _lose(self, group: Group, error: BaseException) -> None:
        """The group could not be read."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            if not isinstance(error, RankError):  # the others already know errors of another rank
                self._ring.fail(self._rank, describe(error))
