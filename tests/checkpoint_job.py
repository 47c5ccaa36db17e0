"""A process that saves until it is killed, and tells on stdout what is complete: started by test_checkpoint_crash.py.

    python checkpoint_job.py FOLDER SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import pario
from pario.checkpoint import layout


def tree_of(step: int) -> dict[str, object]:
    rng = np.random.default_rng(step)
    return {"step": step, "large": rng.random(200_000), "small": [rng.random(k) for k in range(20)]}


def main() -> None:
    folder = Path(sys.argv[1])
    layout.LEAST_BLOCK = 64 << 10
    with pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast", keep=2) as ckpt:
        latest = ckpt.latest()
        first = -1 if latest is None else latest
        if latest is not None:
            got = ckpt.restore()
            assert got["step"] >= 0
        print("begin", first, flush=True)
        before = None
        for step in range(first + 1, first + 500):
            handle = ckpt.save(step, tree_of(step))
            if before is not None:
                before.wait("fast")
                print("fast", before.step, flush=True)
            if step % 3 == 0:
                handle.wait()
                print("slow", step, flush=True)
            before = handle


if __name__ == "__main__":
    main()
