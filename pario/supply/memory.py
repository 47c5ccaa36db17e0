"""The source of a rank that decodes its records straight out of the node's memory tier.

    first rank of the node, threads   chunks, in the order of their first use --> memory tier      (stage/fill.py)
    every rank                        wait for the chunks of a step; check, decode out of the tier's memory --> batch

There is one copy between the tier and the batch, no system call per record, and no communication but through the tier.
The tier may give a chunk back at any time: a step that used one is decoded again, from what the fetcher delivers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from pario.comm.farewell import describe
from pario.errors import CorruptedError, RankError
from pario.plan.stream import Work
from pario.records import Records
from pario.stage.fill import Filler
from pario.stage.memory import MemoryTier
from pario.supply.base import Ahead, Context, Parts
from pario.supply.seat import Places, SeatSource
from pario.text import decimal_bytes
from pario.threads import Workers

__all__ = ["MemorySource"]

_log = logging.getLogger("pario")

#: Batches of this size are prepared by several threads even if the caller does nothing else: their bytes take longer
#: than the interpreter, whose lock the threads share. (Epochs of an idle caller, one thread -> two on two cores: 197 KB
#: records, 12 MB a batch, 0.28 -> 0.22 s in all orders; 3 KB, 0.8 MB a batch, 0.55 to 0.76 -> 0.76 to 1.05 s.)
_LARGE_BATCH_BYTES = 4 << 20

#: A rank that waits for a chunk looks so often whether the others still live, in seconds.
_LOOK_S = 0.2
#: After so many seconds of waiting rank 0 says why: in "global" order that may take most of a first epoch.
_SAY_S = 20.0


class MemorySource(SeatSource):
    """The batches of one rank in one epoch, or in the rest of one.

    memory : the tier, which is to hold all records; filled by the node's first rank
    preparer : the threads that prepare batches
    own_kernels : only pario's kernels touch the records
    """

    def __init__(
        self, context: Context, work: Work, memory: MemoryTier, preparer: Workers, *, own_kernels: bool
    ) -> None:
        super().__init__(context, work)
        self._context = context
        self._memory = memory
        self._said = context.world.rank != 0
        self._view = memory.kernel_view if own_kernels else memory.view
        self._states = memory.states
        self._reader = context.reader
        self._filler = self._fill(work) if context.world.is_leader else None
        if not context.decode.decoder.parallel:
            self.ahead = ahead = self.ahead_of(context, preparer)
            if ahead is not None and ahead.least > 1 and (self.batch_bytes or 0) >= _LARGE_BATCH_BYTES:
                self.ahead = replace(ahead, eager=True)
        else:
            self._held.held_bytes = context.options.held_bytes
            self.ahead = Ahead(preparer.call, context.decode.tuner.ahead)
        context.stats.reader, context.stats.own = self._filler is not None, False

    def _fill(self, work: Work) -> Filler | None:
        context, memory, reader = self._context, self._memory, self._reader
        stage, held = reader.stage, memory.held()
        assert stage is not None
        assert stage.fetcher is not None  # the node's first rank has opened the file
        used = stage.used(self._index, self._checked)
        for chunk in np.setdiff1d(np.flatnonzero(held), used).tolist():  # they would take the room of others
            memory.give_back(chunk)
        if held[used].all():
            memory.say_whole(used)
            memory.announce(False)
            return None

        def failed(error: BaseException) -> None:
            if not isinstance(error, RankError):  # the others already know errors of another rank
                context.ring.fail(context.world.rank, describe(error))

        chunks = self._first_uses(work, held)
        inflight, usual = reader.file.knobs["inflight"], context.options.usual_inflight
        if inflight.value < usual:  # chunks are longer than the reads that begin with one or two in flight
            inflight.turn(usual, "nothing is measured yet")
        return Filler(stage.fetcher, memory, chunks, used, inflight=inflight, stats=context.stats, failed=failed)

    def _first_uses(self, work: Work, seen: np.ndarray) -> Iterator[int]:
        """The chunks of this node's records that are not in `seen`, in the order of their first use. Those of a group
        come in file order, which makes long reads of neighbours."""
        index, grid = self._index, self._memory.grid
        schedule = work.schedule
        for group in range(schedule.groups):
            ids, _, _ = self._context.node_records(schedule, work.order, group)
            offsets, nbytes = index.extents_of(ids)
            begins, lengths = self._checked.spans(offsets, nbytes)
            for chunk in grid.chunks_at(begins, lengths).tolist():
                if not seen[chunk]:
                    seen[chunk] = True
                    yield chunk

    def prepare(self, step: int, check: Callable[[], None]) -> Parts:
        check()
        begin = time.perf_counter()
        places = self._places(step)
        offsets, nbytes = places.offsets, places.nbytes
        located = waited = time.perf_counter()
        if self._states.whole() is not None:
            parts = self._decode_here(places, self._states.whole)
        else:
            begins, lengths = self._checked.spans(offsets, nbytes)
            chunks = self._memory.grid.chunks_at(begins, lengths)
            self._states.wait(chunks, self._saying(check), _LOOK_S)
            waited = time.perf_counter()
            parts = self._decode_here(places, lambda: self._states.generations(chunks))
        if parts is None:  # the tier has given a chunk back, or had no room for it
            parts = self._decoded(self._reader.read_stored(places.ids, self._stats, verify=False))
        with self._counting:
            self._stats.locate += located - begin
            self._stats.share += waited - located
            self._stats.decode += time.perf_counter() - waited
            self._stats.node_bytes += int(nbytes.sum())
        return parts

    def _decoded(self, records: Records) -> Parts:
        decode = self._context.decode
        arrays, ids = decode.arrays(records, len(records) // self._width)
        ids[:] = records.ids[:: self._width]
        return Parts(arrays, ids, decode.decode(records, arrays, self._draw))

    def _saying(self, check: Callable[[], None]) -> Callable[[], None]:
        """`check`, which also says once that a long wait has a reason."""
        begin = time.perf_counter()

        def look() -> None:
            check()
            if not self._said and time.perf_counter() - begin > _SAY_S:
                self._said = True
                _log.info(
                    "%s: %s of it are in this node's memory, and the next batch needs more (docs/tiers.md)",
                    self._reader.path,
                    decimal_bytes(int(self._memory.held().sum()) * self._memory.grid.chunk_bytes),
                )

        return look

    def _decode_here(self, places: Places, state: Callable[[], object]) -> Parts | None:
        """Decode out of the tier's memory; None if it gave back a chunk meanwhile.

        state : of the chunks, the same before and after if nothing happened to them; None: one is not there
        """
        before = state()
        if before is None:
            return None
        error: CorruptedError | None = None
        parts: Parts | None = None
        try:
            data = self._memory.kernel_view
            self._checked.in_copy(data, places.offsets, places.offsets, places.nbytes, places.ids)
            # The arrays, too, depend on what is in the memory where values are packed.
            parts = self._decoded(Records(places.ids, self._view, places.offsets, places.nbytes))
        except CorruptedError as e:
            error = e
        if state() != before:
            return None
        if error is not None:
            raise error
        return parts

    def check(self) -> None:
        if self._filler is not None and self._filler.error is not None:
            raise self._filler.error

    def wake(self) -> None:
        self._states.wake()

    def end(self, limit_s: float = math.inf) -> bool:
        return self._filler is None or self._filler.stop(limit_s)
