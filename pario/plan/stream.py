"""What a loader delivers in each epoch, as numbers alone: which record at which position, in which step; and the shape
of a node's ring: how many slots, and how much of an epoch fills one slot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from pario.errors import OptionError
from pario.options import BLOCK_SLOTS, Options, Recipe
from pario.plan.budget import Costs, Cuts, CutSchedule
from pario.plan.epoch import Order, epoch_order
from pario.plan.mixture import MixedOrder, Mixture
from pario.plan.schedule import Schedule
from pario.plan.selection import Selection

#: A ring may take at most this many times the bytes that its options ask for, which happens if records are scattered
#: over many more pages than they fill. Beyond that it gets fewer slots, but at least two: one is used while the other
#: fills.
_MOST_TIMES = 2


@dataclass(frozen=True)
class Stream:
    """The records of all epochs in their order, as a function of these numbers alone.

    n : records of an epoch
    batch_size : records per seat and step; with `costs` the most of them
    seats : ranks
    shuffle : False, "global" or "block"
    seed : seed of the order
    block_records, mix_blocks : parameters of a block order, see `plan/epoch.py`; 0 for the others
    drop_last : leave out the last step if it is not full on every seat
    chosen : which records the n are; None: all records of the database
    mixture : of sources by weight, whose draws the n are; None: each record once
    costs : what the records cost, if batches are cut by cost
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
    costs: Costs | None = field(default=None, compare=False)
    _cuts: dict[tuple[int, int], Cuts] = field(default_factory=dict, compare=False, repr=False)

    @property
    def step_records(self) -> int:
        """Records of a full step on all seats together."""
        return self.batch_size * self.seats

    @property
    def repeats(self) -> bool:
        """Whether all epochs are the same."""
        return not self.shuffle and self.mixture is None and self.costs is None

    def order(self, epoch: int) -> Order:
        if self.mixture is not None:
            return MixedOrder(self.mixture, self.shuffle, self.seed, epoch)
        sizes = {"block_records": max(1, self.block_records), "mix_blocks": max(1, self.mix_blocks)}
        return epoch_order(self.shuffle, self.n, seed=self.seed, epoch=epoch, **sizes)

    def steps(self, start: int, epoch: int) -> int:
        """Steps of an epoch from position `start` on."""
        if self.costs is not None:
            return self.cuts(epoch, start).steps
        return Schedule(self.n, self.batch_size, self.seats, start, self.drop_last).steps

    def cuts(self, epoch: int, start: int) -> Cuts:
        """The steps of an epoch from position `start` on, where batches are cut by cost. Of an epoch, of
        what is left of it and of the next one they are kept."""
        assert self.costs is not None
        found = self._cuts.get((epoch, start))
        if found is None:
            found = self.costs.cut(self.order(epoch), self.seats, start, drop_last=self.drop_last)
            for old in list(self._cuts)[:-2]:
                self._cuts.pop(old, None)
            self._cuts[epoch, start] = found
        return found


@dataclass(frozen=True)
class RingShape:
    """The shape of a node's ring.

    slots : slots of the ring
    per_group : steps that fill a slot; in a block order, pools
    pieces : slots that a step fills if it is larger than one slot
    """

    slots: int
    per_group: int
    pieces: int = 1


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
        # The pools of a block order differ between epochs, and every rank needs them.
        pools = self.order.pools if stream.shuffle == "block" else None
        given = stream.n, stream.batch_size, stream.seats, self.start, stream.drop_last, pools
        if stream.costs is None:
            return Schedule(*given, per_group=self.shape.per_group, pieces=self.shape.pieces)
        cuts = stream.cuts(self.epoch, self.start)
        return CutSchedule(*given, per_group=self.shape.per_group, cuts=cuts)

    @property
    def table_steps(self) -> int:
        """Rows of a table with one row per step, numbered modulo this number, such that no step in use is
        overwritten."""
        return self.schedule.max_steps_in_flight(max(self.shape.slots, BLOCK_SLOTS))


def step_shape(step_bytes: float, batch_size: int, options: Options, recipe: Recipe, *, by_rows: bool) -> RingShape:
    """The shape for orders whose groups are whole steps.

    step_bytes : mean bytes that a node reads for one step
    by_rows : the decoder takes a batch in pieces, so a step larger than a slot can be handed out in pieces
    """
    cut = by_rows and recipe.ahead
    return RingShape(
        slots=options.slots if recipe.ahead else 1,
        per_group=_units_per_group(step_bytes, options.slot_bytes) if recipe.fill else 1,
        pieces=max(1, min(batch_size, round(step_bytes / options.slot_bytes))) if cut else 1,
    )


def pool_shape(pool_bytes: float, pool_records: int, step_records: int, options: Options, recipe: Recipe) -> RingShape:
    """The shape for a block order, whose groups are whole pools.

    pool_bytes : mean bytes that a node reads of one pool
    pool_records, step_records : records of a pool, and of a step on all ranks
    """
    units = _units_per_group(pool_bytes, options.slot_bytes) if recipe.fill else 1
    # A group holds as many records as a step, so that no step waits for more than these slots.
    return RingShape(slots=BLOCK_SLOTS, per_group=max(units, -(-step_records // pool_records)))


def fit_memory(shape: RingShape, slot_bytes: int, options: Options) -> RingShape:
    """The shape with fewer slots, if that many slots of `slot_bytes` would take far more memory than the options say.

    100-byte records in a "global" order need one page each: a group of 8 MiB of such records may cover a whole small
    file. (121 MB of them: 1,064 MB resident with 6 slots, 516 with 2.)
    """
    if shape.slots <= BLOCK_SLOTS:  # a block order, or a recipe that prefetches nothing
        return shape
    room = _MOST_TIMES * options.slots * options.slot_bytes
    return replace(shape, slots=max(2, min(shape.slots, room // max(1, slot_bytes))))


def _units_per_group(unit_bytes: float, slot_bytes: int) -> int:
    """How many steps (or pools) fill a slot; at least one.

    unit_bytes : mean bytes that a node reads for one step (or pool)
    """
    if not unit_bytes > 0:
        raise OptionError(f"unit_bytes must be above 0, got {unit_bytes!r}")
    return max(1, int(slot_bytes // unit_bytes))
