"""`checksum`: read all records, and save a checksum of each."""

from __future__ import annotations

import os
import time

import numpy as np

from pario.comm.base import together
from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.dataset.reader import Reader
from pario.locate.sums import save_sums, sums_of
from pario.plan.shard import even_split

__all__ = ["checksum"]

#: Bytes of values that are read at once per rank, unless one value is larger.
CHUNK = 32 << 20


def checksum(path: str, db: str | None) -> int:
    """Collective over all ranks, which divide the records by their places in the file."""
    started = time.perf_counter()
    reader = Reader(path, db=db, progress=screen.progress("leaf pages", "page"))
    world, index = reader.world, reader.index
    begin, stop = even_split(index.n, world.size, world.rank)
    # Neighbours in the file make long reads.
    ids = np.arange(begin, stop) if index.by_offset is None else np.array(index.by_offset[begin:stop])
    mine = np.empty(len(ids), np.uint64)
    with together(world, "reading the records"):
        _sum_up(reader, ids, mine)
    everyones_ids, everyones = world.gather_array(ids), world.gather_array(mine)
    where = ""
    with together(world, "saving the checksums"):
        if world.rank == 0:
            assert everyones_ids is not None
            assert everyones is not None
            sums = np.empty(index.n, np.uint64)
            sums[everyones_ids] = everyones
            (file,) = reader.file.pool.fetcher.files
            where = save_sums(index.database, file.status(), sums)
    took = seconds(time.perf_counter() - started)
    screen.say(f"{reader.path}: {counted(index.n, 'record')} read in {took} on {counted(world.size, 'rank')}")
    if where:
        screen.say(f"checksums saved as {where} ({decimal_bytes(os.path.getsize(where))})")
    reader.close()
    return 0


def _sum_up(reader: Reader, ids: np.ndarray, sums: np.ndarray) -> None:
    """sums u64[k] = the checksums of the records ids i64[k]."""
    ends = np.cumsum(reader.index.extents_of(ids)[1])
    bar = screen.bar(int(ends[-1]) if len(ends) else 0, "values", "B")
    at = 0
    while at < len(ids):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        sums[at:stop] = sums_of(reader.read_stored(ids[at:stop]))
        bar.update(int(ends[stop - 1]) - bar.n)
        at = stop
    screen.end_bar()
