"""Every default of the house, with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pario.errors import OptionError

__all__ = ["KiB", "MiB", "Options", "Recipe"]

KiB = 1 << 10
MiB = 1 << 20

FETCHERS = ("auto", "posix", "direct")
ORDERS = (False, "global", "block")
POLICIES = ("raise", "skip")
OWN_ROWS = ("auto", "never", "always")

#: Slots of the ring with shuffle="block", each of a whole pool of blocks: no step waits for more than these.
BLOCK_SLOTS = 3


@dataclass(frozen=True)
class Options:
    """Knobs of reading, shuffling and handing out. The defaults suit a training job; none changes what is delivered
    except `block_bytes` and `mix_blocks`, which are part of the order of `shuffle="block"`.

    Reading, per node
        slot_bytes: bytes of the window's slots that a group of steps aims at (8 MiB: enough for all reads in flight).
        slots: slots in the ring of one node; one is consumed while the others fill. `shuffle="block"` always has 3,
            each for at least a whole pool (`block_bytes * mix_blocks`, divided among the nodes).
        readers_per_node: ranks of one node that read (LMDBIO found one enough up to 16 cores).
        inflight: reads under way at once per reading rank: its threads.
        read_bytes: the longest single read. 1 MiB is what FUSE and many network file systems carry in one request, and
            a group of 8 MiB then gives all threads something to do: on a store that answers a MiB in 20 ms, 3 KB
            records came at 0.93 of its bandwidth, and at 0.85 with 4 MiB; on local disks there was no difference.
        gap_bytes: two extents of one group are read by one read if at most this many unwanted bytes lie between them
            (a leaf page or two between runs of overflow pages).
        stagger: for the recipe "stag" (docs/recipes.md): how many readers of all nodes may read at once; 0: found by a
            trial when the first loop starts.
        fetch: "posix" reads through the page cache, "direct" past it (O_DIRECT); "auto" is "posix" so far:
            what stays in memory is read once. With `shuffle="block"` on a fast local disk "direct" may read a cold file
            up to a half faster.

    Order
        block_bytes: bytes of neighbouring records that `shuffle="block"` moves as one block.
        mix_blocks: blocks whose records are mixed with each other; a power of two.

    Handing out, per rank
        decode_threads: threads for decoders that work record by record (images, Python functions); 0 = one per core
            that this rank may use, those that several ranks of the node may use divided among them.
        decode_ahead: batches that such a decoder prepares ahead of the training step.
        own_rows: "auto": each rank of a node fills its batches straight from the page cache (pario/own.py) where that
            holds the records when an epoch begins, and on a disk of the node whose reads the kernel begins ahead: in
            key order, if the file has it, and with records of 64 KiB or more in a "global" order. Not where a record is
            worth a decoding thread of its own, nor small records in a shuffled order on a node with a single rank.
            "never": all comes through the node's ring; "always": nothing does that the decoder allows.
        held_bytes: memory of batch arrays in use at once, those that the user still refers to among them; batches that
            are prepared ahead straight from the page cache come on top, in as much memory as the node's ring has.

    Waiting
        alive_seconds: how often a waiting rank looks whether the others still live. An error or the loss of a rank is
            known to all after about this long; the job has ended some 5 s later (docs/failures.md).

    Watching
        metrics_file: after each epoch rank 0 writes what all ranks did to this file, in the text format of Prometheus
            (NAME.prom in the folder that a textfile collector looks at). Needs `pip install "pario[metrics]"`.
    """

    slot_bytes: int = 8 * MiB
    slots: int = 6
    readers_per_node: int = 1
    inflight: int = 8
    read_bytes: int = MiB
    gap_bytes: int = 16 * KiB
    stagger: int = 0
    fetch: str = "auto"

    block_bytes: int = 2 * MiB
    mix_blocks: int = 32

    decode_threads: int = 0
    decode_ahead: int = 2
    own_rows: str = "auto"
    held_bytes: int = 2048 * MiB

    alive_seconds: float = 1.0

    metrics_file: str | None = None

    def __post_init__(self) -> None:
        least = {
            "slot_bytes": 64 * KiB,
            "slots": 2,
            "readers_per_node": 1,
            "inflight": 1,
            "read_bytes": 4 * KiB,
            "gap_bytes": 0,
            "stagger": 0,
            "block_bytes": 4 * KiB,
            "mix_blocks": 1,
            "decode_threads": 0,
            "decode_ahead": 1,
            "held_bytes": MiB,
        }
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in least and (not isinstance(value, int) or value < least[field.name]):
                raise OptionError(f"{field.name} must be an integer of at least {least[field.name]}, got {value!r}")
        if self.mix_blocks & (self.mix_blocks - 1):
            raise OptionError(f"mix_blocks must be a power of two, got {self.mix_blocks!r}")
        if self.metrics_file is not None and not isinstance(self.metrics_file, str):
            raise OptionError(f"metrics_file must be a path or None, got {self.metrics_file!r}")
        if self.fetch not in FETCHERS:
            raise OptionError(f"fetch must be one of {', '.join(FETCHERS)}, got {self.fetch!r}")
        if self.own_rows not in OWN_ROWS:
            raise OptionError(f"own_rows must be one of {', '.join(OWN_ROWS)}, got {self.own_rows!r}")
        if not self.alive_seconds > 0:
            raise OptionError(f"alive_seconds must be above 0, got {self.alive_seconds!r}")


@dataclass(frozen=True)
class Recipe:
    """One way of reading a dataset: a word for each room that takes part. The table of them is `pario.reader.RECIPES`.

    per_rank: every rank reads alone, through the real py-lmdb; the index (`locate`) tells it the keys only.
    locate: how the places of records become known: "walk" (exact, from branch and leaf pages, by rank 0 alone at every
        start), "sidecar" (a walk's result of an earlier run; made by all ranks together where there is none),
        "cursor" (leaf after leaf in key order, each reader for itself, as far as needed), "speculate" (page ranges are
        guessed and read, and settled by the leaf pages among them), "auto" (what suits the dataset and the order).
    fetch: the fetcher; None: what `Options.fetch` says.
    span: one read from a step's first record to its last, with all that lies between, instead of merged extents.
    ahead: groups are read in the background while others are used; False: by the reader's own thread, when asked for.
    fill: as many steps at once as fill a slot; False: one step.
    stagger: no more than some of all readers read at once, in the order of the file.
    """

    per_rank: bool = False
    locate: str = "auto"
    fetch: str | None = None
    span: bool = False
    ahead: bool = True
    fill: bool = True
    stagger: bool = False
