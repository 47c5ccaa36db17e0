"""The source of a rank that fills its batches straight from the page cache of its node, without the ring.

    ring       page cache --pread--> ring --decode, on another core--> batch        one rank reads for the node
    this way   page cache --preadv--------------------------------> batch           large rows that need no decoding
               page cache --pread--> scratch --decode, same core--> batch           anything else

The ring makes long reads on a slow store and reads each byte once per node. Where the page cache does that as well, the
ring only adds a copy, out of memory that another core has just written. This is so if the bytes are in memory already,
and on a local disk where the kernel can read ahead (choose.py): its ranks share the page cache, and only the disk makes
them wait. Here the thread that reads also decodes, from its own CPU cache. If a record contains its row in the wanted
form (`Decoder.verbatim`), the kernel copies the row straight into the batch. The bytes before and behind the row are
checked; a record that differs goes through `Decoder.decode`.

This module does not call MPI, and the ranks of a node do not communicate: an error ends the rank's loop, which tells
the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.comm.memory import PAGE
from pario.decode.base import Draw, Failures, Verbatim
from pario.fetch.base import Form
from pario.plan.schedule import node_share
from pario.plan.stream import Work
from pario.records import Records
from pario.supply.base import Ahead, Context, Parts, Source

__all__ = ["PageCacheSource"]

#: Fewer threads than this do not repay their context switches when the caller is idle. (Two on two cores: 1.04 of
#: py-lmdb's rate against 1.00 with 197 KB rows in memory.)
_MANY_AHEAD = 4

#: Rows of at least this size are read straight into the batch, at any offset. A 197 KB row then took 25 us of a core,
#: through scratch memory 34 us, by a memcpy out of a mapping 21 us; a 3 KB row, one read each, 1.8 us against 1.5 and
#: 0.75. Smaller rows are read straight only if they are neighbours, so that one read brings hundreds: 0.95 us against
#: 1.3 for 3 KB rows. (Values of less than half a page are inside leaf pages, last one first.)
_STRAIGHT_BYTES = 16 << 10
#: ... if at most this many bytes follow them.
_TAIL_BYTES = 64

#: Bytes to read and decode at once through scratch memory, so that it stays in a core's cache. 128 KiB to 4 MiB made no
#: difference on a core with 2 MiB of level 2 and a large level 3; more evicts more of it.
_UNIT_BYTES = 1 << 20
#: Bytes between two checks whether the loop has ended, for rows that are read straight.
_STRAIGHT_UNIT_BYTES = 16 << 20

#: Records to look up at once, if that needs no reading: the calls then cost almost nothing.
_PLANNED = 2048

_NOTHING = np.empty(0, np.uint8)


class _Rows(NamedTuple):
    """Rows of a batch: record ids, extents of their values, whether all have overflow pages, the arrays' rows."""

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    large: bool
    arrays: dict[str, np.ndarray]

    def part(self, first: int, stop: int) -> _Rows:
        """Rows [first, stop)."""
        if stop - first == len(self.ids):
            return self
        rows = slice(first, stop)
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return _Rows(self.ids[rows], self.offsets[rows], self.nbytes[rows], self.large, arrays)


class _Places(NamedTuple):
    """Records: their ids, extents, rows in the batch, and whether all values have overflow pages of their own."""

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    rows: np.ndarray
    large: bool


@dataclass(frozen=True, slots=True)
class _Share:
    """The records of consecutive steps from `first` on; step `first` + k begins at cuts[k]."""

    first: int
    cuts: list[int]
    places: _Places

    def step(self, step: int) -> _Places:
        k, last = step - self.first, len(self.cuts) - 1
        part = slice(self.cuts[min(k, last)], self.cuts[min(k + 1, last)]) if k >= 0 else slice(0, 0)
        ids, offsets, nbytes, rows, large = self.places
        return _Places(ids[part], offsets[part], nbytes[part], rows[part], large)


