"""FFCV in random order over a .beton of the same records, which are uint8 rows with a label. One JSON line.

Runs under the interpreter of an environment with FFCV, numpy, lmdb and mpi4py; pario may lack what else it needs there.
Several ranks divide the records, as FFCV's distributed sampler does.
"""

from __future__ import annotations

import argparse
import os
import time

import lmdb
import numpy as np
from ffcv.fields import IntField, NDArrayField
from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.writer import DatasetWriter

from benchmarks.worker import Team, run


class Records:
    """What FFCV's writer wants: rows of an LMDB by number."""

    def __init__(self, path: str, head: int, pixels: int) -> None:
        self.path, self.head, self.pixels = path, head, pixels
        self.env: lmdb.Environment | None = None  # opened by each of the writer's processes
        with lmdb.open(path, readonly=True, lock=False) as env:
            self.n = env.stat()["entries"]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False)
        with self.env.begin() as txn:
            value = txn.get(b"%08d" % i)
        return np.frombuffer(value, np.uint8, self.pixels, self.head), i


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", help="the LMDB")
    parser.add_argument("--beton", required=True, help="made from it if missing")
    parser.add_argument("--head", type=int, required=True, help="bytes of a value before the pixels")
    parser.add_argument("--pixels", type=int, required=True, help="bytes of pixels in a value")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="threads per rank that fill batches")
    options = parser.parse_args()

    team = Team()
    records = Records(options.path, options.head, options.pixels)
    if team.rank == 0 and not os.path.exists(options.beton):
        fields = {"data": NDArrayField(np.dtype(np.uint8), (options.pixels,)), "number": IntField()}
        DatasetWriter(f"{options.beton}.part", fields, num_workers=1).from_indexed_dataset(records)
        os.rename(f"{options.beton}.part", options.beton)
    team.barrier()
    loader = Loader(
        options.beton,
        options.batch,
        num_workers=options.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        indices=np.arange(team.rank, len(records), team.size),
        pipelines={"data": [NDArrayDecoder()], "number": [IntDecoder()]},
    )
    epochs = []
    for _ in range(options.epochs):
        seen = 0
        team.barrier()
        start = time.perf_counter()
        for data, _ in loader:
            seen += len(data)
        epochs.append({"seconds": time.perf_counter() - start, "records": seen})
        # Right content, of the last batch: what was measured must be the work that was asked for.
        data, number = next(iter(loader))
        for row, i in zip(data, number[:, 0].tolist(), strict=True):
            assert (row == records[i][0]).all(), i
    team.report({"epochs": epochs}, {"side": "ffcv", "workers": options.workers})


if __name__ == "__main__":
    run(main)
