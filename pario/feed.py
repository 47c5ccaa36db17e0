"""The feed: fills the node's ring, group by group, and the tap that each rank draws its records from.

    feeding rank, one thread       plan group j -> wait for its slot -> hand its reads to the pool
    pool threads                   read straight into the slot; the last one checks and publishes the group
    every rank of the node         wait for the groups of its step -> views of its records -> decode -> done

Nothing of that calls MPI: all of it is memory shared by the node, and futexes in it.

A synchronous recipe (`Recipe.ahead` is False) has no thread: the feeding rank's tap lets the feed bring a group when it
is asked for, so that one read at a time is under way and the rank's own thread waits for it, and for its turn among the
readers of other nodes (`comm/turns.py`) if the recipe has turns.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pario.errors import ParioError, RankError
from pario.kernels.verify import check_nodes
from pario.plan.coalesce import Reads, coalesce, span_reads
from pario.plan.schedule import node_share
from pario.records import Records
from pario.stats.rank import RankStats

if TYPE_CHECKING:
    from pario.comm.turns import Turns
    from pario.comm.window import Ring
    from pario.fetch.base import ReadPool
    from pario.locate.index import RecordIndex
    from pario.options import Options, Recipe
    from pario.plan.epoch import Order
    from pario.plan.schedule import Schedule

__all__ = ["Feed", "Group", "Tap"]


@dataclass(frozen=True, slots=True)
class Group:
    """Group `number` of this node, planned.

    ids : i64[k], record ids; steps i64[k] and rows i32[k], their places in the ring's tables
    offsets, nbytes : i64[k], where the values lie in the file
    reads : what to read, and where it goes in a slot
    """

    number: int
    ids: np.ndarray
    steps: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    reads: Reads


class Feed:
    """Reads one epoch for this node: in the background between `start()` and `stop()`, or group by group by `bring()`.

    check_snapshot : called after the bytes of a group are there and before they are handed out; raises SnapshotError
    feeder, feeders : this rank reads the groups j with j % feeders == feeder
    stats : of this rank; the feed adds to it what it does
    turns : with `bring` only: this rank reads when those before it have read; set before the first group
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        order: Order,
        index: RecordIndex,
        ring: Ring,
        pool: ReadPool,
        options: Options,
        recipe: Recipe,
        check_snapshot: Callable[[], None],
        node_seat: int,
        node_size: int,
        rank: int,
        feeder: int = 0,
        feeders: int = 1,
        stats: RankStats | None = None,
    ) -> None:
        self._schedule = schedule
        self._order = order
        self._index = index
        self._ring = ring
        self._pool = pool
        self._options = options
        self._span = recipe.span
        # A side-car that the recipe relies on: each value in a leaf page must be that of a node of this page.
        self._check_nodes = recipe.locate == "sidecar" and not index.trusted and index.snapshot.native
        self._check_snapshot = check_snapshot
        self._seats = (node_seat, node_size)
        self._rank = rank
        self._shares = (feeder, feeders)
        self.turns: Turns | None = None
        self.stats = stats or RankStats()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._idle = threading.Condition()  # guards the three below, and what the pool's threads add to the stats
        self._under_way = 0
        self._busy_since = 0.0  # while something is under way: until then `read` is counted
        self._thread: threading.Thread | None = None

    # -- in the background -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read the whole epoch in a thread of its own; returns at once."""
        self._thread = threading.Thread(target=self._run, name="pario-feed", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float = math.inf) -> bool:
        """End it; whether no read is under way and no thread of the feed runs any more, after `limit_s` at most."""
        self._stop.set()
        self._ring.wake()
        if self._thread is None or (limit_s and self._ring.stop_feeder(self._stop, self._thread, limit_s)):
            self._thread = None
        return self._thread is None

    def _run(self) -> None:
        try:
            self._read_all()
        except BaseException as e:
            self._fail(e)
        with self._idle:
            while self._under_way:
                self._idle.wait()

    def _read_all(self) -> None:
        feeder, feeders = self._shares
        for j in range(feeder, self._schedule.groups, feeders):
            if self._stop.is_set() or self.error is not None:
                break
            self._submit(j)

    def _submit(self, j: int) -> None:
        """Plan group j, wait for its slot, and leave the rest to the pool."""
        group = self._plan(j)
        if not self._wait_slot(j, None):
            return
        if self._is_deserted():
            return
        self._submit_group(group, self._lay_out(group))

    def _is_deserted(self) -> bool:
        """Nobody waited for the group that was in a free slot, so it may even be under way still: end it then."""
        if self._ring.deserted():
            self._stop.set()
        return self._stop.is_set()

    def _submit_group(self, group: Group, data: np.ndarray, urgent: bool = False) -> None:
        """Hand its reads to the pool; the thread that finishes last checks and publishes it."""

        def done(error: BaseException | None, seconds: float) -> None:
            try:
                if error is None:
                    self._check(group, data)
                    self._publish(group, seconds)
            except BaseException as e:
                error = e
            if error is not None:
                self._fail(error)
            self._forget_read()

        self._begin_read()
        try:
            self._pool.submit(group.reads.reads, data, group.reads.starts, done, urgent)
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)

    # -- when asked --------------------------------------------------------------------------------------------------

    def bring(self, j: int, check: Callable[[], None]) -> None:
        """Read group j now, in this thread, if this rank is the one that reads it; `check` is called while it waits."""
        feeder, feeders = self._shares
        if j % feeders != feeder:
            return
        try:
            self._bring(j, check)
            self._under_way = 0
        except BaseException as e:
            self._fail(e)
            raise

    def _bring(self, j: int, check: Callable[[], None]) -> None:
        group = self._plan(j)
        self._wait_slot(j, check)
        data = self._lay_out(group)
        if self.turns is not None:
            begin = time.perf_counter()
            self.turns.wait(j)
            self.stats.turn += time.perf_counter() - begin
        begin = self._begin_read()
        self._pool.fetcher.read(group.reads.reads, data, group.reads.starts)
        seconds = time.perf_counter() - begin
        if self.turns is not None:
            self.turns.pass_on(j)
        self._check(group, data)
        self._publish(group, seconds)

    def try_read(self, j: int) -> None:
        """Read group j into the memory of slot 0, for nobody: between two epochs, to see how long it takes."""
        reads = self._plan(j).reads
        self._pool.fetcher.read(reads.reads, self._ring.data[0], reads.starts)

    # -- what both have in common --------------------------------------------------------------------------------------

    def _plan(self, j: int) -> Group:
        """Which records, where they lie, which reads."""
        begin = time.perf_counter()
        numbers, steps, rows = node_share(self._schedule, self._order, j, *self._seats)
        by_offset = self._index.by_offset if self._order.space == "place" else None
        ids = numbers if by_offset is None else by_offset[numbers]
        extents = self._index.places(ids)
        offsets = np.ascontiguousarray(extents["offset"])
        nbytes = np.ascontiguousarray(extents["nbytes"])
        options, fetcher = self._options, self._pool.fetcher
        begins, lengths = offsets, nbytes
        if self._check_nodes:
            # Read from the beginning of the page, where its header and the places of its nodes stand.
            begins = offsets - ((offsets - 1) % self._index.page_size + 1) + self._index.header_bytes
            lengths = nbytes + (offsets - begins)
        how: Callable[..., Reads] = coalesce
        if self._span:
            # Neighbours in a block order are those of a pool, whichever steps they go to.
            how = partial(span_reads, runs=steps if self._schedule.pools is None else np.zeros(len(steps), np.int64))
        reads = how(
            begins,
            lengths,
            lead_bytes=self._index.header_bytes,
            align=fetcher.align,
            gap_bytes=options.gap_bytes,
            read_bytes=options.read_bytes,
            file_bytes=fetcher.nbytes,
            capacity=self._ring.slot_bytes,
        )
        if self._check_nodes:
            reads = replace(reads, record_starts=reads.record_starts + offsets - begins)
        self.stats.locate += time.perf_counter() - begin
        return Group(j, ids, steps, rows, offsets, nbytes, reads)

    def _wait_slot(self, j: int, check: Callable[[], None] | None) -> bool:
        """Wait until all ranks of the node have released what was in group j's slot. False: the feed was stopped."""
        begin = time.perf_counter()
        free = self._ring.wait_done(self._free_after(j), check, self._stop)
        self.stats.turn += time.perf_counter() - begin
        return free

    def _free_after(self, j: int) -> int:
        """Ticks that all ranks of the node must have finished before group j may fill its slot."""
        slots = self._ring.slots
        return self._schedule.group_release_tick(j - slots) if j >= slots else 0

    def _lay_out(self, group: Group) -> np.ndarray:
        """Write the group's rows of the tables; u8[slot_bytes], the memory of its slot."""
        begin = time.perf_counter()
        ring = self._ring
        slot = group.number % ring.slots
        table = (group.steps % len(ring.ids), group.rows)
        ring.ids[table] = group.ids
        ring.starts[table] = group.reads.record_starts + slot * ring.slot_bytes
        ring.nbytes[table] = group.nbytes
        self._count(group.reads)
        self.stats.locate += time.perf_counter() - begin
        return ring.data[slot]

    def _count(self, reads: Reads) -> None:
        self.stats.count(len(reads.reads), int(reads.reads["nbytes"].sum()))

    def _begin_read(self) -> float:
        now = time.perf_counter()
        with self._idle:
            if not self._under_way:
                self._busy_since = now
            self._under_way += 1
        return now

    def _end_read(self, seconds: float) -> None:
        """seconds : that the threads spent in its reads, added up"""
        with self._idle:
            now = time.perf_counter()
            self.stats.read += now - self._busy_since
            self.stats.reading += seconds
            self._busy_since = now

    def _forget_read(self) -> None:
        with self._idle:
            self._under_way -= 1
            if not self._under_way:
                self._idle.notify_all()

    def _publish(self, group: Group, seconds: float) -> None:
        """seconds : that its reads took, added up"""
        self._end_read(seconds)  # counted first: who takes the bytes may ask for the numbers next
        self._ring.publish(group.number, self._schedule.group_ready_ticks(group.number))

    def _check(self, group: Group, data: np.ndarray) -> None:
        t0 = time.perf_counter()
        # The snapshot first: when a writer overtook us, wrong headers are its work and not damage.
        self._check_snapshot()
        index = self._index
        index.check_headers(data, group.reads.record_starts, group.offsets, group.nbytes, group.ids)
        if self._check_nodes:
            where = (data, group.reads.record_starts, group.offsets, group.nbytes, index.page_size, index.header_bytes)
            bad = check_nodes(*where, index.snapshot.base, index.snapshot.version == 3)
            if bad >= 0:
                what = "this record's value is none of its leaf page"
                raise index.damaged(what, int(group.offsets[bad]), int(group.ids[bad]))
        with self._idle:
            self.stats.check += time.perf_counter() - t0

    def _fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            if not isinstance(error, RankError):  # those that another rank caused are known already
                self._ring.fail(self._rank, f"{type(error).__name__}: {error}")


