"""What `verify=True` costs: epochs with and without, from memory and a cold disk; the table of measurements/costs.md.

    python -m benchmarks.verify --data DIR [--rounds 9] [--states warm,cold] [--quick]

One rank, the data sets of benchmarks/data.py, whose checksums are saved beside them if they are not there. Both sides
stay open and take turns, each first in every other round; loops do nothing but take batches. A row has the middle
seconds (least ... most) of each side, and the middle of the ratios of neighbours; the last line of a state is the
geometric mean of its rows. Exit status 1 if a state misses its bar.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from statistics import median
from typing import Any

import pario
from benchmarks import cache, data
from benchmarks.measure import interleave, machine
from benchmarks.sides import BATCH, SHUFFLES
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
        verify: pario.Loader(held.path, BATCH[which], pario.decode.Datum(), verify=verify, **how)
        for verify in (False, True)
    }
    for loader in loaders.values():
        epoch(loader, held.file, "warm")  # loads the kernels
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        turn = (False, True) if number % 2 else (True, False)
        for name, runs in interleave({str(v): _once(loaders[v], held.file, state) for v in turn}, 1).items():
            found[name == "True"] += runs
    for loader in loaders.values():
        loader.close()
    ratios = [a / b for a, b in zip(found[True], found[False], strict=True)]
    row = f"| {held.name}, {SHUFFLES[order]}, {state} | {_told(found[False])} | {_told(found[True])} "
    return row + f"| {median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f}) |", median(ratios)


def _once(loader: pario.Loader, file: str, state: str) -> Any:
    return lambda: epoch(loader, file, state)


def _told(seconds: list[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f} … {max(seconds):.3f}) s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of the data sets; made there if missing")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--states", default="warm,cold")
    parser.add_argument("--quick", action="store_true", help="small data sets: does it run at all?")
    given = parser.parse_args()
    logging.getLogger("pario").setLevel(logging.ERROR)
    os.makedirs(given.data, exist_ok=True)
    print(machine(), file=sys.stderr)
    small = {"3k": 4000, "197k": 100}
    sets = {which: with_checksums(given.data, which, small[which] if given.quick else None) for which in small}
    print("| records | without | `verify=True` | ratio |\n|---|---|---|---|")
    missed = False
    for state in given.states.split(","):
        ratios = []
        for which, held in sets.items():
            for order in ORDERS:
                row, ratio = compared(held, which, order, state, given.rounds)
                ratios.append(ratio)
                print(row, flush=True)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        missed |= max(ratios) > BARS[state]
        print(f"| {state}: geometric mean (bar {BARS[state]:.2f} for each) | | | {mean:.3f} |", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
