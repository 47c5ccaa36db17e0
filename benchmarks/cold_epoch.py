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

import json
import mmap
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cache import drop_file
from benchmarks.in_memory import BATCH, ORDERS, add_means, make, numbers
from benchmarks.measure import Row, Section, finish, interleave, interval, launch, parser_of

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


def turn(path: str, *words: str) -> float:
    """MB/s of the file, in a new process."""
    drop_file(path)
    seconds: float = launch("benchmarks.cold_epoch", ["side", path, *words])["seconds"]
    return os.path.getsize(path) / seconds / 1e6


def main() -> int:
    parser = parser_of("cold_epoch", __doc__, 7, data=False)
    parser.add_argument("folder")
    parser.add_argument("--sizes", type=numbers, default=[3072, 201_728])
    options = parser.parse_args()
    folder = Path(options.folder) / "cold"
    folder.mkdir(parents=True, exist_ok=True)
    section = Section("cold_epoch", "The first epoch of a cold file ÷ a bare loop into new shared memory", "cold")
    wrong = False
    for size in options.sizes:
        path = str(make(folder, size, (BYTES >> 6 if options.smoke else BYTES) // size))
        turn(path, "key", str(size))  # saves the index, and compiles
        sides = {"loop": partial(turn, path), **{order: partial(turn, path, order, str(size)) for order in ORDERS}}
        rates = section.raw[str(size)] = interleave(sides, 1 if options.smoke else options.rounds)
        for order in ORDERS:
            mean, low, high = interval(np.divide([rates[order]], [rates["loop"]]))
            wrong |= high < BARS[order]
            ours, theirs = (f"{statistics.median(rates[name]):,.0f} MB/s" for name in (order, "loop"))
            section.add(Row(f"{size} B, {order}", mean, low, high, ours=f"pario {ours}", theirs=f"loop {theirs}"))
    add_means(section, BARS)
    return finish("cold_epoch", options, [section]) or int(wrong and not options.smoke)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        path, *rest = sys.argv[2:]
        print(json.dumps(pario_side(path, rest[0], int(rest[1])) if rest else loop_side(path)))
    else:
        sys.exit(main())
