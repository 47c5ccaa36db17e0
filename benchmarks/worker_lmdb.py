"""The reader that everybody would write: py-lmdb's `get`, record by record, into one batch array. One JSON line.

`array` is the loop of training scripts: `batch[i] = np.frombuffer(txn.get(key), ...)`. The others are as tight as
Python allows: `whole` copies the value as it is into a memoryview, `slice` only its pixels; `join` makes a new batch of
each step instead of filling one. Values come as bytes or, with `-buffers`, as views of the mapping.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import lmdb
import numpy as np

from benchmarks.worker import Team, memory, run

VARIANTS = ("array", "array-buffers", "whole", "slice", "join", "whole-buffers", "slice-buffers", "join-buffers")
BARE = ("array", "array-buffers")
REUSING = tuple(name for name in VARIANTS if not name.startswith("join"))


def loop(variant: str, get: Callable[[bytes], bytes], keys: list[bytes], batch: int, head: int, pixels: int) -> None:
    """One epoch over `keys`."""
    if not keys:
        return
    kind = variant.removesuffix("-buffers")
    if kind == "join":
        for start in range(0, len(keys), batch):
            np.frombuffer(b"".join(map(get, keys[start : start + batch])), np.uint8)
        return
    if kind == "array":
        rows = np.empty((batch, pixels), np.uint8)
        for start in range(0, len(keys), batch):
            for i, key in enumerate(keys[start : start + batch]):
                rows[i] = np.frombuffer(get(key), np.uint8, pixels, head)
        return
    row = len(get(keys[0])) if kind == "whole" else pixels
    out = memoryview(np.empty(batch * row, np.uint8))
    for start in range(0, len(keys), batch):
        at = 0
        if kind == "whole":
            for key in keys[start : start + batch]:
                out[at : at + row] = get(key)
                at += row
        else:
            stop = head + pixels
            for key in keys[start : start + batch]:
                out[at : at + row] = get(key)[head:stop]
                at += row


def numpy_order(kind: str, n: int, neighbours: int) -> np.ndarray:
    """A stand-in for the Loader's order where no file gives it."""
    rng = np.random.default_rng(1)
    if kind == "global":
        return rng.permutation(n)
    if kind == "block":
        blocks = [np.arange(i, min(n, i + neighbours)) for i in range(0, n, neighbours)]
        rng.shuffle(blocks)
        mixed = [np.concatenate(blocks[i : i + 32]) for i in range(0, len(blocks), 32)]
        return np.concatenate([rng.permutation(part) for part in mixed])
    return np.arange(n)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--order", default="none", help="none, global, block, or a folder with ids-RANK.npy")
    parser.add_argument("--variant", default="whole", choices=VARIANTS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=0, help="records of all ranks together; 0 = all")
    parser.add_argument("--head", type=int, required=True, help="bytes of a value before the pixels")
    parser.add_argument("--pixels", type=int, required=True, help="bytes of pixels in a value")
    parser.add_argument("--readahead", type=int, default=0)
    options = parser.parse_args()

    team = Team()
    env = lmdb.open(options.path, readonly=True, lock=False, readahead=bool(options.readahead))
    n = env.stat()["entries"]
    if options.order in ("none", "global", "block"):
        neighbours = max(1, (2 << 20) // (-(-(options.pixels + 30) // 4096) * 4096))
        steps = numpy_order(options.order, n, neighbours)
        starts = range(team.rank * options.batch, n, team.size * options.batch)
        mine = np.concatenate([np.empty(0, np.int64), *(steps[i : i + options.batch] for i in starts)])
    else:
        mine = np.load(f"{options.order}/ids-{team.rank}.npy")
    if options.limit:
        mine = mine[: options.limit // team.size]
    keys = [b"%08d" % i for i in mine]  # the benchmark sets' keys, in key order
    epochs = []
    with env.begin(buffers=options.variant.endswith("-buffers")) as txn:
        for _ in range(options.epochs):
            team.barrier()
            start = time.perf_counter()
            loop(options.variant, txn.get, keys, options.batch, options.head, options.pixels)
            seconds = time.perf_counter() - start
            nbytes = len(keys) * options.pixels
            epochs.append({"seconds": seconds, "records": len(keys), "bytes": nbytes, "memory": memory()})
    env.close()
    team.report({"epochs": epochs}, {"side": "py-lmdb", "version": lmdb.__version__, "variant": options.variant})


if __name__ == "__main__":
    run(main)
