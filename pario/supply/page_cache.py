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

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.decode.base import Failures, Verbatim
from pario.fetch.base import Compare, Form
from pario.plan.stream import Work
from pario.records import Records
from pario.supply.base import Ahead, Context, Parts
from pario.supply.seat import NOTHING, Places, SeatSource
from pario.threads import Workers

__all__ = ["PageCacheSource"]

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
#: Packed bytes that one thread reads and unpacks at once: what it has read stays in a core's second cache until then.
_PACKED_UNIT_BYTES = 4 << 20
#: Batches that are prepared ahead for so many threads, if they are small.
_MOST_AHEAD = 64
#: Bytes between two checks whether the loop has ended, for rows that are read straight.
_STRAIGHT_UNIT_BYTES = 16 << 20


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


class PageCacheSource(SeatSource):
    """The batches of one rank in one epoch, or in the rest of one.

    way : a result of `choose.page_cache_way`
    preparer : the threads that prepare batches; packed values have others
    """

    def __init__(self, context: Context, work: Work, way: str, preparer: Workers) -> None:
        super().__init__(context, work)
        self._fetcher = context.reader.file.pool.fetcher
        assert self._fetcher.rows is not None  # as choose.py makes sure
        self._rows = self._fetcher.rows
        self._decode = context.decode
        self._workers = context.decode.workers
        self._sums = context.decode.sums
        self._gap_bytes = context.options.gap_bytes
        self._verbatim = self._decoder.verbatim()
        self._advise_bytes = self._ahead_bytes if way == "advised" else 0
        self._advised: deque[tuple[int, int]] = deque()  # (step, bytes) behind the one that is prepared
        self._advised_step = 0  # the first step without advice yet; `_planning` guards both
        # guarded by `_counting`
        self._under_way = 0
        self._busy_since = 0.0
        self._decoding = 0
        self._decoding_since = 0.0
        self._scratch = threading.local()
        self._edge_starts = np.empty(0, np.int64)  # offsets of the bytes that are read beside the rows
        self.ahead = self.ahead_of(context, preparer) if self._workers is None else self._unpacking_ahead(context)
        context.stats.reader = context.stats.own = True

    def prepare(self, step: int, check: Callable[[], None]) -> Parts:
        begin = time.perf_counter()
        places = self._places(step)
        if self._workers is not None:
            return self._prepare_in_parts(step, places, check)
        ids, offsets, nbytes = places.ids.copy(), places.offsets, places.nbytes  # the ids are the caller's
        arrays = self._held.take(self._decoder.shapes(Records(ids, NOTHING, offsets, nbytes)))
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
                straight, wrong = self._read_straight(batch.part(first, stop), verbatim)
                left = [(first + a, first + b) for a, b in straight]
                failures += [(first + row, why) for row, why in wrong]
            for a, b in left:
                failures += [(a + row, why) for row, why in self._read_and_decode(batch.part(a, b))]
        return Parts(arrays, ids, failures)

    # -- packed values: threads that read, unpack and decode ----------------------------------------------------------

    def _unpacking_ahead(self, context: Context) -> Ahead:
        """The decoder's threads prepare whole batches, and the parts of a large one together."""
        assert self._workers is not None  # the caller has looked
        self._held.held_bytes = context.options.held_bytes
        records = self._schedule.batch_size * self._width
        parts = max(1, int(records * self._index.mean_bytes) // _PACKED_UNIT_BYTES)
        # One more than they are at: the caller asks for the next one when it has one.
        least = min(_MOST_AHEAD, 1 + -(-context.decode.tuner.threads.value // parts))
        return Ahead(self._workers.call, context.decode.tuner.ahead, least=least)

    def _prepare_in_parts(self, step: int, places: Places, check: Callable[[], None]) -> Parts:
        decode, workers = self._decode, self._workers
        assert workers is not None  # the caller has looked
        if self._advise_bytes:
            self._advise_behind(step)
        total = int(places.nbytes.sum())
        with self._counting:
            self._stats.node_bytes += total
        n = len(places.ids)
        failures: Failures = []
        cuts = _even_cuts(places.nbytes, total, _PACKED_UNIT_BYTES)
        records = Records(places.ids, NOTHING, places.offsets, places.nbytes)
        if not self._decoder.by_rows:  # where a value begins follows from the sizes of those before, in their headers
            begin = time.perf_counter()
            records = self._read_checked(places.ids, places.offsets, places.nbytes)
            decode.spent(time.perf_counter() - begin)
        arrays, ids = decode.arrays(records, n)
        ids[:] = places.ids
        parts = [(records, arrays)] if len(cuts) == 2 else self._decoder.parts(records, arrays, cuts)

        def work(first: int, part: Records, rows: dict[str, np.ndarray]) -> None:
            begin = time.perf_counter()
            try:
                check()
                if self._decoder.by_rows:
                    part = self._read_checked(part.ids, part.starts, part.nbytes)
                failures.extend((first + row, why) for row, why in self._decoded(part, rows))
            finally:
                decode.spent(time.perf_counter() - begin)

        workers.share(work, [(cuts[k], *part) for k, part in enumerate(parts)], decode.tuner.threads.value)
        return Parts(arrays, ids, sorted(failures))

    # -- other values: read straight, or decoded by one call -----------------------------------------------------------

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

    def _read_straight(self, batch: _Rows, verbatim: Verbatim) -> tuple[list[tuple[int, int]], Failures]:
        """Read straight into rows; returns [first, stop) of the rows whose records do not have the layout of
        `verbatim` and must be decoded, and the failures among the others."""
        out = batch.arrays[verbatim.name]
        lead, n, by_rows = self._index.header_bytes, len(batch.ids), self._decoder.by_rows
        row = out[:1].nbytes if by_rows else -1
        form = Form(lead, verbatim.head, row, _TAIL_BYTES)
        edges = np.empty((n, lead + verbatim.head + _TAIL_BYTES), np.uint8)
        rows = out.reshape(-1).view(np.uint8)
        sums, compare = self._sums, None
        if sums is not None:
            compare = Compare(batch.ids, sums.values, np.zeros(n, np.bool_))
        begin = self._read_begins()
        done = None
        try:
            begins = batch.offsets - lead
            done = self._rows.read_split(begins, batch.nbytes, form, self._gap_bytes, edges, rows, compare)
        finally:
            self._read_ends(begin, *(done or (0, 0)))
        if done is None:
            return [(0, n)], []
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
        failures: Failures = []
        again = odd
        if sums is not None and compare is not None and compare.wrong.any():
            wrong = np.flatnonzero(compare.wrong).tolist()
            if by_rows:  # read once more, to be compared again where records are decoded
                again = sorted({*odd, *wrong})
            else:
                failures = sums.failures(_packed(batch.ids, rows, batch.nbytes))
        return [(row, row + 1) for row in again], failures

    def _read_and_decode(self, batch: _Rows) -> Failures:
        """Read into this thread's scratch memory and decode from there."""
        records = self._read_checked(batch.ids, batch.offsets, batch.nbytes)
        return self._decoded(records, batch.arrays)

    def _decoded(self, records: Records, arrays: dict[str, np.ndarray]) -> Failures:
        with self._counting:
            if not self._decoding:
                self._decoding_since = time.perf_counter()
            self._decoding += 1
        try:
            return self._decode.decode_here(records, arrays, self._draw)
        finally:
            with self._counting:
                self._decoding -= 1
                now = time.perf_counter()
                self._stats.decode += now - self._decoding_since
                self._decoding_since = now

    def _read_checked(self, ids: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray) -> Records:
        """Read values into this thread's scratch memory, with what their checks need, and check them."""
        begins, lengths = self._checked.spans(offsets, nbytes)
        scratch: np.ndarray = getattr(self._scratch, "memory", NOTHING)
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


def _even_cuts(nbytes: np.ndarray, total: int, each: int) -> list[int]:
    """Where to cut records of these sizes into parts of about equally many bytes, of at most about `each`: ascending,
    with both ends."""
    parts = min(-(-total // each), len(nbytes))
    if parts < 2:
        return [0, len(nbytes)]
    inner = np.searchsorted(np.cumsum(nbytes), total * np.arange(1, parts) / parts)
    return np.unique([0, *inner.tolist(), len(nbytes)]).tolist()


def _packed(ids: np.ndarray, data: np.ndarray, nbytes: np.ndarray) -> Records:
    """The values of a batch that lie in `data` u8[...] one after the other."""
    return Records(ids, data, np.cumsum(nbytes) - nbytes, nbytes)
