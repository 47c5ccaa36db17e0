"""The feed: fills the node's ring, group by group, and the tap that each rank draws its records from.

    feeding rank, one thread       plan group j -> wait for its slot -> hand its reads to the pool
    pool threads                   read straight into the slot; the last one checks and publishes the group
    every rank of the node         wait for the groups of its step -> views of its records -> decode -> done

Nothing here calls MPI: all of it is memory shared by the node, and futexes in it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pario.errors import CorruptedError, RankError
from pario.kernels.verify import check_runs
from pario.plan.coalesce import coalesce
from pario.plan.schedule import node_share
from pario.records import Records
from pario.stats.rank import RankStats

if TYPE_CHECKING:
    from pario.comm.window import Ring
    from pario.fetch.base import ReadPool
    from pario.locate.index import RecordIndex
    from pario.options import Options
    from pario.plan.epoch import Order
    from pario.plan.schedule import Schedule

__all__ = ["Feed", "Tap"]


class Feed:
    """Reads one epoch for this node. `start()` returns at once; `stop()` ends it wherever it is.

    check_snapshot : called after the bytes of a group are there and before they are handed out; raises SnapshotError
    feeder, feeders : this rank reads the groups j with j % feeders == feeder
    stats : of this rank; the feed adds to it what it does
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
        self._check_snapshot = check_snapshot
        self._seats = (node_seat, node_size)
        self._rank = rank
        self._turns = (feeder, feeders)
        self.stats = stats or RankStats()
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._idle = threading.Condition()  # guards the three below, and what the pool's threads add to the stats
        self._under_way = 0
        self._busy_since = 0.0  # while something is under way: until then `read` is counted
        self._thread: threading.Thread | None = None

    def start(self) -> None:
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
        feeder, feeders = self._turns
        try:
            for j in range(feeder, self._schedule.groups, feeders):
                if self._stop.is_set() or self.error is not None:
                    break
                self._group(j)
        except BaseException as e:
            self._fail(e)
        with self._idle:
            while self._under_way:
                self._idle.wait()

    def _group(self, j: int) -> None:
        ring, options, stats = self._ring, self._options, self.stats
        t0 = time.perf_counter()
        numbers, steps, rows = node_share(self._schedule, self._order, j, *self._seats)
        by_offset = self._index.by_offset
        ids = numbers if self._order.space == "id" or by_offset is None else by_offset[numbers]
        extents = self._index.extents[ids]
        offsets = np.ascontiguousarray(extents["offset"])
        nbytes = np.ascontiguousarray(extents["nbytes"])
        slot_bytes = ring.data.shape[1]
        plan = coalesce(
            offsets,
            nbytes,
            lead_bytes=self._index.header_bytes,
            align=self._pool.fetcher.align,
            gap_bytes=options.gap_bytes,
            read_bytes=options.read_bytes,
            file_bytes=self._pool.fetcher.nbytes,
            capacity=slot_bytes,
        )
        t1 = time.perf_counter()
        free_after = self._schedule.group_release_tick(j - len(ring.data)) if j >= len(ring.data) else 0
        if not ring.wait_done(free_after, None, self._stop):
            return
        if ring.deserted():
            # Nobody waited for the group that was in this slot, so it may even be under way still.
            self._stop.set()
            return
        t2 = time.perf_counter()
        slot = j % len(ring.data)
        table = (steps % len(ring.ids), rows)
        ring.ids[table] = ids
        ring.starts[table] = plan.record_starts + slot * slot_bytes
        ring.nbytes[table] = nbytes
        data = ring.data[slot]

        def done(error: BaseException | None, seconds: float) -> None:
            try:
                if error is None:
                    self._check(data, plan.record_starts, offsets, nbytes, ids)
                    with self._idle:  # counted first: who takes the bytes may ask for the numbers next
                        now = time.perf_counter()
                        stats.read += now - self._busy_since
                        stats.reading += seconds
                        self._busy_since = now
                    ring.publish(j, self._schedule.group_ready_ticks(j))
            except BaseException as e:
                error = e
            if error is not None:
                self._fail(error)
            with self._idle:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.notify_all()

        with self._idle:
            if not self._under_way:
                self._busy_since = time.perf_counter()
            self._under_way += 1
        stats.locate += t1 - t0 + time.perf_counter() - t2
        stats.turn += t2 - t1
        stats.bytes_read += int(plan.reads["nbytes"].sum())
        stats.reads += len(plan.reads)
        try:
            self._pool.submit(plan.reads, data, plan.starts, done)
        except BaseException as e:  # the pool was closed meanwhile
            done(e, 0.0)

    def _check(
        self, data: np.ndarray, starts: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray, ids: np.ndarray
    ) -> None:
        t0 = time.perf_counter()
        # The snapshot first: when a writer overtook us, wrong headers are its work and not damage.
        self._check_snapshot()
        index = self._index
        if index.snapshot.native:
            bad = check_runs(data, starts, offsets, nbytes, index.page_size, index.header_bytes)
            if bad >= 0:
                offset = int(offsets[bad]) - index.header_bytes
                raise CorruptedError(
                    "the page header before this record's value is not that of its overflow pages",
                    path=index.path,
                    page=offset // index.page_size,
                    offset=offset,
                    record=int(ids[bad]),
                    hint="The file is damaged, or was rewritten since its index was made: delete the .pario.h5 beside "
                    "it and try again; `python -m pario verify` looks at every record.",
                )
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
    """

    def __init__(
        self, ring: Ring, schedule: Schedule, *, seat: int, node_seat: int, node_rank: int, stats: RankStats
    ) -> None:
        self._ring = ring
        self._schedule = schedule
        self._seat = seat
        self._node_rank = node_rank
        self._row = (seat - node_seat) * schedule.batch_size
        self._flat = ring.data.reshape(-1)
        self._stats = stats
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
        return first, Records(ring.ids[table, rows], self._flat, ring.starts[table, rows], ring.nbytes[table, rows])

    def _next(self, check: Callable[[], None]) -> None:
        """Wait for the next group."""
        ring, stats, group = self._ring, self._stats, self._next_group
        full = ring.full_slots(group)
        stats.groups += 1
        stats.ready += full
        begin = time.perf_counter()
        ready = ring.wait_group(group, check)
        if not full:
            waited = time.perf_counter() - begin
            stats.share += waited
            if group:  # somebody must wait for the first
                stats.stalls += 1
                stats.stalled += waited
        stats.node_bytes += self._bytes(self._ready, ready)
        self._ready = ready
        self._next_group = group + 1

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
