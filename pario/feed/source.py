"""The contract between a loader and its records: one `Source` per epoch, created by one `Supply` per loader.

    Supply.propose   the best way for the next epoch, as the first rank of each node sees it
    Supply.source    a Source of that kind; all ranks of a node use the same kind
    Source.prepare   once per step, or for several: this rank's records, decoded. It stands here, for all sources:
        pieces         which rows are decoded at once
        take           their records, as soon as they are in memory
        release        they have been decoded
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
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld
from pario.comm.slots import Slots
from pario.comm.window import Ring
from pario.dataset.reader import Reader
from pario.decode.base import Draw
from pario.feed.decode_step import DecodeStep, Parts
from pario.machine import Share
from pario.options import Options
from pario.plan.epoch import Order
from pario.plan.samples import widened
from pario.plan.schedule import Schedule
from pario.plan.seats import Seats, seat_share, seats_share
from pario.plan.stream import Stream, Work
from pario.records import Records
from pario.stats.rank import RankStats
from pario.tune.knobs import Knob


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
    depth : number of steps to prepare beyond the one that the caller waits for
    least, most : what it is at least and at most, whatever the knob says (where several steps are prepared at once,
        at least `least` times as many); most None: `DecodeStep` finds out for how
        many there is memory
    eager : False: prepare ahead only while the caller is busy between two batches, or where a step takes long. Else a
        caller that asks immediately is served by its own thread.
    """

    submit: Callable[..., Future[Any]]
    depth: Knob
    eager: bool = True
    least: int = 1
    most: int | None = None

    @property
    def steps(self) -> int:
        """`depth`, now."""
        steps = max(self.least, self.depth.value)
        return steps if self.most is None else min(steps, self.most)


@dataclass(slots=True)
class Piece:
    """Rows [first, stop) of this rank's batch of a step, or of several steps from `step` on: the `number`-th part of
    it that is decoded at once.

    last : no other piece follows
    mark : what the source keeps from `take` to `release`
    """

    step: int
    number: int
    first: int
    stop: int
    last: bool
    mark: Any = None


class Source(ABC):
    """One rank's records of one epoch, or of the rest of one.

    ahead : how to prepare steps ahead; None: prepare each step when the caller asks for it, in the caller's thread
    most_steps : how many steps may be prepared at once; their arrays then lie in one block of memory
    """

    ahead: Ahead | None = None
    most_steps = 1

    def __init__(self, context: Context, work: Work) -> None:
        self._context = context
        self._stats = context.stats
        self._schedule = work.schedule
        self._draw = Draw(work.stream.seed, work.epoch, context.reader.keys)
        self.width = context.width
        self._counting = threading.Lock()  # guards the stats of the threads that prepare, and what follows
        self._decoding = 0
        self._decoding_since = 0.0

    @abstractmethod
    def pieces(self, step: int, steps: int = 1) -> list[Piece]:
        """The parts of a step, or of `steps` of them, at least one; together all their rows."""

    @abstractmethod
    def take(self, piece: Piece, check: Callable[[], None]) -> Records:
        """The records of one piece: views, valid until its release. Adds the time it waits to `stats.share`.

        check : called now and then while this waits; may raise
        """

    @abstractmethod
    def release(self, piece: Piece) -> bool:
        """The records of the piece have been decoded. False: their bytes have changed meanwhile, so take it again."""

    def prepare(self, step: int, check: Callable[[], None], steps: int = 1) -> list[Parts]:
        """This rank's records of one step, or of `steps` of them, decoded. Called once per step, in ascending order,
        except that several threads of `ahead` may call it at once.

        Raises ReadError, CorruptedError, SnapshotError, PeerError, DeadRankError, and what `check` raises.
        """
        parts = self._decode_pieces(self.pieces(step, steps), check)
        if steps == 1:
            return [parts]
        seat = self._context.seats.mine
        cuts = accumulate((self._schedule.rows(k, seat) for k in range(step, step + steps)), initial=0)
        return [parts.rows(a, b) for a, b in pairwise(cuts)]

    def _decode_pieces(self, pieces: list[Piece], check: Callable[[], None]) -> Parts:
        records = self.take(pieces[0], check)
        parts = Parts(*self._context.decode.arrays(records, pieces[-1].stop), [])
        for piece in pieces:
            if piece.number:
                records = self.take(piece, check)
            while not self._decode_piece(piece, records, parts):
                records = self.take(piece, check)
                if len(pieces) == 1:  # sizes that stand in the values may have been wrong, too
                    parts = Parts(*self._context.decode.arrays(records, piece.stop), [])
        return parts

    def _decode_piece(self, piece: Piece, records: Records, parts: Parts) -> bool:
        """Decode a piece into its rows; False: its bytes changed meanwhile."""
        rows = slice(piece.first, piece.stop)
        begin = self._decode_begins()
        try:
            whole = piece.last and not piece.number  # a decoder that does not go by rows has only such ones
            arrays = parts.arrays if whole else {name: array[rows] for name, array in parts.arrays.items()}
            parts.ids[rows] = records.ids[:: self.width]
            found = self._context.decode.decode(records, arrays, self._draw)
        finally:
            self._decode_ends(begin)
        good = self.release(piece)
        if good:
            parts.failures.extend((piece.first + row, why) for row, why in found)
        return good

    def _decode_begins(self) -> float:
        now = time.perf_counter()
        with self._counting:
            if not self._decoding:
                self._decoding_since = now
            self._decoding += 1
        return now

    def _decode_ends(self, begin: float) -> None:
        """While two threads decode at once, that is time of one."""
        now = time.perf_counter()
        with self._counting:
            self._decoding -= 1
            self._stats.decode += now - max(begin, self._decoding_since)
            self._decoding_since = now

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

    def close(self, limit_s: float = math.inf) -> bool:
        """No rank of the node takes more records. Returns whether all background work ended within `limit_s` seconds.
        Idempotent."""
        return True


class Supply(ABC):
    """Creates the sources of a loader's epochs, and owns what they share. The thread that takes the batches calls all
    methods except `close` and `stats`."""

    #: what the node's ranks share is prepared already for an epoch without the ring: the last one was one, too
    is_prepared = False

    def __init__(self, context: Context) -> None:
        self.context = context

    def propose(self) -> str:
        """The best way for this node's ranks in the next epoch, if there are several. Called on the node's first rank.
        """
        return ""

    def renew(self) -> None:
        """A node has proposed `Way.RENEW`: open the tiers anew. Collective."""

    def needs_ring(self, way: str) -> bool:
        """True if this way needs the node's ring."""
        return True

    @abstractmethod
    def source(self, work: Work, way: str) -> Source:
        """The source of one epoch; collective over the world if the class says so.

        way : the proposal of this node's first rank
        """

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
