"""What a loader delivers in each epoch, as numbers alone: which record at which position, in which step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from pario.options import BLOCK_SLOTS
from pario.plan.epoch import Order, epoch_order
from pario.plan.mixture import MixedOrder, Mixture
from pario.plan.schedule import Schedule
from pario.plan.selection import Selection
from pario.plan.sizing import RingShape

__all__ = ["Stream", "Work"]


@dataclass(frozen=True)
class Stream:
    """The records of all epochs in their order, as a function of these numbers alone.

    n : records of an epoch
    batch_size : records per seat and step
    seats : ranks
    shuffle : False, "global" or "block"
    seed : seed of the order
    block_records, mix_blocks : parameters of a block order, see `plan/epoch.py`; 0 for the others
    drop_last : leave out the last step if it is not full on every seat
    chosen : which records the n are; None: all records of the database
    mixture : of sources by weight, whose draws the n are; None: each record once
    """

    n: int
    batch_size: int
    seats: int
    shuffle: bool | str
    seed: int
    block_records: int
    mix_blocks: int
    drop_last: bool
    chosen: Selection | None = field(default=None, compare=False)
    mixture: Mixture | None = None

    @property
    def step_records(self) -> int:
        """Records of a full step on all seats together."""
        return self.batch_size * self.seats

    def order(self, epoch: int) -> Order:
        if self.mixture is not None:
            return MixedOrder(self.mixture, self.shuffle, self.seed, epoch)
        return epoch_order(
            self.shuffle,
            self.n,
            seed=self.seed,
            epoch=epoch,
            block_records=max(1, self.block_records),
            mix_blocks=max(1, self.mix_blocks),
        )

    def steps(self, start: int) -> int:
        """Steps of an epoch from position `start` on."""
        return Schedule(self.n, self.batch_size, self.seats, start, self.drop_last).steps


@dataclass(frozen=True)
class Work:
    """One epoch of a stream, or its rest from position `start` on, in groups that fit a ring of this shape.

    The order is computed on first use: only ranks that read need a permutation of all records.
    """

    stream: Stream
    shape: RingShape
    epoch: int
    start: int

    @cached_property
    def order(self) -> Order:
        return self.stream.order(self.epoch)

    @cached_property
    def schedule(self) -> Schedule:
        stream = self.stream
        return Schedule(
            n=stream.n,
            batch_size=stream.batch_size,
            seats=stream.seats,
            start=self.start,
            drop_last=stream.drop_last,
            # The pools of a block order differ between epochs, and every rank needs them.
            pools=self.order.pools if stream.shuffle == "block" else None,
            per_group=self.shape.per_group,
            pieces=self.shape.pieces,
        )

    @property
    def table_steps(self) -> int:
        """Rows of a table with one row per step, numbered modulo this number, such that no step in use is
        overwritten."""
        return self.schedule.max_steps_in_flight(max(self.shape.slots, BLOCK_SLOTS))
