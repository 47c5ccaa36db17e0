"""The reader that everybody would write: py-lmdb's `get`, record by record, into one batch array. One JSON line.

`array` is the loop of training scripts: `batch[i] = np.frombuffer(txn.get(key), ...)`. `slice` is as tight as Python
allows: it copies the pixels into a memoryview, `whole` the value as it is. Values come as bytes or, with `-buffers`, as
views of the mapping.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import lmdb
import numpy as np

from benchmarks.worker import Team, memory, run

BARE = ("array", "array-buffers")
TIGHT = ("slice-buffers", "whole-buffers")


def loop(variant: str, get: Callable[[bytes], bytes], keys: list[bytes], batch: int, head: int, pixels: int) -> None:
    """One epoch over `keys`."""
    if not keys:
        return
    kind = variant.removesuffix("-buffers")
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--order", required=True, help="a folder with ids-RANK.npy")
    parser.add_argument("--variant", default="whole-buffers", choices=BARE + TIGHT)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=0, help="records of all ranks together; 0 = all")
    parser.add_argument("--head", type=int, required=True, help="bytes of a value before the pixels")
    parser.add_argument("--pixels", type=int, required=True, help="bytes of pixels in a value")
    options = parser.parse_args()

    team = Team()
    env = lmdb.open(options.path, readonly=True, lock=False, readahead=False)
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
