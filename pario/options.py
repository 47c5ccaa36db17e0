"""Every default of pario, with its unit and its origin; the table of recipes."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

from pario.errors import OptionError
from pario.text import read_size

KiB = 1 << 10
MiB = 1 << 20

#: what `Loader(shuffle=)` takes; True means "global"
Shuffle = bool | Literal["global", "block"]
#: what `Loader(on_error=)` takes
Policy = Literal["raise", "skip", "substitute"]
ORDERS = (False, "global", "block")
POLICIES = ("raise", "skip", "substitute")

#: what `Recipe` takes
Supplies = Literal["auto", "ring", "synchronous", "per_rank"]
Locate = Literal["auto", "walk", "sidecar", "cursor", "speculate"]
Fetch = Literal["posix", "direct", "mapped"]

#: Reads in flight that are tried with `inflight="auto"`: one thread each, which costs address space for its stack.
MOST_INFLIGHT = 64

#: Reads in flight, with `inflight="auto"`, where nothing is tuned: of tiers and services.
USUAL_INFLIGHT = 8

#: The longest single read, if no fetcher wants longer ones. FUSE and many network file systems carry 1 MiB in one
#: request, and a group of 8 MiB then occupies all threads. (A store that answers in 20 ms, 3 KB records: 0.93 of its
#: bandwidth, with 4 MiB 0.85; local disks showed no difference.)
READ_BYTES = MiB


class Turns(NamedTuple):
    """A knob: a value that may change while epochs run, unless an option of its name pins it.

    words : what it is, in plain words
    floor : no user may ask for less
    least, most, start : "auto": its bounds, and its value before anything is measured
    """

    words: str
    floor: int
    least: int
    most: int
    start: int


#: All knobs; tune/knobs.py has their values, docs/tuning.md what turns them.
KNOBS: dict[str, Turns] = {
    # Doubling finds a large depth within a few latencies, while a latency that was measured with a queue in front of
    # the store is found out only by probes.
    "inflight": Turns("reads in flight", 1, 1, MOST_INFLIGHT, 2),
    # Most and start are the cores of the rank (Knobs.decode).
    "decode_threads": Turns("threads that decode", 0, 1, 1 << 10, 1),
    "decode_ahead": Turns("batches prepared ahead", 1, 1, 16, 2),
}

#: Slots of the ring with shuffle="block", each of a whole pool of blocks: no step waits for more than these.
BLOCK_SLOTS = 3





@dataclass(frozen=True)
class Tier:
    """Where a node keeps copies of the dataset, nearer than the store (docs/tiers.md).

    where : "memory", or a folder on a disk of the node
    quota : how much the copies may take: "64 GiB", "400GB", bytes, or "auto": of memory a quarter of what is available,
        of a disk what is free above 5 %; never more than the data
    force : use the folder although it is on a network file system

    Raises OptionError.
    """

    where: str
    quota: int | str = "auto"
    force: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.where, (str, os.PathLike)) or not os.fspath(self.where):
            raise OptionError(f'a tier is "memory" or a folder, got {self.where!r}')
        object.__setattr__(self, "where", os.path.expanduser(os.fspath(self.where)))
        self.quota_bytes  # noqa: B018  raises OptionError

    @property
    def quota_bytes(self) -> int | None:
        """None: automatic."""
        quota = self.quota
        if quota == "auto":
            return None
        if isinstance(quota, int) and not isinstance(quota, bool) and quota > 0:
            return quota
        found = read_size(quota) if isinstance(quota, str) else None
        if not found:
            raise OptionError(
                f"the quota of tier {self.where!r} is no size: {quota!r}",
                hint='Sizes are "64 GiB", "400GB", a number of bytes, or "auto".',
            )
        return int(found)


def read_tiers(text: str) -> tuple[Tier, ...]:
    """The tiers that a job script names: `memory:auto,/local/nvme:400GiB`, nearest first; quotas may be left out.

    Raises OptionError.
    """
    parts = [part.strip().rpartition(":") for part in text.split(",") if part.strip()]
    return tuple(Tier(where, quota) if where else Tier(quota) for where, _, quota in parts)


@dataclass(frozen=True)
class Options:
    """How to read, shuffle and hand out. The defaults suit a training job. No option changes which records are
    delivered, except `block_bytes` and `mix_blocks`, which are part of the order of `shuffle="block"`.

    Reading, per node
        slot_bytes: target size of a slot of the ring (8 MiB: enough for all reads in flight).
        slots: slots in the ring of one node; one is consumed while the others fill. `shuffle="block"` always has 3,
            each for at least a whole pool (`block_bytes * mix_blocks`, divided among the nodes).
        inflight: prefetch depth: reads in flight at once on the rank of a node that reads, one thread each. "auto": as
            many, up to 64, as keep the store busy or the consumer supplied, found by measuring while epochs run
            (docs/tuning.md). A number pins it, a pair (least, most) gives bounds. This holds for all options that may
            be "auto" and that docs/tuning.md calls knobs.
        gap_bytes: one read covers two extents of a group if at most this many unwanted bytes lie between them (a leaf
            page or two between runs of overflow pages).
        tiers: copies of the dataset on the node, nearest first, so that every byte leaves the store once: `Tier`s
            (docs/tiers.md). (): none. None: as the environment variable PARIO_TIERS says; without it one of memory, if
            a quarter of the memory that is available on the nodes has room for the records.
        peers: with tiers on several nodes, nodes read from each other what another one keeps, so that every byte leaves
            the store once per job. False: each node for itself.
        once: the loader goes through its dataset once, so nothing is read for a next epoch, and no file of the node is
            kept in memory unless `tiers` says so. False: while an epoch ends, the next one's first groups are read, up
            to the ring's bytes.

    Order
        block_bytes: bytes of neighbouring records that `shuffle="block"` moves as one block.
        mix_blocks: blocks whose records are mixed with each other; a power of two.

    Handing out, per rank
        decode_threads: threads for decoders that work record by record (images, Python functions). "auto" (or 0): as
            many as keep the training step supplied, up to one per core that this rank may use; ranks of a node divide
            the cores that they share.
        held_bytes: memory of batch arrays in use at once, including those that the user still refers to. Batches that
            are prepared ahead out of the node's memory may take as much memory again as the node's ring. Small batches
            that a loop takes quickly are made up to eight at once, in one block of memory that lives as long as any of
            them.
        max_bad: with on_error="skip" or "substitute": the most records that the decoder cannot read, per rank and
            loader; one more raises DecodeError on all ranks. None: no limit.

    Waiting
        alive_seconds: how often a waiting rank checks whether the others still live. All ranks learn of an error or of
            the loss of a rank after about this time; the job ends up to 4 s later (measurements/failures.md).

    Watching
        metrics_file: after each epoch rank 0 writes the counters of all ranks to this file, in the text format of
            Prometheus (NAME.prom in the folder of a textfile collector). Needs `pip install ".[metrics]"`.
        trace: write what each rank did, and when, to this file (NAME.json), which Perfetto shows (docs/report.md). All
            loaders of a process that name the same file are in it.
    """

    slot_bytes: int = 8 * MiB
    slots: int = 6
    inflight: int | str | tuple[int, int] = "auto"
    gap_bytes: int = 16 * KiB
    tiers: tuple[Tier, ...] | None = None
    peers: bool = True
    once: bool = False

    block_bytes: int = 2 * MiB
    mix_blocks: int = 32

    decode_threads: int | str | tuple[int, int] = "auto"
    held_bytes: int = 2048 * MiB
    max_bad: int | None = None

    alive_seconds: float = 1.0

    metrics_file: str | None = None
    trace: str | None = None

    def __post_init__(self) -> None:
        least = {
            "slot_bytes": 64 * KiB,
            "slots": 2,
            "gap_bytes": 0,
            "block_bytes": 4 * KiB,
            "mix_blocks": 1,
            "held_bytes": MiB,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in least and (not isinstance(value, int) or value < least[field.name]):
                raise OptionError(f"{field.name} must be an integer of at least {least[field.name]}, got {value!r}")
        for name in KNOBS:
            self.bounds(name)
        if self.mix_blocks & (self.mix_blocks - 1):
            raise OptionError(f"mix_blocks must be a power of two, got {self.mix_blocks!r}")
        for name in ("metrics_file", "trace"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise OptionError(f"{name} must be a path or None, got {getattr(self, name)!r}")
        if self.max_bad is not None and (
            isinstance(self.max_bad, bool) or not isinstance(self.max_bad, int) or self.max_bad < 0
        ):
            raise OptionError(f"max_bad must be a number of records or None, got {self.max_bad!r}")
        if self.tiers is not None:
            tiers = tuple(self.tiers) if isinstance(self.tiers, (tuple, list)) else (self.tiers,)
            if not all(isinstance(tier, Tier) for tier in tiers):
                raise OptionError(f"tiers must be pario.Tier objects, got {self.tiers!r}")
            object.__setattr__(self, "tiers", tiers)
        if not self.alive_seconds > 0:
            raise OptionError(f"alive_seconds must be above 0, got {self.alive_seconds!r}")

    def bounds(self, name: str) -> tuple[int, int] | None:
        """Least and most of a knob, equal if the user pins it; None: it is "auto". Raises OptionError."""
        given, floor = getattr(self, name, "auto"), KNOBS[name].floor  # not every knob is an option
        if given == "auto" or (given == 0 == floor and not isinstance(given, bool)):
            return None
        pair = (given, given) if isinstance(given, int) else given
        if isinstance(pair, tuple) and len(pair) == 2:
            least, most = pair
            if all(isinstance(n, int) and not isinstance(n, bool) for n in pair) and max(1, floor) <= least <= most:
                return least, most
        raise OptionError(
            f'{name} must be "auto", an integer of at least {floor}, or a pair (least, most) of them, got {given!r}'
        )

    @property
    def inflight_bounds(self) -> tuple[int, int]:
        """The fewest and the most reads in flight of a reading rank; equal if the number is pinned."""
        return self.bounds("inflight") or (KNOBS["inflight"].least, KNOBS["inflight"].most)

    @property
    def usual_inflight(self) -> int:
        """Reads in flight where no measurement decides: what is pinned, or 8 if the bounds permit that."""
        least, most = self.inflight_bounds
        return max(least, min(USUAL_INFLIGHT, most))


@dataclass(frozen=True)
class Recipe:
    """One way of reading a dataset, for studies: one setting per room that takes part.

    source: where a rank's records come from. "auto": chosen by dataset and storage. "ring": from the node's ring, which
        the reading rank fills in the background. "synchronous": from the same ring, which it fills in the caller's
        thread when a step is asked for. "per_rank": every rank reads alone with the real py-lmdb; the index supplies
        only the keys.
    locate: how extents become known. "walk": exactly, from branch and leaf pages, by rank 0 alone at every start.
        "sidecar": from an earlier run; if there is none, all ranks walk together. "cursor": leaf after leaf in key
        order, each reader for itself, as far as needed. "speculate": page ranges are guessed and read, and settled by
        the leaf pages inside them. "auto": chosen by dataset and order.
    fetch: "posix" reads through the page cache, "direct" past it (O_DIRECT), "mapped" copies out of a mapping. None: as
        "posix", so that later epochs hit the page cache.
    span: one read from a step's first record to its last, including everything between, instead of merged extents.
    fill: read as many steps at once as fill a slot; False: one step.
    stagger: at most this many nodes read at once, in the order of the file. 0: a trial before the first
        epoch finds the number. None: no node waits for another.
    """

    source: Supplies = "auto"
    locate: Locate = "auto"
    fetch: Fetch | None = None
    span: bool = False
    fill: bool = True
    stagger: int | None = None

    def __post_init__(self) -> None:
        if self.stagger is not None and (not isinstance(self.stagger, int) or self.stagger < 0):
            raise OptionError(f"stagger must be an integer of at least 0, or None, got {self.stagger!r}")
        for name, names in (("source", get_args(Supplies)), ("locate", get_args(Locate))):
            if getattr(self, name) not in names:
                raise OptionError(f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r}")
        if self.fetch not in (None, *get_args(Fetch)):
            raise OptionError(f"fetch must be one of {', '.join(get_args(Fetch))}, or None, got {self.fetch!r}")
        if self.locate in ("cursor", "speculate") and (self.stagger is not None or self.span):
            raise OptionError(f"locate={self.locate!r} takes neither stagger nor span: it reads what it guesses")

    @property
    def ahead(self) -> bool:
        """Groups are prefetched in the background."""
        return self.source in ("auto", "ring")


#: All recipes but "auto" re-create a step of LMDBIO (Pumma, Si, Feng, Balaji, "Scalable Deep Learning via I/O Analysis
#: and Optimization", ACM TOPC 6(2), 2019), for studies. Each adds one optimisation to the ones before, except "dm",
#: which is a branch of its own. All recipes deliver the same records in every order.
RECIPES: dict[str, Recipe] = {
    "auto": Recipe(),
    "ring": Recipe("ring"),
    "plain": Recipe("per_rank", "sidecar"),
    "lmm": Recipe("synchronous", "cursor", "mapped", fill=False),
    "dm": Recipe("synchronous", "speculate", "posix", fill=False),
    "dio": Recipe("synchronous", "walk", "posix", span=True, fill=False),
    "prov": Recipe("synchronous", "sidecar", "posix", span=True, fill=False),
    "coal": Recipe("synchronous", "sidecar", "posix", span=True),
    "stag": Recipe("synchronous", "sidecar", "posix", span=True, stagger=0),
}


def find_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name in `RECIPES`; a Recipe is returned as it is. Raises OptionError."""
    found = recipe if isinstance(recipe, Recipe) else RECIPES.get(recipe) if isinstance(recipe, str) else None
    if found is None:
        raise OptionError(f"recipe must be one of {', '.join(RECIPES)}, or a Recipe, got {recipe!r}")
    return found