class Tap:
    """One rank's side of the ring: steps in ascending order, piece by piece, each taken once and then released.

    stats : of this rank; the tap adds to it what it waits for and takes, once per group and not per step
    feed : of a synchronous recipe, on a rank that reads: brings the groups that are this rank's to read
    reader_of : of a synchronous recipe: reader_of(group) -> node rank that reads it
    read : where sizes were not known when the ring was made: brings records that did not fit into it
    """

    def __init__(
        self,
        ring: Ring,
        schedule: Schedule,
        *,
        seat: int,
        node_seat: int,
        node_rank: int,
        stats: RankStats,
        feed: Feed | None = None,
        reader_of: Callable[[int], int] | None = None,
        read: Callable[[np.ndarray, RankStats], Records] | None = None,
    ) -> None:
        self._ring = ring
        self._schedule = schedule
        self._seat = seat
        self._node_rank = node_rank
        self._row = (seat - node_seat) * schedule.batch_size
        self._flat = ring.data.reshape(-1)
        self._stats = stats
        self._feed = feed
        self._reader_of = reader_of
        self._read = read
        self._next_group = 0
        self._ready = 0
        self.pieces = schedule.pieces

    def rows(self, step: int) -> int:
        """How many records this rank has in `step`."""
        return self._schedule.rows(step, self._seat)

    def take(self, step: int, piece: int, check: Callable[[], None]) -> tuple[int, Records]:
        """(first row, this rank's records) of one piece of `step`: views into the ring, valid until it is released.

        Waits for their bytes; `check` is called meanwhile and may raise.
        """
        while self._ready <= step * self.pieces + piece:
            self._next(check)
        if self.pieces == 1:
            first, stop = 0, self._schedule.rows(step, self._seat)
        else:
            first, stop = self._schedule.piece_rows(step, self._seat, piece)
        ring = self._ring
        table = step % len(ring.ids)
        rows = slice(self._row + first, self._row + stop)
        ids, starts = ring.ids[table, rows], ring.starts[table, rows]
        if self._read is not None and len(starts) and int(starts.min()) < 0:
            begin = time.perf_counter()
            records = self._read(ids.copy(), self._stats)
            self._stats.spilled += len(ids)
            self._stats.share += time.perf_counter() - begin
            return first, records
        return first, Records(ids, self._flat, starts, ring.nbytes[table, rows])

    def _next(self, check: Callable[[], None]) -> None:
        """Wait for the next group."""
        ring, stats, group = self._ring, self._stats, self._next_group
        full = ring.full_slots(group)
        stats.groups += 1
        stats.ready += full
        begin = time.perf_counter()
        if self._feed is not None:
            self._feed.bring(group, check)
        ready = ring.wait_group(group, check if self._reader_of is None else lambda: self._check_reader(group, check))
        if not full:
            waited = time.perf_counter() - begin
            stats.share += waited
            if group:  # somebody must wait for the first
                stats.stalls += 1
                stats.stalled += waited
        stats.node_bytes += self._bytes(self._ready, ready)
        self._ready = ready
        self._next_group = group + 1

    def _check_reader(self, group: int, check: Callable[[], None]) -> None:
        """Somebody reads this group when asked only: is that rank still there to be asked?"""
        check()
        assert self._reader_of is not None
        reader = self._reader_of(group)
        if self._ring.has_left(reader) and not self._ring.full_slots(group):
            raise ParioError(
                f"the rank that reads for this node (number {reader} on it) left the loop before this rank did",
                hint="With this recipe all ranks must leave a loop at the same step; the recipe auto does not mind.",
            )

    def _bytes(self, first: int, stop: int) -> int:
        """Of this rank's records in ticks [first, stop)."""
        if stop <= first:
            return 0
        schedule, nbytes, row = self._schedule, self._ring.nbytes, self._row
        if self.pieces > 1:
            return sum(
                int(nbytes[step % len(nbytes), row + a : row + b].sum())
                for step, piece in (divmod(tick, self.pieces) for tick in range(first, stop))
                for a, b in [schedule.piece_rows(step, self._seat, piece)]
            )
        last = stop - 1  # may be shorter than the others; what stands behind it in its row is old
        steps = np.arange(first, last) % len(nbytes)
        rest = nbytes[last % len(nbytes), row : row + schedule.rows(last, self._seat)]
        return int(nbytes[steps, row : row + schedule.batch_size].sum()) + int(rest.sum())

    def release(self, step: int, piece: int) -> None:
        """The memory of the piece may be filled anew, as far as this rank is concerned."""
        self._ring.finish(self._node_rank, step * self.pieces + piece + 1)
