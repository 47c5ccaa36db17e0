"""Chooses the source of each epoch; no other module does.

    ring         one rank of the node, or a few, prefetch groups of records into memory that its ranks share: long
                 reads, each byte once per node. The first epoch without an index fills the ring on guesses. With one,
                 an epoch's end and the beginning of the next are in the ring at the same time (next_epoch.py)
    memory tier  each rank decodes out of memory that the node's ranks share, if it has room for all records
    page cache   each rank fills its batches itself, if the page cache holds the records, or if the kernel prefetches
                 them from a local disk at full speed

Recipes for studies have their own supplies (`pario/recipes/`), which the loader passes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pario.dataset.reader import Reader
from pario.decode.base import Decoder
from pario.fetch.base import Fetcher
from pario.fetch.past_cache import past_cache
from pario.fetch.traced import traced
from pario.locate.base import Index
from pario.plan.selection import Selection
from pario.plan.stream import Work
from pario.supply.base import Ahead, Context, Source, Supply
from pario.supply.first_epoch import FirstEpochWriter
from pario.supply.memory import MemorySource
from pario.supply.next_epoch import ContinuingWriter
from pario.supply.page_cache import PageCacheSource
from pario.supply.ring_reader import RingReader
from pario.supply.ring_writer import RingWriter
from pario.supply.sweep import Sweep
from pario.threads import Workers

__all__ = ["Automatic", "bypass_cache", "decodes_batches", "make_supply", "page_cache_way"]

#: The page cache holds a file if it has this fraction of a sample of this many records. The sample excludes leaf pages,
#: which no epoch reads. A few missing pages cost less than the way through the ring.
_HELD = 0.98
_SAMPLE = 256

#: A single rank on its node takes smaller records in a shuffled order from the ring: long reads bring many of them at
#: once, and its threads need the interpreter less.
#: Rates relative to py-lmdb's loop on as many ranks, everything in memory, on 2 cores with other work (medians):
#:                        3 KB ring -> own rows                   197 KB ring -> own rows
#:                        key order     global        block       key order     global        block
#:              1 rank    1.43 -> 1.19  1.34 -> 0.93  1.63 -> 1.12  0.67 -> 1.22  0.58 -> 1.24  0.53 -> 0.97
#:              2 ranks   0.71 -> 0.98  0.88 -> 1.03                0.31 -> 0.75  0.27 -> 0.77
#:              8 ranks   0.79 -> 0.93  0.63 -> 0.85                0.32 -> 0.93  0.32 -> 0.92
_ALONE_BYTES = 16 << 10

#: Packed records in random order come out of the page cache one by one down to this part of a page, also for a single
#: rank: unpacking takes longest, and a thread that reads, unpacks and decodes hands nothing over. (Records of 1.6 KB
#: that become 3 KB, two threads, us of processors each, ring -> own rows: key order 7.6 -> 6.2, "global" 10.4 -> 8.0;
#: of 103 KB that become 197 KB: 468 -> 379, 460 -> 375. The codec alone: 5.9 and 352.)
_PACKED_SHARE = 4

#: Records in random order are requested one by one from this size on: a disk reads them nearly as fast as long runs.
#: (197 KB at random, cold: 0.9 to 1.5 GB/s by advice from one thread, 1.2 GB/s by 8 threads past the cache.)
_SINGLE_BYTES = 64 << 10

#: the way through the memory tier
_MEMORY = "memory"


def make_supply(context: Context, others: Mapping[str, Callable[[Context], Supply]]) -> Supply:
    """The supply of the reader's recipe: the automatic one, or one of `others`. Collective if that one says so."""
    return {"auto": Automatic, **others}[context.reader.recipe.source](context)


