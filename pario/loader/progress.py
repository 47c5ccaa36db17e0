"""A loader's position in its stream of records, and its running loop."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pario.comm.alive import tell
from pario.comm.base import abandoning
from pario.decode.base import Draw
from pario.errors import OptionError
from pario.feed.choose import Way
from pario.feed.source import Context, Parts
from pario.loader.build import Built
from pario.loader.epoch import Epoch, Loop
from pario.loader.lifetime import Lifetime
from pario.loader.meeting import Meeting
from pario.loader.state import VERSION, LoaderState
from pario.plan.schedule import Schedule
from pario.plan.stream import Work
from pario.records import Batch
from pario.text import counted

if TYPE_CHECKING:
    from pario.stats.report import Report

class Progress:
    """epoch : of the last loop, or the next one if that is complete
    position : records of this epoch that all ranks together have consumed
    next : (epoch, position where its loop begins) of the running loop, or else of the next one
    """

    def __init__(self, life: Lifetime, meeting: Meeting, built: Built) -> None:
        self._life = life
        self._meeting = meeting
        self._supply = built.supply
        self._context = built.supply.context
        self._shape = built.shape
        self._fingerprint = built.fingerprint
        self.epoch = 0
        self.position = 0
        self._begin_at = 0  # position where the loop of this epoch begins
        self._step = 0  # steps taken since
        self._loop: weakref.ref[Loop] | None = None  # the last one

    @property
    def _is_left(self) -> bool:
        """Whether this rank has left a loop early, after which the next one runs the next epoch."""
        return self._life.run is not None and self._loop is not None and self._loop() is None

    @property
    def next(self) -> tuple[int, int]:
        return (self.epoch + 1, 0) if self._is_left else (self.epoch, self._begin_at)

    def steps(self, whole: bool = False) -> int:
        """Steps of the current loop, or of the next one between two loops; or of its whole epoch."""
        epoch, begin_at = self.next
        return self._context.stream.steps(0 if whole else begin_at, epoch)

    def state(self) -> LoaderState:
        stream = self._context.stream
        return LoaderState(
            version=VERSION, fingerprint=self._fingerprint, n=stream.n, seed=stream.seed,
            shuffle=str(stream.shuffle or "none"), block_records=stream.block_records, mix_blocks=stream.mix_blocks,
            epoch=self.epoch, position=self.position, drop_last=stream.drop_last,
            selection=stream.chosen.digest if stream.chosen is not None else "",
            mixture=stream.mixture.mark if stream.mixture is not None else "",
        )  # fmt: skip

    def peek(self) -> Batch:
        """The batch that this rank gets next, to look at. Not collective."""
        self._life.check_open()
        context = self._context
        stream, epoch, position, step = context.stream, self.epoch, self.position, self._step
        if self._is_left or stream.steps(position, epoch) == 0:  # or after the last batch of an epoch
            epoch, position, step = epoch + 1, 0, 0
        return _peek(context, Work(stream, self._shape, epoch, position), step)

    def go_to(self, epoch: int, position: int = 0) -> None:
        """Set where the next loop begins; leaves a running loop."""
        self.leave()
        self.epoch, self.position, self._begin_at, self._step = epoch, position, position, 0

    def position_of(self, epoch: int, batch: int) -> int:
        """The position where this batch of an epoch begins. Raises OptionError if there is none."""
        if not batch:
            return 0
        schedule = Work(self._context.stream, self._shape, epoch, 0).schedule
        if batch >= schedule.steps:
            raise OptionError(f"batch must be below {schedule.steps}, the batches of epoch {epoch}, got {batch}")
        return schedule.next_position(batch - 1)

    def meet(self, doing: str) -> None:
        """`Meeting.meet`; an error ends the loader. Collective."""
        self._life.check_open()
        with abandoning(self._life):
            self._meeting.meet(doing)

    def report(self, all_ranks: bool) -> Report:
        """Of this rank; or of all ranks, which is collective, and an error ends the loader."""
        self._life.check_open()
        with abandoning(self._life):
            return self._meeting.report(all_ranks or self._context.world.size == 1)

    def begin(self) -> Loop:
        """Start the next loop. Collective; an error ends the loader."""
        self._life.check_open()
        with abandoning(self._life):
            run = self._life.run = self._begin()
        loop = Loop(run)
        self._loop = weakref.ref(loop)
        return loop

    def _begin(self) -> Epoch:
        life, supply, context = self._life, self._supply, self._context
        world, ring, stats = context.world, context.ring, context.stats
        if life.run is not None:  # a loop that was left early
            self.go_to(self.epoch + 1)
        doing = f"epoch {self.epoch} from record {self.position}"

        def meet() -> dict[int, tuple[str, bool]]:
            return self._meeting.meet(doing, (supply.propose(), supply.is_prepared) if world.is_leader else ("", False))

        ways = meet()
        if any(way == Way.RENEW for way, _ in ways.values()):
            life.end_source()
            world.barrier()
            supply.renew()
            ways = meet()
        if any(supply.needs_ring(way) for way, _ in ways.values()):
            context.slots.allocate()
        way, is_prepared = ways[world.node]
        last = life.source
        self._meeting.loop_begins()
        tell(f"is in epoch {self.epoch}")
        work = Work(context.stream, self._shape, self.epoch, self.position)
        life.end_source(work, way)
        if world.is_leader:
            context.reader.warn_if_replaced()
        if supply.needs_ring(way) or not is_prepared:
            # (Two meetings: 0.2 ms with two ranks, 0.9 with four on two cores.)
            world.node_barrier()
            if world.is_leader:
                ring.reset()
            world.node_barrier()
        elif last is not None:
            last.check()  # its fill may have told the others of an error, which nobody clears
        life.source = source = supply.source(work, way)
        stats.ahead = source.ahead is not None
        taken, complete = partial(self._taken, work.schedule), self._complete
        seconds = context.options.alive_seconds
        return Epoch(source, work, life, stats, alive_seconds=seconds, taken=taken, complete=complete)

    def _taken(self, schedule: Schedule, batch: Batch) -> None:
        stats = self._context.stats
        self.position, self._step = schedule.next_position(batch.step), batch.step + 1
        if self._context.world.size > 1:
            tell(f"is in epoch {self.epoch}, after {counted(self._step, 'batch', 'batches')}")
        stats.batches += 1
        stats.records += len(batch.ids) + (0 if self._context.decode.substitutes else batch.skipped)
        stats.skipped += batch.skipped

    def _complete(self) -> None:
        self.leave(complete=True)
        if self._context.world.rank == 0:
            self._context.reader.save_index()
        self.go_to(self.epoch + 1)

    def leave(self, complete: bool = False) -> None:
        """This rank needs nothing more of the running loop, if there is one."""
        if self._life.run is not None:
            self._meeting.loop_ends(self.epoch, complete)
            self._life.leave()


def _peek(context: Context, work: Work, step: int) -> Batch:
    """This rank's batch of the first step of `work`, whose number in its loop is `step`. Not collective.

    Raises ReadError, CorruptedError, SnapshotError, and DecodeError as the loop would, on this rank alone.
    """
    schedule = replace(work.schedule, pieces=1, per_group=1)
    first, stop = schedule.step_groups(0)
    shares = [context.own_records(schedule, work.order, group) for group in range(first, stop)]
    ids, steps, rows = (np.concatenate(column) for column in zip(*shares, strict=True))
    mine = steps == 0
    reader, decode = context.reader, context.decode
    records = reader.read_stored(ids[mine][np.argsort(rows[mine])], verify=False)
    arrays, filled = decode.arrays(records, len(records) // context.width)
    filled[:] = records.ids[:: context.width]
    failures = decode.decode(records, arrays, Draw(work.stream.seed, work.epoch, reader.keys))
    return decode.batch(Parts(arrays, filled, failures), step, work.epoch)
