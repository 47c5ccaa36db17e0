"""LMDBIO's ways of reading: through the node's ring, but in the reading rank's own thread, when a group is asked for.

One read at a time is in flight. The reading rank waits for it and, if the recipe has turns, for its turn among the
readers of other nodes. All ranks must leave a loop at the same step, because a rank that has left reads
no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld
from pario.comm.turns import Turns
from pario.errors import ParioError
from pario.feed.first_epoch import FirstEpochWriter
from pario.feed.ring_reader import RingReader
from pario.feed.ring_writer import RingWriter
from pario.feed.source import Context, Source, Supply
from pario.plan.coalesce import Reads, span_reads
from pario.plan.stream import Work
from pario.text import seconds

_log = logging.getLogger("pario")

#: Reads that each reader does per number of readers that the trial tests.
ROUNDS = 2

#: Seconds between two ranks of a node that hear of the same error.
_NEWS_S = 1.0


class Synchronous(Supply):
    """Sources that read a group when it is asked for. If readers take turns, `source` is collective and `prepare` may
    send messages, only in the thread that takes the batches."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        wanted = context.reader.recipe.stagger
        self._stagger = None if wanted is None else Stagger(context.world, wanted)

    def source(self, work: Work, way: str) -> Source:
        context, writer = self.context, None
        if context.world.is_leader:
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
        """Read group j now, in this thread; calls `check` while it waits."""
        try:
            self._bring(j, check)
        except BaseException as e:
            self._fail(e)
            raise

    def _bring(self, j: int, check: Callable[[], None]) -> None:
        group = self._plan(j)
        self._wait_slot(j, check)
        self._write_tables(group)
        data = self._slot(j)
        if self.turns is not None:
            begin = time.perf_counter()
            self.turns.wait(j)
            self.stats.turn += time.perf_counter() - begin
        begin = self.stats.begin_reads()
        self._pool.fetcher.read(group.reads.reads, data, group.reads.starts)
        self.stats.end_reads(time.perf_counter() - begin)
        if self.turns is not None:
            self.turns.pass_on(j)
        self._check(group, data)
        self._publish(group)

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
        begin = self.stats.begin_reads()
        read = self._pool.fetcher.read
        data = self._slot(j)
        read(one.reads.reads, data, one.reads.starts)
        group = self._settle(one, None)
        self._write_tables(group)
        read(group.reads.reads, data, group.reads.starts)
        self.stats.end_reads(time.perf_counter() - begin)
        self._check(group, data)
        self._publish(group)


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
        """Raise an error if the node's first rank, which reads, has left the loop."""
        check()
        if self._ring.has_left(0) and not self._ring.full_slots(group):
            # A failing rank reports first, and then leaves: both may have happened since the test above. And one of
            # another node tells the ranks of this one after another.
            until = time.monotonic() + _NEWS_S
            while time.monotonic() < until:
                check()
                time.sleep(1e-3)
            raise ParioError(
                "the rank that reads for this node left the loop before this rank did",
                hint="With this recipe all ranks must leave a loop at the same step; the recipe auto does not mind.",
            )

    def leave(self) -> None:
        super().leave()
        if self._stagger is not None:
            self._stagger.leave()



def neighbours(rank: int, size: int, group: int) -> tuple[int | None, int | None]:
    """The readers that reader `rank` of `size`, of which `group` may read at once, waits for and hands over to."""
    before, after = rank - group, rank + group
    return before if before >= 0 else None, after if after < size else None


def candidates(size: int) -> list[int]:
    """1, 2, 4, ... and `size` itself: the numbers that the trial tests."""
    found = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return [*found, size]


