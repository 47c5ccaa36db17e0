"""The contract between a loader and its records: one `Source` per epoch, created by one `Supply` per loader.

    Supply.propose   the best way for the next epoch, as the first rank of each node sees it
    Supply.source    a Source of that kind; all ranks of a node use the same kind
    Source.prepare   once per step: this rank's records, decoded
    Source.leave     this rank takes no more records; work for other ranks continues
    Source.end       no rank of the node takes more records
    Supply.close     together with the loader

A Source calls MPI only in the thread that takes the batches, and only if its class says so.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld
from pario.comm.slots import Slots
from pario.comm.window import Ring
from pario.control.knobs import Knob
from pario.dataset.reader import Reader
from pario.decode.base import Draw, Failures
from pario.machine import Share
from pario.options import Options
from pario.plan.epoch import Order
from pario.plan.samples import widened
from pario.plan.schedule import Schedule
from pario.plan.seats import Seats, seat_share, seats_share
from pario.plan.stream import Stream, Work
from pario.records import Records
from pario.stats.rank import RankStats
from pario.supply.decode_step import DecodeStep, Parts

__all__ = ["Ahead", "Context", "Parts", "RecordSource", "Source", "Supply"]

#: A thread that waits for another one to take its records looks so often whether the epoch was left, in seconds.
_TURN_S = 0.2


@dataclass(frozen=True)
class Context:
    """Everything that the sources of one loader need.

    world, reader : those of the loader; the reader's recipe says how to read
    options : the loader's options
    stream : the records to deliver
    seats : which ranks deliver which of them
    share : this rank's share of the machine's cores
    ring : the node's ring; `slots`: its memory for records, which exists after `Slots.allocate`
    decode : arrays and decoder of the batches
    stats : this rank's counters
    """

    world: AnyWorld
    reader: Reader
    options: Options
    stream: Stream
    seats: Seats
    share: Share
    ring: Ring
    slots: Slots
    decode: DecodeStep
    stats: RankStats

    def ids_of(self, numbers: np.ndarray, order: Order) -> np.ndarray:
        """i64[k * width]: the record ids of an order's numbers i64[k]."""
        chosen = self.stream.chosen
        return self.reader.index.ids_of(numbers, order) if chosen is None else chosen.ids_of(numbers, order.space)

    @property
    def width(self) -> int:
        """Records of each of the stream's items; more than 1 only for samples of several records."""
        chosen = self.stream.chosen
        return 1 if chosen is None else chosen.width

    def node_records(self, schedule: Schedule, order: Order, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`seats_share` in records: (ids i64[k], step i64[k], row i32[k]) of all seats of this node. A table of rows
        has `width` times as many as the schedule's, those of a sample one after the other."""
        return self._records(seats_share(schedule, order, group, self.seats), order)

    def own_records(self, schedule: Schedule, order: Order, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`seat_share` in records, of this rank's seat."""
        return self._records(seat_share(schedule, order, group, self.seats), order)

    def _records(
        self, share: tuple[np.ndarray, np.ndarray, np.ndarray], order: Order
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        numbers, steps, rows = share
        ids, width = self.ids_of(numbers, order), self.width
        return (ids, steps, rows) if width == 1 else (ids, np.repeat(steps, width), widened(rows, width))


@dataclass(frozen=True)
class Ahead:
    """How other threads prepare steps before the caller asks for them.

    submit : submit(function, *arguments) -> Future; calls the function in another thread
    depth : number of steps to prepare beyond the one that the caller waits for; a knob may change it
    least, most : what it is at least and at most, whatever the knob says; most None: `DecodeStep` finds out for how
        many there is memory
    eager : False: prepare ahead only while the caller is busy between two batches. A caller that asks immediately is
        served by its own thread.
    """

    submit: Callable[..., Future[Any]]
    depth: int | Knob
    eager: bool = True
    least: int = 1
    most: int | None = None

    @property
    def steps(self) -> int:
        """`depth`, now."""
        steps = max(self.least, self.depth if isinstance(self.depth, int) else self.depth.value)
        return steps if self.most is None else min(steps, self.most)


class Source(ABC):
    """One rank's records of one epoch, or of the rest of one.

    ahead : how to prepare steps ahead; None: prepare each step when the caller asks for it, in the caller's thread
    """

    ahead: Ahead | None = None

    @abstractmethod
    def prepare(self, step: int, check: Callable[[], None]) -> Parts:
        """This rank's records of one step, decoded. Called once per step, in ascending order, except that several
        threads of `ahead` may call it at once.

        check : called now and then while this waits for bytes; may raise
        Raises ReadError, CorruptedError, SnapshotError, PeerError, DeadRankError, and what `check` raises.
        """

    def check(self) -> None:
        """Raise the error of this source's background work, if there is one. Any thread, no MPI."""

    def wake(self) -> None:
        """Make calls of `prepare` that wait for bytes call their `check` now."""

    def leave(self) -> None:
        """This rank takes no more records. Does not wait. Idempotent."""

    def outlive(self, then: Callable[[], None]) -> bool:
        """The loader was dropped on this rank: leave. If other ranks of the node still need this rank's reads, continue
        reading for them, call `then` at the end, in any thread, and return True. Any thread, no MPI."""
        return False

    def end(self, limit_s: float = math.inf) -> bool:
        """No rank of the node takes more records. Returns whether all background work ended within `limit_s` seconds.
        Idempotent."""
        return True


class Supply(ABC):
    """Creates the sources of a loader's epochs, and owns what they share. The thread that takes the batches calls all
    methods except `close` and `stats`."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def propose(self) -> str:
        """The best way for this node's ranks in the next epoch; "" is the usual one. Called on the node's first
        rank."""
        return ""

    def needs_ring(self, way: str) -> bool:
        """True if this way needs the node's ring."""
        return True

    @abstractmethod
    def source(self, work: Work, way: str) -> Source:
        """The source of one epoch; collective over the world if the class says so.

        way : the proposal of this node's first rank
        """

    def taken(self, position: int) -> None:
        """This rank's loop is about to get a batch, the one that ends at this position of the epoch. Called for each
        batch: it must take no time."""

    def settle(self, work: Work | None = None, way: str = "") -> None:
        """Called when all ranks have left the last source, before the next one and before `close`. Collective.

        work, way : what `source` will be asked for; None: nothing more
        """

    def no_more(self, limit_s: float = math.inf) -> bool:
        """No other epoch will begin: read nothing ahead for one. Any thread, no MPI. Returns whether what was under way
        for it ended within `limit_s` seconds. Idempotent."""
        return True

    def stats(self) -> dict[str, Any]:
        """Settings and measurements for the user, besides `RankStats`."""
        return {}

    def close(self, limit_s: float = math.inf) -> bool:
        """End threads and close files. Returns whether the threads ended within `limit_s` seconds. Idempotent.

        limit_s : 0 also where a thread that decodes has not ended
        """
        return True


class RecordSource(Source):
    """A source that has the bytes of records in memory before it decodes them, one piece of a step at a time.

    pieces : pieces of a step (`Schedule.pieces`)
    width : records of each row
    """

    def __init__(self, context: Context, work: Work) -> None:
        self._context = context
        self._schedule = work.schedule
        self._stats = context.stats
        self._draw = Draw(work.stream.seed, work.epoch, context.reader.keys)
        self.pieces = work.schedule.pieces
        self.width = context.width
        self._turn = threading.Condition()  # guards those below, and the stats
        self._next_step = 0  # the one whose records are taken next
        self._decoded: set[int] = set()  # steps that wait for earlier ones to be released
        self._next_release = 0
        self._counted = 0.0  # until when the time of decoding is counted

    @abstractmethod
    def take(self, step: int, piece: int, check: Callable[[], None]) -> tuple[int, Records]:
        """(first row, the records of this rank's rows) of one piece of `step`: views, valid until its release.

        Adds the time it waits to `stats.share`, and calls `check` meanwhile, which may raise.
        """

    @abstractmethod
    def release(self, step: int, piece: int) -> None:
        """The records of the piece have been decoded."""

    def rows(self, step: int) -> int:
        """Number of this rank's rows in `step`."""
        return self._schedule.rows(step, self._context.seats.mine)

    def prepare(self, step: int, check: Callable[[], None]) -> Parts:
        if self.pieces > 1:
            return self._prepare_pieces(step, check)
        # One thread takes records while another one decodes those of the step before: the time between two batches is
        # mostly the interpreter's, and was a quarter of all for packed records of 3 KB.
        decode, stats = self._context.decode, self._stats
        self._wait_turn(step, check)
        try:
            begin, waited_before = time.perf_counter(), stats.share
            _, records = self.take(step, 0, check)
            arrays, ids = decode.arrays(records, self.rows(step))
            ids[:] = records.ids[:: self.width]
            waited = stats.share - waited_before
        finally:
            self._pass_turn(step)
        failures = decode.decode(records, arrays, self._draw)
        with self._turn:
            # While two threads decode at once, that is time of one.
            end, begin = time.perf_counter(), max(begin + waited, self._counted)
            stats.decode += max(0.0, end - begin)
            self._counted = end
            self._decoded.add(step)
            while self._next_release in self._decoded:
                self._decoded.remove(self._next_release)
                self.release(self._next_release, 0)
                self._next_release += 1
        return Parts(arrays, ids, failures)

    def _wait_turn(self, step: int, check: Callable[[], None]) -> None:
        with self._turn:
            while self._next_step < step:
                self._turn.wait(_TURN_S)
                check()

    def _pass_turn(self, step: int) -> None:
        with self._turn:
            self._next_step = step + 1
            self._turn.notify_all()

    def _prepare_pieces(self, step: int, check: Callable[[], None]) -> Parts:
        """A step that is larger than a slot: its pieces come one after the other, each when the last one is decoded."""
        decode, stats = self._context.decode, self._stats
        arrays: dict[str, np.ndarray] = {}
        ids = np.empty(0, np.int64)
        failures: Failures = []
        self._wait_turn(step, check)
        begin, waited_before = time.perf_counter(), stats.share
        try:
            for piece in range(self.pieces):
                first, records = self.take(step, piece, check)
                if piece == 0:
                    arrays, ids = decode.arrays(records, self.rows(step))
                part = slice(first, first + len(records) // self.width)
                ids[part] = records.ids[:: self.width]
                pieces = {name: array[part] for name, array in arrays.items()}
                failures += [(first + row, why) for row, why in decode.decode(records, pieces, self._draw)]
                self.release(step, piece)
            stats.decode += time.perf_counter() - begin - (stats.share - waited_before)  # before another thread waits
        finally:
            self._pass_turn(step)
        return Parts(arrays, ids, failures)
