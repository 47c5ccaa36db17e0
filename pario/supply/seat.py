"""The part that all sources share whose ranks fill their batches themselves, without the node's ring."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pario.comm.memory import PAGE
from pario.decode.base import Draw
from pario.plan.stream import Work
from pario.records import Records
from pario.supply.base import Ahead, Context, Source
from pario.threads import Workers

__all__ = ["NOTHING", "Places", "SeatSource"]

#: Fewer threads than this do not repay their context switches when the caller is idle. (Two on two cores: 1.04 of
#: py-lmdb's rate against 1.00 with 197 KB rows in memory.)
_MANY_AHEAD = 4

#: Records to look up at once, if that needs no reading: the calls then cost almost nothing.
_PLANNED = 2048

NOTHING = np.empty(0, np.uint8)


class Places(NamedTuple):
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
    places: Places

    def step(self, step: int) -> Places:
        k, last = step - self.first, len(self.cuts) - 1
        part = slice(self.cuts[min(k, last)], self.cuts[min(k + 1, last)]) if k >= 0 else slice(0, 0)
        ids, offsets, nbytes, rows, large = self.places
        return Places(ids[part], offsets[part], nbytes[part], rows[part], large)


class SeatSource(Source):
    """Knows which records belong to this rank's steps, where they lie, and how many steps to prepare ahead. Several
    threads may call `prepare`; the context's stats count the work of all of them."""

    def __init__(self, context: Context, work: Work) -> None:
        reader, options, schedule = context.reader, context.options, work.schedule
        self._index = index = reader.index
        self._decoder = context.decode.decoder
        if schedule.pools is None and index.is_complete:  # groups of the size of slots do not fit here
            schedule = replace(schedule, pieces=1, per_group=-(-_PLANNED // schedule.batch_size))
        elif schedule.pieces > 1:
            schedule = replace(schedule, pieces=1, per_group=1)
        self._schedule = schedule
        self._order = work.order
        self._width = context.width
        self._own_records = context.own_records
        chosen = work.stream.chosen
        self._figures = chosen.figures if chosen is not None else None
        self._draw = Draw(work.stream.seed, work.epoch, reader.keys)
        self._held = context.decode.held
        self._checked = reader.checked
        self._stats = context.stats
        # As far ahead as the ring would be.
        self._ahead_bytes = options.slots * options.slot_bytes // context.world.node_size
        self._shares: dict[int, _Share] = {}
        self._planning = threading.RLock()  # guards the shares
        self._counting = threading.Lock()  # guards the stats

    def ahead_of(self, context: Context, preparer: Workers) -> Ahead | None:
        """How to prepare batches in as much memory as the node's ring has, beside what the caller holds.

        preparer : a thread for each core that this rank may use
        """
        options, share, batch_bytes = context.options, context.share, self.batch_bytes
        self._held.held_bytes = options.held_bytes
        # If ranks share cores, another thread would only take turns with this one.
        if share.crowded or batch_bytes is None or 4 * batch_bytes > options.held_bytes:
            return None
        knobs = context.reader.file.knobs
        knobs.acts("decode_ahead")
        most = max(1, min(knobs["decode_ahead"].most, self._ahead_bytes // batch_bytes))
        # One per core, so that each thread has work.
        least = min(most, share.threads, options.usual_inflight)
        # Batches prepared ahead do not count against the caller's limit: the same script must work when the file is
        # cold.
        self._held.held_bytes += most * (batch_bytes * 9 // 8 + 2 * PAGE)
        ahead = context.decode.tuner.ahead
        return Ahead(preparer.call, ahead, eager=least >= _MANY_AHEAD, least=least, most=most)

    @property
    def batch_bytes(self) -> int | None:
        """The most memory of a full batch's arrays; None if records are packed and their sizes are still unknown."""
        largest: int | None = 0
        if not self._decoder.by_rows:
            largest = self._index.largest_bytes if self._figures is None else self._figures.largest_bytes
        if largest is None:
            return None
        rest = np.zeros(self._schedule.batch_size * self._width, np.int64)
        shapes = self._decoder.shapes(Records(rest, NOTHING, rest, rest + largest))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    def _places(self, step: int, now: int | None = None) -> Places:
        """This rank's records of a step, row by row; `now`: the step in preparation, if that is another one."""
        first, stop = self._schedule.step_groups(step)
        oldest = first if now is None else self._schedule.step_groups(now)[0]
        parts = [self._share(group, oldest).step(step) for group in range(first, stop)]
        if len(parts) == 1:
            return parts[0]
        columns = zip(*((part.ids, part.offsets, part.nbytes, part.rows) for part in parts), strict=True)
        ids, offsets, nbytes, rows = (np.concatenate(column) for column in columns)
        order = np.argsort(rows)
        return Places(ids[order], offsets[order], nbytes[order], rows[order], all(part.large for part in parts))

    def _share(self, group: int, oldest: int) -> _Share:
        """This rank's records of a group, which covers several steps. Keeps groups from `oldest` - 2 on, because
        several threads work on neighbouring steps."""
        with self._planning:
            share = self._shares.get(group)
            if share is None:
                ids, steps, rows = self._own_records(self._schedule, self._order, group)
                if self._schedule.pools is not None:  # by step and row, as in the other orders
                    by_row = np.lexsort((rows, steps))
                    ids, steps, rows = ids[by_row], steps[by_row], rows[by_row]
                self._index.reach(ids, self._stats)
                offsets, nbytes = self._index.extents_of(ids)
                large = self._checked.are_large(nbytes)  # here, where one call looks at the records of many steps
                for old in [number for number in self._shares if number < oldest - 2]:
                    del self._shares[old]
                first = int(steps[0]) if len(steps) else 0
                cuts = [0, *np.cumsum(np.bincount(steps - first)).tolist()]
                share = self._shares[group] = _Share(first, cuts, Places(ids, offsets, nbytes, rows, large))
            return share
