"""`for batch in loader`: order, reader, decoder and prefetch, put together for a training loop."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from pario.assemble import Assembler, allowed_cores, fair_threads
from pario.buffers import BatchBuffers
from pario.checkpoint import VERSION, LoaderState
from pario.comm.agree import guard, spread
from pario.comm.turns import Turns
from pario.comm.window import LEFT, Ring
from pario.comm.world import PAGE, get_world
from pario.decode.base import Decoder, Draw
from pario.decode.function import as_decoder
from pario.errors import ClosedError, DeadRankError, DecodeError, OptionError, ParioError, RankError
from pario.feed import Feed, Tap
from pario.fetch.base import STOP_S
from pario.fetch.posix import PosixFetcher
from pario.loop import Hooks, Loop
from pario.machine import boot
from pario.options import BLOCK_SLOTS, ORDERS, POLICIES, KiB, Options
from pario.own import OwnRows, suited, suits
from pario.plan.epoch import Order, epoch_order, records_per_block
from pario.plan.schedule import Schedule, slot_capacity, units_per_group
from pario.plan.stagger import candidates
from pario.reader import RECIPES, Reader
from pario.records import Batch
from pario.scout import Scout
from pario.stats.prometheus import write_metrics
from pario.stats.rank import RankStats
from pario.stats.report import Report
from pario.tune import choose_stagger, readers_by_node, turns_among

__all__ = ["Loader"]

_log = logging.getLogger("pario")
#: prepare(step, check), what calls it in other threads, batches that these prepare ahead, even for a hasty caller
_Way = tuple[Callable[[int, Callable[[], None]], Any], Callable[..., Any] | None, int, bool]
#: So many threads, and not fewer, fill rows faster than a single one by more than their switches are worth where the
#: caller does nothing else. (Two on two cores: 1.04 of py-lmdb's rate against 1.00 with 197 KB rows in memory.)
_MANY_AHEAD = 4
#: With on_error="skip" the decoder may learn from one of this many first records.
_SKIPPED_FIRST = 64
#: Slots for records of unknown sizes: times the mean size, and this many bytes more.
_ROOM = 1.25
_LEAST_ROOM = 64 * KiB


class Loader:
    """Batches of one LMDB for every rank of a communicator, an epoch per `for` loop.

    Collective over `comm`: construction, the start of each `for` loop, and `close`. Taking a batch is not: a slow rank
    delays nobody until the node's ring is full.

    Parameters
    ----------
    path : LMDB data file, or the directory that holds data.mdb
    batch_size : records per rank and step
    decoder : a decoder of `pario.decode`, a plain function of one record's bytes, or None for raw bytes
    shuffle : False (key order), "global" (a uniform permutation), or "block" (blocks of neighbouring records in random
        order, their records mixed over `Options.mix_blocks` blocks: reads stay long)
    seed : of the order and of random augmentation; the order is a function of (seed, epoch, number of records) alone
    comm : an mpi4py communicator, which is duplicated. None: COMM_WORLD under a launcher, else one process without MPI
    db : name of a named database
    drop_last : False: the last step divides what is left among the ranks, as evenly as it goes, so that every record
        is delivered exactly once per epoch; some batches of that step may be smaller by one, or empty when fewer
        records than ranks are left. True: that step is left out unless it is full on every rank.
    on_error : what to do with a record that the decoder cannot read: "raise" (all ranks raise), or "skip" (it is
        missing from its batch; counted in `batch.skipped` and `loader.skipped`)
    options : see `Options`
    recipe : "auto", or for a study one of the others in `pario.reader.RECIPES` (docs/recipes.md); it changes how the
        records are read and not which ones are delivered
    save_index, progress : see `Reader`

    Use it in a `with` block: that is how an exception of yours on one rank reaches the others at once. Batches are
    taken by one thread, in the process that made the loader.

    Every rank gets the same number of batches: `len(loader)`. A loop that is left early (`break`) is over; the next
    loop is the next epoch. Raises `ParioError`s: all ranks raise together, the others a `PeerError` that names the
    rank where it happened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        batch_size: int,
        decoder: Decoder | Callable[..., Any] | None = None,
        *,
        shuffle: bool | str = False,
        seed: int = 0,
        comm: Any = None,
        db: str | bytes | None = None,
        drop_last: bool = False,
        on_error: str = "raise",
        options: Options | None = None,
        recipe: str = "auto",
        save_index: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        self._options = options if isinstance(options, Options) else Options()
        self._given_options = options
        self._pid = os.getpid()
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._on_error = on_error
        self._recipe = recipe
        self._closed = True  # until there is something to close
        self._epoch = 0
        self._position = 0
        self._block_records = 0
        self._pieces = 1
        self._run: Loop | None = None
        self._feed: Feed | None = None
        self._made_ring: Ring | None = None
        self._plain: Any = None  # PlainLmdb of the recipe "plain"
        self._turns: Turns | None = None
        self._stagger: tuple[int, dict[int, float]] | None = None  # readers at once; seconds of those that were tried
        self._stats = RankStats()
        self._loop_since = 0.0
        self._ended: tuple[int, bool] | None = None  # (epoch, was it complete) of a loop that the log does not know yet
        self._told: Report | None = None  # when the log was written last; rank 0
        self._held: BatchBuffers = BatchBuffers(self._options.held_bytes)
        self._assembler: Assembler | None = None
        self._conductor: ThreadPoolExecutor | None = None
        self.world = get_world(comm)
        self._stats.rank, self._stats.node = self.world.rank, self.world.node
        self._reader = self._open(path, db, save_index, progress)
        self._closed = False
        guard(self.world, self)
        try:
            self._prepare(decoder)
        except BaseException as e:
            self._abandon(e)
            raise
        self._stats.open = time.perf_counter() - started

    # -- construction --------------------------------------------------------------------------------------------

    def _open(
        self,
        path: str | os.PathLike[str],
        db: str | bytes | None,
        save_index: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Reader:
        try:
            error: BaseException | None = None
            try:
                self._check_arguments()
                os.fspath(path)
            except Exception as e:
                error = e
            self.world.agree(error, "looking at the arguments of Loader")
            self._check_same_arguments(path, db)
        except BaseException as e:
            self.world.abandon(e)
            raise
        return Reader(
            path,
            comm=self.world,
            db=db,
            options=self._options,
            recipe=self._recipe,
            save_index=save_index,
            progress=progress,
            grow=self._shuffle is False,  # the other orders need all places before the first record
        )

    def _check_arguments(self) -> None:
        shuffle, on_error, size, seed = self._shuffle, self._on_error, self._batch_size, self._seed
        if not isinstance(self._given_options, Options | None):
            raise OptionError(f"options must be a pario.Options, got {self._given_options!r}")
        if not (shuffle is False or (isinstance(shuffle, str) and shuffle in ORDERS)):
            raise OptionError(f'shuffle must be False, "global" or "block", got {shuffle!r}')
        if not (isinstance(self._recipe, str) and self._recipe in RECIPES):
            raise OptionError(f"recipe must be one of {', '.join(RECIPES)}, got {self._recipe!r}")
        if on_error not in POLICIES:
            raise OptionError(f'on_error must be "raise" or "skip", got {on_error!r}')
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise OptionError(f"batch_size must be an integer of at least 1 record per rank, got {size!r}")
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise OptionError(f"seed must be an integer of at least 0 and below 2**64, got {seed!r}")
        self._batch_size, self._seed = int(size), int(seed)

    def _prepare(self, decoder: Decoder | Callable[..., Any] | None) -> None:
        world, index, options, recipe = self.world, self._reader.index, self._options, self._reader.recipe
        mean_bytes = index.mean_bytes + index.header_bytes
        seats, most = world.size, world.allreduce_max(world.node_size)
        self.decoder = copy.copy(as_decoder(decoder))  # what it learns is this loader's own
        per_step = self._batch_size * seats
        if self._shuffle == "block":
            # A function of the dataset and the options alone: the order is the same for every number of ranks.
            self._block_records = records_per_block(mean_bytes, options.block_bytes)
            pool = min(index.n, self._block_records * options.mix_blocks)
            # A group holds as many records as a step, so that no step waits for more than these slots.
            fill = units_per_group(mean_bytes * pool * most / seats, options.slot_bytes) if recipe.fill else 1
            self._per_group = max(fill, -(-per_step // pool))
            self._slots = BLOCK_SLOTS
        else:
            step_bytes = mean_bytes * self._batch_size * most
            self._per_group = units_per_group(step_bytes, options.slot_bytes) if recipe.fill else 1
            if self.decoder.by_rows and recipe.ahead:
                self._pieces = max(1, min(self._batch_size, round(step_bytes / options.slot_bytes)))
            self._slots = options.slots if recipe.ahead else 1
        self._schedule = self._make_schedule(0)
        if self._schedule.steps == 0:
            raise OptionError(
                f"drop_last leaves no batch: {index.n:,} records are fewer than one step of "
                f"{self._batch_size} records on {world.size} ranks",
                path=self._reader.path,
            )
        whole = self._make_schedule(0, self._make_order(0) if self._shuffle == "block" else None)
        # Done by one rank for all: it looks at the first record and adds up the largest ones.
        found: tuple[tuple[Any, str], int] | None = None
        error: BaseException | None = None
        if world.rank == 0:
            try:
                found = self._learn(), 1 if recipe.per_rank else self._slot_bytes(whole, most)
                if options.metrics_file is not None:  # what cannot be written is said now, and not after an epoch
                    self._try_metrics(options.metrics_file)
            except BaseException as e:
                error = e
        world.agree(error, "looking at the first record")
        (self.decoder.spec, self._fingerprint), slot_bytes = world.bcast(found)
        self._stats.reader = self._reader.feeder is not None and not recipe.per_rank
        self._table_steps = whole.max_steps_in_flight(max(self._slots, BLOCK_SLOTS))
        # With a recipe whose ranks read alone the ring carries no records, but still the news of errors and losses.
        self._made_ring = Ring(
            world,
            slots=self._slots,
            slot_bytes=slot_bytes,
            table_steps=self._table_steps,
            table_rows=self._batch_size * world.node_size,
            alive_seconds=options.alive_seconds,
            provide=False,
        )
        world.on_wait = _weakly(self._check)
        # What does without it today may want it tomorrow; who wants it now hears now that there is not enough memory.
        if world.allreduce_max(world.is_leader and self._needs_ring(self._choose_own())):
            self._ring.provide()
        reader = self._reader
        self._assembler = Assembler(
            self.decoder,
            self._held,
            threads=options.decode_threads or self._fair_threads,
            on_error=self._on_error,
            path=reader.path,
            rank=world.rank,
            key_of=lambda record: reader.keys([record])[0],
            stats=self._stats,
        )
        # A synchronous recipe reads, and may send messages, when a step is prepared: in the caller's thread only.
        if self.decoder.parallel and recipe.ahead:
            self._conductor = ThreadPoolExecutor(1, thread_name_prefix="pario-ahead")
        if recipe.per_rank:
            self._plain = self._open_plain()

    def _open_plain(self) -> Any:
        """Each rank's own py-lmdb. Collective."""
        from pario.lmdb.plain import PlainLmdb  # and with it py-lmdb

        reader, error, plain = self._reader, None, None
        try:
            keys = None if self._shuffle is False else reader.keys(np.arange(len(reader)))
            plain = PlainLmdb(reader.path, reader.index, keys)
        except BaseException as e:
            error = e
        self.world.agree(error, "opening the dataset with py-lmdb")
        return plain

    def _try_metrics(self, place: str) -> None:
        try:
            write_metrics(Report(self._reader.path, [self._stats]), place)
        except OSError as e:
            raise OptionError(
                f"metrics_file cannot be written: {e.strerror}",
                path=place,
                rank=self.world.rank,
                hint="Rank 0 writes it: name a folder of rank 0's node that exists and is writable.",
            ) from e

    def _learn(self) -> tuple[Any, str]:
        """(what the decoder makes of the first record, what identifies the dataset in a saved state)."""
        reader, n = self._reader, self._reader.index.n
        ends = [0, n - 1]
        records, keys = reader.read(ends), reader.keys(ends)
        # How many pages of which kind the tree has, and the first and the last record: sets that agree in this are
        # taken for the same. Not where all records lie, which may be found out only while they are read.
        tree = reader.tree()
        counts = (n, tree.md_depth, tree.md_branch_pages, tree.md_leaf_pages, tree.md_overflow_pages)
        identity = hashlib.sha256(repr(counts).encode())
        for part in (*keys, *records):
            identity.update(len(part).to_bytes(8, "little") + bytes(part))
        tries = min(n, _SKIPPED_FIRST) if self._on_error == "skip" else 1
        for record in range(tries):
            try:
                self.decoder.learn(records[0] if record == 0 else reader.read([record])[0])
                break
            except DecodeError as e:
                if record + 1 == tries:
                    raise e.at(path=reader.path, record=record, key=reader.keys([record])[0]) from None
        return self.decoder.spec, identity.hexdigest()[:32]

    def _slot_bytes(self, schedule: Schedule, node_size: int) -> int:
        """No group needs more."""
        index = self._reader.index
        if index.growth is not None:
            # An estimate. What does not fit is read by the rank that takes it.
            most = schedule.max_group_records(node_size)
            return int(_ROOM * most * (index.mean_bytes + index.header_bytes)) + _LEAST_ROOM
        capacity = slot_capacity(
            index.extents,
            schedule,
            node_size,
            lead_bytes=index.header_bytes,
            # Whole pages: neighbouring values are read with what lies between them in a page.
            align=max(index.page_size, self._reader.pool.fetcher.align),
            by_offset=index.by_offset,
        )
        return capacity + capacity // 32 + 2 * index.page_size  # for the leaf pages that lie between values

    def _check_same_arguments(self, path: str | os.PathLike[str], db: str | bytes | None) -> None:
        mine: tuple[Any, ...] = (os.path.abspath(os.fspath(path)), db)
        mine += (self._batch_size, self._shuffle, self._seed, self._drop_last, self._on_error, self._recipe)
        mine += (repr(self._options),)
        cores = allowed_cores()
        everyones = self.world.allgather((mine, boot(), cores))
        first = everyones[0][0]
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                error = OptionError(
                    f"rank {rank} was given other arguments than rank 0: {theirs} against {first} "
                    "(path, db, batch_size, shuffle, seed, drop_last, on_error, recipe, options)",
                    hint="The constructor is collective: call it with the same arguments on every rank. For a file "
                    "per rank pass comm=MPI.COMM_SELF.",
                )
                raise spread(self.world, error)  # on all ranks: nobody needs to be told
        # Cores and the page cache are the machine's, whose memory may be several nodes to MPI (containers).
        machines = [machine for _, machine, _ in everyones]
        here = [theirs for _, machine, theirs in everyones if machine == machines[self.world.rank]]
        self._machines = len(set(machines))
        self._fair_threads = fair_threads(cores, here)
        self._crowded = len(here) > len(set().union(*here))  # more ranks than cores

    def _make_order(self, epoch: int) -> Order:
        return epoch_order(
            self._shuffle,
            self._reader.index.n,
            seed=self._seed,
            epoch=epoch,
            block_records=max(1, self._block_records),
            mix_blocks=self._options.mix_blocks,
        )

    def _make_schedule(self, start: int, order: Order | None = None) -> Schedule:
        return Schedule(
            n=self._reader.index.n,
            batch_size=self._batch_size,
            seats=self.world.size,
            start=start,
            drop_last=self._drop_last,
            pools=order.pools if order is not None else None,
            per_group=self._per_group,
            pieces=self._pieces,
        )

    # -- what a training loop uses -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch on every rank; after `load_state_dict`, of what is left of the epoch."""
        return self._schedule.steps

    def __iter__(self) -> Iterator[Batch]:
        """Start the next epoch (or the rest of the one that a loaded state left). Collective over `comm`.

        An earlier loop over this loader, if it is not at its end, cannot go on then.
        """
        self._check_open()
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this loader was made in process {self._pid}, and its threads did not come along to this one",
                hint="Construct the Loader in the process that iterates over it; it needs no worker processes.",
            )
        try:
            self._begin()
        except BaseException as e:
            self._abandon(e)
            raise
        assert self._run is not None
        return self._run

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or else the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be this epoch, from its beginning. Call it on every rank."""
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
            raise OptionError(f"epoch must be at least 0, got {epoch!r}")
        self._leave()
        self._set_place(int(epoch), 0)

    @property
    def index(self) -> Any:
        """The `RecordIndex`: where each record lies."""
        return self._reader.index

    def keys(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """The LMDB keys of these records. Not collective."""
        self._check_open()
        return self._reader.keys(ids)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader stands after the batch that was handed out last: a few integers, the same on every rank."""
        return self._state(self._epoch, self._position).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next loop go on after the batch at which `state` was taken, also on another number of ranks.

        Call it on every rank. Raises StateError if the state is of another dataset, seed or order.
        """
        loaded = LoaderState.from_dict(state)
        loaded.check(self._state(loaded.epoch, loaded.position))
        self._leave()
        self._set_place(loaded.epoch, loaded.position)
        if self._schedule.steps == 0:  # taken after the last batch of its epoch
            self._set_place(loaded.epoch + 1, 0)

    def stats(self) -> dict[str, Any]:
        """What happened so far on this rank: the fields of `pario.stats.rank.RankStats`, and the sizes of the ring's
        slots, their number, and the memory of batches, in bytes; with the recipe "stag" how many readers read at once
        and what the trial took, in seconds by number of readers. Not collective; cheap at any time."""
        return {
            **asdict(self._so_far()),
            "slot_bytes": self._ring.slot_bytes,
            "slots": self._slots,
            **self._stagger_stats(),
            "batch_memory": self._held.allocated_bytes,
        }

    def _stagger_stats(self) -> dict[str, Any]:
        """Of a recipe with turns, once the first loop has begun."""
        if self._stagger is None:
            return {}
        return {"stagger": self._stagger[0], "stagger_seconds": self._stagger[1]}

    def report(self) -> Report:
        """What each rank did so far, all together, and a sentence that says which part was the slow one.

        Collective over `comm`, at any time between two batches. `print(report)` shows a table.
        """
        self._check_open()
        try:
            return self._meet("report")[0]
        except BaseException as e:
            self._abandon(e)
            raise

    @property
    def skipped(self) -> int:
        """Records left out on this rank so far (on_error="skip")."""
        return self._stats.skipped

    def close(self) -> None:
        """End reading and free the windows. Collective over `comm`; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._leave()
        try:
            # Nobody may still be reading or waiting when the window goes.
            self._meet("close")
        except BaseException as e:
            self._abandon(e)
            raise
        if self._turns is not None:
            self._turns.settle()
        self.world.on_wait = None
        self._closed = True
        self._stop_threads()
        self._ring.close()
        self._reader.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        # Leaving on purpose, a generator that is closed or sys.exit(0), is no failure.
        if error is None or kind is GeneratorExit or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self._abandon(error)

    def __reduce__(self) -> Any:
        raise TypeError("a Loader holds threads and shared memory and cannot be pickled; construct it where it is used")

    def __del__(self) -> None:
        # A loader that was neither closed nor used in a `with` block: let its threads end. The garbage collector may
        # run this in any of them, so nothing is waited for, and MPI is not called: windows go with the process.
        if getattr(self, "_closed", True) or os.getpid() != self._pid:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            if self._feed is not None:
                self._feed.stop(0)
            self._end_threads(wait=False)
            self._reader.abandon(0)

    def __repr__(self) -> str:
        return (
            f"Loader({self._reader.path!r}, records={self._reader.index.n:,}, batch_size={self._batch_size}, "
            f"ranks={self.world.size}, shuffle={self._shuffle!r}, decoder={self.decoder!r})"
        )

    # -- inside --------------------------------------------------------------------------------------------------

    @property
    def _ring(self) -> Ring:
        assert self._made_ring is not None  # from the end of the constructor on
        return self._made_ring

    def _state(self, epoch: int, position: int) -> LoaderState:
        return LoaderState(
            version=VERSION,
            fingerprint=self._fingerprint,
            n=self._reader.index.n,
            seed=self._seed,
            shuffle=str(self._shuffle or "none"),
            block_records=self._block_records,
            mix_blocks=self._options.mix_blocks if self._shuffle == "block" else 0,
            epoch=epoch,
            position=position,
            drop_last=self._drop_last,
        )

    def _set_place(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._schedule = self._make_schedule(position)

    def _begin(self) -> None:
        world = self.world
        if self._run is not None:  # a loop that was left early
            self._leave()
            self._set_place(self._epoch + 1, 0)
        doing = f"epoch {self._epoch} from record {self._position}"
        _, own, ring = self._meet(doing, own=self._choose_own() if world.is_leader else "")
        if ring:
            self._ring.provide()
        self._loop_since = time.perf_counter()
        if self._feed is not None:
            self._feed.stop()
            self._feed = None
        if self._turns is not None:
            self._turns.settle()
        world.node_barrier()
        if world.is_leader:
            self._reader.warn_if_replaced()
            self._ring.reset()
        world.node_barrier()
        # The pools of a block order differ from epoch to epoch, and every rank must know them; a permutation of all
        # records is needed by those that read only.
        reads = own or self._reader.feeder is not None or self._reader.recipe.per_rank
        order = self._make_order(self._epoch) if reads or self._shuffle == "block" else None
        schedule = self._make_schedule(self._position, order)
        self._stats.reader, self._stats.own = reads and not self._reader.recipe.per_rank, bool(own)
        prepare, submit, ahead, eager = self._own_way(schedule, order, own) if own else self._ring_way(schedule, order)
        self._stats.ahead = submit is not None
        assembler = self._assembler
        assert assembler is not None  # from the end of the constructor on
        hooks = Hooks(
            check=self._check,
            check_ahead=self._check_node,
            prepare=prepare,
            finish=partial(assembler.batch, epoch=self._epoch),
            taken=partial(self._taken, schedule),
            complete=self._complete,
            failed=self._abandon,
            check_open=self._check_open,
            wake=self._ring.wake,
        )
        self._run = Loop(
            hooks,
            epoch=self._epoch,
            steps=schedule.steps,
            submit=submit,
            ahead=ahead,
            eager=eager,
            alive_seconds=self._options.alive_seconds,
            stats=self._stats,
        )

    def _ring_way(self, schedule: Schedule, order: Order | None) -> _Way:
        """Batches out of the node's ring, or of the recipe's py-lmdb. Collective where readers take turns."""
        world, reader, assembler, draw = self.world, self._reader, self._assembler, Draw(self._seed, self._epoch)
        recipe = reader.recipe
        assert assembler is not None  # from the end of the constructor on
        self._held.held_bytes = self._options.held_bytes
        tap: Any = None
        if recipe.per_rank:
            assert order is not None
            tap = self._plain_tap(schedule, order)
        else:
            if reader.feeder is not None:
                assert order is not None
                self._feed = self._make_feed(schedule, order)
            if recipe.stagger and schedule.groups:
                self._take_turns(schedule)
            if self._feed is not None and recipe.ahead:
                self._feed.start()
            tap = Tap(
                self._ring,
                schedule,
                seat=world.seat,
                node_seat=world.node_seat,
                node_rank=world.node_rank,
                stats=self._stats,
                feed=None if recipe.ahead else self._feed,
                reader_of=None if recipe.ahead else reader.reader_of,
                read=reader.read if reader.index.growth is not None else None,
            )
        submit = None if self._conductor is None else self._conductor.submit
        return lambda step, check: assembler.parts(tap, step, draw, check), submit, self._options.decode_ahead, True

    def _needs_ring(self, own: str) -> bool:
        return not own and not self._reader.recipe.per_rank

    def _choose_own(self) -> str:
        """How the ranks of this node, whose leader this is, do without the ring in the next epoch (see `suited`), or
        ""."""
        chosen, reader = self._options.own_rows, self._reader
        if chosen == "never" or self._recipe != "auto" or not suits(self.decoder):
            return ""
        fetcher = reader.pool.fetcher
        if type(fetcher) is not PosixFetcher:
            return ""
        found = suited(fetcher, reader.index, self._shuffle, self.world.node_size, self._machines)
        return found or ("cached" if chosen == "always" else "")

    def _own_way(self, schedule: Schedule, order: Order | None, kind: str) -> _Way:
        """Batches straight out of the page cache; `kind` is an answer of `suited`."""
        reader, pool, options = self._reader, self._reader.pool, self._options
        assert order is not None
        assert isinstance(pool.fetcher, PosixFetcher)
        pool.fetcher.let_read_ahead(kind == "ordered")
        rows = OwnRows(
            schedule=schedule,
            order=order,
            index=reader.index,
            fetcher=pool.fetcher,
            decoder=self.decoder,
            held=self._held,
            check_snapshot=reader.check_snapshot,
            seat=self.world.seat,
            stats=self._stats,
            # As far ahead as the ring would be.
            advise_bytes=options.slots * options.slot_bytes // self.world.node_size if kind == "advised" else 0,
        )
        ahead = 0  # where ranks share cores, another thread would only take turns with this one
        known = self.decoder.by_rows or reader.index.growth is None or reader.index.growth.is_complete
        if not self._crowded and known and 4 * rows.batch_bytes <= options.held_bytes:
            # One per core, in as much memory as the node's ring has; one at least.
            room = options.slots * options.slot_bytes // (self.world.node_size * rows.batch_bytes)
            ahead = max(1, min(self._fair_threads, options.inflight, room))
        # What is ahead takes nothing from what the caller may hold: the same script must work when the file is cold.
        self._held.held_bytes = options.held_bytes
        if ahead:
            self._held.held_bytes += ahead * (rows.batch_bytes * 9 // 8 + 2 * PAGE)
        eager = ahead >= _MANY_AHEAD
        return partial(rows.prepare, draw=Draw(self._seed, self._epoch)), pool.call if ahead else None, ahead, eager

    def _make_feed(self, schedule: Schedule, order: Order) -> Feed:
        world, reader = self.world, self._reader
        assert reader.feeder is not None
        reader.pool.fetcher.let_read_ahead(False)
        kind: Callable[..., Feed] = Feed
        if reader.index.growth is not None:
            kind = partial(Scout, guess=reader.recipe.locate != "cursor")
        return kind(
            schedule=schedule,
            order=order,
            index=reader.index,
            ring=self._ring,
            pool=reader.pool,
            options=self._options,
            recipe=reader.recipe,
            check_snapshot=reader.check_snapshot,
            node_seat=world.node_seat,
            node_size=world.node_size,
            rank=world.rank,
            feeder=reader.feeder,
            feeders=reader.feeders,
            stats=self._stats,
        )

    def _plain_tap(self, schedule: Schedule, order: Order) -> Any:
        from pario.lmdb.plain import PlainTap

        return PlainTap(
            self._plain,
            schedule,
            order,
            index=self._reader.index,
            seat=self.world.seat,
            table_steps=self._table_steps,
            check_snapshot=self._reader.check_snapshot,
            stats=self._stats,
        )

    def _take_turns(self, schedule: Schedule) -> None:
        """Readers of several nodes read in turns; before the first loop it is tried how many should at once.
        Collective."""
        world, feed = self.world, self._feed
        if self._stagger is None:
            readers = readers_by_node(world, self._reader.feeder)
            size = self._options.stagger or (1 if world.nodes == 1 else 0)
            if size:
                self._stagger = size, {}
            else:
                first = [some[:1] for some in readers]
                self._stagger = choose_stagger(
                    world,
                    candidates(world.nodes),
                    lambda size: turns_among(world, first, size),
                    feed.try_read if feed is not None else None,
                    schedule.groups,
                )
            self._turns = turns_among(world, readers, self._stagger[0])
        if feed is not None:
            feed.turns = self._turns

    def _meet(self, doing: str, own: str = "") -> tuple[Report, str, bool]:
        """All ranks do the same next, or all raise; (what everybody did so far, what this node's leader says as `own`,
        does some node need the ring). Collective."""
        everyones = self.world.allgather((doing, own, *vars(self._so_far()).values()))
        first = everyones[0][0]
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                error = OptionError(
                    f"the ranks go different ways: {first!r} on rank 0, {theirs!r} on rank {rank}",
                    hint="Each rank must run the same loops over the loader, and call set_epoch, load_state_dict, "
                    "report and close alike.",
                )
                raise spread(self.world, error)  # on all ranks
        report = Report(self._reader.path, [RankStats(*numbers) for _, _, *numbers in everyones])
        owns: dict[int, str] = {}
        for (_, theirs, *_), numbers in zip(everyones, report.ranks, strict=True):
            owns[numbers.node] = max(theirs, owns.get(numbers.node, ""))
        ended, self._ended = self._ended, None
        if ended is not None and self.world.rank == 0:
            self._tell(report, *ended)
        return report, owns[self.world.node], any(map(self._needs_ring, owns.values()))

    def _tell(self, report: Report, epoch: int, complete: bool) -> None:
        """Write down the loop that ended since the last time."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("epoch %d%s: %s", epoch, "" if complete else ", left early", report.since(self._told).line())
        self._told = report
        if self._options.metrics_file is not None:
            try:
                write_metrics(report, self._options.metrics_file)
            except OSError as e:  # a full disk under the monitoring ends no training
                _log.warning("metrics not written: %s", e)

    def _so_far(self) -> RankStats:
        """This rank's numbers with the loop under way."""
        under_way = time.perf_counter() - self._loop_since if self._run is not None else 0.0
        return replace(self._stats, loop=self._stats.loop + under_way)

    def _taken(self, schedule: Schedule, batch: Batch) -> None:
        self._position = schedule.next_position(batch.step)
        self._stats.batches += 1
        self._stats.records += len(batch.ids) + batch.skipped
        self._stats.skipped += batch.skipped

    def _complete(self) -> None:
        self._leave(complete=True)
        if self.world.rank == 0:
            try:
                self._reader.index.save()
            except ParioError as e:  # all of this epoch's records were good; the next one meets it where it counts
                _log.warning("the index of %s is not complete: %s", self._reader.path, e)
        self._set_place(self._epoch + 1, 0)

    def _leave(self, complete: bool = False) -> None:
        """This rank needs nothing more of the epoch under way."""
        run, self._run = self._run, None
        if run is not None:
            self._stats.loop += time.perf_counter() - self._loop_since
            self._ended = (self._epoch, complete)
            run.end()
            self._ring.finish(self.world.node_rank, LEFT)
            if self._turns is not None:
                self._turns.leave()

    def _check(self) -> None:
        """Does everybody else still live and work? Raises PeerError or DeadRankError."""
        self._check_node()
        self.world.alarm.check()

    def _check_node(self) -> None:
        """The same for the ranks of this node alone; calls no MPI."""
        if self._feed is not None and self._feed.error is not None:
            raise self._feed.error
        self._ring.check()

    def _abandon(self, error: BaseException) -> None:
        """Tell the others, then drop what this rank holds without waiting for anybody."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self.world.on_wait = None
        with contextlib.suppress(Exception):
            self.world.alarm.raise_all(error)
            # Another rank's error is known already, and must not come back to it as somebody else's.
            known = isinstance(error, RankError) and not isinstance(error, DeadRankError)
            if self._made_ring is not None and not known:
                self._made_ring.fail(self.world.rank, f"{type(error).__name__}: {error}")
        if self._run is not None:
            self._run.end(STOP_S)
        ended = self._stop_threads(STOP_S)
        if self._made_ring is not None:
            self._made_ring.close()
        self._reader.abandon(STOP_S if ended else 0)
        self.world.free(collective=False)

    def _stop_threads(self, limit_s: float = math.inf) -> bool:
        """Whether the feed has ended within `limit_s`."""
        feed, self._feed = self._feed, None
        ended = feed is None or feed.stop(limit_s)
        self._end_threads(wait=True)
        return ended

    def _end_threads(self, wait: bool) -> None:
        if self._conductor is not None:
            self._conductor.shutdown(wait=wait, cancel_futures=True)
        if self._assembler is not None:
            self._assembler.end(wait)
        if self._plain is not None and wait:  # nobody decodes out of its mapping any more
            self._plain.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader is already closed", path=self._reader.path)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method for as long as its object lives: the feed's thread holds the World, which must not hold the Loader."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
