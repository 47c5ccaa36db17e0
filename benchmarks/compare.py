"""Another state of the source beside this one: the same epochs and look-ups, in turns, after ÷ before.

    git worktree add ../before REVISION
    python -m benchmarks.compare ../before --data DIR [--pairs 7] [--rounds 3] [--only TEXT] [--out results.json]

Each state runs in processes of its own, which stay for a few rounds and are then started anew; a round measures one
cell on one side and then on the other, the first one changing from round to round. "warm": the page cache holds the
file, which an untimed epoch of each side made sure of. "cold": its pages were dropped just before. A ratio above 1
means that this state is faster; the interval is a bootstrap of the mean log ratio, 95 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
#: Records of each set: an epoch of either is some 200 MB, and takes a fraction of a second in memory.
RECORDS = {"3k": 60_000, "197k": 1_000}
#: Records of 100 bytes, which stand in leaf pages.
SMALL_RECORDS = 1_000_000


@dataclass(frozen=True)
class Cell:
    """what : "loader", or a call of the drop-in: "get", "getmulti", "scan"
    which : a set of benchmarks.data, or "100b"
    """

    what: str
    which: str
    order: str = "none"
    ranks: int = 1
    cold: bool = False
    recipe: str = "auto"

    @property
    def name(self) -> str:
        state = "cold" if self.cold else "warm"
        if self.what != "loader":
            return f"{state} {self.what}, {self.which}"
        return f"{state} {self.which}, {self.order}, {self.ranks} rank(s), {self.recipe}"


def cells() -> Iterator[Cell]:
    for which, order, ranks in itertools.product(("3k", "197k"), ("none", "global", "block"), (1, 2)):
        yield Cell("loader", which, order, ranks)
        yield Cell("loader", which, order, ranks, cold=True)
    for order, ranks in itertools.product(("none", "global"), (1, 2)):
        yield Cell("loader", "100b", order, ranks)
    for which, recipe in itertools.product(("3k", "197k"), ("plain", "lmm", "dm", "dio", "prov", "coal")):
        yield Cell("loader", which, recipe=recipe)
    for what, which in itertools.product(("get", "getmulti", "scan"), ("3k", "197k")):
        yield Cell(what, which)
    yield Cell("get", "197k", cold=True)


# -- the process of one side ---------------------------------------------------------------------------------------


def drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Side:
    """Keeps what it has opened: a task is an epoch, and nothing else."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._open: dict[str, Any] = {}

    def seconds(self, task: dict[str, Any]) -> float:
        path = task["path"]
        if task["what"] != "loader":
            return self._look_up(task, path)
        import pario

        key = json.dumps([task[name] for name in ("which", "order", "recipe")])
        if key not in self._open:
            order = False if task["order"] == "none" else task["order"]
            small = task["which"] == "100b"
            decoder = pario.decode.Raw() if small else pario.decode.Datum()
            batch_size = 1024 if small else 64
            loader = pario.Loader(path, batch_size, decoder, shuffle=order, comm=self._comm(), recipe=task["recipe"])
            self._open[key] = loader
            for _ in loader:
                pass
        loader = self._open[key]
        self._world.barrier()
        if task["cold"] and self._world.rank == 0:
            drop(f"{path}/data.mdb")
        self._world.barrier()
        begin = time.perf_counter()
        for _ in loader:
            pass
        self._world.barrier()
        return time.perf_counter() - begin

    def _comm(self) -> Any:
        if self._world.size == 1:
            return None
        from mpi4py import MPI

        return MPI.COMM_WORLD

    def _look_up(self, task: dict[str, Any], path: str) -> float:
        import pario.lmdb as lmdb

        if path not in self._open:
            with suppress(ImportError):  # a state that serves nobody in plain Python while it compiles
                from pario.lmdb.native import compile_now

                compile_now()
            env = lmdb.open(path, readonly=True, lock=False)
            self._open[path] = env, list(env.begin().cursor().iternext(values=False))
        env, keys = self._open[path]
        chosen = random.Random(task["round"]).sample(keys, min(len(keys), 300 if task["cold"] else 5000))
        txn = env.begin()
        if task["cold"]:
            drop(f"{path}/data.mdb")
        begin = time.perf_counter()
        if task["what"] == "get":
            for key in chosen:
                txn.get(key)
        elif task["what"] == "getmulti":
            cursor = txn.cursor()
            for first in range(0, len(chosen), 1000):
                cursor.getmulti(chosen[first : first + 1000])
        else:
            for _ in itertools.islice(txn.cursor(), 5000):
                pass
        return time.perf_counter() - begin


