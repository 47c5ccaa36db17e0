"""The source of a rank that decodes its records where they are: in the memory of its node.

    tiers (tiers/)   store, disk or page cache --> the node's memory tier, in the background
    every rank       decode out of the tier's memory --> batch          where the chunks of a piece are there
                     page cache or disk --> scratch --> batch           where some are not, of a file of this node
                     wait for them                                      where some are not, of a shared file

There is one copy between the tier and the batch, no system call per record, and no communication but through the tier.
The tier may give a chunk back at any time: a piece that used one is taken again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.buffers import large_pages
from pario.comm.memory import PAGE
from pario.decode.base import cached_bytes
from pario.errors import CorruptedError
from pario.feed.fill import Fill, begin_fill
from pario.feed.source import Ahead, Context, Piece, Source
from pario.fetch.checked import NONE_SEEN
from pario.kernels.pack import copy_ranges
from pario.options import READ_BYTES
from pario.plan.coalesce import coalesce
from pario.plan.stream import Work
from pario.records import Records
from pario.text import decimal_bytes
from pario.threads import Workers

_log = logging.getLogger("pario")

#: Records to look up at once: the calls then cost almost nothing. (3 KB, batches of 256: 25 us a batch with 2,048.)
_PLANNED = 16_384
#: Bytes that are read into scratch memory and decoded at once, so that they stay in a core's cache meanwhile.
_UNIT_BYTES = 1 << 20

#: Steps that are prepared at once, at most: a batch that is kept keeps the memory of all of them. (Large ones, which go
#: past the caches, two at once, ÷ one by one, records of 150 and 197 KB, 1, 2 and 4 ranks: 0.81 to 1.03.)
_AT_ONCE = 8

#: After this many seconds of waiting rank 0 says why: in "global" order that may take most of a first epoch.
_SAY_S = 20.0
_NOTHING = np.empty(0, np.uint8)


class Places(NamedTuple):
    """Records, one per row, i64[n] each: ids, extents, and the first and the last chunk of what they and their checks
    need."""

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def part(self, rows: slice) -> Places:
        return Places(*[column[rows] for column in self])


@dataclass(frozen=True, slots=True)
class _Share:
    """The records of consecutive steps from `first` on; step `first` + k begins at cuts[k]."""

    first: int
    cuts: list[int]
    places: Places
    rows: np.ndarray

    def part(self, step: int, steps: int) -> slice:
        """Where the records of these steps are."""
        k, last = step - self.first, len(self.cuts) - 1
        return slice(self.cuts[min(k, last)], self.cuts[min(k + steps, last)]) if k >= 0 else slice(0, 0)


@dataclass(slots=True)
class _Mark:
    """Of a piece: its records; and, if they are decoded out of the tier, the generation of their chunks, which must be
    the same afterwards, else -1."""

    places: Places
    before: int = -1


class Seat(Source):
    """The batches of one rank in one epoch, or in the rest of one. Several threads may call `prepare`.

    preparer : the threads that prepare batches
    own_kernels : only pario's kernels touch the records
    """

    def __init__(self, context: Context, work: Work, preparer: Workers, *, own_kernels: bool) -> None:
        super().__init__(context, work)
        reader, schedule = context.reader, work.schedule
        self._index, self._checked = reader.index, reader.checked
        self._decoder, self._held = context.decode.decoder, context.decode.held
        if schedule.pools is None:  # groups of the size of slots do not fit here
            schedule = replace(schedule, pieces=1, per_group=-(-_PLANNED // schedule.batch_size))
        elif schedule.pieces > 1:
            schedule = replace(schedule, pieces=1, per_group=1)
        self._schedule, self._order = schedule, work.order
        stage = reader.stage
        assert stage is not None  # choose.py has looked
        assert stage.memory is not None
        self._memory, self._local = stage.memory, stage.local
        self._said = context.world.rank != 0
        self._fill: Fill | None = None
        self._own_kernels = own_kernels
        if context.world.is_leader:
            self._fill = begin_fill(context, work, self._memory)
        self._shares: dict[int, _Share] = {}
        self._planning = threading.RLock()  # guards the shares
        self._scratch = threading.local()
        self.ahead = self._prepare_ahead(preparer)
        context.stats.reader = context.world.is_leader

    # -- preparing ahead -----------------------------------------------------------------------------------------------

    def _prepare_ahead(self, preparer: Workers) -> Ahead | None:
        """How to prepare batches in as much memory as the node's ring has, beside what the caller holds; sets how many
        steps may be prepared at once, and the memory for both."""
        context = self._context
        options, share, knob = context.options, context.share, context.decode.tuner.ahead
        self._held.held_bytes = options.held_bytes
        if self._decoder.parallel:
            return Ahead(preparer.call, knob)
        batch_bytes = self._batch_bytes
        if batch_bytes is None or 4 * batch_bytes > options.held_bytes:
            return None
        block_bytes = batch_bytes * 9 // 8 + 2 * PAGE
        if self._decoder.by_rows:
            room = min(options.held_bytes // 8, cached_bytes() // context.world.node_size)
            self.most_steps = max(1, min(_AT_ONCE, room // block_bytes))
            # Batches of the caller's block, and of the one before and behind it, do not count against its limit.
            self._held.held_bytes += 3 * self.most_steps * block_bytes
        # If ranks share cores, another thread would only take turns with this one.
        if share.crowded:
            return None
        knobs = context.reader.file.knobs
        knobs.acts("decode_ahead")
        room = options.slots * options.slot_bytes // context.world.node_size  # as far ahead as the ring would be
        most = max(1, min(knobs["decode_ahead"].most, room // max(1, batch_bytes)))
        # One per core, so that each thread has work. (Two threads on two cores that share the rows of a batch instead:
        # 4.0 to 6.8 GB/s with 197 KB records in batches of 6 to 13 MB, against 6.7 to 10.9.)
        least = min(most, share.threads, options.usual_inflight)
        # Batches prepared ahead do not count against the caller's limit: the same script must work when the file is
        # cold.
        self._held.held_bytes += (most + least * self.most_steps) * block_bytes
        return Ahead(preparer.call, knob, eager=False, least=least, most=most)

    @property
    def _batch_bytes(self) -> int | None:
        """The most memory of a full batch, arrays and ids; None where records are packed, of sizes still unknown."""
        largest: int | None = 0
        if not self._decoder.by_rows:
            chosen = self._context.stream.chosen
            figures = None if chosen is None else chosen.figures
            largest = self._index.largest_bytes if figures is None else figures.largest_bytes
        if largest is None:
            return None
        rest = np.zeros(self._schedule.batch_size * self.width, np.int64)
        shapes = self._decoder.shapes(Records(rest, _NOTHING, rest, rest + largest))
        return rest.nbytes + sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    # -- which records -------------------------------------------------------------------------------------------------

    def _places(self, step: int, steps: int) -> Places:
        """This rank's records of these steps, row by row."""
        first, stop = self._schedule.step_groups(step)
        if steps > 1 and (first + 1 < stop or self._schedule.step_groups(step + steps - 1) != (first, stop)):
            each = zip(*(self._places(k, 1) for k in range(step, step + steps)), strict=True)
            return Places(*map(np.concatenate, each))
        shares = [self._share(group, first) for group in range(first, stop)]
        if len(shares) == 1:
            return shares[0].places.part(shares[0].part(step, steps))
        rows = np.argsort(np.concatenate([share.rows[share.part(step, 1)] for share in shares]))
        columns = zip(*(share.places.part(share.part(step, 1)) for share in shares), strict=True)
        return Places(*(np.concatenate(column)[rows] for column in columns))

    def _share(self, group: int, oldest: int) -> _Share:
        """This rank's records of a group, which covers several steps. Keeps groups from `oldest` - 2 on, because
        several threads work on neighbouring steps."""
        with self._planning:
            share = self._shares.get(group)
            if share is None:
                ids, steps, rows = self._context.own_records(self._schedule, self._order, group)
                first = int(steps.min()) if len(steps) else 0
                steps -= first
                if self._schedule.pools is not None:  # by step and row, as in the other orders
                    most = self._schedule.batch_size * self.width
                    if self._schedule.is_even:
                        # (1,000,000 records of 100 bytes in "block" order: by lexsort 225 ms an epoch, so 165.)
                        number = np.full((int(steps.max(initial=0)) + 1) * most, -1)
                        number[steps * most + rows] = np.arange(len(ids))
                        by_row = number[number >= 0]
                    else:  # a few batches may have many times as many rows as the others
                        by_row = np.lexsort((rows, steps))
                    ids, rows = ids[by_row], rows[by_row]
                offsets, nbytes = self._index.extents_of(ids)
                chunks = self._memory.grid.ends_of(*self._checked.spans(offsets, nbytes))
                self._shares = {number: kept for number, kept in self._shares.items() if number >= oldest - 2}
                cuts = [0, *np.cumsum(np.bincount(steps)).tolist()]
                share = self._shares[group] = _Share(first, cuts, Places(ids, offsets, nbytes, *chunks), rows)
            return share

    # -- a piece -------------------------------------------------------------------------------------------------------

    def pieces(self, step: int, steps: int = 1) -> list[Piece]:
        """The whole step where the node's memory has it, or will have it; else parts that fit a core's cache."""
        begin = time.perf_counter()
        places = self._places(step, steps)
        rows, width, cuts = len(places.ids) // self.width, self.width, [0]
        if self._decoder.by_rows and not self._decoder.parallel and self._local and self._generation(places) < 0:
            through = np.cumsum(places.nbytes.reshape(-1, width).sum(axis=1)) // _UNIT_BYTES
            cuts += (np.flatnonzero(np.diff(through)) + 1).tolist()
        with self._counting:
            self._stats.locate += time.perf_counter() - begin
            self._stats.node_bytes += int(np.add.reduce(places.nbytes))
        if len(cuts) == 1:
            return [Piece(step, 0, 0, rows, True, _Mark(places))]
        edges = list(pairwise([*cuts, rows]))
        return [
            Piece(step, k, a, b, b == rows, _Mark(places.part(slice(a * width, b * width))))
            for k, (a, b) in enumerate(edges)
        ]

    def _generation(self, places: Places) -> int:
        """Of the chunks that hold these records; -1 if the tier has not all of them."""
        return self._memory.states.generation(places.first, places.last)

    def take(self, piece: Piece, check: Callable[[], None]) -> Records:
        check()
        mark: _Mark = piece.mark
        if self._local and self._memory.fill_end.left(self._stats.waiting):
            begin, steps = time.perf_counter(), self._schedule.steps - piece.step
            alone = steps * self._schedule.batch_size * self.width
            self._memory.fill_end.wait(mark.places.last, alone, self._stats.waiting, check)
            self._waited(begin)
        records = self._take_here(mark, check)
        if records is not None:
            return records
        mark.before = -1
        return self._take_scratch(mark.places, check)

    def _take_here(self, mark: _Mark, check: Callable[[], None]) -> Records | None:
        """Out of the tier's memory; None if a chunk is not there, and is not waited for."""
        memory, places = self._memory, mark.places
        if not self._local and self._generation(places) < 0:
            begin = time.perf_counter()
            chunks = memory.grid.chunks_at(*self._checked.spans(places.offsets, places.nbytes))
            memory.states.wait(chunks, self._saying(check))
            self._waited(begin)
        given = memory.states.given
        mark.before = self._generation(places)
        if mark.before < 0:
            return None
        records = Records(places.ids, memory.kernel_view, places.offsets, places.nbytes)
        # What is checked while chunks go is checked again when they are back.
        seen = memory.seen(given, self._index, self._index.n) if memory.states.given == given else NONE_SEEN
        try:
            self._checked.in_copy(records, places.offsets, seen)
        except CorruptedError:
            if self._generation(places) == mark.before:
                raise
            return None  # it was given back meanwhile
        return records if self._own_kernels else replace(records, data=memory.view)

    def release(self, piece: Piece) -> bool:
        mark: _Mark = piece.mark
        return mark.before < 0 or self._generation(mark.places) == mark.before

    # -- what is not in the tier ---------------------------------------------------------------------------------------

    def _take_scratch(self, places: Places, check: Callable[[], None]) -> Records:
        """Into this thread's memory: out of the tier what is there, the rest from the file, by one plan."""
        ids, offsets, nbytes, first, last = places
        begin = time.perf_counter()
        begins, lengths = self._checked.spans(offsets, nbytes)
        memory = self._memory
        generations = memory.states.generation_of_each(first, last)
        here = generations >= 0
        starts = np.empty(len(ids), np.int64)
        absent = np.flatnonzero(~here)
        pool = self._context.reader.file.pool
        fetcher = pool.fetcher
        plan = coalesce(
            begins[absent],
            lengths[absent],
            align=fetcher.align,
            gap_bytes=self._context.options.gap_bytes,
            read_bytes=READ_BYTES,
            file_bytes=fetcher.nbytes,
        )
        starts[absent] = plan.record_starts
        present = np.flatnonzero(here)
        # Congruent to their places in the file, as the others.
        room = (lengths[present] + 15) & -8
        ends = -(-plan.nbytes // 8) * 8 + np.cumsum(room)
        starts[present] = ends - room + begins[present] % 8
        data = self._scratch_memory(int(ends[-1]) if len(ends) else plan.nbytes, max(fetcher.align, 8))
        self._read(plan.reads, data, plan.starts, len(absent))
        if len(present):
            copied = np.ones(len(present), bool)
            copy_ranges(memory.kernel_view, begins[present], lengths[present], data, starts[present], copied)
            now = memory.states.generation_of_each(first[present], last[present])
            if not (copied & (now == generations[present])).all():  # given back meanwhile, and not yet copied again
                return self._take_scratch(places, check)
        starts += offsets - begins
        self._waited(begin)
        records = Records(ids, data, starts, nbytes)
        self._checked.records(records, offsets)
        return records

    def _read(self, reads: np.ndarray, data: np.ndarray, starts: np.ndarray, records: int) -> None:
        """What the page cache has, in this thread, and the rest by the threads that read."""
        if not len(reads):
            return
        pool, stats = self._context.reader.file.pool, self._stats
        begin = stats.begin_reads()
        try:
            left = ~pool.fetcher.read_now(reads, data, starts)
            if left.any():
                pool.read(reads[left], data, starts[left])
        finally:
            seconds = time.perf_counter() - begin
            stats.end_reads(seconds)
        self._memory.fill_end.record_s = seconds / records
        stats.count(len(reads), int(reads["nbytes"].sum()))

    def _scratch_memory(self, nbytes: int, align: int) -> np.ndarray:
        memory: np.ndarray = getattr(self._scratch, "memory", _NOTHING)
        if len(memory) < nbytes + align:
            memory = self._scratch.memory = large_pages(nbytes + align)
        return memory[-memory.ctypes.data % align :]

    def _waited(self, begin: float) -> None:
        with self._counting:
            self._stats.share += time.perf_counter() - begin

    def _saying(self, check: Callable[[], None]) -> Callable[[], None]:
        """`check`, which also says once that a long wait has a reason."""
        begin = time.perf_counter()

        def look() -> None:
            check()
            if not self._said and time.perf_counter() - begin > _SAY_S:
                self._said = True
                _log.info(
                    "%s: %s of it are in this node's memory, and the next batch needs more (docs/tiers.md)",
                    self._context.reader.path,
                    decimal_bytes(int(self._memory.held().sum()) * self._memory.grid.chunk_bytes),
                )

        return look

    # -- the end -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self._fill is not None and self._fill.error is not None:
            raise self._fill.error

    def wake(self) -> None:
        self._memory.states.wake()

    def close(self, limit_s: float = math.inf) -> bool:
        return self._fill is None or self._fill.cancel(limit_s)
