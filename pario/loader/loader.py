"""Loader, the object that a training script uses: `for batch in loader`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np

from pario.comm.base import abandoning
from pario.comm.world import get_world
from pario.dataset.reader import Reader
from pario.decode.base import Decoder
from pario.errors import OptionError
from pario.fetch.resolve import Paths
from pario.loader.arguments import Arguments
from pario.loader.build import build
from pario.loader.lifetime import Lifetime
from pario.loader.meeting import Meeting
from pario.loader.progress import Progress
from pario.loader.state import LoaderState
from pario.locate.base import Index
from pario.options import Options, Policy, Recipe, Shuffle
from pario.plan.budget import Budget
from pario.plan.selection import Selection
from pario.records import Batch
from pario.stats.rank import RankStats

if TYPE_CHECKING:
    from typing_extensions import Self, TypeVar

    from pario.stats.report import Report

    B = TypeVar("B", default=Batch)
else:
    from typing import TypeVar

    B = TypeVar("B")


_log = logging.getLogger("pario")


class Loader(Generic[B]):
    """Batches of one LMDB, or of several, for every rank of a communicator, an epoch per `for` loop.

    Construction, the start of each `for` loop, `report` and `close` are collective over `comm`. Taking a batch is not:
    a slow rank delays nobody until the ring of its node is full.

    Parameters
    ----------
    path : the LMDB: its data file, or the directory that holds data.mdb; or a tar. Several of them as one dataset
        (docs/selections.md): a list of paths, a pattern such as "data.%04d.lmdb" or "data.*.lmdb", or a directory of
        LMDBs; the records of one come behind those of another
    batch_size : records per rank and step; or a `pario.Budget`, what a batch may cost (docs/selections.md)
    decoder : a decoder of `pario.decode`, a plain function of one record's bytes, or None for raw bytes
    shuffle : False (key order), "global" or True (a uniform permutation), or "block" (blocks of neighbouring records in
        random order, mixed over `Options.mix_blocks` blocks, so that reads stay long). None: key order, and a line in
        the log at the first epoch, unless another loader of the process was told its order
    seed : seed of the order and of random augmentation. The order depends only on seed, epoch and number of records
    comm : an mpi4py communicator, which pario duplicates. None: COMM_WORLD under a launcher, else one process without
        MPI. "self": this process alone, whatever started it
    db : name of a named database
    drop_last : False: the last step divides the remaining records evenly among the ranks, so that every record is
        delivered exactly once per epoch. Batches of that step can differ by one record, and are empty on some ranks if
        fewer records than ranks remain. True: the last step is dropped unless it is full on every rank
    on_error : what to do with a record that the decoder cannot read. "raise": all ranks raise. "skip": the record is
        missing from its batch. "substitute": the next readable record of its batch takes its row. Both are counted in
        `batch.skipped`, `loader.skipped` and, by reason, in `loader.stats()["bad"]`; `Options(max_bad=...)` limits them
    options : see `Options`
    recipe : "auto"; for studies also a name in `pario.options.RECIPES`, or a `Recipe` (measurements/recipes.md). It
        changes how records are read, not which records are delivered
    select : which records belong to an epoch (docs/selections.md); the order of ids does not matter. Record ids (an
        array or a list of integers), a range or a slice of them; bytes: the records whose keys begin with them; a
        compiled pattern of bytes, matched from the beginning of a key; a function of a key (bytes), called once per
        key, the keys divided over the ranks; a part of `pario.split`. None: all records, less those that hold counts
        and lists about the dataset, such as `__len__`; "all": those, too
    fields : samples of several records (docs/selections.md): field -> (keys, decoder), instead of `decoder`. Keys are a
        template such as "image-%09d", or a function of a sample's number; a decoder that is None gives the bytes. The
        records of the first field say which samples there are; where another one is missing the sample is bad, as
        `on_error` says, unless (keys, decoder, "optional") lets it: docs/decoders.md. Batches count samples, and
        `batch.ids` are their numbers
    weights : with a list of paths, or with a list of selections in `select`, such as the ids of each class: how often
        each of these sources is drawn, in any unit. An epoch has as many draws as all sources have records; a source
        that runs out comes again, one that does not goes on in the next epoch (docs/selections.md). No record is in two
        sources. Not with shuffle="block"
    verify : True: compare each record's value with the checksum that `pario data checksum` saved, before it is
        decoded. One that differs is a record that cannot be read, for `on_error` (docs/order.md)
    share_batch : an mpi4py communicator, or a list, of the ranks that are to get the same batches: those of one tensor,
        pipeline or context parallel group (docs/selections.md). `comm` has the ranks of all groups, which have equal
        sizes. Then `batch_size` counts records per group and step, and "rank" means group in what is said of batches
    save_index, progress : see `Reader`

    Use it in a `with` block, so that an exception in your code on one rank reaches the others at once. Take batches in
    one thread, in the process that made the loader.

    Every rank gets `len(loader)` batches. A loop that is left early (`break`) is over; the next loop is the next epoch.
    Errors are `ParioError`s. All ranks raise together: the rank where it happened raises the error itself, the others
    a `PeerError` that names that rank.
    """

    _order_is_known = False  # a loader of this process was told its order, or its user was

    if not TYPE_CHECKING:  # answers to what type checkers refuse

        def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
            if keywords.keys() - Loader.__init__.__kwdefaults__.keys():  # a usual one needs no look
                from pario.loader.keywords import refuse

                refuse(cls, keywords)
            return super().__new__(cls)

        def __getitem__(self, number: int) -> None:
            from pario.loader.keywords import refuse_number

            refuse_number()

    def __init__(
        self,
        path: Paths,
        batch_size: int | Budget,
        decoder: Decoder | Callable[..., Any] | None = None,
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        comm: Any = None,
        db: str | bytes | None = None,
        drop_last: bool = False,
        on_error: Policy = "raise",
        options: Options | None = None,
        recipe: str | Recipe = "auto",
        select: Any = None,
        fields: Mapping[str, tuple[Any, Any]] | None = None,
        weights: Sequence[float] | None = None,
        verify: bool = False,
        share_batch: Any = None,
        save_index: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        given = Arguments(
            path, batch_size, decoder, False if shuffle is None else shuffle, seed, db, drop_last, on_error,
            options if options is not None else Options(), recipe, select, fields, weights, verify, share_batch,
        )  # fmt: skip
        self.world = world = get_world(comm, "making a Loader")
        with abandoning(world):
            share = given.agree(world)
        self._arguments = given
        Loader._order_is_known |= shuffle is not None
        # The other orders, most selections, and sizes need the whole index before the first record.
        grow = given.shuffle is False and given.select.grows and given.fields is None and given.budget is None
        reader = Reader(
            path, comm=world, db=db, options=given.options, recipe=given.recipe, save_index=save_index,
            progress=progress, grow=grow, verify=given.verify, tiers=True,
        )  # fmt: skip
        self._life = Lifetime(world, reader)
        knobs = reader.file.knobs
        recorder = reader.file.recorder
        counters: Callable[..., RankStats] = RankStats
        if recorder is not None:
            from pario.stats.traced_stats import TracedStats

            counters = partial(TracedStats.traced, recorder)
        self._stats = counters(
            rank=world.rank,
            node=world.node,
            reader=self.world.is_leader,
            tuned=not knobs["inflight"].is_pinned,
        )
        self._meeting = Meeting(world, reader.path, self._stats, given.options.metrics_file, knobs)
        if recorder is not None:
            from pario.loader.tracing import LoaderTrace

            self._life.trace = LoaderTrace(recorder, world, reader, given, self._meeting)
        with abandoning(self._life):
            built = build(self._life, given, share, self._stats, self._meeting)
        self._supply = built.supply
        self._progress = Progress(self._life, self._meeting, built)
        decoder = built.supply.context.decode.decoder
        self.decoder, self._stats.copies = decoder.users, decoder.copies
        self._stats.open = time.perf_counter() - started

    # -- what a training loop uses -------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of batches per epoch, the same on every rank; after `load_state_dict`, in the rest of the epoch."""
        return self._progress.steps()

    def __iter__(self) -> Iterator[B]:
        """Start the next epoch, or the rest of the epoch of a loaded state. Collective over `comm`.

        An earlier loop over this loader that has not ended cannot continue afterwards.
        """
        if not Loader._order_is_known:
            Loader._order_is_known = True
            if self.world.rank == 0:
                what = 'is read in key order: pass shuffle="global" to train, or shuffle=False'
                _log.warning("%s %s", self._life.reader.path, what)
        return cast("Iterator[B]", self._progress.begin())

    def peek(self) -> B:
        """The batch that this rank gets next, to look at. It is not used up: order, epoch, counters stay the same.
        Not collective: any rank may call it, at any time between two batches.

        Reads and decodes its records once more. With shuffle="global" it also computes the order of the epoch, which
        takes as long as at the beginning of a loop. A record that cannot be read raises on this rank alone.
        """
        return cast("B", self._progress.peek())

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the next one."""
        return self._progress.next[0]

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Let the next loop run this epoch, from its batch of this number on: 0 is the first. Call it on every rank."""
        for name, number in (("epoch", epoch), ("batch", batch)):
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
                raise OptionError(f"{name} must be at least 0, got {number!r}")
        self._progress.go_to(int(epoch), self._progress.position_of(int(epoch), int(batch)))

    @property
    def groups(self) -> int:
        """Number of groups of ranks that share a batch; without `share_batch` the number of ranks."""
        return self._supply.context.seats.count

    @property
    def batches(self) -> int:
        """Number of batches of the whole epoch that runs, or else of the next one, also after `load_state_dict`."""
        return self._progress.steps(whole=True)

    @property
    def records(self) -> int:
        """Records (with `fields`: samples) of an epoch: all of the dataset, or those that `select` picks."""
        return self._supply.context.stream.n

    @property
    def selection(self) -> Selection | None:
        """Which records these are; None: all of the dataset."""
        return self._supply.context.stream.chosen

    @property
    def index(self) -> Index:
        """The index: where each record lies in the file."""
        return self._life.reader.index

    def keys(self, ids: Iterable[int] | np.ndarray) -> list[bytes]:
        """The LMDB keys of the records with these ids; with `fields`, of the samples' first records. Not collective."""
        self._life.check_open()
        wanted = ids if isinstance(ids, np.ndarray) else np.array(list(ids), np.int64)
        return self._life.reader.keys(wanted if self.selection is None else self.selection.records(wanted))

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken: a few integers, the same on every rank."""
        return self._progress.state().to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next loop continue after the batch at which `state` was taken, on any number of ranks.

        Call it on every rank. Raises StateError if the state belongs to another dataset, seed or order.
        """
        loaded, progress = LoaderState.from_dict(state), self._progress
        loaded.check(progress.state())
        progress.go_to(loaded.epoch, loaded.position)
        if progress.steps() == 0:  # taken after the last batch of its epoch
            progress.go_to(loaded.epoch + 1)

    def stats(self) -> dict[str, Any]:
        """Counters of this rank: the fields of `pario.stats.rank.RankStats`, `slots` and `slot_bytes` (number and size
        in bytes of the ring's slots), `batch_memory` (bytes) and `bad` (why records could not be read -> how many).
        With the recipe "stag" also how many readers read at once, and the seconds that the trial took for each number
        of readers. Not collective; cheap at any time."""
        parts = self._supply.context
        return {
            **asdict(self._meeting.so_far()),
            "slot_bytes": parts.slots.slot_bytes,
            "slots": parts.slots.count,
            **self._supply.stats(),
            "batch_memory": parts.decode.held.allocated_bytes,
            "bad": dict(parts.decode.reasons),
        }

    def report(self, *, all_ranks: bool = False) -> Report:
        """What this rank did so far, and a sentence that names the slow part. `print(report)` shows a table.

        all_ranks : what each rank did, the sums, and who is slower than the others. Collective over `comm`, at any time
            between two batches; without it any rank may ask alone, whatever the others do
        """
        report, reader = self._progress.report(all_ranks), self._life.reader
        if reader.packing is None or reader.unpacking is None or len(reader.unpacking.packings) > 1:
            return report  # a prediction speaks of one file
        return replace(report, prediction=reader.packing.more.get("prediction"))

    @property
    def skipped(self) -> int:
        """Number of records on this rank so far that the decoder could not read (on_error="skip" or "substitute")."""
        return self._stats.skipped

    def close(self) -> None:
        """Stop reading and free the shared memory. Collective over `comm`; a second call does nothing."""
        if self._life.over:
            return
        self._progress.leave()
        # No rank may be reading or waiting when the ring goes, nor asking a node whose tiers end.
        self._life.no_more()
        trace = self._life.trace
        if trace is not None:
            trace.close()
        self._progress.meet("close")
        self._life.close()
        if trace is not None:
            trace.merge()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        # Closing a generator and sys.exit(0) are deliberate ends, not failures.
        if error is None or kind is GeneratorExit or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close()
        else:
            self._life.abandon(error)

    def __reduce__(self) -> Any:
        raise TypeError("a Loader holds threads and shared memory and cannot be pickled; construct it where it is used")

    def __repr__(self) -> str:
        reader, given = self._life.reader, self._arguments
        records = f"{self.records:,}" + (f" of {len(reader):,}" if self.records < len(reader) else "")
        return (
            f"Loader({reader.path!r}, records={records}, batch_size={given.batch_size!r}, "
            f"ranks={self.world.size}, shuffle={given.shuffle!r}, decoder={self.decoder!r})"
        )

    def _repr_html_(self) -> str:
        from pario.notebook import html

        return html(f"Loader in epoch {self.epoch}, of {self.batches:,} batches", [("", repr(self), "")])
