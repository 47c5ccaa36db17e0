"""The rate that pario's prefetch depth reaches by itself, on slow stores and on the disk.

    python -m benchmarks.tuning --data DIR [--rounds 5] [--only TEXT] [--stores NAME,NAME] [--out DIR/tuning.json]
                                [--times 4] [--tiers default]
    python -m benchmarks.tuning --data DIR --design     beside the best by hand: 36 cells (benchmarks/design.py)
    python -m benchmarks.tuning --data DIR --law        its depth, beside fixed ones (benchmarks/law_runs.py)

Each cell is a store, a set, an order and a number of nodes: one rank on one, four on two. A run is a new process that
reads EPOCHS epochs from a store without a page cache (the disk: its pages are dropped before): the first begins with
two reads in flight. The table has the rate as a part of the store's bandwidth. What --design and --law have measured is
in their JSON at once, and a further call goes on from there. Needs root, fuse3 and mfusepy, but for the disk.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cache, data, design, law_runs
from benchmarks.measure import Pieces, Row, Section, finish, parser_of
from benchmarks.sides import BATCH, SHUFFLES, SMALL, Bench, epoch_seconds
from benchmarks.stores.latency import latency_store

EPOCHS = 2


@dataclass(frozen=True)
class Kind:
    """read_s : seconds of a read; None: the bare disk
    bytes_per_s : bandwidth of all readers together
    records : of each set, so that an epoch takes a second or a few
    """

    read_s: float | None
    bytes_per_s: float | None
    records: dict[str, int]


STORES = {
    "20 ms, 200 MB/s": Kind(0.020, 200e6, {"3k": 60_000, "197k": 1_000}),
    "5 ms, 1.5 GB/s": Kind(0.005, 1.5e9, {"3k": 60_000, "197k": 1_000}),
    "5 ms, 18 MB/s": Kind(0.005, 18e6, {"3k": 4_000, "197k": 100}),
    "disk, cold": Kind(None, None, {"3k": 60_000, "197k": 1_000}),
}
#: Records of 3 KB in random order are a read each: fewer of them.
SCATTERED = 4_000


@dataclass(frozen=True)
class Cell:
    store: str
    which: str
    shuffle: str
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.which}, {SHUFFLES[self.shuffle]}, {self.nodes} node{'s' * (self.nodes > 1)}"

    @property
    def records(self) -> int:
        most = STORES[self.store].records[self.which]
        return min(most, SCATTERED) if (self.which, self.shuffle) == ("3k", "global") else most


def cells() -> Iterator[Cell]:
    for store, which, shuffle, nodes in itertools.product(STORES, ("3k", "197k"), SHUFFLES, (1, 2)):
        yield Cell(store, which, shuffle, nodes)


@contextmanager
def mounted(kind: Kind, held: data.DataSet) -> Iterator[str]:
    """The folder to read."""
    if kind.read_s is None:
        yield held.path
    else:
        with latency_store(held.path, read_s=kind.read_s, bytes_per_s=kind.bytes_per_s) as store:
            yield store.folder


def measure(bench: Bench, cell: Cell, held: data.DataSet, tiers: str = "") -> list[dict[str, Any]]:
    """Runs: seconds of every epoch. With tiers, of the first one: later ones need not read."""
    kind = STORES[cell.store]
    epochs = EPOCHS if kind.read_s is not None and not tiers else 1
    with mounted(kind, held) as folder:

        def run() -> dict[str, Any]:
            if kind.read_s is None:
                cache.drop_file(held.file)
            more = ["--epochs", str(epochs), "--warmup", bench.small[cell.which].path, "--tiers", tiers]
            found = bench.pario(folder, cell.which, cell.shuffle, *more, ranks=cell.nodes**2, nodes=cell.nodes)
            return {
                "seconds": [epoch_seconds(found, epoch) for epoch in range(epochs)],
                "depth": [rank["stats"]["depth"] for rank in found["ranks"]],
            }

        return [run() for _ in range(bench.rounds)]


def add(cell: Cell, held: data.DataSet, runs: list[dict[str, Any]], section: Section) -> None:
    section.raw[cell.name] = runs
    depths = sorted({depth for run in runs for depth in run["depth"]})
    full = STORES[cell.store].bytes_per_s
    for epoch in range(len(runs[0]["seconds"])):
        rates = [held.file_bytes / run["seconds"][epoch] for run in runs]
        said = f"{statistics.median(rates) / 1e6:,.0f} MB/s, depth {depths[0]} to {depths[-1]} at the end"
        case = f"{cell.name}, epoch {epoch}"
        if full:
            section.add(Row.of(f"{case}, of the store's", [rate / full for rate in rates], ">=", 0.95, ours=said))
        else:
            section.add(Row.of(case, [rate / 1e6 for rate in rates], unit="MB/s", ours=said))


def _in_pieces(options: argparse.Namespace) -> int:
    """Measure what the JSON does not have yet, unit by unit, and print the tables."""
    pieces = Pieces(Path(options.out or Path(options.data) / f"{'design' if options.design else 'law'}.json"))
    units: dict[str, Callable[[], Any]] = {
        cell.name: partial(design.measure, cell, options.data, options.rounds) for cell in design.cells()
    }
    for unit, measured in (units if options.design else law_runs.units(options.data, options.rounds)).items():
        if options.only in unit:
            pieces.get(unit, measured)
    print(design.summary(pieces.runs) if options.design else law_runs.summary(pieces.runs))
    if options.figures:
        law_runs.plot(pieces.runs, options.figures)
    return 0


def main() -> int:
    parser = parser_of("tuning", __doc__, 5)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--stores", default=",".join(STORES).replace(", ", " "), help="names without commas")
    parser.add_argument("--tiers", default="", help="as in PARIO_TIERS, or default: what people get who set nothing")
    parser.add_argument("--times", type=int, default=1, help="epochs of so many times the usual records")
    parser.add_argument("--design", action="store_true", help="the pairwise design of benchmarks/design.py")
    parser.add_argument("--law", action="store_true", help="the depth that pario's law finds, benchmarks/law_runs.py")
    parser.add_argument("--figures", help="a folder for the figure of --law, as SVG")
    options = parser.parse_args()
    if options.design or options.law:
        return _in_pieces(options)
    bench = Bench.of(options)
    names = [name for name in STORES if name.replace(", ", " ") in options.stores.split(",")]
    chosen = [cell for cell in cells() if cell.store in names and options.only in cell.name]
    if options.smoke:
        chosen = [Cell("disk, cold", "197k", "global", 1)]
    if not chosen:
        parser.error("no such cell")
    for which in {cell.which for cell in chosen}:
        bench.small[which] = data.make(options.data, which, SMALL[which])
        bench.index(bench.small[which].path)
    sections = []
    for store in dict.fromkeys(cell.store for cell in chosen):
        sections.append(Section(store, f"{store}: the rate ÷ the store's", "no page cache, or dropped"))
        for cell in (cell for cell in chosen if cell.store == store):
            held = bench.small[cell.which]
            if not options.smoke:
                held = data.make(options.data, cell.which, options.times * cell.records)
                bench.index(held.path)
            add(cell, held, measure(bench, cell, held, options.tiers), sections[-1])
    finish("tuning", options, sections, batch=BATCH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