class PageCacheSource(Source):
    """The batches of one rank in one epoch, or in the rest of one. Several threads may call `prepare`; the context's
    stats count the work of all of them.

    way : a result of `choose.page_cache_way`
    """

    def __init__(self, context: Context, work: Work, way: str) -> None:
        reader, options, schedule = context.reader, context.options, work.schedule
        self._index = index = reader.index
        self._decoder = context.decode.decoder
        if schedule.pools is None and index.is_complete:  # groups of the size of slots do not fit here
            schedule = replace(schedule, pieces=1, per_group=-(-_PLANNED // schedule.batch_size))
        elif schedule.pieces > 1:
            schedule = replace(schedule, pieces=1, per_group=1)
        self._schedule = schedule
        self._order = work.order
        self._draw = Draw(work.stream.seed, work.epoch)
        self._fetcher = reader.file.pool.fetcher
        assert self._fetcher.rows is not None  # as choose.py makes sure
        self._rows = self._fetcher.rows
        self._gap_bytes = options.gap_bytes
        self._held = context.decode.held
        self._checked = reader.checked
        self._seat = context.world.seat
        self._stats = context.stats
        self._verbatim = self._decoder.verbatim()
        # As far ahead as the ring would be.
        ring_bytes = options.slots * options.slot_bytes // context.world.node_size
        self._advise_bytes = ring_bytes if way == "advised" else 0
        self._advised: deque[tuple[int, int]] = deque()  # (step, bytes) behind the one that is prepared
        self._advised_step = 0  # the first step without advice yet
        self._shares: dict[int, _Share] = {}
        self._planning = threading.RLock()  # guards the four above
        self._counting = threading.Lock()  # guards the stats and the two below
        self._under_way = 0
        self._busy_since = 0.0
        self._scratch = threading.local()
        self._edge_starts = np.empty(0, np.int64)  # offsets of the bytes that are read beside the rows
        self._fetcher.let_read_ahead(way == "ordered")
        self.ahead = self._find_ahead(context, ring_bytes)
        context.stats.reader = context.stats.own = True

    def _find_ahead(self, context: Context, ring_bytes: int) -> Ahead | None:
        options, share, batch_bytes = context.options, context.share, self.batch_bytes
        self._held.held_bytes = options.held_bytes
        # If ranks share cores, another thread would only take turns with this one.
        if share.crowded or batch_bytes is None or 4 * batch_bytes > options.held_bytes:
            return None
        # One per core, in as much memory as the node's ring has; at least one.
        steps = max(1, min(share.threads, options.inflight, ring_bytes // batch_bytes))
        # Batches prepared ahead do not count against the caller's limit: the same script must work when the file is
        # cold.
        self._held.held_bytes += steps * (batch_bytes * 9 // 8 + 2 * PAGE)
        return Ahead(context.reader.file.pool.call, steps, eager=steps >= _MANY_AHEAD)

    @property
    def batch_bytes(self) -> int | None:
        """The most memory of a full batch's arrays; None if records are packed and their sizes are still unknown."""
        largest = 0 if self._decoder.by_rows else self._index.largest_bytes
        if largest is None:
            return None
        rest = np.zeros(self._schedule.batch_size, np.int64)
        shapes = self._decoder.shapes(Records(rest, _NOTHING, rest, rest + largest))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    def prepare(self, step: int, check: Callable[[], None]) -> Parts:
        begin = time.perf_counter()
        places = self._places(step)
        ids, offsets, nbytes = places.ids.copy(), places.offsets, places.nbytes  # the ids are the caller's
        arrays = self._held.take(self._decoder.shapes(Records(ids, _NOTHING, offsets, nbytes)))
        batch = _Rows(ids, offsets, nbytes, places.large, arrays)
        total = int(nbytes.sum())
        verbatim = self._verbatim
        if verbatim is not None and total < self._straight_bytes(offsets, total) * len(ids):
            verbatim = None
        unit = _UNIT_BYTES if verbatim is None else _STRAIGHT_UNIT_BYTES
        cuts = [0, len(ids)]
        if total > unit and self._decoder.by_rows:  # where the running sum of bytes passes a multiple of the unit
            cuts[1:1] = (np.flatnonzero(np.diff(np.cumsum(nbytes) // unit)) + 1).tolist()
        if self._advise_bytes:
            self._advise_behind(step)
        with self._counting:
            self._stats.locate += time.perf_counter() - begin
            self._stats.node_bytes += total
        failures: Failures = []
        for first, stop in pairwise(cuts):
            check()
            left = [(first, stop)]
            if verbatim is not None:
                left = [(first + a, first + b) for a, b in self._read_straight(batch.part(first, stop), verbatim)]
            for a, b in left:
                failures += [(a + row, why) for row, why in self._read_and_decode(batch.part(a, b))]
        return Parts(arrays, ids, failures)

    def _straight_bytes(self, offsets: np.ndarray, total: int) -> int:
        """Size from which records are read straight, in a batch with these offsets and `total` bytes."""
        page = self._index.page_size
        dense = len(offsets) > 1 and 0 < offsets[-1] - offsets[0] < total + (len(offsets) + 8) * page
        return min(page // 2, _STRAIGHT_BYTES) if dense else _STRAIGHT_BYTES

    def _advise_behind(self, step: int) -> None:
        """Ask the kernel to prefetch the records of the next steps."""
        lead, advised = self._index.header_bytes, self._advised
        with self._planning:
            while advised and advised[0][0] <= step:
                advised.popleft()
            room = self._advise_bytes - sum(nbytes for _, nbytes in advised)
            while self._advised_step < self._schedule.steps:
                ahead = self._advised_step > step
                if ahead and advised and room <= 0:  # always advise the next step
                    break
                places = self._places(self._advised_step, step)
                self._fetcher.advise(places.offsets - lead, places.nbytes + lead, self._gap_bytes)
                if ahead:
                    nbytes = int(places.nbytes.sum())
                    advised.append((self._advised_step, nbytes))
                    room -= nbytes
                self._advised_step += 1

    def _places(self, step: int, now: int | None = None) -> _Places:
        """This rank's records of a step, row by row; `now`: the step in preparation, if that is another one."""
        first, stop = self._schedule.step_groups(step)
        oldest = first if now is None else self._schedule.step_groups(now)[0]
        parts = [self._share(group, oldest).step(step) for group in range(first, stop)]
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.ids, part.offsets, part.nbytes, part.rows) for part in parts), strict=True)
        ids, offsets, nbytes, rows = (np.concatenate(column) for column in columns)
        order = np.argsort(rows)
        return _Places(ids[order], offsets[order], nbytes[order], rows[order], all(part.large for part in parts))

    def _share(self, group: int, oldest: int) -> _Share:
        """This rank's records of a group, which covers several steps. Keeps groups from `oldest` - 2 on, because
        several threads work on neighbouring steps."""
        with self._planning:
            share = self._shares.get(group)
            if share is None:
                numbers, steps, rows = node_share(self._schedule, self._order, group, self._seat, 1)
                if self._schedule.pools is not None:  # by step and row, as in the other orders
                    by_row = np.lexsort((rows, steps))
                    numbers, steps, rows = numbers[by_row], steps[by_row], rows[by_row]
                ids = self._index.ids_of(numbers, self._order)
                self._index.reach(ids, self._stats)
                offsets, nbytes = self._index.extents_of(ids)
                large = self._checked.are_large(nbytes)  # here, where one call looks at the records of many steps
                for old in [number for number in self._shares if number < oldest - 2]:
                    del self._shares[old]
                first = int(steps[0]) if len(steps) else 0
                cuts = [0, *np.cumsum(np.bincount(steps - first)).tolist()]
                share = self._shares[group] = _Share(first, cuts, _Places(ids, offsets, nbytes, rows, large))
            return share

    def _read_straight(self, batch: _Rows, verbatim: Verbatim) -> list[tuple[int, int]]:
        """Read straight into rows; returns [first, stop) of the rows whose records do not have the layout of
        `verbatim`."""
        out = batch.arrays[verbatim.name]
        lead, n, by_rows = self._index.header_bytes, len(batch.ids), self._decoder.by_rows
        row = out[:1].nbytes if by_rows else -1
        form = Form(lead, verbatim.head, row, _TAIL_BYTES)
        edges = np.empty((n, lead + verbatim.head + _TAIL_BYTES), np.uint8)
        rows = out.reshape(-1).view(np.uint8)
        begin = self._read_begins()
        done = None
        try:
            done = self._rows.read_split(batch.offsets - lead, batch.nbytes, form, self._gap_bytes, edges, rows)
        finally:
            self._read_ends(begin, *(done or (0, 0)))
        if done is None:
            return [(0, n)]
        starts = self._edge_starts
        if len(starts) < n:
            starts = self._edge_starts = np.arange(n) * edges.shape[1] + lead
        rest = Records(batch.ids, edges.reshape(-1), starts[:n], batch.nbytes - row if by_rows else batch.nbytes)
        # Values in leaf pages that are said to be large fail the check: no header of their page stands before them.
        leaves = None if batch.large else self._checked.in_leaves(batch.offsets)
        if leaves is not None and leaves.any():  # few: read them once more, with their pages
            self._read_checked(batch.ids[leaves], batch.offsets[leaves], batch.nbytes[leaves])
            others = ~leaves
            self._check(rest.data, batch.ids[others], rest.starts[others], batch.offsets[others], batch.nbytes[others])
        else:
            self._check(rest.data, batch.ids, rest.starts, batch.offsets, batch.nbytes)
        begin = time.perf_counter()
        odd = self._decoder.decode_rest(rest, batch.arrays)
        with self._counting:
            self._stats.decode += time.perf_counter() - begin
        if 2 * len(odd) > n:  # written by another program: do not try again with the next rows
            self._verbatim = None
        return [(row, row + 1) for row in odd]

    def _read_and_decode(self, batch: _Rows) -> Failures:
        """Read into this thread's scratch memory and decode from there."""
        records = self._read_checked(batch.ids, batch.offsets, batch.nbytes)
        begin = time.perf_counter()
        failures = self._decoder.decode(records, batch.arrays, self._draw)
        with self._counting:
            self._stats.decode += time.perf_counter() - begin
        return failures

    def _read_checked(self, ids: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray) -> Records:
        """Read values into this thread's scratch memory, with what their checks need, and check them."""
        begins, lengths = self._checked.spans(offsets, nbytes)
        scratch: np.ndarray = getattr(self._scratch, "memory", _NOTHING)
        begin = self._read_begins()
        reads = read_bytes = 0
        try:
            while (done := self._rows.read_ranges(begins, lengths, self._gap_bytes, scratch)) is None:
                scratch = np.empty(max(2 * len(scratch), _UNIT_BYTES), np.uint8)
                self._scratch.memory = scratch
            starts, reads, read_bytes = done
        finally:
            self._read_ends(begin, reads, read_bytes)
        starts += offsets - begins
        self._check(scratch, ids, starts, offsets, nbytes)
        return Records(ids, scratch, starts, nbytes)

    def _check(
        self, data: np.ndarray, ids: np.ndarray, starts: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray
    ) -> None:
        begin = time.perf_counter()
        self._checked.records(data, starts, offsets, nbytes, ids)
        with self._counting:
            self._stats.check += time.perf_counter() - begin

    def _read_begins(self) -> float:
        begin = time.perf_counter()
        with self._counting:
            if not self._under_way:
                self._busy_since = begin
            self._under_way += 1
        return begin

    def _read_ends(self, begin: float, reads: int, nbytes: int) -> None:
        now = time.perf_counter()
        stats = self._stats
        with self._counting:
            self._under_way -= 1
            stats.read += now - self._busy_since
            self._busy_since = now
            stats.reading += now - begin
        stats.count(reads, nbytes)  # the index counts its reads from any thread, too
