"""What `verify=True` costs: epochs with and without, from memory and a cold disk; the table of measurements/costs.md.

    python -m benchmarks.verify --data DIR [--rounds 9]

One rank, the data sets of benchmarks/data.py, whose checksums are saved beside them if they are not there. Both sides
stay open and take turns, each first in every other round; loops do nothing but take batches. A row has the middle
seconds (least ... most) of each side, and the middle of the ratios of neighbours; the last line of a state is the
geometric mean of its rows. Exit status 1 if a state misses its bar.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import pario
from benchmarks import cache, data
from benchmarks.measure import interleave, machine, parser_of, told
from benchmarks.sides import BATCH, SHUFFLES, SMALL
from pario.commands.screen import screen
from pario.commands.sidecars import checksum
from pario.errors import MissingError

#: state of the page cache -> the most that an epoch may take with checksums, as a ratio
BARS = {"warm": 1.15, "cold": 1.05}
ORDERS = ("none", "global")


def with_checksums(folder: str, which: str, records: int | None) -> data.DataSet:
    held = data.make(folder, which, records)
    try:
        pario.Reader(held.path, comm="self", verify=True).close()
    except MissingError:
        screen.rank = 1  # silent
        checksum.callback(held.path, None)
    return held


def epoch(loader: pario.Loader, file: str, state: str) -> float:
    """Seconds of one epoch."""
    (cache.drop_file if state == "cold" else cache.warm_file)(file)
    begin = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begin


def compared(held: data.DataSet, which: str, order: str, state: str, rounds: int) -> tuple[str, float]:
    """(the row, the middle ratio)"""
    how: dict[str, Any] = {"shuffle": order if order != "none" else False, "comm": "self"}
    loaders = {
        name: pario.Loader(held.path, BATCH[which], pario.decode.Datum(), verify=name == "with", **how)
        for name in ("without", "with")
    }
    for loader in loaders.values():
        epoch(loader, held.file, "warm")  # loads the kernels
    found = interleave({verify: partial(epoch, loader, held.file, state) for verify, loader in loaders.items()}, rounds)
    for loader in loaders.values():
        loader.close()
    ratios = [a / b for a, b in zip(found["with"], found["without"], strict=True)]
    sides = " | ".join(told(found[side], ".3f", " s") for side in loaders)
    return f"| {held.name}, {SHUFFLES[order]}, {state} | {sides} | {told(ratios, '.3f')} |", median(ratios)


def main() -> int:
    given = parser_of("verify", __doc__, 9).parse_args()
    logging.getLogger("pario").setLevel(logging.ERROR)
    os.makedirs(given.data, exist_ok=True)
    print(machine(), file=sys.stderr)
    sets = {which: with_checksums(given.data, which, few if given.smoke else None) for which, few in SMALL.items()}
    print("| records | without | `verify=True` | ratio |\n|---|---|---|---|")
    missed = False
    for state, bar in BARS.items():
        ratios = []
        for which, held in sets.items():
            for order in ORDERS:
                row, ratio = compared(held, which, order, state, 1 if given.smoke else given.rounds)
                ratios.append(ratio)
                print(row, flush=True)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        missed |= max(ratios) > bar
        print(f"| {state}: geometric mean (bar {bar:.2f} for each) | | | {mean:.3f} |", flush=True)
    return int(missed and not given.smoke)


if __name__ == "__main__":
    sys.exit(main())
