"""Batches by cost instead of by number: a budget of bytes or tokens for each batch. Pure arithmetic.

The order of an epoch is the same as for plain batches. It is cut into steps, one after the other: each record goes to
the seat whose batch costs least so far. If one does not fit there, all of the step are dealt anew, the largest first,
which makes room, a few times; the first that does not fit then begins the next step. So

    * a step is a run of positions, and every seat has a batch in every step, empty only in the last one;
    * a batch costs at most `limit`, or is one record that alone costs more;
    * where a step ends depends on the costs from its beginning on, on the limits and on the number of seats. Anyone who
      resumes at the end of a step on as many seats gets the steps that would have followed.

At last the records of a step are dealt once more, the largest first: its batches cost nearly the same. (R. L. Graham,
Bounds on multiprocessing timing anomalies, 1969: at most 4/3 of the best.) If that breaks the limit, they stay as they
were when the step was cut. The rows of a batch are in the epoch's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from pario.errors import ClosedError, OptionError
from pario.kernels import budget as kernels
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule

#: Records of a batch, as a multiple of what the budget holds on average, unless `Budget.records` says another number:
#: memory is set aside for this many.
_MOST_TIMES = 4
#: Positions that are cut at once: 8 bytes each, a few times over.
_CHUNK = 1 << 20


@dataclass(frozen=True, eq=False)
class Budget:
    """What a batch may cost: `Loader(path, pario.Budget(bytes=4 << 20))`, instead of a number of records.

    Parameters
    ----------
    bytes : bytes of the records' values in one batch, as they stand in the file. The index knows them; nothing is read
    tokens : the most that the records of one batch cost together, in any unit; `cost` says what one costs
    cost : an array of integers, one per record of the whole database, by record id; or a function
        cost(ids i64[k], nbytes i64[k]) -> integers [k], called on one rank with all records of the epoch, a part at a
        time. Integers of at least 0
    records : the most records of a batch; None: four times as many as the budget holds on average

    Exactly one of `bytes` and `tokens` is given; `cost` with `tokens`.
    """

    bytes: int | None = None
    tokens: int | None = None
    cost: Any = None
    records: int | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.tokens is None):
            raise OptionError("a Budget has bytes=... or tokens=..., one of them")
        for name, value in (("bytes", self.bytes), ("tokens", self.tokens), ("records", self.records)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 1 << 62:
                raise OptionError(f"{name} of a Budget must be an integer of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if (self.tokens is None) != (self.cost is None):
            raise OptionError("tokens= of a Budget needs cost=, an array or a function, and bytes= takes none")
        if self.cost is not None and not callable(self.cost):
            found = np.asarray(self.cost)
            if found.ndim != 1 or found.dtype.kind not in "iu":
                raise OptionError(
                    f"cost of a Budget must be integers, one per record, or a function, got {found.dtype} {found.shape}"
                )
            object.__setattr__(self, "cost", found)

    @property
    def limit(self) -> int:
        """What one batch may cost."""
        return self.bytes or self.tokens or 1

    @property
    def mark(self) -> tuple[Any, ...]:
        """What all ranks must have alike: of a function its name and code, not the values that it refers to."""
        code = hashlib.sha256()
        if callable(self.cost):
            code.update(getattr(getattr(self.cost, "__code__", None), "co_code", b""))
        elif self.cost is not None:
            code.update(self.cost.dtype.str.encode())
            code.update(memoryview(np.ascontiguousarray(self.cost)).cast("B"))
        return repr(self), f"hash {code.hexdigest()[:16]}"

    def __repr__(self) -> str:
        given = {"bytes": self.bytes, "tokens": self.tokens, "cost": self.cost, "records": self.records}
        said = {name: value for name, value in given.items() if value is not None and name != "cost"}
        if self.cost is not None:
            said["cost"] = getattr(self.cost, "__name__", None) or f"{len(self.cost):,} integers"
        return f"Budget({', '.join(f'{name}={value}' for name, value in said.items())})"


@dataclass(frozen=True, eq=False)
class Costs:
    """The costs of an epoch's records.

    of : u32[n] or i64[n], by an order's numbers
    limit : the most that a batch costs, unless it is a single record
    most : the most records of a batch
    are_bytes : costs are the sizes of values
    """

    of: np.ndarray
    limit: int
    most: int
    are_bytes: bool

    @classmethod
    def within(cls, budget: Budget, of: np.ndarray) -> Costs:
        mean = float(of.mean(dtype=np.float64)) if len(of) else 1.0
        usual = round(_MOST_TIMES * budget.limit / max(mean, 1e-9))
        most = max(1, min(len(of), budget.records or usual))  # this many rows have memory in the ring's tables
        return cls(of, budget.limit, most, budget.bytes is not None)

    @property
    def usual_records(self) -> float:
        """About how many records a batch has."""
        return max(1.0, min(self.most, self.limit / max(float(self.of.mean(dtype=np.float64)), 1e-9)))

    def close(self) -> None:
        """Let go of memory that is shared. Idempotent."""
        object.__setattr__(self, "of", self.of[:0].copy())

    def along(self, order: Order, start: int, stop: int) -> np.ndarray:
        """i64[stop - start]: the costs at these positions."""
        if len(self.of) != order.n:
            raise ClosedError("the loader is already closed")
        return self.of[order.ids(start, stop)].astype(np.int64)

    def cut(self, order: Order, seats: int, start: int = 0, *, drop_last: bool = False) -> Cuts:
        """The steps from position `start` to the end of the epoch. drop_last : leave out the last step, which the end
        of the epoch cuts short."""
        n, at, chunk = order.n, start, _CHUNK
        bounds, rows = [np.array([start])], [np.empty((0, seats), np.int32)]
        while at < n:
            stop = min(n, at + chunk)
            whole = stop == n and not drop_last
            ends, _, counts, _ = self._dealt(self.along(order, at, stop), seats, at, None, whole)
            bounds.append(at + ends[1:])
            rows.append(counts.astype(np.int32))
            if stop == n:
                break
            at += int(ends[-1])
            chunk *= 1 if len(ends) > 1 else 2
        return Cuts(self, np.concatenate(bounds), np.concatenate(rows))

    def deal(self, costs: np.ndarray, bounds: np.ndarray, seats: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(seat i32[k] of each record, rows i64[steps, seats], cost i64[steps, seats] of each batch) of whole steps.

        costs : i64[k], at the positions from bounds[0] to bounds[-1]
        """
        return self._dealt(costs, seats, int(bounds[0]), bounds - bounds[0], True)[1:]

    def _dealt(
        self, costs: np.ndarray, seats: int, start: int, bounds: np.ndarray | None, whole: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(bounds of the steps as indices, and what `deal` returns). bounds : None: they are to be found

        start : position of the first record; whole : the last records are a step even if they do not fill one
        """
        k = len(costs)
        known = -1 if bounds is None else len(bounds) - 1
        most = k // seats + 1 if bounds is None else known  # every seat has a record in every step but the last
        bounds = np.zeros(most + 1, np.int64) if bounds is None else bounds.copy()
        heap, loads, counts = np.empty((3, seats), np.int64)
        seat_of, tried = np.empty((2, k), np.int32)
        rows, sums = np.zeros((2, most, seats), np.int64)
        given = np.array([self.limit, self.most, start, known, whole])
        scratch = np.empty(k, np.int64), heap, loads, counts
        steps = kernels.deal_steps(costs, given, *scratch, seat_of, tried, bounds, rows, sums)
        return bounds[: steps + 1], seat_of, rows[:steps], sums[:steps]


@dataclass(frozen=True, eq=False)
class Cuts:
    """The steps of an epoch, or of the rest of one.

    bounds : i64[steps + 1], positions where steps begin and end
    rows : i32[steps, seats], records of each batch
    """

    costs: Costs
    bounds: np.ndarray
    rows: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True)
class CutSchedule(Schedule):
    """A schedule whose steps are cut by cost. `batch_size` is the most records of a batch; `pieces` is 1."""

    is_even: ClassVar[bool] = False

    cuts: Cuts = field(kw_only=True, compare=False)

    @property
    def steps(self) -> int:
        return self.cuts.steps

    @property
    def stop(self) -> int:
        return int(self.cuts.bounds[-1])

    def step_positions(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        return int(self.cuts.bounds[step]), int(self.cuts.bounds[step + 1])

    def rows(self, step: int, seat: int) -> int:
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        return int(self.cuts.rows[step, seat])

    def piece_rows(self, step: int, seat: int, piece: int) -> tuple[int, int]:
        return 0, self.rows(step, seat)

    def seat_rows(self, step: int, seat: int) -> tuple[int, int]:
        raise NotImplementedError("a seat's records of a step that is cut by cost are no run of them")

    def _run(self, group: int) -> tuple[int, int]:
        """Positions of a group without pools."""
        bounds, first = self.cuts.bounds, group * self.per_group
        return int(bounds[first]), int(bounds[min(first + self.per_group, self.steps)])

    def _complete_by(self, position: int) -> int:
        return int(np.searchsorted(self.cuts.bounds, position, side="right")) - 1

    def _begun_by(self, position: int) -> int:
        return int(np.searchsorted(self.cuts.bounds, position, side="left"))

    # Limits of all epochs, for memory that is set aside once ---------------------------------------------------------

    def max_steps_in_flight(self, slots: int) -> int:
        if self.pools is None:
            return slots * self.per_group
        # A step costs more than half a budget on every seat, unless a record of more than half a budget came next, or a
        # batch had its most records.
        records = slots * self._most_group_positions
        costs = self.cuts.costs
        bulky = min(records, int(np.count_nonzero(costs.of > costs.limit // 2)))
        total = self._most_cost(slots * self.per_group)
        by_cost = 2 * total // (costs.limit * self.seats) + bulky + records // self.batch_size
        return int(max(1, min(records // self.seats, by_cost) + 3))

    def _most_cost(self, pools: int) -> int:
        """The most that this many pools can cost: those of the largest blocks."""
        assert self.pools is not None
        block, of = self.pools.block_records, self.cuts.costs.of
        sums = np.add.reduceat(of, np.arange(0, len(of), block), dtype=np.int64)
        return int(np.sort(sums)[-pools * self.pools.mix_blocks :].sum())

    def max_group_records(self, node_size: int) -> int:
        most = self.batch_size * node_size
        if self.pools is None:
            return int(min(self.n, self.per_group * most))
        return int(min(self._most_group_positions, self.max_steps_in_flight(1) * most))

    def max_group_bytes(self, node_size: int) -> int | None:
        costs = self.cuts.costs
        if not costs.are_bytes or self.pools is not None:
            return None
        return self.per_group * node_size * max(costs.limit, int(costs.of.max(initial=0)))

    # Shares ----------------------------------------------------------------------------------------------------------

    def share(
        self, order: Order, group: int, node_seat: int, node_size: int, only: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if only is not None:
            node_seat, node_size = only, 1
        cuts, (first, stop) = self.cuts, self.group_positions(group)
        first_step, stop_step = self.group_steps(group)
        bounds = cuts.bounds[first_step : stop_step + 1]
        # Whole steps are dealt, and those of their records that are in this group are kept.
        numbers = order.ids(int(bounds[0]), int(bounds[-1]))
        seat_of, _, _ = cuts.costs.deal(cuts.costs.of[numbers].astype(np.int64), bounds, self.seats)
        step = np.repeat(np.arange(first_step, stop_step), np.diff(bounds))
        row = _counted(seat_of + (step - first_step) * self.seats)
        local = seat_of.astype(np.int64) - node_seat
        position = np.arange(int(bounds[0]), int(bounds[-1]))
        mine = (local >= 0) & (local < node_size) & (position >= first) & (position < stop)
        return numbers[mine], step[mine], (local[mine] * self.batch_size + row[mine]).astype(np.int32)


def _counted(labels: np.ndarray) -> np.ndarray:
    """i64[k]: how many equal labels stand before each one."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    counts = np.arange(len(labels)) - np.repeat(begins, np.diff(begins, append=len(labels)))
    found = np.empty(len(labels), np.int64)
    found[order] = counts
    return found


def cost_of(cost: Callable[..., Any] | np.ndarray, ids: np.ndarray, nbytes: np.ndarray, records: int) -> np.ndarray:
    """i64[k]: what these records cost. Raises OptionError.

    records : those of the whole database
    """
    if callable(cost):
        found = np.asarray(cost(ids, nbytes))
        if found.shape != ids.shape or found.dtype.kind not in "iu":
            raise OptionError(
                f"cost of the Budget gave {found.dtype} {found.shape} for {len(ids):,} records, not as many integers"
            )
    else:
        if len(cost) != records:
            raise OptionError(f"cost of the Budget has {len(cost):,} integers, the dataset {records:,} records")
        found = cost[ids]
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= 1 << 48):
        wrong = int(np.flatnonzero((found < 0) | (found >= 1 << 48))[0])
        raise OptionError(f"cost of the Budget is {int(found[wrong])} for record {int(ids[wrong])}, not 0 or more")
    return found.astype(np.int64)
