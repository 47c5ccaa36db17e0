"""Builds the parts of a loader that serve all its epochs: decoder, order, ring, and the supply of records."""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from pario.comm.base import together
from pario.comm.slots import Slots
from pario.comm.window import Ring
from pario.dataset.costs import costs_of
from pario.dataset.reader import Reader
from pario.dataset.select import choose
from pario.decode.base import Decoder, Draw
from pario.decode.given import as_decoder
from pario.errors import ChecksumError, DecodeError, OptionError
from pario.feed.automatic import Automatic
from pario.feed.decode_step import DecodeStep, learn
from pario.feed.source import Context, Supply
from pario.loader.arguments import Arguments
from pario.loader.lifetime import Lifetime
from pario.loader.meeting import Meeting
from pario.loader.state import ends_of, identify
from pario.locate.base import Stretch
from pario.machine import Share
from pario.plan.budget import Costs
from pario.plan.epoch import records_per_block
from pario.plan.mixture import Mixture
from pario.plan.seats import Seats
from pario.plan.selection import Selection
from pario.plan.stream import RingShape, Stream, Work, fit_memory, pool_shape, step_shape
from pario.stats.rank import RankStats

#: If bad records are no error, the decoder may learn from any of this many first records.
_SKIPPED_FIRST = 64
#: The most records that say what a column is of which record 0 has no elements.
_SETTLING = 512


class Built(NamedTuple):
    """supply : the supply of records; its context has all parts
    shape : shape of the ring
    fingerprint : the dataset's, see `state.identify`
    """

    supply: Supply
    shape: RingShape
    fingerprint: str


def _synchronous(context: Context) -> Supply:
    from pario.recipes.lmdbio import Synchronous

    return Synchronous(context)


def _per_rank(context: Context) -> Supply:
    from pario.recipes.per_rank import PerRank  # imports py-lmdb, too

    return PerRank(context)


#: supplies by `Recipe.source`
_SUPPLIES = {"auto": Automatic, "ring": Automatic, "synchronous": _synchronous, "per_rank": _per_rank}


def build(life: Lifetime, given: Arguments, share: Share, stats: RankStats, meeting: Meeting) -> Built:
    """Build the parts, and hand each one to `life` as soon as it needs cleaning up. Collective; raises on all ranks."""
    world, reader, options = life.world, life.reader, given.options
    decoder, chosen = _decoder_and_records(given, reader)
    if reader.unpacking is not None:
        from pario.decode.packed import Packed

        decoder = Packed(decoder, reader.unpacking, stats.count_unpacked)
    selected = given.select.mixture(reader, given.weights) if given.weights is not None else None
    given.select = None  # its ids may take much memory
    reader.use_tiers(chosen)
    most = world.allreduce_max(given.seats.here)
    life.costs = costs_of(given.budget, reader, chosen, file_order=given.shuffle == "block")
    stream, shape = _plan(reader, given, decoder, most, chosen, life.costs, selected)
    if stream.steps(0, 0) == 0:
        raise world.raised_by_all(
            OptionError(
                f"drop_last leaves no batch: {stream.n:,} records are fewer than one step of "
                f"{given.batch_size!r}{' records' * isinstance(given.batch_size, int)} on {_counted(given.seats)}",
                path=reader.path,
            )
        )
    schedule = Work(stream, shape, epoch=0, start=0).schedule
    # One rank works for all: it examines the first record and adds up the largest ones.
    found: tuple[Any, str, int] | None = None
    with together(world, "looking at the first record"):
        if world.rank == 0:
            ids = np.arange(min(stream.n, _SKIPPED_FIRST if given.on_error != "raise" else 1))
            ids = ids if chosen is None else chosen.ids(ids)
            # Once for all: each read also asks whether a writer overtook us.
            edges = ends_of(reader)
            ends = reader.read_stored([*edges, *ids[: decoder.records_per_row].tolist()], verify=False)
            learn(decoder, reader, ends.part(len(edges), len(ends)), ids, given.seed)
            _settle(decoder, reader, stream, given.seed)
            ends = ends.part(0, len(edges))
            slot_bytes = reader.index.group_bytes(schedule, most, reader.file.pool.fetcher.align, chosen)
            if chosen is not None and chosen.has_gaps and given.shuffle != "global":
                slot_bytes = int(slot_bytes / chosen.density)  # room for the gaps, which are read along
            found = decoder.spec, identify(reader, ends), slot_bytes
            meeting.try_metrics()
    decoder.spec, fingerprint, slot_bytes = world.bcast(found)
    shape = fit_memory(shape, slot_bytes, options)
    whole = Work(stream, shape, epoch=0, start=0)
    # Even if records take another way, the ring carries news of errors and lost ranks.
    life.ring = ring = Ring(world, shape.slots, alive_seconds=options.alive_seconds)
    rows = stream.batch_size * given.seats.here * decoder.records_per_row
    life.slots = slots = Slots(world, shape.slots, slot_bytes, whole.table_steps, rows)
    life.watch()
    knobs = reader.file.knobs
    if decoder.parallel:
        knobs.decode(share.threads)
    else:
        knobs.prepare()
    life.decode = decode = DecodeStep(
        decoder,
        reader,
        held_bytes=options.held_bytes,
        tuner=knobs.decoding,
        policy=given.on_error,
        max_bad=options.max_bad,
    )
    context = Context(world, reader, options, stream, given.seats, share, ring, slots, decode, stats)
    life.supply = supply = _SUPPLIES[reader.recipe.source](context)
    # A later epoch may need the ring even if the first does not. If the first needs it, too little memory is an error
    # now.
    if world.allreduce_max(world.is_leader and supply.needs_ring(supply.propose())):
        slots.allocate()
    return Built(supply, shape, fingerprint)


