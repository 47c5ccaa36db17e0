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
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np

from pario.comm.farewell import describe
from pario.errors import ParioError, RankError
from pario.fetch.pool import Job
from pario.plan.coalesce import Reads, coalesce
from pario.plan.stream import Work
from pario.stats.rank import RankStats
from pario.supply.base import Context
from pario.supply.ring_room import RingRoom
from pario.threads import start_thread

__all__ = ["Group", "InFlight", "RingWriter"]

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
    """The groups of a writer whose reads are under way. Its lock also guards the stats that the pool's threads update.

    beside : of another writer with the same stats, whose reads may be under way at the same time
    """

    def __init__(self, stats: RankStats, beside: InFlight | None = None) -> None:
        self.lock: threading.Condition = threading.Condition() if beside is None else beside.lock
        self._stats = stats
        self._count = 0
        self._all: _Busy = _Busy() if beside is None else beside._all

    def begin(self) -> float:
        now = time.perf_counter()
        with self.lock:
            if not self._all.count:
                self._all.since = now
            self._all.count += 1
            self._count += 1
        return now

    def end(self, seconds: float) -> None:
        """seconds : sum over the threads of the time in its reads"""
        with self.lock:
            now = time.perf_counter()
            self._stats.read += now - self._all.since
            self._stats.reading += seconds
            self._all.since = now

    def forget(self) -> None:
        with self.lock:
            self._all.count -= 1
            self._count -= 1
            if not self._count:
                self.lock.notify_all()

    @property
    def is_alone(self) -> bool:
        """No more than one is under way, of either writer."""
        return self._all.count <= 1

    def wait(self, limit_s: float = math.inf) -> bool:
        """Wait until there are none, at most this long; returns whether there are none."""
        with self.lock:
            return self.lock.wait_for(lambda: not self._count, None if limit_s == math.inf else limit_s)


@dataclass(slots=True)
class _Busy:
    """count : groups under way; since : while there are any, `read` is counted up to this time"""

    count: int = 0
    since: float = 0.0


class RingWriter:
    """Reads the groups of one epoch for this node, in the background between `start()` and `stop()`.

    If a node has several readers, each reads its share of the groups (`DataFile.feeder`). Counts its work in the
    context's stats. `error` is the error that ended it early.

    base : number of the epoch's first group in the ring
    _paced : it reads no further ahead than the consumer needs, and _packed : it uses no more slots than it needs
        (ring_room.py)
    """

    _paced = _packed = True
    #: groups that were read before the epoch began
    _early: Collection[int] = ()

    def __init__(self, context: Context, work: Work, base: int = 0) -> None:
        reader, world = context.reader, context.world
        assert reader.file.feeder is not None  # a rank without a share of the groups needs no writer
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
        self._read_bytes = max(reader.file.knobs["read_bytes"].value, self._pool.fetcher.long_bytes)
        self._checked = reader.checked
        self._seats = context.seats
        self._rank = world.rank
        self._shares = (reader.file.feeder, reader.file.feeders)
        self.stats = context.stats
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._in_flight = InFlight(self.stats)
        self._room = RingRoom(context, work.schedule, base, paced=self._paced, packed=self._packed)
        self._is_full = self._room.is_full
        self._thread: threading.Thread | None = None
        self.ended: Future[None] | None = None  # done when the thread has read everything that is needed

    # -- in the background -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a thread that reads the whole epoch."""
        ended = self.ended = Future()
        self._pool.follow(self._is_full)
        try:
            self._thread = start_thread("pario-fill", self._run, ended)
        except ParioError:
            self.ended = None
            self._pool.unfollow(self._is_full)
            raise

    def stop(self, limit_s: float = math.inf) -> bool:
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
        self._pool.unfollow(self._is_full)
        ended.set_result(None)

    def _read_all(self) -> None:
        feeder, feeders = self._shares
        for j in range(feeder, self._schedule.groups, feeders):
            if j in self._early:
                continue
            if self._stop.is_set() or self.error is not None:
                break
            group = self._plan(j)
            if not self._wait_slot(j, None) or not self._room.wait(j, self._stop) or self._is_deserted():
                break
            self._submit_group(group, self._lay_out(group))

    def _is_deserted(self) -> bool:
        """Nobody waited for the group that was in a free slot, so it may even be under way still: end it then."""
        return self._ring.deserted() or self._stop.is_set()

    def _submit_group(self, group: Group, data: np.ndarray, urgent: bool = False) -> Job | None:
        """Pass its reads to the pool; the thread that finishes last checks and publishes it. None: the pool has ended
        """

        def done(error: BaseException | None, seconds: float) -> None:
            try:
                if error is None:
                    self.stats.slot_filled(slot, group.number, begun, group.reads.nbytes)
                    self._check(group, data)
                    self._publish(group, seconds)
            except BaseException as e:
                error = e
            if error is not None:
                self._lose(group, error)
            self._room.forget(group.number)
            self._in_flight.forget()

        slot, begun = self._room.slot(group.number), self._in_flight.begin()
        self._room.begin(group.number, begun, alone=self._in_flight.is_alone)
        try:
            return self._pool.submit(group.reads.reads, data, group.reads.starts, done, urgent)
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)
            return None

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
        """Wait until all ranks of the node have released group j's slot. Returns False if `stop` was called."""
        begin = time.perf_counter()
        free = self._ring.wait_done(self._free_after(j), check, self._stop)
        self.stats.turn += time.perf_counter() - begin
        return free

    def _free_after(self, j: int) -> int:
        """Ticks that all ranks of the node must have finished before group j may fill its slot."""
        slots = self._ring.slots
        return self._schedule.group_release_tick(j - slots) if j >= slots else 0

    def _slot(self, j: int) -> np.ndarray:
        """u8[slot_bytes], the memory of group j's slot."""
        return self._slots.data[self._room.slot(j)]

    def _lay_out(self, group: Group) -> np.ndarray:
        """Write the group's rows of the tables; returns u8[slot_bytes], the memory of its slot."""
        self._count(group.reads)
        self._write_tables(group)
        return self._slot(group.number)

    def _write_tables(self, group: Group) -> None:
        begin = time.perf_counter()
        slots, slot = self._slots, self._room.slot(group.number)
        table = (group.steps % len(slots.ids), group.rows)
        slots.ids[table] = group.ids
        slots.starts[table] = group.reads.record_starts + slot * slots.slot_bytes
        slots.nbytes[table] = group.nbytes
        self.stats.locate += time.perf_counter() - begin

    def _count(self, reads: Reads) -> None:
        with self._in_flight.lock:
            self.stats.count(len(reads.reads), int(reads.reads["nbytes"].sum()))

    def _publish(self, group: Group, seconds: float) -> None:
        """seconds : sum of its reads' times"""
        self._in_flight.end(seconds)  # count first: the rank that takes the bytes may read the stats next
        self._pool.note_full()
        self._room.filled(group.number, group.reads, seconds)
        self._ring.publish(self._base + group.number, self._schedule.group_ready_ticks(group.number))

    def _check(self, group: Group, data: np.ndarray) -> None:
        t0 = time.perf_counter()
        self._checked.records(data, group.reads.record_starts, group.offsets, group.nbytes, group.ids)
        with self._in_flight.lock:
            self.stats.check += time.perf_counter() - t0

    def _lose(self, group: Group, error: BaseException) -> None:
        """The group could not be read."""
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            if not isinstance(error, RankError):  # the others already know errors of another rank
                self._ring.fail(self._rank, describe(error))
