"""Own rows: a rank fills its batches straight from the page cache of its node, without the ring.

    ring       page cache --pread--> ring --decode, on another core--> batch        one rank reads for the node
    own rows   page cache --preadv--------------------------------> batch           large rows that need no decoding
               page cache --pread--> scratch --decode, same core--> batch           anything else

The ring brings long reads to a slow store and reads each byte once per node. Where the page cache does that as well,
the ring costs: a second copy, out of memory that another core has just written. So it is where the bytes are in memory
already, and on a disk of this node, whose reads the kernel can begin ahead of us (`suited`): its ranks share what it
brings, and nobody sleeps but for the disk. Here the thread that reads also decodes, out of its own cache, and where a
record holds its row as it is wanted (`Decoder.verbatim`), the kernel copies that row to its place in the batch and
nobody touches it again. What stands before and behind the row is checked; a record that looks different goes through
`Decoder.decode`.

Nothing here calls MPI, and the ranks of a node have nothing to tell each other: an error ends the rank's loop, which
tells the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Decoder
from pario.plan.schedule import node_share
from pario.records import Records

if TYPE_CHECKING:
    from pario.buffers import BatchBuffers
    from pario.decode.base import Draw, Failures, Verbatim
    from pario.fetch.posix import PosixFetcher
    from pario.locate.index import RecordIndex
    from pario.plan.epoch import Order
    from pario.plan.schedule import Schedule
    from pario.stats.rank import RankStats

__all__ = ["OwnRows", "suited", "suits"]

#: The node's page cache holds a file if it has this part of a sample of so many records. Leaf pages, which no epoch
#: reads, are not in the sample; a few pages that were dropped cost less than the way through the ring.
_HELD = 0.98
_SAMPLE = 256

#: Rows from this size on are read straight into the batch, wherever they lie. For 197 KB rows that took 25 us (a core's
#: time), through scratch memory 34 us, a memcpy out of a mapping 21 us; for 3 KB rows, one read each, 1.8 us against
#: 1.5 and 0.75. Smaller ones if they lie one behind the other, so that one read brings hundreds of them: 0.95 us
#: against 1.3 for 3 KB rows. (Values of less than half a page are inside of leaf pages, last one first.)
_STRAIGHT_BYTES = 16 << 10
#: ... if no more than this stands behind them.
_TAIL_BYTES = 64

#: Read and decoded at once through scratch memory, which so stays in a core's cache. From 128 KiB to 4 MiB made no
#: difference on a core with 2 MiB of level 2 and a large level 3; more only lets more of it fall out.
_UNIT_BYTES = 1 << 20
#: Between two looks whether the loop has ended, for rows that are read straight.
_STRAIGHT_UNIT_BYTES = 16 << 20

#: A rank that has its node for itself leaves smaller records in a shuffled order to the ring, whose long reads bring
#: many of them at once and whose threads need the interpreter less.
#: Of the rate of as many ranks with py-lmdb's loop, everything in memory, on 2 cores that had other work too (medians):
#:                        3 KB ring -> own rows                   197 KB ring -> own rows
#:                        key order     global        block       key order     global        block
#:              1 rank    1.43 -> 1.19  1.34 -> 0.93  1.63 -> 1.12  0.67 -> 1.22  0.58 -> 1.24  0.53 -> 0.97
#:              2 ranks   0.71 -> 0.98  0.88 -> 1.03                0.31 -> 0.75  0.27 -> 0.77
#:              8 ranks   0.79 -> 0.93  0.63 -> 0.85                0.32 -> 0.93  0.32 -> 0.92
_ALONE_BYTES = 16 << 10

#: Records in no order of the file are asked for one by one from this size on: a disk reads them nearly as fast as long
#: pieces. (197 KB at random, cold: 0.9 to 1.5 GB/s by advice from one thread, 1.2 GB/s by 8 threads past the cache.)
_SINGLE_BYTES = 64 << 10

#: A kernel that reads ahead less is told what to read.
_READ_AHEAD_BYTES = 4 << 20

#: Records with no more than this between them are one read: the bytes of a page cost less than another call.
_GAP_BYTES = 4096

#: Records whose places are looked up at once, where that needs no reading: the calls then cost next to nothing.
_PLANNED = 2048

_NOTHING = np.empty(0, np.uint8)


def suited(fetcher: PosixFetcher, index: RecordIndex, shuffle: bool | str, ranks: int, machines: int) -> str:
    """How the `ranks` of this node do well without the ring in an epoch of this order, "" if they do not:

    "ordered"   in key order, which is that of the file, on a disk of the only machine, whose kernel reads ahead
    "advised"   the same where the kernel does not, or would not since other machines want a part of it, and large
                records in a "global" order: the page cache is told what is read next
    "cached"    the node's page cache holds the records

    Where the sizes say nothing this looks at a sample of the places in the page cache; a cold file costs a few small
    reads.
    """
    small, ahead, ordered = index.mean_bytes < _ALONE_BYTES, fetcher.read_ahead_bytes, shuffle is False
    if ordered and machines == 1 and ahead >= _READ_AHEAD_BYTES and index.in_file_order:
        return "ordered"
    if ranks == 1 and small and not (ordered and ahead and index.in_file_order):
        return ""
    growing = index.growth is not None and not index.growth.is_complete
    if not growing:
        some = np.unique(np.linspace(0, index.n - 1, min(index.n, _SAMPLE)).astype(np.int64))
        share = fetcher.cached_share(index.places(some)["offset"], _HELD)
        if share is not None and share >= _HELD:
            return "cached"
    single = index.mean_bytes >= _SINGLE_BYTES and shuffle != "block"
    return "advised" if ahead and (single or (ordered and index.in_file_order)) else ""


def suits(decoder: Decoder) -> bool:
    """Is it of a kind that decodes a batch in one call, into arrays that depend on the number and sizes of the records
    alone? So are those that have an answer to `verbatim`, unless somebody's class changed what goes with it."""
    mine: Any = type(decoder)
    kind = next(base for base in mine.__mro__ if "verbatim" in vars(base))
    known = kind is not Decoder and mine.decode is kind.decode and mine.shapes is kind.shapes
    return known and not decoder.parallel and (decoder.by_rows or decoder.verbatim() is not None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch: record ids, where their values lie, the arrays' rows."""

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    arrays: dict[str, np.ndarray]

    def part(self, first: int, stop: int) -> _Rows:
        """Rows [first, stop)."""
        if stop - first == len(self.ids):
            return self
        rows = slice(first, stop)
        arrays = {name: array[rows] for name, array in self.arrays.items()}
        return _Rows(self.ids[rows], self.offsets[rows], self.nbytes[rows], arrays)


@dataclass(frozen=True, slots=True)
class _Places:
    """Some records: their ids, where their values lie, their rows in the batch."""

    ids: np.ndarray
    offsets: np.ndarray
    nbytes: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class _Share:
    """The records of some steps from `first` on, one step behind the other; step `first` + k begins at cuts[k]."""

    first: int
    cuts: list[int]
    places: _Places

    def step(self, step: int) -> _Places:
        k, last = step - self.first, len(self.cuts) - 1
        part = slice(self.cuts[min(k, last)], self.cuts[min(k + 1, last)]) if k >= 0 else slice(0, 0)
        all_of = self.places
        return _Places(all_of.ids[part], all_of.offsets[part], all_of.nbytes[part], all_of.rows[part])


class OwnRows:
    """The batches of one rank in one epoch, or in the rest of one. `prepare` may be called by several threads.

    schedule, order : of the epoch
    decoder : one that `suits`
    held : memory of the batches
    check_snapshot : called after bytes are there and before they are used; raises SnapshotError
    seat : of this rank
    stats : of this rank; gets the work of all threads together
    advise_bytes : of records behind a step that the page cache is told to bring when the step is prepared; 0: it is
        not told
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        order: Order,
        index: RecordIndex,
        fetcher: PosixFetcher,
        decoder: Decoder,
        held: BatchBuffers,
        check_snapshot: Callable[[], None],
        seat: int,
        stats: RankStats,
        advise_bytes: int = 0,
    ) -> None:
        known = index.growth is None or index.growth.is_complete
        if schedule.pools is None and known:  # what is for slots of the ring's size is not for us
            schedule = replace(schedule, pieces=1, per_group=-(-_PLANNED // schedule.batch_size))
        elif schedule.pieces > 1:
            schedule = replace(schedule, pieces=1, per_group=1)
        self._schedule = schedule
        self._order = order
        self._index = index
        self._by_offset = index.by_offset if order.space == "place" else None
        self._fetcher = fetcher
        self._decoder = decoder
        self._held = held
        self._check_snapshot = check_snapshot
        self._seat = seat
        self._stats = stats
        self._verbatim = decoder.verbatim()
        self._advise_bytes = advise_bytes
        self._advised: deque[tuple[int, int]] = deque()  # (step, bytes) behind the one that is prepared
        self._advised_step = 0  # the first one that the page cache was not told about
        self._shares: dict[int, _Share] = {}
        self._planning = threading.RLock()  # guards the four above
        self._counting = threading.Lock()  # guards the stats and the two below
        self._under_way = 0
        self._busy_since = 0.0
        self._scratch = threading.local()
        self._edge_starts = np.empty(0, np.int64)  # of what is read beside the rows, one behind the other

    @property
    def batch_bytes(self) -> int:
        """Memory of a full batch's arrays, at most. Not where records are packed while the index grows."""
        rest = np.zeros(self._schedule.batch_size, np.int64)
        sizes = rest if self._decoder.by_rows else rest + self._index.largest_bytes
        shapes = self._decoder.shapes(Records(rest, _NOTHING, rest, sizes))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    def prepare(
        self, step: int, check: Callable[[], None], draw: Draw
    ) -> tuple[dict[str, np.ndarray], np.ndarray, Failures]:
        """(arrays, i64[n] record ids, records that could not be decoded) of this rank's batch of one step.

        `check` is called now and then and may raise. Raises ReadError, CorruptedError, SnapshotError.
        """
        begin = time.perf_counter()
        places = self._places(step)
        ids, offsets, nbytes = places.ids.copy(), places.offsets, places.nbytes  # the ids are the caller's
        arrays = self._held.take(self._decoder.shapes(Records(ids, _NOTHING, offsets, nbytes)))
        batch = _Rows(ids, offsets, nbytes, arrays)
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
                failures += [(a + row, why) for row, why in self._read_and_decode(batch.part(a, b), draw)]
        return arrays, ids, failures

    def _straight_bytes(self, offsets: np.ndarray, total: int) -> int:
        """Records of how many bytes are worth reading straight, in a batch of these places and `total` bytes."""
        page = self._index.page_size
        dense = len(offsets) > 1 and 0 < offsets[-1] - offsets[0] < total + (len(offsets) + 8) * page
        return min(page // 2, _STRAIGHT_BYTES) if dense else _STRAIGHT_BYTES

    def _advise_behind(self, step: int) -> None:
        """Let the page cache bring the records of the next steps."""
        lead, advised = self._index.header_bytes, self._advised
        with self._planning:
            while advised and advised[0][0] <= step:
                advised.popleft()
            room = self._advise_bytes - sum(nbytes for _, nbytes in advised)
            while self._advised_step < self._schedule.steps:
                ahead = self._advised_step > step
                if ahead and advised and room <= 0:  # the step after this one in any case
                    break
                places = self._places(self._advised_step, step)
                self._fetcher.advise(places.offsets - lead, places.nbytes + lead, _GAP_BYTES)
                if ahead:
                    nbytes = int(places.nbytes.sum())
                    advised.append((self._advised_step, nbytes))
                    room -= nbytes
                self._advised_step += 1

    def _places(self, step: int, now: int | None = None) -> _Places:
        """This rank's records of a step, row by row; `now`: the step that is prepared, if that is another one."""
        first, stop = self._schedule.step_groups(step)
        oldest = first if now is None else self._schedule.step_groups(now)[0]
        parts = [self._share(group, oldest).step(step) for group in range(first, stop)]
        if len(parts) == 1:
            return parts[0]
        fields = [
            np.concatenate(some) for some in zip(*((p.ids, p.offsets, p.nbytes, p.rows) for p in parts), strict=True)
        ]
        by_row = np.argsort(fields[-1])
        return _Places(*(field[by_row] for field in fields))

    def _share(self, group: int, oldest: int) -> _Share:
        """This rank's records of a group: of several steps. Those from two before group `oldest` on are kept, since
        several threads work on steps that are close to each other."""
        with self._planning:
            share = self._shares.get(group)
            if share is None:
                numbers, steps, rows = node_share(self._schedule, self._order, group, self._seat, 1)
                if self._schedule.pools is not None:  # by step and row, as the others come
                    by_row = np.lexsort((rows, steps))
                    numbers, steps, rows = numbers[by_row], steps[by_row], rows[by_row]
                ids = numbers if self._by_offset is None else self._by_offset[numbers]
                if self._index.growth is not None and len(ids):
                    # Leaf after leaf: a place known for another reason tells not how many records are before it.
                    growth = self._index.growth
                    before = growth.reads, growth.bytes_read
                    growth.grow(int(ids.max()) + 1)
                    self._stats.count(growth.reads - before[0], growth.bytes_read - before[1])
                extents = self._index.places(ids)
                offsets, nbytes = (np.ascontiguousarray(extents[name]) for name in ("offset", "nbytes"))
                for old in [number for number in self._shares if number < oldest - 2]:
                    del self._shares[old]
                first = int(steps[0]) if len(steps) else 0
                cuts = [0, *np.cumsum(np.bincount(steps - first)).tolist()]
                share = self._shares[group] = _Share(first, cuts, _Places(ids, offsets, nbytes, rows))
            return share

    def _read_straight(self, some: _Rows, verbatim: Verbatim) -> list[tuple[int, int]]:
        """Fill rows by reads into them; [first, stop) of those rows whose records are not as `verbatim` says."""
        out = some.arrays[verbatim.name]
        lead, n, by_rows = self._index.header_bytes, len(some.ids), self._decoder.by_rows
        row = out[:1].nbytes if by_rows else -1
        edges = np.empty((n, lead + verbatim.head + _TAIL_BYTES), np.uint8)
        rows = out.reshape(-1).view(np.uint8)
        begin = self._read_begins()
        done = None
        try:
            done = self._fetcher.read_split(
                some.offsets - lead, some.nbytes, lead, verbatim.head, row, edges, _TAIL_BYTES, rows, _GAP_BYTES
            )
        finally:
            self._read_ends(begin, *(done or (0, 0)))
        if done is None:
            return [(0, n)]
        starts = self._edge_starts
        if len(starts) < n:
            starts = self._edge_starts = np.arange(n) * edges.shape[1] + lead
        rest = Records(some.ids, edges.reshape(-1), starts[:n], some.nbytes - row if by_rows else some.nbytes)
        self._check(rest, some)
        begin = time.perf_counter()
        odd = self._decoder.decode_rest(rest, some.arrays)
        with self._counting:
            self._stats.decode += time.perf_counter() - begin
        if 2 * len(odd) > n:  # written by another hand: no second try with the next rows
            self._verbatim = None
        return [(row, row + 1) for row in odd]

    def _read_and_decode(self, some: _Rows, draw: Draw) -> Failures:
        """Read into this thread's scratch memory, and decode from there."""
        lead = self._index.header_bytes
        most = int(some.nbytes.sum()) + len(some.nbytes) * (lead + _GAP_BYTES)
        scratch: np.ndarray = getattr(self._scratch, "memory", _NOTHING)
        if len(scratch) < most:
            scratch = self._scratch.memory = np.empty(most + most // 8, np.uint8)
        begin = self._read_begins()
        reads = read_bytes = 0
        try:
            starts, reads, read_bytes = self._fetcher.read_records(some.offsets, some.nbytes, lead, _GAP_BYTES, scratch)
        finally:
            self._read_ends(begin, reads, read_bytes)
        records = Records(some.ids, scratch, starts, some.nbytes)
        self._check(records, some)
        begin = time.perf_counter()
        failures = self._decoder.decode(records, some.arrays, draw)
        with self._counting:
            self._stats.decode += time.perf_counter() - begin
        return failures

    def _check(self, records: Records, some: _Rows) -> None:
        begin = time.perf_counter()
        # The snapshot first: when a writer overtook us, wrong headers are its work and not damage.
        self._check_snapshot()
        self._index.check_headers(records.data, records.starts, some.offsets, some.nbytes, some.ids)
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
            stats.reads += reads
            stats.bytes_read += nbytes
