"""Begins the filling of a node's memory tier, in the order in which an epoch needs its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from pario.comm.farewell import describe
from pario.errors import RankError
from pario.feed.source import Context
from pario.fetch.joined import bases_of
from pario.plan.stream import Work
from pario.tiers.fill import Filler
from pario.tiers.local_fill import LocalFill, can_compare
from pario.tiers.memory import MemoryTier

#: A filling under way.
Fill = Filler | LocalFill


def begin_fill(context: Context, work: Work, memory: MemoryTier) -> Fill | None:
    """Let threads bring the chunks of this node's records that are absent; None if there are none. On the node's first
    rank."""
    reader, held = context.reader, memory.held()
    stage, index = reader.stage, reader.index
    assert stage is not None
    used = stage.used(index, reader.checked)
    # Those without records of this epoch take room. (With setdiff1d an epoch begins in 0.58 ms, so in 0.37.)
    memory.give_back(np.flatnonzero(held & (np.bincount(used, minlength=len(held)) == 0)))
    if held[used if stage.needed is None else stage.needed].all():
        memory.announce(False)
        return None

    def failed(error: BaseException) -> None:
        if not isinstance(error, RankError):  # the others already know errors of another rank
            context.ring.fail(context.world.rank, describe(error))

    chunks, usual = _first_uses(context, work, memory, held, used), context.options.usual_inflight
    if stage.local and stage.is_plain and can_compare(reader.file.fetchers, reader.snapshots):
        bases = bases_of([snapshot.file_bytes for snapshot in reader.snapshots]).tolist()
        files = list(zip(reader.file.fetchers, reader.snapshots, bases, strict=True))
        counts = context.stats, stage.count
        return LocalFill(files, memory, chunks, used, threads=usual, counts=counts, failed=failed)
    assert stage.fetcher is not None  # the node's first rank has opened the file
    reader.file.knob.at_least(usual)  # chunks are longer than the reads of the start
    order = chain.from_iterable(map(np.ndarray.tolist, chunks))
    return Filler(reader.file.pool, stage.fetcher, memory, order, stats=context.stats, failed=failed)


def _first_uses(
    context: Context, work: Work, memory: MemoryTier, seen: np.ndarray, used: np.ndarray
) -> Iterator[np.ndarray]:
    """The chunks of this node's records that are not in `seen`, in the order of their first use, i64[n] of a group at a
    time. Those come in file order, which makes long reads of neighbours."""
    index, checked, grid = context.reader.index, context.reader.checked, memory.grid
    schedule, left, needed = work.schedule, int((~seen[used]).sum()), np.zeros(len(seen), bool)
    for group in range(schedule.groups):
        if not left:
            return
        ids, _, _ = context.node_records(schedule, work.order, group)
        offsets, nbytes = index.extents_of(ids)
        chunks = grid.chunks_at(*checked.spans(offsets, nbytes))
        needed[chunks] = True
        fresh = chunks[~seen[chunks]]
        seen[fresh] = True
        left -= len(fresh)
        yield fresh
    # In key order no epoch needs the rest, and a filling that looks for it would begin in each.
    if context.world.nodes == 1 and not context.options.once:  # of what is dropped, or was read before this was resumed
        yield used[~seen[used]]
    elif work.stream.repeats and not work.start:  # of other nodes
        assert context.reader.stage is not None
        context.reader.stage.needed = np.flatnonzero(needed)
