"""What a study measures: cells, each with all recipes side by side, and presets of many cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from pario import options

__all__ = ["LOOPS", "PRESETS", "RECIPES", "STORES", "Cell", "HandWritten", "Preset", "words"]

#: in the order of the paper's figures, the default last
RECIPES = (*(name for name in options.RECIPES if name not in ("auto", "ring")), "auto")


@dataclass(frozen=True)
class HandWritten:
    """A loop over py-lmdb, written by hand (by_hand.py), as a baseline beside the recipes.

    title : what it is on the store with latency
    in_order : it reads a contiguous shard per rank in key order; else random records by their keys
    read_ahead_bytes : of its mount on the store with latency; None: what the mount has by default
    """

    title: str
    in_order: bool = True
    read_ahead_bytes: int | None = None


#: name -> loop. A cell names them like recipes; only sets of Datum records have them.
LOOPS = {
    "shard": HandWritten("py-lmdb, a contiguous shard per rank, read-ahead 128 KiB (the mount's default)"),
    "shard-8M": HandWritten("py-lmdb, a contiguous shard per rank, read-ahead 8 MiB", read_ahead_bytes=8 << 20),
    "get": HandWritten("py-lmdb, `get` of random records, no read-ahead", in_order=False),
}

#: store -> what it is
STORES = {
    "disk": "bare disk",
    "throttled": "block device, 200 MB/s",
    "latency": "latency store, 20 ms and 200 MB/s",
}

#: state -> what it is
STATES = {
    "cold": "file dropped from the page cache, index saved",
    "warm": "file in the page cache, index saved",
    "first": "file dropped from the page cache, no index: time from Loader(...) on",
}


@dataclass(frozen=True)
class Cell:
    """One comparison: all its recipes and loops read the same records, in turns.

    recipes : names of `RECIPES` and `LOOPS`
    """

    store: str
    dataset: str
    ranks: int
    nodes: int
    state: str
    order: str = "none"
    recipes: tuple[str, ...] = RECIPES

    @property
    def title(self) -> str:
        order = "" if self.order == "none" else f', "{self.order}"'
        return f"{self.store}, {self.dataset}, {words(self.ranks, self.nodes)}, {self.state}{order}"


@dataclass(frozen=True)
class Preset:
    """A whole study.

    records : data set -> records
    limit_s : a run that would take longer ends after as many steps as fit (slow recipes on slow stores)
    requests : request sizes in bytes of the sub-study "read time against request size"; it reads request_bytes per size
    groups : values of Recipe(stagger=...) of the sub-study "staggering", which measures group_cells with each
    """

    cells: tuple[Cell, ...]
    rounds: int
    records: dict[str, int]
    limit_s: float
    requests: tuple[int, ...] = ()
    request_bytes: int = 0
    groups: tuple[int, ...] = ()
    group_cells: tuple[Cell, ...] = field(default=())

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks of all cells, ascending."""
        return sorted({cell.ranks for cell in (*self.cells, *self.group_cells)})

    def only(
        self,
        recipes: Sequence[str] = (),
        stores: Sequence[str] = (),
        ranks: Sequence[int] = (),
        rounds: int | None = None,
    ) -> Preset:
        """A part of the preset; arguments that are not given select everything."""

        def kept(cells: tuple[Cell, ...]) -> Iterator[Cell]:
            for cell in cells:
                if (not stores or cell.store in stores) and (not ranks or cell.ranks in ranks):
                    chosen = tuple(name for name in cell.recipes if not recipes or name in recipes)
                    if chosen:
                        yield replace(cell, recipes=chosen)

        return replace(
            self,
            cells=tuple(kept(self.cells)),
            group_cells=tuple(kept(self.group_cells)),
            requests=() if stores and "disk" not in stores else self.requests,
            rounds=rounds or self.rounds,
        )


def words(ranks: int, nodes: int) -> str:
    """ "4 ranks on 2 nodes" """
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def _with_loops(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """The cells with the loops for their order, except for sets without Datum records and cells without an index."""

    def loops(cell: Cell) -> Iterator[str]:
        if cell.dataset != "variable" and cell.state != "first":
            for name, loop in LOOPS.items():
                slow = cell.store == "latency"
                if cell.order == ("none" if loop.in_order else "global") and (slow or not loop.read_ahead_bytes):
                    yield name

    return tuple(replace(cell, recipes=(*cell.recipes, *loops(cell))) for cell in cells)


def _small() -> Preset:
    jobs = {(1, 1): ("3k", "197k"), (2, 1): ("3k",), (4, 2): ("3k", "197k", "variable")}
    cells = [
        Cell("disk", which, *job, state) for job, sets in jobs.items() for which in sets for state in ("cold", "warm")
    ]
    cells += [Cell("disk", "197k", 2, 1, "cold", "global", ("plain", "auto"))]
    cells += [Cell("disk", which, 4, 2, "first") for which in ("3k", "197k")]
    cells += [Cell("throttled", "3k", 4, 2, "cold")]
    cells += [Cell("latency", "197k", 4, 2, "cold")]
    cells += [Cell("latency", "3k", 4, 2, "cold", "none", ("plain", "dio", "auto"))]
    cells += [Cell("latency", "197k", 4, 2, "cold", order, ("auto",)) for order in ("block", "global")]
    cells += [Cell("latency", "3k", 1, 1, "first", "none", ("prov", "auto"))]
    return Preset(
        cells=_with_loops(cells),
        rounds=5,
        records={"3k": 40_000, "197k": 1_000, "variable": 4_000},
        limit_s=0.7,
        requests=tuple(4096 << k for k in range(0, 11, 2)),
        request_bytes=32 << 20,
        groups=(1, 2, 4),
        group_cells=(Cell("disk", "197k", 4, 4, "cold", "none", ("stag",)),),
    )


#: Runs everything once, in seconds.
_TINY = Preset(
    cells=_with_loops(
        (
            Cell("disk", "3k", 1, 1, "cold"),
            Cell("disk", "3k", 2, 1, "warm"),
            Cell("disk", "variable", 2, 1, "first"),
        )
    ),
    rounds=1,
    records={"3k": 2_000, "197k": 40, "variable": 200},
    limit_s=1.0,
    requests=(4096, 1 << 20),
    request_bytes=4 << 20,
)

PRESETS: dict[str, Preset] = {"tiny": _TINY, "small": _small()}
