"""LMDBIO's ways of reading: through the node's ring, but in the reading rank's own thread, when a group is asked for.

One read at a time is in flight. The reading rank waits for it and, if the recipe has turns, for its turn among the
readers of other nodes (`stagger.py`). All ranks must leave a loop at the same step, because a rank that has left reads
no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.errors import ParioError
from pario.plan.coalesce import Reads, span_reads
from pario.plan.stream import Work
from pario.recipes.stagger import Stagger
from pario.supply.base import Context, Source, Supply
from pario.supply.first_epoch import FirstEpochWriter
from pario.supply.ring_reader import RingReader
from pario.supply.ring_writer import RingWriter

__all__ = ["Synchronous"]


class Synchronous(Supply):
    """Sources that read a group when it is asked for. If readers take turns, `source` is collective and `prepare` may
    send messages, only in the thread that takes the batches."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        wanted = context.reader.recipe.stagger
        self._stagger = None if wanted is None else Stagger(context.world, context.reader.file.feeder, wanted)

    def source(self, work: Work, way: str) -> Source:
        context, writer = self.context, None
        if context.reader.file.feeder is not None:
            known = context.reader.index.sizes_known
            writer = AskedWriter(context, work) if known else FirstEpochAsked(context, work)
        if self._stagger is not None and work.schedule.groups:
            turns = self._stagger.turns(writer.try_read if writer is not None else None, work.schedule.groups)
            if writer is not None:
                writer.turns = turns
        return AskingReader(context, work, writer, self._stagger)

    def settle(self, work: Work | None = None, way: str = "") -> None:
        if self._stagger is not None:
            self._stagger.settle()

    def stats(self) -> dict[str, Any]:
        """After the start of the first loop: how many readers read at once, and the seconds of each number that the
        trial tested."""
        return {} if self._stagger is None else self._stagger.stats()


class AskedWriter(RingWriter):
    """Reads a group when this rank's loop, or that of another rank of the node, asks for it.

    turns : this rank reads when the readers before it have finished; set before the first group
    """

    turns: Any = None
    _paced = False

    def __init__(self, context: Context, work: Work, base: int = 0) -> None:
        super().__init__(context, work, base)
        self._span = context.reader.recipe.span

    def _merge_steps(self, begins: np.ndarray, nbytes: np.ndarray, steps: np.ndarray) -> Reads:
        """With `Recipe.span`: one read from a step's first record to its last."""
        if not self._span:
            return super()._merge_steps(begins, nbytes, steps)
        # In a block order the neighbours are those of the pool, whatever their steps.
        runs = steps if self._schedule.pools is None else np.zeros(len(steps), np.int64)
        return self._merge(span_reads, begins, nbytes, runs, capacity=self._slots.slot_bytes)

    def bring(self, j: int, check: Callable[[], None]) -> None:
        """Read group j now, in this thread, if it is this rank's to read; calls `check` while it waits."""
        feeder, feeders = self._shares
        if j % feeders != feeder:
            return
        try:
            self._bring(j, check)
            self._in_flight.forget()
        except BaseException as e:
            self._fail(e)
            raise

    def _bring(self, j: int, check: Callable[[], None]) -> None:
        group = self._plan(j)
        self._wait_slot(j, check)
        data = self._lay_out(group)
        if self.turns is not None:
            begin = time.perf_counter()
            self.turns.wait(j)
            self.stats.turn += time.perf_counter() - begin
        begin = self._in_flight.begin()
        self._pool.fetcher.read(group.reads.reads, data, group.reads.starts)
        seconds = time.perf_counter() - begin
        if self.turns is not None:
            self.turns.pass_on(j)
        self._check(group, data)
        self._publish(group, seconds)

    def try_read(self, j: int) -> None:
        """Read group j into the memory of slot 0 and discard it: between two epochs, to measure the time."""
        reads = self._plan(j).reads
        self._pool.fetcher.read(reads.reads, self._slots.data[0], reads.starts)


class FirstEpochAsked(FirstEpochWriter, AskedWriter):
    """While the index grows: guesses, or leaves read ahead, as `Recipe.locate` says."""

    def __init__(self, context: Context, work: Work) -> None:
        super().__init__(context, work, guess=context.reader.recipe.locate != "cursor")

    def _bring(self, j: int, check: Callable[[], None]) -> None:
        self._wait_slot(j, check)
        one = self._foresee(j)
        begin = self._in_flight.begin()
        read = self._pool.fetcher.read
        read(one.reads.reads, self._slot(j), one.reads.starts)
        group = self._settle(one, None)
        data = self._lay_out(group)
        read(group.reads.reads, data, group.reads.starts)
        seconds = time.perf_counter() - begin
        self._check(group, data)
        self._publish(group, seconds)


class AskingReader(RingReader):
    """Asks for each group before it waits for it."""

    _writer: AskedWriter | None

    def __init__(self, context: Context, work: Work, writer: AskedWriter | None, stagger: Stagger | None) -> None:
        spills = not context.reader.index.sizes_known
        super().__init__(context, work, writer, spills=spills, ahead=None)
        self._stagger = stagger

    def _wait(self, group: int, check: Callable[[], None]) -> int:
        if self._writer is not None:
            self._writer.bring(group, check)
        return self._ring.wait_group(group, lambda: self._check_reader(group, check))

    def _check_reader(self, group: int, check: Callable[[], None]) -> None:
        """Raise an error if the rank that would read this group has left the loop."""
        check()
        reader = self._context.reader.file.reader_of(group)
        if self._ring.has_left(reader) and not self._ring.full_slots(group):
            check()  # a failing rank reports first, and then leaves: both may have happened since the test above
            raise ParioError(
                f"the rank that reads for this node (number {reader} on it) left the loop before this rank did",
                hint="With this recipe all ranks must leave a loop at the same step; the recipe auto does not mind.",
            )

    def leave(self) -> None:
        super().leave()
        if self._stagger is not None:
            self._stagger.leave()
