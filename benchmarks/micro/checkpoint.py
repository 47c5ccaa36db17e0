"""A training loop that saves checkpoints: straight to a slow store, to a fast one, through a burst buffer, and not.

After section 5.4 of the study (threads.py): this many iterations, a checkpoint after every so many of them; the time of
the whole loop, and how long each checkpoint stops it. Beside DCP and Orbax: benchmarks/checkpoint_beside.py.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pario.checkpoint.checkpointer import Checkpointer
from pario.machine import closing_fd

#: way -> what it is
WAYS = {
    "none": "no checkpoints",
    "plain write": "one file written to the slow store, and fsync, while the training waits",
    "direct": "Checkpointer(slow=...), and wait() until it is durable there",
    "background": "Checkpointer(slow=...): copied in memory, written in the background",
    "fast only": "Checkpointer on the fast device alone, and wait()",
    "burst buffer": "Checkpointer(slow=..., fast=...): drained in the background",
}

Save = Callable[[int, dict[str, np.ndarray]], object]


@dataclass(frozen=True)
class Training:
    """nbytes : of one checkpoint, in `arrays` arrays of f32
    every : iterations between two checkpoints; step_s : seconds of one
    """

    nbytes: int = 100_000_000
    arrays: int = 16
    checkpoints: int = 5
    every: int = 20
    step_s: float = 0.03


def tree_of(what: Training, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights, as much noise as real ones."""
    rng = np.random.default_rng(seed)
    size = max(1, what.nbytes // 4 // what.arrays)
    return {f"layer{k:03d}": rng.standard_normal(size, dtype=np.float32) for k in range(what.arrays)}


def ways_here(fast: str | None) -> list[str]:
    """The ways that can be measured: some need a fast folder."""
    return [way for way in WAYS if fast is not None or way not in ("fast only", "burst buffer")]


def run_way(way: str, what: Training, slow: str, fast: str | None, seed: int = 0) -> dict[str, float]:
    """One loop: {"total": seconds of it, "stall": seconds per checkpoint in which it stood still, "durable": seconds
    until the last checkpoint was on the slow store, or on the fast one if that is all}. What was saved is removed.

    Raises CheckpointError, OSError.
    """
    tree = tree_of(what, seed)
    with _folder(slow) as on_slow, _folder(fast or slow) as on_fast:
        begin = time.perf_counter()
        with _saving(way, what, on_slow, on_fast) as save:
            begin = time.perf_counter()
            stall = _train(tree, what, save)
            total = time.perf_counter() - begin
        durable = time.perf_counter() - begin
    return {"total": total, "stall": stall / what.checkpoints, "durable": durable}


def _train(tree: dict[str, np.ndarray], what: Training, save: Save | None) -> float:
    """Seconds in which checkpoints stopped the loop."""
    stall = 0.0
    for number in range(what.checkpoints):
        for _ in range(what.every):
            time.sleep(what.step_s)
        for array in tree.values():
            array[0] += 1  # no checkpoint equals the one before
        if save is not None:
            begin = time.perf_counter()
            save((number + 1) * what.every, tree)
            stall += time.perf_counter() - begin
    return stall


@contextmanager
def _folder(parent: str) -> Iterator[str]:
    # Named before it is made: the signal may come between the two.
    made = os.path.join(parent, f"pario-checkpoints-{secrets.token_hex(4)}")
    try:
        os.mkdir(made, 0o700)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _saving(way: str, what: Training, slow: str, fast: str) -> Iterator[Save | None]:
    """The function that saves; at the end everything is durable."""
    with ExitStack() as stack:
        if way == "none":
            yield None
        elif way == "plain write":
            yield lambda step, tree: _plain(os.path.join(slow, f"step-{step}"), tree)
        else:
            # Room for all: the loop shall not wait for the drain.
            folders: dict[str, Any] = {"slow": fast if way == "fast only" else slow}
            if way == "burst buffer":
                folders["fast"] = fast
            saver = stack.enter_context(Checkpointer("self", keep=None, pending=what.checkpoints, **folders))
            waits = way in ("direct", "fast only")
            yield lambda step, tree: saver.save(step, tree).wait() if waits else saver.save(step, tree)


def _plain(path: str, tree: dict[str, np.ndarray]) -> None:
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)) as fd:
        for array in tree.values():
            left = memoryview(array).cast("B")
            while left:
                left = left[os.write(fd, left) :]
        os.fsync(fd)
