"""Jobs of several nodes whose drain never ends: started by test_checkpoint_partner.py, which kills them.

    mpiexec -n RANKS python partner_job.py FOLDER save [OPTIONS of Checkpointer, as JSON]
    mpiexec -n RANKS python partner_job.py FOLDER restart NODE

`save` notes in FOLDER/pid-NODE-RANK its processes, and in FOLDER/said the newest step whose copies stand; step 0 alone
gets to the slow store. `restart` finds that step or a newer one though NODE has lost its fast tier, and step 0 when the
node after it loses its own, too; it says what it has found.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import pario
from pario.checkpoint.writing import DrainThread
from pario.comm.world import get_world

COMM = MPI.COMM_WORLD


def tree_of(step: int) -> dict[str, Any]:
    """Each rank's rows differ."""
    rows = np.random.default_rng([step, COMM.rank]).random((1, 100_000))
    return {"step": step, "rows": pario.Shard(rows, (COMM.size, 100_000), (COMM.rank, 0))}


def save(folder: Path, fast: Path, node: int, options: dict[str, Any]) -> None:
    (folder / f"pid-{node}-{COMM.rank}").write_text(str(os.getpid()))
    with pario.Checkpointer(COMM, slow=folder / "slow", fast=fast, partner=True, pending=10**6, **options) as ckpt:
        ckpt.save(0, tree_of(0)).wait()
        DrainThread._copy = lambda *_: time.sleep(1000)  # type: ignore[method-assign]
        before = None
        for step in range(1, 500):
            handle = ckpt.save(step, tree_of(step))
            if before is not None:  # one copy is under way
                before.wait("partner")
                if COMM.rank == 0:
                    (folder / "new").write_text(str(before.step))
                    (folder / "new").rename(folder / "said")
            before = handle


def restored(folder: Path, fast: Path) -> int:
    with pario.Checkpointer(COMM, slow=folder / "slow", fast=fast) as ckpt:
        step = ckpt.latest()
        assert step is not None
        got = ckpt.restore()
        expected = tree_of(step)["rows"].array[0]
        assert got["step"] == step
        assert np.array_equal(got["rows"][COMM.rank], expected)
        return step


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
    with get_world(COMM) as world:
        node, nodes, leads = world.node, world.nodes, world.is_leader
    fast = folder / f"fast-{node}"
    if what == "save":
        save(folder, fast, node, json.loads(sys.argv[3]))
        return
    lost = int(sys.argv[3])
    first = restored(folder, fast)
    COMM.Barrier()
    if leads and node == (lost + 1) % nodes:
        shutil.rmtree(fast)
    COMM.Barrier()
    second = restored(folder, fast)
    if COMM.rank == 0:
        print("found", first, second, flush=True)


if __name__ == "__main__":
    main()
