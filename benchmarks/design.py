"""At most 36 cells in which every two levels of any two factors meet: what "auto" loses against the best by hand.

`python -m benchmarks.tuning --design` measures them. Factors: the six stores of benchmarks/stores/kinds.py, the orders,
the seconds of computing per record (sleep), ranks and nodes; records of 197 KB, batches of 8. Where a cell has one
rank, each node has one.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from benchmarks import data
from benchmarks.measure import launch
from benchmarks.stores.kinds import STORES, opened

__all__ = ["SEED", "Cell", "cells", "interval", "measure", "summary"]

SEED = 12
MOST = 36
FACTORS: tuple[Sequence[Any], ...] = (
    tuple(STORES),
    ("none", "block", "global"),
    (0.0, 0.002, 0.006, 0.012, 0.040),
    (1, 4),
    (1, 2),
)
BATCH = 8
EPOCH_S = 1.0
#: Numbers of records, so that few sets need be made.
LADDER = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
RECORD_BYTES = 197_000

#: Student's t for 95 %, by degrees of freedom.
_T95 = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Cell:
    """compute_s : seconds of computing per record
    ranks : all of them; at least one per node
    """

    store: str
    shuffle: str
    compute_s: float
    ranks: int
    nodes: int

    @property
    def name(self) -> str:
        order = "key order" if self.shuffle == "none" else self.shuffle
        return f"{self.store}, {order}, {self.compute_s * 1e3:g} ms, ranks {self.ranks}, nodes {self.nodes}"

    @property
    def records(self) -> int:
        """So many that an epoch takes about EPOCH_S, and every rank a few steps."""
        each = max(self.compute_s / self.ranks, RECORD_BYTES / STORES[self.store].caps)
        wanted = max(EPOCH_S / each, 4 * BATCH * self.ranks)
        return min(LADDER, key=lambda number: abs(math.log(number / wanted)))


def cells(seed: int = SEED) -> list[Cell]:
    """The design: the same for the same seed. Each row is the one of the product with most pairs that are still
    missing; among several, chance decides."""
    chance = random.Random(seed)
    rows = list(product(*(range(len(levels)) for levels in FACTORS)))
    missing = {pair for row in rows for pair in _pairs(row)}
    found: list[tuple[int, ...]] = []
    while missing:
        gain = [len(_pairs(row) & missing) for row in rows]
        most = max(gain)
        row = chance.choice([row for row, number in zip(rows, gain, strict=True) if number == most])
        found.append(row)
        missing -= _pairs(row)
    assert len(found) <= MOST, f"{len(found)} cells with seed {seed}: take another"
    levels = [[values[k] for values, k in zip(FACTORS, row, strict=True)] for row in found]
    return [Cell(store, order, compute, max(ranks, nodes), nodes) for store, order, compute, ranks, nodes in levels]


def _pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, b, row[a], row[b]) for a, b in combinations(range(len(row)), 2)}


def measure(cell: Cell, folder: str, rounds: int) -> dict[str, Any]:
    """Best by hand and "auto" in turns: see benchmarks/worker_design.py."""
    held = data.make(folder, "197k", cell.records)
    small = data.make(folder, "197k", 100)
    for one in (held, small):
        launch("benchmarks.worker_pario", [one.path, "--index-only"])
    with opened(cell.store, held) as store:
        how = ["--rounds", str(rounds), "--compute", str(cell.compute_s), "--shuffle", cell.shuffle]
        more = ["--drop", store.file] if store.file else []
        words = [store.folder, "--warmup", small.path, "--batch", str(BATCH), *how, *more]
        found = launch("benchmarks.worker_design", words, ranks=cell.ranks, nodes=cell.nodes, group=store.group)
    return {**found["ranks"][0], "records": cell.records}


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """(geometric mean, least, most): 95 % of a mean of so few, by Student's t of their logarithms."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = _T95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def summary(found: dict[str, Any], bar: float = 1.05) -> str:
    """A Markdown table: auto ÷ best by hand, of times, in each cell and altogether. found: cell's name -> measured"""
    lines = [
        "| store, order, computing per record, ranks, nodes | by hand | epoch, s | first epoch | second epoch |",
        "|---|---|---|---|---|",
    ]
    means: list[list[float]] = [[], []]
    above = [0, 0]
    for name, cell in found.items():
        texts = []
        for epoch in (0, 1):
            pairs = zip(cell["runs"]["auto"], cell["runs"]["hand"], strict=True)
            middle, least, most = interval([auto["seconds"][epoch] / hand["seconds"][epoch] for auto, hand in pairs])
            means[epoch].append(middle)
            above[epoch] += least > bar
            texts.append(f"{middle:.2f} ({least:.2f} … {most:.2f}){' **above**' if least > bar else ''}")
        seconds = statistics.median(run["seconds"][-1] for run in cell["runs"]["hand"])
        lines.append(f"| {name} | {cell['hand']} | {seconds:.2f} | {texts[0]} | {texts[1]} |")
    for epoch, said in enumerate(("first epoch", "second epoch")):
        if means[epoch]:
            middle = math.exp(statistics.fmean(math.log(mean) for mean in means[epoch]))
            lines.append(
                f"\n{said}: geometric mean {middle:.3f} over {len(means[epoch])} cells; the interval is wholly above "
                f"{bar} in {above[epoch]}."
            )
    return "\n".join(lines)