class Automatic(Supply):
    """The node's ring, filled in the background, or the page cache: decided for each node before each epoch."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Decoders that work record by record have threads of their own: those that prepare batches wait for bytes and
        # for decoders. A second one takes the records of the next batch meanwhile, if there is a core for it. Others
        # do all the work themselves.
        self._decodes_apart = context.decode.decoder.parallel
        threads = min(2 if self._decodes_apart else context.options.usual_inflight, context.share.threads)
        self._preparer = Workers("pario-ahead", threads)
        self._writer: ContinuingWriter | None = None
        self._sweep: Sweep | None = None  # of the first epoch, on the first rank of a node
        self._base = 0  # number in the ring of the next epoch's first group
        if context.reader.stage is not None:
            context.stats.staged, context.reader.stage.stats = True, context.stats

    def propose(self) -> str:
        context, reader = self.context, self.context.reader
        if reader.stage is not None:
            fits = reader.index.is_complete and reader.stage.fits_memory(reader.index, reader.checked)
            return _MEMORY if fits else ""
        chosen = context.options.own_rows
        if chosen == "never" or not decodes_batches(context.decode.decoder):
            return ""
        fetcher = reader.file.pool.fetcher
        if fetcher.rows is None:
            return ""
        ranks, stream, shuffle = context.world.node_size, context.stream, context.stream.shuffle
        unpacks = reader.unpacking is not None
        found = page_cache_way(fetcher, reader.index, shuffle, ranks, stream.chosen, unpacks=unpacks)
        return found or ("cached" if chosen == "always" else "")

    def settle(self, work: Work | None = None, way: str = "") -> None:
        if self._writer is not None:
            following = self._writer.following
            if following is None or work is None or way or following.begins_at != (work.epoch, work.start):
                self._writer.go_no_further()
                following = None
            self._writer = following
        # Before any rank of the node begins: none must find that nothing is on its way yet.
        stage = self.context.reader.stage
        if stage is not None and stage.memory is not None:
            stage.memory.announce(True)

    def needs_ring(self, way: str) -> bool:
        return not way

    def source(self, work: Work, way: str) -> Source:
        """Not collective."""
        context, stage = self.context, self.context.reader.stage
        if way == _MEMORY and stage is not None and stage.memory is not None:
            own = decodes_batches(context.decode.decoder)
            return MemorySource(context, work, stage.memory, self._preparer, own_kernels=own)
        if self._sweep is None and stage is None and context.world.is_leader:
            self._sweep = Sweep(context)
            self._sweep.begin(work)
        if way:
            return PageCacheSource(context, work, way, self._preparer)
        known, base = context.reader.index.sizes_known, self._base
        self._base = (base + work.schedule.groups) % context.ring.slots
        writer: RingWriter | None = None
        if context.reader.file.feeder is not None:
            if known:
                writer = self._writer = self._writer or ContinuingWriter(context, work, base, self._follow)
            else:
                writer = FirstEpochWriter(context, work, base)
            writer.start()
        ahead = Ahead(self._preparer.call, context.decode.tuner.ahead) if self._decodes_apart else None
        return RingReader(context, work, writer, spills=not known, ahead=ahead, base=base)

    def taken(self, position: int) -> None:
        if self._sweep is not None:
            self._sweep.look(position)

    def _follow(self, writer: ContinuingWriter) -> ContinuingWriter | None:
        """What reads the first groups of the next epoch, if that takes this way again."""
        if not self.context.options.next_epoch or self.propose():
            return None
        return ContinuingWriter(self.context, writer.next_work, writer.next_base, self._follow, writer)

    def no_more(self, limit_s: float = math.inf) -> bool:
        writer, self._writer = self._writer, None
        ended = self._sweep is None or self._sweep.end(limit_s)
        return (writer is None or writer.go_no_further(limit_s)) and ended

    def stats(self) -> dict[str, Any]:
        stage = self.context.reader.stage
        return {} if stage is None else stage.state()

    def close(self, limit_s: float = math.inf) -> bool:
        ended = self.no_more(limit_s)
        return self._preparer.end(limit_s if ended else 0, cancel=True) and ended


def page_cache_way(
    fetcher: Fetcher,
    index: Index,
    shuffle: bool | str,
    ranks: int,
    chosen: Selection | None = None,
    *,
    unpacks: bool = False,
) -> str:
    """The best way for the `ranks` of this node without the ring, in an epoch of this order; "" if the ring is better:

    "advised"   key order, if that is the file's order, and large records in "global" order, on a disk of this node:
                readahead(2) tells the kernel what comes next. (Its own read-ahead, of 8 MiB, takes 0.8 to 2.2 times as
                long in key order, 1.3 times in the middle of 12 pairs on 1, 2 and 4 ranks, and more processor time.)
    "cached"    the node's page cache holds the records

    unpacks : the values are packed

    If the sizes do not decide, this tests a sample of offsets in the page cache; a cold file costs a few small reads.
    """
    small, ahead = index.mean_bytes < _ALONE_BYTES, fetcher.read_ahead_bytes
    # Records of a sparse selection lie in the order of the file, too, but not beside each other.
    ordered = shuffle is False and (chosen is None or chosen.is_dense)
    if ranks == 1 and small and not unpacks and not (ordered and ahead and index.in_file_order):
        return ""
    if not ordered and index.mean_bytes < index.page_size // (_PACKED_SHARE if unpacks else 2):
        # Many records per leaf page: each would cost one call, while the ring's groups merge neighbours.
        # (100-byte records in memory, "global", 2 ranks, 1,000 records/s: ring 542, by themselves 254.)
        return ""
    if index.is_complete:
        n = index.n if chosen is None else chosen.n
        sample = np.unique(np.linspace(0, n - 1, min(n, _SAMPLE)).astype(np.int64))
        sample = sample if chosen is None else chosen.ids(sample)
        share = fetcher.cached_share(index.places(sample)["offset"], _HELD)
        if share is not None and share >= _HELD:
            return "cached"
    single = index.mean_bytes >= _SINGLE_BYTES and shuffle != "block"
    return "advised" if ahead and (single or (ordered and index.in_file_order)) else ""


def bypass_cache(reader: Reader, shuffle: bool | str) -> None:
    """Read past the page cache from now on, if nothing says otherwise, a cold file lies on a fast disk, and each node
    has one rank. Collective; the same on all nodes, since slots are made for one alignment.

    Several ranks of a node decode straight out of the page cache, all at the same time, and small records in random
    order share its pages. (197 KB records, 4 ranks: first epochs alike, later ones out of the page cache in half of the
    time.)
    """
    if reader.recipe.source != "auto" or not reader.options.chooses_fetch:
        return
    long = shuffle != "global" or reader.index.mean_bytes >= _SINGLE_BYTES
    alone = reader.stage is None and reader.world.node_size == 1
    direct = past_cache(reader.file.pool.fetcher) if long and alone else None
    direct = traced(direct, reader.file.recorder)
    if not reader.world.allreduce_max(direct is None):
        reader.file.read_through(lambda store: _instead(store, direct))
    elif direct is not None:
        direct.close()


def _instead(store: Fetcher, other: Fetcher | None) -> Fetcher:
    assert other is not None
    store.close()
    return other


def decodes_batches(decoder: Decoder) -> bool:
    """True if one call decodes a batch into arrays whose shapes depend only on record count and sizes. Decoders with a
    `verbatim` do, unless a subclass has changed the methods that belong to it. Of packed values, once they are
    unpacked. (Pictures by the page-cache way, JPEGs of 20 KB in memory, own rows ÷ ring: rate 0.99 with one thread that
    decodes, 1.00 with two; processor time 0.98.)"""
    decoder = decoder.users
    mine: Any = type(decoder)
    kind = next(base for base in mine.__mro__ if "verbatim" in vars(base))
    known = kind is not Decoder and mine.decode is kind.decode and mine.shapes is kind.shapes
    return known and not decoder.parallel and (decoder.by_rows or decoder.verbatim() is not None)
