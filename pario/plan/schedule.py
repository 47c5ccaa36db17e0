"""Which rank gets which records in which step, and which steps wait for which group of records.

Positions `start` .. `stop` of the epoch's order are cut into steps of `batch_size * seats`; the last one may be
shorter. Every seat (rank) has a share of every step, so the number of steps is the same on all ranks.

    steps     |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|-- 4 --|
    groups    |---------- 0 ----------|---------- 1 ----------|-- 2 --|     whole steps (key order, global shuffle)
              |------- 0 -------|--------- 1 ---------|------ 2 ------|     whole pools (block shuffle)

A group fills one slot of a node's ring. In a block-shuffled epoch a group is one pool or several, and a node reads its
share of it at once; a step may need two groups or more. In the other orders a step larger than a slot is cut into
pieces: a group then holds one piece of every seat's rows, so that all ranks decode one piece while the next is read.

    steps     |----------- 0 -----------|----------- 1 -----------|         pieces = 3
    groups    |-- 0 ---|-- 1 ---|-- 2 --|-- 3 ---|-- 4 ---|-- 5 --|

Ranks count their progress in ticks: a tick is one piece of a step, or the whole step if pieces = 1.

Arrangement within a step. A step is cut where pools meet. Inside each part the records are sorted by their block's
number in the pool, then by ordinal, and every node gets a run of them, as long as if the step's rows were dealt in turn
(row i to seat i modulo seats). So a node takes its records from the same part of the pool's blocks in every step,
including steps that span two pools, and reads whole blocks instead of parts of all blocks. This is exact if the part
holds equally many records of each block, and approximate otherwise. A node deals its run to its seats in turn, so that
each seat's batch has records of all blocks that the node reads. The arrangement does not change which records a step
has, so these do not depend on seats and nodes. Without pools the order itself is the arrangement, and seat k has share
k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from pario.errors import OptionError
from pario.kernels import permute as kernels
from pario.plan.epoch import BlockOrder, Order, Pools
from pario.plan.selection import Selection

#: Addresses in slots are congruent to file offsets modulo this, for every alignment of the file system (see
#: plan/coalesce.py).
_LEAST_ALIGN = 8


@dataclass(frozen=True)
class Schedule:
    """The steps and groups of one epoch, from position `start` on.

    n : records of the epoch
    batch_size : records per seat in a full step
    seats : ranks
    start : the first position to deliver (0, or that of a saved state)
    drop_last : leave out the last step if it is not full
    pools : the pools of a block order (`order.pools`), None for the other orders
    per_group : steps of a group or, with pools, pools of a group
    pieces : groups of a step; more than 1 only without pools and with per_group = 1
    """

    n: int
    batch_size: int
    seats: int
    start: int = 0
    drop_last: bool = False
    pools: Pools | None = None
    per_group: int = 1
    pieces: int = 1
    #: every step but the last one has `batch_size` records on every seat
    is_even: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("n", 0), ("batch_size", 1), ("seats", 1), ("per_group", 1), ("pieces", 1)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, got {getattr(self, name)!r}")
        if not 0 <= self.start <= self.n:
            raise OptionError(f"start must be a position in 0..{self.n}, got {self.start!r}")
        if self.pieces > 1 and (self.pools is not None or self.per_group > 1):
            raise OptionError(f"{self.pieces} pieces of a step exclude pools and groups of {self.per_group} steps")
        if self.pools is not None and self.pools.n != self.n:
            raise OptionError(f"pools of {self.pools.n} records cannot group {self.n}")

    # Steps ---------------------------------------------------------------------------------------------------------

    @cached_property
    def step_records(self) -> int:
        """Records of a full step on all seats together."""
        return self.batch_size * self.seats

    @cached_property
    def steps(self) -> int:
        rest = self.n - self.start
        return rest // self.step_records if self.drop_last else -(-rest // self.step_records)

    @cached_property
    def stop(self) -> int:
        """Position after the last delivered one."""
        return min(self.n, self.start + self.steps * self.step_records)

    def step_positions(self, step: int) -> tuple[int, int]:
        """Positions [p0, p1) of a step."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        first = self.start + step * self.step_records
        return first, min(self.stop, first + self.step_records)

    def next_position(self, step: int) -> int:
        """The position to resume at after this step: records of the epoch that all seats together have delivered."""
        return self.step_positions(step)[1]

    def seat_rows(self, step: int, seat: int) -> tuple[int, int]:
        """Rows [a0, a1) of the arranged step that belong to a seat, if it is a node of its own."""
        first, stop = self.step_positions(step)
        return even_split(stop - first, self.seats, seat)

    def rows(self, step: int, seat: int) -> int:
        """Records of a seat in a step; 0 is possible only in the last one."""
        first, stop = self.seat_rows(step, seat)
        return stop - first

    # Groups --------------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> int:
        if not self.steps:
            return 0
        if self.pools is not None:
            return _pool_group(self, self.pools, self.stop - 1) + 1
        return -(-self.steps * self.pieces // self.per_group)

    def group_pools(self, group: int) -> range:
        """The pools of a group; with pools only."""
        assert self.pools is not None
        begin, end = self.pools.pool_of(self.start), self.pools.pool_of(self.stop - 1) + 1
        more = self._leading - 1
        first = self._first_pool + group * self.per_group
        return range(max(begin, first + more if first else 0), min(first + self.per_group + more, end))

    @cached_property
    def _first_pool(self) -> int:
        """The pool with which the first group begins, where the leading ones count as one."""
        assert self.pools is not None
        return max(0, self.pools.pool_of(self.start) - self._leading + 1)

    @cached_property
    def _leading(self) -> int:
        """How many of the epoch's first pools, which are smaller than the others, count as one: no step may need more
        groups than the ring has slots."""
        assert self.pools is not None
        return self.pools.cut_first if self.per_group > 1 else self.pools.first_of(self.step_records)

    def group_positions(self, group: int) -> tuple[int, int]:
        """Positions [p0, p1) of a group that are delivered; with pieces, of the whole step."""
        if not 0 <= group < self.groups:
            raise IndexError(f"group {group} of {self.groups}")
        if self.pools is not None:
            pools = self.group_pools(group)
            first, stop = self.pools.bounds(pools[0])[0], self.pools.bounds(pools[-1])[1]
        else:
            first, stop = self._run(group)
        return max(self.start, first), min(self.stop, stop)

    def _run(self, group: int) -> tuple[int, int]:
        """Positions of a group without pools; the last one may end later than the epoch."""
        first = self.start + group // self.pieces * self.per_group * self.step_records
        return first, first + self.per_group * self.step_records

    def _complete_by(self, position: int) -> int:
        """Steps that end at `position` or before."""
        return (position - self.start) // self.step_records

    def _begun_by(self, position: int) -> int:
        """Steps that begin before `position`."""
        return -(-(position - self.start) // self.step_records)

    def group_ready_steps(self, group: int) -> int:
        """Steps that are complete once groups 0..group are there."""
        stop = self.group_positions(group)[1]
        return self.steps if stop == self.stop else self._complete_by(stop)

    def group_release_step(self, group: int) -> int:
        """Steps that all seats must have finished before the group's memory may be reused."""
        return self._begun_by(self.group_positions(group)[1])

    def group_ready_ticks(self, group: int) -> int:
        """Ticks that are complete once groups 0..group are there."""
        return group + 1 if self.pieces > 1 else self.group_ready_steps(group)

    def group_release_tick(self, group: int) -> int:
        """Ticks that all seats must have finished before the group's memory may be reused."""
        return group + 1 if self.pieces > 1 else self.group_release_step(group)

    def piece_rows(self, step: int, seat: int, piece: int) -> tuple[int, int]:
        """Rows [a0, a1) of a seat's batch that are in a piece of a step."""
        return even_split(self.rows(step, seat), self.pieces, piece)

    def group_steps(self, group: int) -> tuple[int, int]:
        """Steps [first, stop) that take records from a group."""
        first = self.group_positions(group)[0]
        return self._complete_by(first), self.group_release_step(group)

    def step_groups(self, step: int) -> tuple[int, int]:
        """Groups [first, stop) that a step takes records from."""
        first, stop = self.step_positions(step)
        if self.pools is not None:
            return _pool_group(self, self.pools, first), _pool_group(self, self.pools, stop - 1) + 1
        return step * self.pieces // self.per_group, step * self.pieces // self.per_group + self.pieces

    def max_steps_in_flight(self, slots: int) -> int:
        """The most unfinished steps that groups in `slots` slots can touch, if group j + slots starts only after
        `group_release_step(j)` steps are finished. A table with one entry per step, numbered modulo this, is never
        overwritten while a rank still reads it."""
        if self.pieces > 1:
            # Unlike groups of whole steps, the pieces in the slots may begin and end inside a step.
            return max(1, min(self.steps, -(-slots // self.pieces) + 1))
        return max(1, min(self.steps, -(-slots * self._most_group_positions // self.step_records)))

    def max_group_records(self, node_size: int) -> int:
        """The most records that a node with `node_size` seats can have in one group."""
        if self.pieces > 1:
            return min(self.n, -(-self.batch_size // self.pieces) * node_size)
        positions = self._most_group_positions
        # Positions that do not start at a step touch at most one step more.
        steps = positions // self.step_records + 2 if self.pools is not None else self.per_group
        return min(positions, steps * self.batch_size * node_size)

    def max_group_bytes(self, node_size: int) -> int | None:
        """The most bytes that the values of one group can have on such a node, if the schedule limits them."""
        return None

    @property
    def _most_group_positions(self) -> int:
        unit = self.step_records if self.pools is None else self.pools.most_records
        return min(self.n, self.per_group * unit)

    def share(
        self, order: Order, group: int, node_seat: int, node_size: int, only: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`node_share`, whose arguments have been checked."""
        if isinstance(order, BlockOrder):
            node = node_seat, node_size, -1 if only is None else only
            parts = [_pool_share(self, order, pool, node) for pool in self.group_pools(group)]
            if len(parts) == 1:
                return parts[0]
            numbers, step, row = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            return numbers, step, row
        if only is not None:
            node_seat, node_size = only, 1
        if self.pieces > 1:
            return _piece_share(self, order, group, node_seat, node_size)
        return _step_share(self, order, group, node_seat, node_size)


def _pool_group(schedule: Schedule, pools: Pools, position: int) -> int:
    """The group that holds a position of a block order."""
    return (max(0, pools.pool_of(position) - schedule._leading + 1) - schedule._first_pool) // schedule.per_group


def even_split(n: int, size: int, rank: int) -> tuple[int, int]:
    """(start, stop) of share `rank` of `size` contiguous shares of `n` items.

    Sizes differ by at most one, larger shares first; with n < size the last size - n shares are empty.
    """
    if n < 0 or size < 1 or not 0 <= rank < size:
        raise OptionError(f"cannot take share {rank!r} of {size!r} from {n!r} things")
    base, extra = divmod(n, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def node_share(
    schedule: Schedule, order: Order, group: int, node_seat: int, node_size: int, only: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The records of a group that belong to the seats [node_seat, node_seat + node_size), or those of one of them.

    only : this seat alone, as if it were the first one of the table

    Returns (numbers i64[k], step i64[k], row i32[k]): what to read (ids or ordinals, as `order.space` says), the step,
    and the row in the node's table of that step. Item i of the node's l-th seat has row l * batch_size + i, so this
    seat finds its batch in rows [l * batch_size, l * batch_size + rows(step, seat)).

    In a block order the numbers of a pool ascend.
    """
    if not 0 <= node_seat <= node_seat + node_size <= schedule.seats or node_size < 1:
        raise OptionError(f"seats {node_seat}..{node_seat + node_size - 1} of {schedule.seats}")
    if order.n != schedule.n or order.pools != schedule.pools:
        raise OptionError(f"the schedule has {schedule.pools}, the order {order.pools}")
    if only is not None and not node_seat <= only < node_seat + node_size:
        raise OptionError(f"seat {only} is none of {node_seat}..{node_seat + node_size - 1}")
    return schedule.share(order, group, node_seat, node_size, only)


def _step_share(
    schedule: Schedule, order: Order, group: int, node_seat: int, node_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`node_share` of whole steps."""
    first_step, stop_step = schedule.group_steps(group)
    batch, width = schedule.batch_size, schedule.batch_size * node_size
    full = stop_step - first_step
    first, stop = schedule.step_positions(stop_step - 1)
    partial = stop - first < schedule.step_records
    full -= partial
    # In full steps the node's part is one run of positions.
    step = np.repeat(np.arange(first_step, first_step + full), width)
    row = np.tile(np.arange(width, dtype=np.int32), full)
    positions = schedule.start + node_seat * batch + step * schedule.step_records + row
    if partial:
        rows = [schedule.seat_rows(stop_step - 1, seat) for seat in range(node_seat, node_seat + node_size)]
        lengths = np.array([b - a for a, b in rows])
        rest = np.arange(rows[0][0], rows[-1][1])
        seat = np.repeat(np.arange(node_size), lengths)
        item = rest - np.repeat([a for a, _ in rows], lengths)
        step = np.concatenate([step, np.full(len(rest), stop_step - 1)])
        row = np.concatenate([row, (seat * batch + item).astype(np.int32)])
        positions = np.concatenate([positions, first + rest])
    return order.take(positions), step, row


def _piece_share(
    schedule: Schedule, order: Order, group: int, node_seat: int, node_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`node_share` of one piece of a step."""
    step, piece = divmod(group, schedule.pieces)
    first = schedule.step_positions(step)[0]
    places, rows = [], []
    for local in range(node_size):
        begin = schedule.seat_rows(step, node_seat + local)[0]
        low, high = schedule.piece_rows(step, node_seat + local, piece)
        places.append(np.arange(begin + low, begin + high))
        rows.append(np.arange(low, high, dtype=np.int32) + local * schedule.batch_size)
    row = np.concatenate(rows).astype(np.int32)
    return order.take(first + np.concatenate(places)), np.full(len(row), step, np.int64), row


def _dealt(rows: np.ndarray, seats: int, seat: int) -> np.ndarray:
    """How many of the first `rows` rows of a step go to the seats before `seat`, if rows are dealt in turn."""
    return seat * (rows // seats) + np.minimum(seat, rows % seats)


def _pool_share(
    schedule: Schedule, order: BlockOrder, pool: int, node: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`node_share` of one pool. node : the node's first seat, its number of seats, and the only one wanted, or -1"""
    node_seat, node_size, only = node
    pool_start, pool_stop = order.pools.bounds(pool)
    first, stop = max(pool_start, schedule.start), min(pool_stop, schedule.stop)
    full = schedule.step_records
    first_step, stop_step = (first - schedule.start) // full, -(-(stop - schedule.start) // full)

    # For each step: its records in this pool, the rows before them, and the node's rows [a0, a1) among them.
    steps = np.arange(first_step, stop_step)
    pieces = np.empty((len(steps), 4), np.int64)
    begin = schedule.start + steps * full
    end = np.minimum(begin + full, schedule.stop)
    pieces[:, 0] = np.minimum(end, stop) - np.maximum(begin, first)
    pieces[:, 1] = np.maximum(begin, first) - begin
    before, after = pieces[:, 1], pieces[:, 1] + pieces[:, 0]

    def rows_before(seat: int) -> np.ndarray:
        return _dealt(after, schedule.seats, seat) - _dealt(before, schedule.seats, seat)

    pieces[:, 2] = before + rows_before(node_seat)
    pieces[:, 3] = before + rows_before(node_seat + node_size)
    wanted = rows_before(only + 1) - rows_before(only) if only >= 0 else pieces[:, 3] - pieces[:, 2]
    count = int(wanted.sum())

    numbers = np.empty(count, np.int64)
    step = np.empty(count, np.int64)
    row = np.empty(count, np.int32)
    if not count:
        return numbers, step, row
    blocks, short, bits = order.layout(pool)
    size, short_records = order.pools.block_records, order.pools.short_records
    m = len(blocks)
    keys = np.array([order.records_key, order.rounds_key(pool)], np.uint64)
    described = {
        "block_records": size,
        "short": short,
        "short_records": short_records,
        "bits": bits,
        "skip": first - pool_start,
        "first_step": first_step,
        "batch_size": schedule.batch_size,
        "seats": schedule.seats,
        "node_seat": node_seat,
        "node_size": node_size,
        "only": only,
    }
    pool_words = np.array([described[name] for name in kernels.POOL], np.int64)
    given = (keys, pool_words, blocks, np.argsort(blocks), pieces)
    if full >= m:
        long_scratch = (
            np.empty(size, np.uint32),
            np.empty(size, np.int32),
            np.empty((len(pieces) + 1, m), np.int32),
            np.empty((len(pieces), m), np.int32),
        )
        kernels.pool_rows(*given, *long_scratch, numbers, step, row)
    else:
        small_scratch = (
            np.empty((m, size), np.uint32),
            np.empty((m, size), np.int64),
            np.empty((m, size), np.int32),
            np.empty(int(pieces[:, 0].max()), np.int64),
        )
        kernels.pool_rows_small(*given, *small_scratch, numbers, step, row)
    return numbers, step, row


def slot_capacity(
    extents: np.ndarray,
    schedule: Schedule,
    node_size: int,
    *,
    lead_bytes: int,
    align: int,
    by_offset: np.ndarray | None = None,
    chosen: Selection | None = None,
) -> int:
    """The most bytes that a node with `node_size` seats needs for the records of one group, in any epoch of any seed.

    This is the sum of the k largest records, k = most records of one group on the node; for a block order at most the
    largest blocks that a group can have. Each record counts with the space that it takes alone: lead and value widened
    to `align`, plus what `coalesce` may add to keep the value's alignment. Unwanted bytes between records do not count:
    `coalesce` leaves them out if they do not fit.

    extents : EXTENT[n] by record id; by_offset : i64[n], ids in file order (None: the same order)
    chosen : which records the schedule's are; None: all
    """
    n = len(extents) if chosen is None else chosen.n
    if n != schedule.n:
        raise OptionError(f"{n} extents for {schedule.n} records")
    k = schedule.max_group_records(node_size)
    if not k:
        return 0
    pools = schedule.pools
    # In chunks of whole blocks, so that a large dataset needs no second copy.
    chunk = max(1 << 20, k)
    if pools:
        chunk = -(-chunk // pools.block_records) * pools.block_records
    largest = np.empty(0, np.int64)
    blocks = np.empty(0, np.int64)
    for first in range(0, schedule.n, chunk):
        if chosen is not None:
            numbers = np.arange(first, min(first + chunk, n))
            part = extents[chosen.ids_of(numbers, "place" if pools else "id")]
        else:
            part = extents[first : first + chunk] if by_offset is None else extents[by_offset[first : first + chunk]]
        begin = np.maximum(part["offset"] - lead_bytes, 0) // align * align
        size = -(-(part["offset"] + part["nbytes"]) // align) * align - begin
        size += _LEAST_ALIGN - 1 if align < _LEAST_ALIGN else 0
        if chosen is not None and chosen.width > 1:  # samples count with all their records
            size = size.reshape(-1, chosen.width).sum(axis=1)
        largest = _top(np.concatenate([largest, size]), k)
        if pools:
            sums = np.add.reduceat(size, np.arange(0, len(size), pools.block_records))
            blocks = _top(np.concatenate([blocks, sums]), pools.mix_blocks * schedule.per_group)
    most = min(int(largest.sum()), int(blocks.sum())) if pools else int(largest.sum())
    values = schedule.max_group_bytes(node_size)
    return most if values is None else min(most, values + k * (lead_bytes + 2 * align + _LEAST_ALIGN))


def _top(values: np.ndarray, k: int) -> np.ndarray:
    """The k largest values, in any order."""
    return values if len(values) <= k else np.partition(values, len(values) - k)[-k:]