class Stagger:
    """LMDBIO's staggering: at most `group` of all readers read at once, in the order of the file. This is one rank's
    turns, epoch after epoch.

        size 7, group 3        turn   0        1        2
                               ranks  0 1 2    3 4 5    6
        each hands over to     rank + 3, which reads the part of the file that is `group` parts further on

    A reader starts when the one `group` positions before it has finished. So at most `group` readers are active, their
    window moves through the file, and no reader waits for a whole turn to end. Any number of readers and any `group`
    work; a trial before the first epoch finds the best `group`.

    wanted : nodes that may read at once; 0: a trial before the first epoch finds the number
    """

    def __init__(self, world: AnyWorld, wanted: int) -> None:
        self._world = world
        self._wanted = wanted or (1 if world.nodes == 1 else 0)
        self._found: tuple[int, dict[int, float]] | None = None  # (readers at once, seconds per tested number)
        self._turns: Turns | None = None

    def turns(self, read: Callable[[int], None] | None, samples: int) -> Turns | None:
        """This rank's turns in the next epoch. The first call runs the trial. Collective.

        read(k) : reads sample k of `samples`, on ranks that read
        """
        world = self._world
        if self._found is None:
            everyones = enumerate(world.allgather((world.node, world.is_leader)))
            leaders = [rank for _, rank in sorted((node, rank) for rank, (node, reads) in everyones if reads)]
            self._found = self._wanted, {}
            if not self._wanted:
                self._found = choose_stagger(
                    world, candidates(world.nodes), lambda size: turns_among(world, leaders, size), read, samples
                )
            self._turns = turns_among(world, leaders, self._found[0])
        return self._turns

    def leave(self) -> None:
        """This rank reads nothing more in this epoch. Does not wait."""
        if self._turns is not None:
            self._turns.leave()

    def settle(self) -> None:
        """Receive the messages that are still in transit; all ranks have left."""
        if self._turns is not None:
            self._turns.settle()

    def stats(self) -> dict[str, Any]:
        return {} if self._found is None else {"stagger": self._found[0], "stagger_seconds": self._found[1]}


def turns_among(world: AnyWorld, leaders: list[int], size: int) -> Turns | None:
    """This rank's turns if `size` nodes read at once; None if it does not read. leaders : each node's reading rank"""
    if not world.is_leader:
        return None
    both = neighbours(world.node, world.nodes, size)
    return Turns(world, *(None if node is None else leaders[node] for node in both))


def choose_stagger(
    world: AnyWorld,
    sizes: Sequence[int],
    turns_of: Callable[[int], Turns | None],
    read: Callable[[int], None] | None,
    samples: int,
) -> tuple[int, dict[int, float]]:
    """How many readers should read at once: (the best of `sizes`, seconds of each size). Collective.

    All readers read the same samples of the epoch in turns, `ROUNDS` for each size. Every size gets other samples, so
    that none finds in memory what another has read. A size's time is that of its slowest reader.

    turns_of(size) -> this rank's turns if `size` readers read at once; None: it reads nothing
    read(k) : reads sample k, on ranks that read
    samples : number of samples; if there are too few, the trial starts over with the first
    """
    took: dict[int, float] = {}
    error: BaseException | None = None
    for number, size in enumerate(sizes):
        turns = turns_of(size)
        world.barrier()
        begin = time.perf_counter()
        if turns is not None and read is not None:
            for k in range(ROUNDS):
                turns.wait(k)
                if error is None:
                    try:
                        read((number * ROUNDS + k) % samples)
                    except BaseException as e:  # the others wait for this rank's message, and learn of it at the end
                        error = e
                turns.pass_on(k)
        mine = time.perf_counter() - begin
        if turns is not None:
            turns.leave()
            turns.settle()
        world.agree(error, "trying how many readers should read at once")
        took[size] = world.allreduce_max(round(mine * 1e6)) / 1e6
    best = min(took, key=took.__getitem__)
    if world.rank == 0:
        each = ", ".join(f"{size}: {seconds(time_s)}" for size, time_s in took.items())
        _log.info("%d of %d readers at once, by a trial of %d reads each (%s)", best, max(sizes), ROUNDS, each)
    return best, took
