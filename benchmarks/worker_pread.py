"""What explicit reads cost before anybody looks at the bytes: the reads of pario's own plan, into a ring that is used
again and again, and nothing else. One JSON line. No reader without mmap can be faster than this on as many threads.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from benchmarks.worker import Team, memory, run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--order", required=True, help="a folder with ids-RANK.npy")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--group", type=int, required=True, help="records that are planned together")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    from pario.dataset.reader import Reader
    from pario.fetch.pool import ReadPool
    from pario.fetch.posix import PosixFetcher
    from pario.plan.coalesce import coalesce

    team = Team()
    ids = np.load(f"{options.order}/ids-{team.rank}.npy")
    with Reader(options.path, comm=team.comm) as reader:
        extents, lead, path = reader.index.extents, reader.index.header_bytes, reader.path
        fetcher = PosixFetcher(path)
        pool = ReadPool(fetcher, options.threads)
        plans = []
        for start in range(0, len(ids), options.group):
            group = extents[ids[start : start + options.group]]
            knobs = {"align": 1, "gap_bytes": 16 << 10, "read_bytes": 4 << 20}
            plans.append(coalesce(group["offset"] - lead, group["nbytes"] + lead, file_bytes=fetcher.nbytes, **knobs))
        memory_of_slots = [np.empty(max(plan.nbytes for plan in plans), np.uint8) for _ in range(2)]
        epochs = []
        for _ in range(options.epochs):
            team.barrier()
            begin = time.perf_counter()
            for k, plan in enumerate(plans):
                pool.read(plan.reads, memory_of_slots[k % 2], plan.starts)
            seconds = time.perf_counter() - begin
            nbytes = sum(int(plan.reads["nbytes"].sum()) for plan in plans)
            epochs.append({"seconds": seconds, "records": len(ids), "bytes": nbytes, "memory": memory()})
        pool.close()
        fetcher.close()
    team.report({"epochs": epochs}, {"side": "pread", "threads": options.threads})


if __name__ == "__main__":
    run(main)