def work() -> None:
    from pario.comm.world import get_world

    world = get_world(None)
    side = Side(world)
    while True:
        task = world.bcast(json.loads(sys.stdin.readline() or "null") if world.rank == 0 else None)
        if task is None:
            break
        took = side.seconds(task)
        if world.rank == 0:
            print(json.dumps(took), flush=True)


# -- the comparison ------------------------------------------------------------------------------------------------


class Process:
    """A side's process, or its ranks. Ended by `close`."""

    def __init__(self, tree: Path, ranks: int) -> None:
        command = [sys.executable, str(HERE), "--work"]
        if ranks > 1:
            command = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks), *command]
        polite = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            command,
            env={**os.environ, **polite, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, task: dict[str, Any]) -> float:
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(task) + "\n")
        child.stdin.flush()
        for line in child.stdout:
            try:
                return float(json.loads(line))
            except ValueError:
                continue  # something that MPI says
        raise SystemExit(f"a side ended with {child.wait()} at {task}")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """(geometric mean, its 95 % interval) of f64[pairs, rounds], by a bootstrap of pairs of processes and of rounds.

    Two processes of the same code differ by several per cent for as long as they live (where their memory lies), so
    that rounds of one pair alone would give an interval that is too narrow.
    """
    logs = np.log(ratios)
    pairs, rounds = logs.shape
    random = np.random.default_rng(0)
    chosen = random.integers(0, pairs, (10_000, pairs))
    means = logs[chosen[:, :, None], random.integers(0, rounds, (10_000, pairs, rounds))].mean(axis=(1, 2))
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return float(np.exp(logs.mean())), float(low), float(high)


def measured(trees: dict[str, Path], cells: Sequence[Cell], paths: dict[str, str], rounds: int) -> list[list[float]]:
    """The ratios of each cell in `rounds` rounds, by one pair of processes for each number of ranks."""
    found: dict[str, list[float]] = {}
    for ranks in sorted({cell.ranks for cell in cells}):
        sides = {name: Process(tree, ranks) for name, tree in trees.items()}
        try:
            for cell in (cell for cell in cells if cell.ranks == ranks):
                ratios = found[cell.name] = []
                for number in range(-1, rounds):  # the first one warms up
                    task = {**asdict(cell), "path": paths[cell.which], "round": number}
                    names = list(sides)[:: 1 if number % 2 else -1]
                    took = {name: sides[name].do(task) for name in names}
                    if number >= 0:
                        ratios.append(took["before"] / took["after"])
        finally:
            for side in sides.values():
                side.close()
    return [found[cell.name] for cell in cells]


def make_small(folder: Path) -> str:
    import lmdb

    path = folder / f"100b-{SMALL_RECORDS}"
    if not path.exists():
        part = folder / f"{path.name}.part"
        env = lmdb.open(str(part), map_size=1 << 30, sync=False)
        with env.begin(write=True) as txn:
            for i in range(SMALL_RECORDS):
                txn.put(b"%08d" % i, b"%0100d" % i, append=True)
        env.close()
        part.rename(path)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other state")
    parser.add_argument("--data", type=Path, required=True, help="folder for the sets of benchmarks.data")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of processes, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each pair")
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    from benchmarks import data

    paths = {which: str(data.make(options.data, which, records).path) for which, records in RECORDS.items()}
    paths["100b"] = make_small(options.data)
    chosen = [cell for cell in cells() if options.only in cell.name]
    trees = {"before": options.before.resolve(), "after": HERE.parent.parent}
    pairs = []
    for number in range(options.pairs):
        pairs.append(measured(trees, chosen, paths, options.rounds))
        print(f"pair {number + 1} of {options.pairs} is measured", flush=True)
    found = {}
    for cell, ratios in zip(chosen, np.array(pairs).transpose(1, 0, 2), strict=True):
        mean, low, high = interval(ratios)
        found[cell.name] = {"ratios": ratios.tolist(), "mean": mean, "interval": [low, high]}
        print(f"{cell.name:44} {mean:6.3f}  ({low:.3f} ... {high:.3f})")
    everything = float(np.exp(np.mean([np.log(cell["mean"]) for cell in found.values()])))
    worse = [name for name, cell in found.items() if cell["interval"][1] < 1]
    print(f"geometric mean of {len(found)} cells: {everything:.3f}; wholly below 1: {worse or 'none'}")
    if options.out:
        options.out.write_text(json.dumps({"cells": found, "mean": everything, "below": worse}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == ["--work"]:
        sys.path.pop(0)  # benchmarks/, where modules have names of others
        work()
    else:
        main()
