"""What `select=` costs: an epoch on a slow store, and a start with many keys; the tables of measurements/costs.md.

    python -m benchmarks.selections --data DIR [--rounds 5]

Needs /dev/fuse. The store answers each read after 20 ms and carries 200 MB/s; one rank reads it past the page cache.
The starts are with a saved index, in memory. Medians (min ... max) of interleaved rounds, as two Markdown tables.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lmdb
import numpy as np

import pario
from benchmarks.measure import interleave, machine, parser_of, told
from benchmarks.stores.latency import LatencyStore, latency_store
from pario.options import Recipe

STORE_S, STORE_BYTES_PER_S = 0.020, 200_000_000
VALUE_BYTES = 8000


def made(folder: str, name: str, n: int, value: Callable[[int], bytes]) -> str:
    """An LMDB of n records with its index beside it."""
    path = os.path.join(folder, f"{name}-{n}")
    if not os.path.exists(path):
        with lmdb.open(path, map_size=1 << 33, sync=False) as env, env.begin(write=True) as txn:
            for i in range(n):
                txn.put(b"%010d" % i, value(i))
    with pario.Reader(path, comm="self"):
        pass
    return path


def epoch(store: LatencyStore, shuffle: Any, select: Any) -> tuple[float, int, float]:
    """(seconds, reads, bytes read ÷ pages of the values)"""
    how: dict[str, Any] = {"options": pario.Options(tiers=()), "recipe": Recipe(fetch="direct"), "comm": "self"}
    with pario.Loader(store.folder, 64, shuffle=shuffle, select=select, **how) as loader:
        before = loader.stats()
        begin = time.perf_counter()
        for _ in loader:
            pass
        seconds, after = time.perf_counter() - begin, loader.stats()
        pages = loader.records * -(-(VALUE_BYTES + 16) // 4096) * 4096
    return seconds, after["reads"] - before["reads"], (after["bytes_read"] - before["bytes_read"]) / pages


def start(path: str, select: Any) -> float:
    begin = time.perf_counter()
    with pario.Loader(path, 64, shuffle="global", select=select, options=pario.Options(tiers=()), comm="self"):
        return time.perf_counter() - begin


def epochs(folder: str, n: int, rounds: int) -> None:
    path = made(folder, "eight", n, lambda i: bytes(VALUE_BYTES))
    random = np.random.default_rng(0)
    chosen: dict[str, Any] = {"all": "all"}
    for share in (0.9, 0.5, 0.1):
        chosen[f"{share:.0%} at random"] = np.flatnonzero(random.random(n) < share)
    chosen["a range of a tenth"] = range(n // 2, n // 2 + n // 10)
    print('| selection | `shuffle=False` | bytes read ÷ wanted | `"block"` |\n|---|---|---|---|')
    with latency_store(path, read_s=STORE_S, bytes_per_s=STORE_BYTES_PER_S) as store:
        epoch(store, False, "all")  # compiles
        orders: tuple[Any, ...] = (False, "block")
        sides = {(name, order): partial(epoch, store, order, ids) for name, ids in chosen.items() for order in orders}
        found = interleave(sides, rounds)
    for name in chosen:
        straight, block = found[name, False], found[name, "block"]
        print(f"| {name} | {_told(straight)} | {straight[0][2]:.2f} | {_told(block)} |", flush=True)


def _told(runs: list[tuple[float, int, float]]) -> str:
    return f"{runs[0][1]:,} reads, {told([run[0] for run in runs], unit=' s')}"


def starts(folder: str, n: int, rounds: int) -> None:
    path = made(folder, "keys", n, lambda i: b"%d" % i)
    chosen: dict[str, Any] = {
        "none": None,
        "a range": range(n * 9 // 10),
        "a prefix": b"0000",
        f"{n * 9 // 10:,} ids": np.random.default_rng(0).permutation(n)[: n * 9 // 10],
        "a part by id": pario.split(path, (0.9, 0.1), comm="self")[0],
        "a function of the key": lambda key: key[-1] == 53,
        "a pattern": re.compile(rb".*5$"),
        "a part by key": pario.split(path, (0.9, 0.1), by="key", comm="self")[0],
    }
    start(path, None)  # compiles
    found = interleave({name: partial(start, path, select) for name, select in chosen.items()}, rounds)
    print(f"\n| `select=`, {n:,} keys | the Loader is there after |\n|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {told(seconds, unit=' s')} |", flush=True)


def main() -> int:
    given = parser_of("selections", __doc__, 5).parse_args()
    logging.getLogger("pario").setLevel(logging.ERROR)
    os.makedirs(given.data, exist_ok=True)
    print(machine(), file=sys.stderr)
    epochs(given.data, 600 if given.smoke else 12_000, given.rounds)
    starts(given.data, 20_000 if given.smoke else 1_000_000, given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
