"""What partner copies of checkpoints cost, and how long a checkpoint depends on one node.

    python -m benchmarks.partner_copies FOLDER [--rounds 7] [--mib 320] [--nodes 2]

The emulated nodes, of one rank each, have their fast tiers side by side in FOLDER, so the writes of all of them, and
the copies, share one device. Each rank saves its shards, --mib in all, four times per round: two saves without partner
copies and two with them, in turns; the second ones count, which find their staging memory made. The slow store takes
100 MB/s. Arrays come from memory; what is read of a checkpoint was written past the page cache.

    stall        seconds of `save` on rank 0: with / without
    fast         seconds from `save` until `wait("fast")` returns: with / without
    copied       seconds from `save` until `wait("partner")` returns, and the bytes per second of one node in between
    drained      seconds from `save` until `wait()` returns: with / without
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks.measure import launch, told

SLOW_RATE = 100e6


def one(comm: Any, folder: Path, node: int, tree: dict[str, Any], partner: bool) -> dict[str, float]:
    """Two saves by a Checkpointer of its own; the figures of the second."""
    with pario.Checkpointer(
        comm, slow=folder / "slow", fast=folder / f"fast-{node}", rate=SLOW_RATE, partner=partner
    ) as ckpt:
        ckpt.save(0, tree).wait()
        comm.Barrier()
        begin = time.perf_counter()
        handle = ckpt.save(1, tree)
        took = {"stall": time.perf_counter() - begin}
        for tier, name in (("fast", "fast"), ("partner", "copied"), ("slow", "drained")):
            if partner or tier != "partner":
                handle.wait(tier)
                took[name] = time.perf_counter() - begin
    comm.Barrier()
    if comm.rank == 0:
        for path in list(folder.iterdir()):
            shutil.rmtree(path)
    comm.Barrier()
    return took


def rank_of_the_job(folder: Path, mib: int, rounds: int) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    shape = 8, comm.size, (mib << 20) // 8 // comm.size
    rows = np.random.default_rng(comm.rank).integers(0, 255, (shape[0], 1, shape[2]), np.uint8)
    tree = {f"layer{k}": pario.Shard(rows[k], shape[1:], (comm.rank, 0)) for k in range(shape[0])}
    found = [[one(comm, folder, comm.rank, tree, partner) for partner in (False, True)] for _ in range(rounds)]
    if comm.rank == 0:
        print(json.dumps({"rounds": found}))


def line(name: str, values: list[float], unit: str) -> str:
    return f"| {name} | {told(values, '.3g', unit)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=320)
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    if "PMI_RANK" in os.environ:
        rank_of_the_job(options.folder, options.mib, options.rounds)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        words = [folder, "--mib", str(options.mib), "--rounds", str(options.rounds)]
        rounds = launch("benchmarks.partner_copies", words, ranks=options.nodes, nodes=options.nodes)["rounds"]
    print(f"{options.nodes} nodes, {options.mib} MiB in all, {options.rounds} rounds; median (range)", file=sys.stderr)
    for name in ("stall", "fast", "drained"):
        print(line(f"{name}, with ÷ without", [w[name] / wo[name] for wo, w in rounds], ""))
        print(line(f"{name}, without", [wo[name] for wo, _ in rounds], " s"))
        print(line(f"{name}, with", [w[name] for _, w in rounds], " s"))
    print(line("copied", [w["copied"] for _, w in rounds], " s"))
    share = options.mib / options.nodes * 2**20 / 1e6
    print(line("copied, of one node", [share / (w["copied"] - w["fast"]) for _, w in rounds], " MB/s"))


if __name__ == "__main__":
    main()
