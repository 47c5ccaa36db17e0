"""The shape of a node's ring: how many slots, and how much of an epoch fills one slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pario.errors import OptionError
from pario.options import BLOCK_SLOTS, Options, Recipe

__all__ = ["RingShape", "fit_memory", "pool_shape", "step_shape"]

#: A ring may take at most this many times the bytes that its options ask for, which happens if records are scattered
#: over many more pages than they fill. Beyond that it gets fewer slots, but at least two: one is used while the other
#: fills.
_MOST_TIMES = 2


@dataclass(frozen=True)
class RingShape:
    """slots : slots of the ring
    per_group : steps that fill a slot; in a block order, pools
    pieces : slots that a step fills if it is larger than one slot
    """

    slots: int
    per_group: int
    pieces: int = 1


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
