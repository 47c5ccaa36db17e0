"""A job that saves until it is killed, and tells on stdout what is complete: started by test_checkpoint_crash.py.

    [mpiexec -n RANKS] python checkpoint_job.py FOLDER [OPTIONS of Checkpointer, as JSON]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

import pario
from pario.checkpoint import layout


def tree_of(step: int) -> dict[str, object]:
    rng = np.random.default_rng(step)
    kept = np.random.default_rng(0).random(200_000)
    return {"step": step, "large": rng.random(200_000), "small": [rng.random(k) for k in range(20)], "kept": kept}


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2]) if sys.argv[2:] else {}
    layout.LEAST_BLOCK = 64 << 10
    rank, comm = 0, "self"
    if "PMI_RANK" in os.environ:
        from mpi4py import MPI

        rank, comm = MPI.COMM_WORLD.rank, MPI.COMM_WORLD
    (folder / f"pid-{rank}").write_text(str(os.getpid()))

    def say(*words: object) -> None:
        if rank == 0:
            print(*words, flush=True)

    with pario.Checkpointer(comm, slow=folder / "slow", fast=folder / "fast", keep=2, **options) as ckpt:
        latest = ckpt.latest()
        first = -1 if latest is None else latest
        if latest is not None:
            got = ckpt.restore()
            assert got["step"] >= 0
        say("begin", first)
        before = None
        for step in range(first + 1, first + 500):
            handle = ckpt.save(step, tree_of(step))
            if before is not None:
                before.wait("fast")
                say("fast", before.step)
            if step % 3 == 0:
                handle.wait()
                say("slow", step)
            before = handle


if __name__ == "__main__":
    main()