def _decoder_and_records(given: Arguments, reader: Reader) -> tuple[Decoder, Selection | None]:
    """The decoder, whose learning belongs to this loader, and the records of an epoch. Collective."""
    file_order = given.shuffle == "block"
    if given.fields is None:
        return copy.copy(as_decoder(given.decoder)), choose(given.select, reader, file_order=file_order)
    from pario.dataset.fields import find

    samples = find(given.fields, given.select, reader, file_order=file_order)
    return given.fields.decoder(samples), samples.samples


def _settle(decoder: Decoder, reader: Reader, stream: Stream, seed: int) -> None:
    """Show the decoder further records, near ones and far ones, until they say what record 0 has left open."""
    numbers = np.unique(np.geomspace(1, stream.n, _SETTLING).astype(np.int64)) - 1
    for number in numbers:
        if not decoder.is_open:
            return
        ids = np.array([number]) if stream.chosen is None else stream.chosen.ids(np.array([number]))
        with suppress(DecodeError, ChecksumError):  # a bad record is bad when its batch comes
            decoder.learn_from(reader.read_stored(ids), Draw(seed, 0, reader.keys))
    if decoder.is_open:
        decoder.settle(len(numbers))


def _counted(seats: Seats) -> str:
    return f"{seats.count} ranks" if seats.shared == 1 else f"{seats.count} groups of {seats.shared} ranks"


def _plan(
    reader: Reader,
    given: Arguments,
    decoder: Decoder,
    node_seats: int,
    chosen: Selection | None,
    costs: Costs | None,
    selected: Mixture | None,
) -> tuple[Stream, RingShape]:
    """The stream of records, and the shape of a ring that fits it.

    node_seats : the most seats of a node
    selected : a mixture of selections
    """
    index, options, seats = reader.index, given.options, given.seats.count
    size = costs.most if costs is not None else given.batch_size
    assert isinstance(size, int)  # a Budget has costs
    blocks = given.shuffle == "block"
    figures = chosen.figures if chosen is not None else None
    mixture = selected or _mixture(reader, given.weights, chosen)
    if mixture is not None and selected is None:
        mean_bytes = _mean_drawn(reader, mixture)
    else:
        mean_bytes = index.mean_bytes if figures is None else figures.mean_bytes
    mean_bytes += index.header_bytes
    stream = Stream(
        n=index.n if chosen is None else chosen.n,
        batch_size=size,
        seats=seats,
        shuffle=given.shuffle,
        seed=given.seed,
        # A function of the dataset and the options alone: the order is the same for every number of ranks.
        block_records=records_per_block(mean_bytes, options.block_bytes) if blocks else 0,
        mix_blocks=options.mix_blocks if blocks else 0,
        drop_last=given.drop_last,
        chosen=chosen,
        mixture=mixture,
        costs=costs,
    )
    if blocks:
        pool = min(stream.n, stream.block_records * stream.mix_blocks)
        pool_bytes = mean_bytes * pool * node_seats / seats
        return stream, pool_shape(pool_bytes, pool, stream.step_records, options, reader.recipe)
    usual = stream.batch_size if costs is None else costs.usual_records
    by_rows = decoder.by_rows and costs is None
    step_bytes = mean_bytes * usual * node_seats
    return stream, step_shape(step_bytes, stream.batch_size, options, reader.recipe, by_rows=by_rows)


def _mixture(reader: Reader, units: tuple[int, ...] | None, chosen: Selection | None) -> Mixture | None:
    """The mixture of the sources, which are the paths that the user gave. Raises OptionError on all ranks."""
    if units is None:
        return None
    edges = [0, *(part[-1].stop for part in _sources(reader))]
    if chosen is not None:
        edges = [chosen.below(edge) for edge in edges]
    sizes = tuple(last - first for first, last in pairwise(edges))
    if 0 in sizes:
        what = f"select picks no record of source {sizes.index(0)} of the mixture"
        raise reader.world.raised_by_all(OptionError(what, path=reader.path))
    return Mixture(units, sizes)


def _mean_drawn(reader: Reader, mixture: Mixture) -> float:
    """Mean bytes of a draw, as if each source's records were of one size."""
    means = []
    for part in _sources(reader):
        total = sum(one.mean_bytes * (one.stop - one.start) for one in part)
        means.append(total / (part[-1].stop - part[0].start))
    return sum(unit * mean for unit, mean in zip(mixture.units, means, strict=True)) / mixture.period


def _sources(reader: Reader) -> list[tuple[Stretch, ...]]:
    """The files of each path that the user gave."""
    stretches = reader.index.files.stretches
    counts = reader.file.counts
    return [stretches[last - count : last] for count, last in zip(counts, accumulate(counts), strict=True)]
