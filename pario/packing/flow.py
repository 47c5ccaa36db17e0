"""The order of the work: chunks of records, which ranks and their threads read and pack in turn, and one rank writes.

A round has one chunk for each thread of each rank, in the order of ranks. Threads work on the next rounds while the
calling thread sends this one to rank 0, whose writer is at the one before: so nobody waits while there is work, and
nothing runs further ahead than a few rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from pario.codec.packing import Packing
from pario.comm.base import AnyWorld, together
from pario.decode.base import columns
from pario.errors import ChecksumError, CorruptedError, SnapshotError
from pario.kernels.pack import copy_ranges
from pario.machine import allowed_cores, boot, my_share
from pario.packing.items import Items
from pario.packing.writer import Batch, Writer, split
from pario.records import Records
from pario.threads import Workers

#: called with the bytes done since the last call
Progress = Callable[[int], None]

#: Raw bytes of a chunk: enough that a round takes longer than its messages; less where many threads share a round.
_CHUNK, _LEAST_CHUNK = 4 << 20, 256 << 10
#: Raw bytes of a round of all ranks, and records of a chunk, that rank 0 is to hold.
_ROUND, _RECORDS = 256 << 20, 1 << 15
#: rounds that threads work on, or have done, before they are sent. (JSON of 0.3 KB, zstd:3, two cores, which the codec
#: alone packs 1.65 times as fast: a thread more changed nothing, an interpreter that switches threads after 1 ms in
#: place of 5 gained 3 %, but that setting belongs to the whole process.)
_AHEAD = 2


class Crew:
    """The threads of all ranks that pack, verify and unpack. Collective: all methods but `close`."""

    def __init__(self, world: AnyWorld) -> None:
        self.world = world
        shares = world.allgather((boot(), allowed_cores()))
        each = [my_share(rank, shares).threads for rank in range(world.size)]
        self.threads = each[world.rank]
        self._first = sum(each[: world.rank])  # this rank's first lane
        self._lanes = sum(each)
        # A transaction of an LMDB belongs to its thread.
        self._packers, self.writer = Workers("pario-pack", self.threads), Workers("pario-write", 1)

    def pack(self, items: Items, packing: Packing | None, begin: int, writer: Writer | None, moved: Progress) -> None:
        """Send the entries from `begin` on to the writer (rank 0's): records, packed, or as they are, or blocks."""
        world, sizes = self.world, entry_sizes(items, packing)
        rounds = self._rounds(sizes, begin)
        under_way: deque[tuple[int, list[Future[Batch]]]] = deque()

        def submit() -> None:
            chunks = next(rounds, None)
            if chunks is not None:
                mine = chunks[self._first : self._first + self.threads]
                raw = int(sizes[chunks[0][0] : chunks[-1][1]].sum())
                under_way.append((raw, [self._packers.call(_packed, items, packing, *chunk) for chunk in mine]))

        for _ in range(_AHEAD):
            submit()
        while under_way:
            raw, futures = under_way.popleft()
            ready: list[Batch] = []
            with together(world, "packing"):
                ready = [future.result() for future in futures]
                if writer is not None:
                    writer.check()
            submit()
            if world.size > 1:  # else copying them would cost 4 % of the processors' time
                parts = [part for batch in ready for part in batch.parts()]
                whole = world.gather_array(np.concatenate(parts) if parts else np.empty(0, np.uint8))
                ready = split(whole) if whole is not None else []
            with together(world, "writing"):
                if writer is not None:
                    writer.append(ready)
            moved(raw)
        with together(world, "writing"):
            if writer is not None:
                writer.flush()

    def compare(self, items: Items, others: Items, path: str, moved: Progress) -> None:
        """Raise unless these are the same records, keys and values. path : of the others

        What is wrong with the others all ranks raise, as a CorruptedError of that path; any other error as `together`.
        """
        wrong: CorruptedError | None = None
        with together(self.world, "verifying"):
            try:
                self._each(items, lambda begin, stop: _compare(items, others, path, begin, stop), moved)
            except CorruptedError as e:
                if e.path != path:
                    raise
                wrong = e
        first = next((e for e in self.world.allgather(wrong) if e is not None), None)
        if first is not None:
            raise self.world.raised_by_all(first)

    def each(self, items: Items, work: Callable[[int, int], None], moved: Progress, doing: str) -> None:
        """Call work(begin, stop) for chunks of the records, in threads of all ranks."""
        with together(self.world, doing):
            self._each(items, work, moved)

    def _each(self, items: Items, work: Callable[[int, int], None], moved: Progress) -> None:
        under_way: deque[tuple[int, Future[None]]] = deque()
        for chunks in self._rounds(items.sizes, 0):
            raw = int(items.sizes[chunks[0][0] : chunks[-1][1]].sum())
            for chunk in chunks[self._first : self._first + self.threads]:
                under_way.append((0, self._packers.call(work, *chunk)))
            if not under_way:
                continue
            under_way[-1] = (raw, under_way[-1][1])
            while len(under_way) > _AHEAD * self.threads:
                done, future = under_way.popleft()
                future.result()
                moved(done)
        for done, future in under_way:
            future.result()
            moved(done)

    def _rounds(self, sizes: np.ndarray, begin: int) -> Iterator[list[tuple[int, int]]]:
        """Lists of chunks (first record, behind the last one), one for each lane, fewer in the last round."""
        limit = min(_CHUNK, max(_LEAST_CHUNK, _ROUND // self._lanes))
        if begin < len(sizes):  # the last rounds of a small database are to be shared by all, too
            limit = min(limit, max(1 << 16, int(sizes[begin:].sum()) // (2 * self._lanes)))
        ends, chunks = np.cumsum(sizes), []
        while begin < len(sizes):
            before = int(ends[begin - 1]) if begin else 0
            stop = int(np.searchsorted(ends, before + limit, side="right"))
            stop = min(max(stop, begin + 1), begin + _RECORDS, len(sizes))
            chunks.append((begin, stop))
            begin = stop
            if len(chunks) == self._lanes:
                yield chunks
                chunks = []
        if chunks:
            yield chunks

    def close(self) -> None:
        """Waits for what runs."""
        self._packers.close(cancel=True)
        self.writer.close(cancel=True)


def entry_sizes(items: Items, packing: Packing | None) -> np.ndarray:
    """i64[entries], bytes of the values of each entry."""
    return items.sizes if packing is None or packing.counts is None else np.add.reduceat(items.sizes, packing.firsts)


def _packed(items: Items, packing: Packing | None, first: int, behind: int) -> Batch:
    begin, stop = first, behind
    if packing is not None and packing.counts is not None:
        counts = packing.counts[first:behind]
        begin = int(packing.firsts[first])
        stop = begin + int(counts.sum())
    records = items.read(np.arange(begin, stop))
    keys = items.keys(begin, stop)
    if len(records) != stop - begin or (records.nbytes != items.sizes[begin:stop]).any():
        raise SnapshotError("sizes of values changed while they were packed", record=begin)
    if packing is None:
        return Batch(keys, records.nbytes, _end_to_end(records))
    if packing.counts is None:
        data, _, nbytes = packing.pack_many(records)
    else:
        keys, data, nbytes = packing.pack_entries(records, keys, counts)
    return Batch(keys, nbytes, data)


def _compare(items: Items, others: Items, path: str, begin: int, stop: int) -> None:
    if items.keys(begin, stop) != others.keys(begin, stop):
        raise ChecksumError("keys of the new dataset are not those of its source", path=path, record=begin)
    ids = np.arange(begin, stop)
    wanted, found = items.read(ids), others.read(ids)
    # All at once: record by record the interpreter took two thirds of the time for values of 0.3 KB.
    if np.array_equal(wanted.nbytes, found.nbytes) and np.array_equal(_end_to_end(wanted), _end_to_end(found)):
        return
    for record, one, other in zip(ids.tolist(), wanted, found, strict=True):
        if not np.array_equal(one, other):
            raise ChecksumError("a value of the new dataset is not that of its source", path=path, record=record)


def _end_to_end(records: Records) -> np.ndarray:
    """u8[...]: the values, one after the other."""
    data, at, nbytes, _ = columns(records)
    ends, wanted = np.cumsum(nbytes), np.ones(len(nbytes), np.bool_)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    copy_ranges(data, at, nbytes, out, ends - nbytes, wanted)
    if not wanted.all():
        raise CorruptedError("a value does not lie inside of the bytes that were read")
    return out
