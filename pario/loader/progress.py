"""A loader's position in its stream of records, and its running loop."""

from __future__ import annotations

from functools import partial

from pario.loader.build import Built
from pario.loader.epoch import Epoch
from pario.loader.lifetime import Lifetime
from pario.loader.meeting import Meeting, Met
from pario.loader.peek import peek
from pario.loader.state import VERSION, LoaderState
from pario.plan.schedule import Schedule
from pario.plan.stream import Work
from pario.records import Batch

__all__ = ["Progress"]


class Progress:
    """epoch : the current epoch, or the next one between two loops
    position : records of this epoch that all ranks together have consumed
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

    @property
    def steps(self) -> int:
        """Steps of the current loop, or of the next one between two loops."""
        return self._context.stream.steps(self._begin_at, self.epoch)

    @property
    def whole_steps(self) -> int:
        """Steps of the whole current epoch, or of the next one between two loops."""
        return self._context.stream.steps(0, self.epoch)

    def state(self) -> LoaderState:
        stream = self._context.stream
        return LoaderState(
            version=VERSION,
            fingerprint=self._fingerprint,
            n=stream.n,
            seed=stream.seed,
            shuffle=str(stream.shuffle or "none"),
            block_records=stream.block_records,
            mix_blocks=stream.mix_blocks,
            epoch=self.epoch,
            position=self.position,
            drop_last=stream.drop_last,
            selection=stream.chosen.digest if stream.chosen is not None else "",
            mixture=stream.mixture.mark if stream.mixture is not None else "",
        )

    def peek(self) -> Batch:
        """The batch that this rank gets next, to look at. Not collective."""
        self._life.check_open()
        context = self._context
        stream, epoch, position, step = context.stream, self.epoch, self.position, self._step
        if stream.steps(position, epoch) == 0:  # after the last batch of an epoch
            epoch, position, step = epoch + 1, 0, 0
        return peek(context, Work(stream, self._shape, epoch, position), step)

    def go_to(self, epoch: int, position: int = 0) -> None:
        """Set where the next loop begins; leaves a running loop."""
        self.leave()
        self.epoch, self.position, self._begin_at, self._step = epoch, position, position, 0

    def meet(self, doing: str, way: str = "") -> Met:
        """`Meeting.meet`; an error ends the loader. Collective."""
        self._life.check_open()
        try:
            return self._meeting.meet(doing, way)
        except BaseException as e:
            self._life.abandon(e)
            raise

    def begin(self) -> Epoch:
        """Start the next loop. Collective; an error ends the loader."""
        self._life.check_open()
        try:
            run = self._life.run = self._begin()
        except BaseException as e:
            self._life.abandon(e)
            raise
        return run

    def _begin(self) -> Epoch:
        life, supply, context = self._life, self._supply, self._context
        world, ring, stats = context.world, context.ring, context.stats
        if life.run is not None:  # a loop that was left early
            self.go_to(self.epoch + 1)
        doing = f"epoch {self.epoch} from record {self.position}"
        ways = self.meet(doing, supply.propose() if world.is_leader else "").ways
        if any(map(supply.needs_ring, ways.values())):
            context.slots.allocate()
        self._meeting.loop_begins()
        work = Work(context.stream, self._shape, self.epoch, self.position)
        life.end_source(work, ways[world.node])
        world.node_barrier()
        if world.is_leader:
            context.reader.warn_if_replaced()
            ring.reset()
        world.node_barrier()
        life.source = source = supply.source(work, ways[world.node])
        stats.ahead = source.ahead is not None
        return Epoch(
            source,
            work,
            life,
            stats,
            alive_seconds=context.options.alive_seconds,
            taken=partial(self._taken, work.schedule),
            complete=self._complete,
        )

    def _taken(self, schedule: Schedule, batch: Batch) -> None:
        stats = self._context.stats
        self.position, self._step = schedule.next_position(batch.step), batch.step + 1
        stats.batches += 1
        stats.records += len(batch.ids) + (0 if self._context.decode.substitutes else batch.skipped)
        stats.skipped += batch.skipped
        self._supply.taken(self.position)

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
