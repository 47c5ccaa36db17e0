"""What the workers share: where they run, how they wait, what they count. A worker prints one JSON line on rank 0."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Team", "bytes_asked", "digests", "memory", "on_request", "run"]


def bytes_asked() -> int:
    """Bytes that this process has asked the kernel for by read calls, from the page cache or a device alike."""
    with open("/proc/self/io", "rb") as file:
        return int(file.readline().split()[1])


def memory() -> dict[str, int]:
    """Bytes of memory of this process; `pss` counts shared pages in equal parts, so that a node's processes add up."""
    names = ("Rss", "Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")
    with open("/proc/self/smaps_rollup") as file:
        rows = (line.split() for line in file)
        return {row[0][:-1].lower(): int(row[1]) * 1024 for row in rows if row[0][:-1] in names}


class Team:
    """The ranks of this run: MPI under a launcher, else alone and without MPI."""

    def __init__(self) -> None:
        self.comm: Any = None
        self.size, self.rank = 1, 0
        if "PMI_SIZE" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:
            from mpi4py import MPI

            self.comm = MPI.COMM_WORLD
            self.size, self.rank = self.comm.size, self.comm.rank

    def barrier(self) -> None:
        """Without spinning: a rank that waits must not take the core of one that works."""
        if self.comm is not None:
            request = self.comm.Ibarrier()
            while not request.Test():
                time.sleep(0.0005)

    def gather(self, mine: Any) -> list[Any]:
        self.barrier()
        return [mine] if self.comm is None else self.comm.allgather(mine)

    def report(self, mine: dict[str, Any], common: dict[str, Any]) -> None:
        """One line: {**common, "ranks": [what each rank says]}."""
        everybody = self.gather(mine)
        if self.rank == 0:
            print(json.dumps({**common, "size": self.size, "ranks": everybody}), flush=True)


def digests(data: np.ndarray, label: np.ndarray) -> np.ndarray:
    """u64[b]: a hash of every delivered record. data: u8[b, ...], label: integers[b]."""
    from benchmarks.data import record_digest

    rows = np.ascontiguousarray(data).reshape(len(data), -1)
    return np.array([record_digest(rows[i], int(label[i])) for i in range(len(rows))], np.uint64)


def on_request(team: Team, epoch: Callable[[], int]) -> None:
    """Run an epoch, which returns its number of records, for each line that rank 0 reads; one JSON line each."""
    while True:
        line = sys.stdin.readline() if team.rank == 0 else ""
        if not any(team.gather(line)):
            return
        team.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        records = epoch()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        team.report({"begin": start, "seconds": seconds, "cpu": cpu, "records": records}, {})


def run(main: Callable[[], None]) -> None:
    """A worker's whole life: an error on one rank ends all of them, instead of leaving the others in a collective."""
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if "mpi4py.MPI" in sys.modules:
            sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(1)
        raise
