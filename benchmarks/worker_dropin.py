"""One reader of the drop-in benchmark, in a process of its own: the same calls to py-lmdb or to pario.lmdb.

    python -m benchmarks.worker_dropin lmdb|pario get|getmulti|scan|keys DIR --records N [--count M] ...

Prints one JSON line: seconds of every pass over the same keys. The library is loaded, its kernels too, before the clock
starts; the file is opened before it starts, its pages are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import time
from collections.abc import Callable
from typing import Any

#: Keys of one getmulti call.
MANY = 1000


def work(module: Any, what: str, path: str, keys: list[bytes], count: int, readahead: bool) -> Callable[[], int]:
    """A function that does one pass and returns how many records it read."""
    env = module.open(path, readonly=True, lock=False, readahead=readahead)
    txn = env.begin()

    def get() -> int:
        read = txn.get
        for key in keys:
            read(key)
        return len(keys)

    def getmulti() -> int:
        read = txn.cursor().getmulti
        return sum(len(read(keys[i : i + MANY])) for i in range(0, len(keys), MANY))

    def scan() -> int:
        n = 0
        for _ in txn.cursor():
            n += 1
            if n == count:
                break
        return n

    def names() -> int:
        n = 0
        for _ in txn.cursor().iternext(values=False):
            n += 1
            if n == count:
                break
        return n

    return {"get": get, "getmulti": getmulti, "scan": scan, "keys": names}[what]


def passes(
    options: argparse.Namespace, seed: int, ready: Any = None, results: Any = None
) -> tuple[list[float], int] | None:
    module = importlib.import_module("lmdb" if options.side == "lmdb" else "pario.lmdb")
    if options.side != "lmdb":
        importlib.import_module("pario.lmdb.native").compile_now()
    work(module, options.what, options.warmup, [b"%08d" % i for i in range(8)], 8, options.readahead)()
    rng = random.Random(seed)
    keys = [b"%08d" % i for i in rng.sample(range(options.records), options.count)] if "get" in options.what else []
    one = work(module, options.what, options.path, keys, options.count, options.readahead)
    if ready is not None:
        ready.wait()
    seconds, records = [], 0
    for _ in range(options.passes):
        begin = time.perf_counter()
        records = one()
        seconds.append(time.perf_counter() - begin)
    if results is None:
        return seconds, records
    results.put((seconds, records))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("side", choices=("lmdb", "pario"))
    parser.add_argument("what", choices=("get", "getmulti", "scan", "keys"))
    parser.add_argument("path")
    parser.add_argument("--records", type=int, required=True, help="records of the set")
    parser.add_argument("--count", type=int, required=True, help="records to read")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--readahead", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", required=True, help="another LMDB, read before the clock starts")
    options = parser.parse_args()
    if options.processes == 1:
        found = passes(options, options.seed)
        assert found is not None
        seconds, records = found
    else:
        context = multiprocessing.get_context("spawn")
        ready, results = context.Barrier(options.processes), context.Queue()
        team = [
            context.Process(target=passes, args=(options, options.seed + i, ready, results))
            for i in range(options.processes)
        ]
        for process in team:
            process.start()
        done = [results.get(timeout=250) for _ in team]
        for process in team:
            process.join()
        # They started together; the slowest ends a pass.
        seconds = [max(s) for s in zip(*(s for s, _ in done), strict=True)]
        records = sum(n for _, n in done)
    print(json.dumps({"seconds": seconds, "records": records}))


if __name__ == "__main__":
    main()
