"""The first epoch of a cold file on a local disk ÷ a bare loop of O_DIRECT reads into new shared memory.

    python -m benchmarks.cold_epoch DIR [--rounds 7] [--sizes 3072,201728] [--out results.json]

The loop reads the file from its beginning to its end, with 4 threads and reads of 1 MiB, into memory that it makes
anew (a memfd that it maps): what it costs to bring a file into a node's memory, and nothing else. pario delivers every
record as a batch's row in the order of the cell, with its defaults. Both turns take new processes, begin with the
file's pages dropped, and count the file's bytes; the clock begins when the libraries are loaded and pario's Loader is
open (the index is saved), the loop's when its threads run. Later epochs: benchmarks/in_memory.py.

Exit status 1 if the geometric mean over an order's cells, or a whole 95 % interval, is below its bar.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache import drop_file
from benchmarks.compare import interval
from benchmarks.in_memory import BATCH, ORDERS, make, numbers
from benchmarks.measure import ROOT, save_facts

BARS = {"key": 0.9, "block": 0.9, "global": 0.7}
#: of the values: what an epoch's beginning costs, some 40 ms, is to count as it does in an epoch of a second
BYTES = 1 << 30
THREADS, READ = 4, 1 << 20


def loop_side(path: str) -> dict[str, float]:
    size = os.path.getsize(path) // READ * READ
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda _: time.sleep(0.01), range(THREADS)))
        begin = time.perf_counter()
        target = os.memfd_create("loop")
        os.ftruncate(target, size)
        memory = memoryview(mmap.mmap(target, size))

        def read(offset: int) -> int:
            return os.preadv(fd, [memory[offset : offset + READ]], offset)

        done = sum(threads.map(read, range(0, size, READ)))
        return {"seconds": (time.perf_counter() - begin) * os.path.getsize(path) / done}


def pario_side(path: str, order: str, size: int) -> dict[str, float]:
    import pario

    with pario.Loader(path, BATCH[size], pario.decode.Raw("u1", (size,)), shuffle=ORDERS[order]) as loader:
        begin, records = time.perf_counter(), 0
        for batch in loader:
            records += len(batch.ids)
        seconds = time.perf_counter() - begin
        assert records == loader.index.n, "not every record came"
    return {"seconds": seconds}


def turn(*words: str) -> dict[str, Any]:
    drop_file(words[1])
    command = [sys.executable, "-m", "benchmarks.cold_epoch", "side", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_epoch", description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=numbers, default=[3072, 201_728])
    parser.add_argument("--out")
    options = parser.parse_args()
    folder = Path(options.folder) / "cold"
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for size in options.sizes:
        path = str(make(folder, size, BYTES // size))
        nbytes = os.path.getsize(path)
        turn("pario", path, "key", str(size))  # saves the index, and compiles
        rates: dict[str, list[float]] = {name: [] for name in ("loop", *ORDERS)}
        for number in range(options.rounds):
            names = list(rates)
            for name in names[number % 4 :] + names[: number % 4]:
                words = ("loop", path) if name == "loop" else ("pario", path, name, str(size))
                rates[name].append(nbytes / turn(*words)["seconds"] / 1e6)
        for order in ORDERS:
            ratio = interval(np.divide([rates[order]], [rates["loop"]]))
            found.append({"size": size, "order": order, "ratio": ratio, "rates": rates[order], "loop": rates["loop"]})
            middle = [sorted(rates[name])[options.rounds // 2] for name in (order, "loop")]
            print(
                f"{size} B, {order}: {ratio[0]:.2f} ({ratio[1]:.2f} … {ratio[2]:.2f}) of the loop; "
                f"{middle[0]:,.0f} against {middle[1]:,.0f} MB/s",
                flush=True,
            )
    wrong = False
    for order, bar in BARS.items():
        ratios = [row["ratio"] for row in found if row["order"] == order]
        mean = math.exp(sum(math.log(each[0]) for each in ratios) / len(ratios))
        wrong |= mean < bar or any(each[2] < bar for each in ratios)
        print(f"{order}: geometric mean {mean:.2f}, bar {bar}")
    if options.out:
        save_facts(options.out, rounds=options.rounds, cells=found)
    return int(wrong)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        _, _, side, path, *rest = sys.argv
        print(json.dumps(loop_side(path) if side == "loop" else pario_side(path, rest[0], int(rest[1]))))
    else:
        sys.exit(main())
