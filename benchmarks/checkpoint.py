"""Checkpoints beside a copy in memory and fio. Beside DCP and Orbax: checkpoint_beside.py.

    python -m benchmarks.checkpoint FOLDER [--rounds 5] [--only WORD ...] [--json F]
    python -m benchmarks.checkpoint --table F [F ...]          the table of measurements/checkpoints.md, from such files

    stall      seconds of `save` (second save on) / of a bare copy of the same arrays (bar: at most 1.3)
               / of writing them to a store of 100 MB/s, as `save(); wait()` does there (bar: at least 50 times less)
    write      bytes per second from `save` until the checkpoint is complete / fio, sequential direct writes and fsync
    read       bytes per second of `restore` / fio, sequential direct reads (bars: 0.9 few large, 0.8 many small arrays)
    cost       time of 50 steps of 100 ms with a checkpoint of 100 MB every 10 / without (bar: at most 1.03)
    burst      the same loop through a burst buffer, the slow store at 200 MB/s / on the fast tier alone (at most 1.05)
    nodes      bytes that a restore on 4 emulated nodes reads from the store / bytes of the checkpoint (at most 1.02)

FOLDER lies on the device to measure. Each round takes all measures in turns. The table has medians, min and max. All
sides read with a page cache that holds none of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks.measure import launch
from benchmarks.stores.latency import latency_store

SLOW_RATE = 100e6
BLOCK = "4m"


def few_large(nbytes: int) -> dict[str, np.ndarray]:
    """Eight arrays."""
    return {f"layer{k}": np.random.default_rng(k).integers(0, 255, nbytes // 8, np.uint8) for k in range(8)}


def many_small(nbytes: int) -> dict[str, np.ndarray]:
    """Arrays of 64 KiB on average, of 4 to 124 KiB."""
    rng = np.random.default_rng(1)
    count = nbytes // (64 << 10)
    return {f"tensor{k}": rng.random(int(n)) for k, n in enumerate(rng.integers(512, 15872, count))}


def size_of(tree: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in tree.values())


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def fio(folder: Path, mode: str, nbytes: int) -> float:
    """Bytes per second. One job of 4 MiB requests, two in flight."""
    file = folder / "fio.bin"
    words = ["fio", "--name=x", f"--filename={file}", f"--rw={mode}", f"--bs={BLOCK}", f"--size={nbytes}", "--direct=1"]
    words += ["--ioengine=libaio", "--iodepth=2", "--end_fsync=1", "--output-format=json", "--fallocate=posix"]
    if mode == "write":
        file.unlink(missing_ok=True)
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    job = json.loads(done.stdout)["jobs"][0]
    return nbytes / (job["job_runtime"] / 1000)


def stall(folder: Path, tree: dict[str, np.ndarray]) -> dict[str, float]:
    """Seconds of `save` once its memory is there, of a bare copy, and of a checkpoint on a slow store."""
    copies = {name: np.zeros_like(array) for name, array in tree.items()}

    def bare() -> None:
        for name, array in tree.items():
            np.copyto(copies[name], array)

    bare()
    with pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast", keep=1) as ckpt:
        ckpt.save(0, tree).wait()
        ours, theirs = [], []
        for step in range(1, 4):
            theirs.append(seconds(bare))
            handle = ckpt.save(step, tree)
            ours.append(handle.stall_s)
            handle.wait()
    part = dict(list(tree.items())[: max(1, len(tree) // 4)])  # a quarter of it: the rate is the same
    with pario.Checkpointer("self", slow=folder / "slow2", keep=1, rate=SLOW_RATE) as ckpt:
        slow = seconds(lambda: ckpt.save(0, part).wait()) * size_of(tree) / size_of(part)
    return {"save_s": statistics.median(ours), "copy_s": statistics.median(theirs), "slow_s": slow}


def speed(folder: Path, tree: dict[str, np.ndarray]) -> dict[str, float]:
    """Bytes per second of a checkpoint, written and read."""
    nbytes = size_of(tree)
    with pario.Checkpointer("self", slow=folder / "slow", keep=1) as ckpt:
        ckpt.save(0, tree).wait()
        fio_write = fio(folder, "write", nbytes)
        write = nbytes / seconds(lambda: ckpt.save(1, tree).wait())
        fio_read = fio(folder, "read", nbytes)
        (folder / "fio.bin").unlink()
        found: list[Any] = []
        read = nbytes / seconds(lambda: found.append(ckpt.restore()))
    assert all(np.array_equal(found[0][name], array) for name, array in tree.items())
    return {"write": write, "fio_write": fio_write, "read": read, "fio_read": fio_read}


def loop(steps: int, save: Callable[[int], Any] | None) -> float:
    """Seconds of steps of 100 ms of work for one core, with `save` after every tenth."""
    work = np.random.default_rng(0).random((200, 200))
    begin = time.perf_counter()
    for k in range(steps):
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            work @ work
        if save is not None and k % 10 == 9:
            save(k)
    return time.perf_counter() - begin


def cost(folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a loop without and with a checkpoint of 100 MB every ten steps."""
    tree = few_large(100 << 20)
    without = loop(steps, None)
    with pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast", keep=2) as ckpt:
        ckpt.save(0, tree).wait()
        return {"with_s": loop(steps, lambda k: ckpt.save(k, tree)), "without_s": without}


def burst(folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a loop with checkpoints through a burst buffer, and on the fast tier alone."""
    tree, found = few_large(100 << 20), {}
    sides: dict[str, dict[str, Any]] = {
        "fast_s": {"slow": folder / "alone"},
        "burst_s": {"slow": folder / "slow", "fast": folder / "fast", "rate": 200e6},
    }
    for name, options in sides.items():
        with pario.Checkpointer("self", keep=2, **options) as ckpt:
            ckpt.save(0, tree).wait()
            found[name] = loop(steps, partial(_saved, ckpt, tree))
    return found


def _saved(ckpt: pario.Checkpointer, tree: dict[str, np.ndarray], step: int) -> None:
    ckpt.save(step, tree)


def nodes(folder: Path, mib: int) -> list[dict[str, float]]:
    """Bytes that the store gives to a restore on four nodes of one rank."""
    (folder / "behind").mkdir()
    with pario.Checkpointer("self", slow=folder / "behind") as ckpt:
        ckpt.save(1, few_large(mib << 20))
    size = sum(path.stat().st_size for path in (folder / "behind").rglob("*") if path.is_file())
    with latency_store(folder / "behind", read_s=0.0, metadata_s=0.0, bytes_per_s=None, writable=True) as store:
        launch("benchmarks.checkpoint", ["--restore", store.folder], ranks=4, nodes=4, timeout_s=280)
        return [{"store_bytes": float(store.total("bytes")), "own_bytes": float(size)}]


def measure(folder: Path, nbytes: int, rounds: int, only: list[str]) -> dict[str, Any]:
    trees = {"few large": few_large(nbytes), "many small": many_small(nbytes)}
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {
        "cost": lambda where: cost(where, 50),
        "burst": lambda where: burst(where, 30),
    }
    for name, tree in trees.items():
        kinds[f"stall, {name}"] = lambda where, tree=tree: stall(where, tree)
        kinds[f"speed, {name}"] = lambda where, tree=tree: speed(where, tree)
    kinds = {name: kind for name, kind in kinds.items() if not only or any(word in name for word in only)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    where = folder / "checkpoint-bench"

    def alone(call: Callable[..., Any], *arguments: Any) -> Any:
        where.mkdir(parents=True)
        try:
            return call(where, *arguments)
        finally:
            shutil.rmtree(where)

    for _ in range(rounds):
        for name, kind in kinds.items():
            found[name].append(alone(kind))
    if not only or any(word in "nodes" for word in only):
        found["nodes"] = alone(nodes, 100)
    return found


RATIOS = {
    "save ÷ copy": ("save_s", "copy_s", "<=", 1.3),
    "slow store ÷ save": ("slow_s", "save_s", ">=", 50.0),
    "write ÷ fio": ("write", "fio_write", ">=", None),
    "read ÷ fio": ("read", "fio_read", ">=", None),
    "with ÷ without": ("with_s", "without_s", "<=", 1.03),
    "burst ÷ fast": ("burst_s", "fast_s", "<=", 1.05),
    "read ÷ checkpoint": ("store_bytes", "own_bytes", "<=", 1.02),
}


def told(found: dict[str, list[dict[str, float]]]) -> list[tuple[str, str, str, str, str]]:
    """(case, ratio, figure, bar, median of what it is divided by) of every ratio."""
    lines = []
    for name, rounds in found.items():
        for title, (over, under, sense, bar) in RATIOS.items():
            if rounds and over in rounds[0]:
                values = sorted(one[over] / one[under] for one in rounds)
                bar = (0.9 if "large" in name else 0.8) if bar is None else bar
                middle = statistics.median(values)
                met = middle <= bar if sense == "<=" else middle >= bar
                below = statistics.median(one[under] for one in rounds)
                unit = f"{below / 1e6:.0f} MB{'/s' * ('fio' in under)}" if below > 1e4 else f"{below:.3f} s"
                sign = {"<=": "≤", ">=": "≥"}.get(sense)
                verdict = f"{sign} {bar:g}, {'met' if met else 'NOT MET'}" if sign else "stated"
                figure = f"{middle:.2f} ({values[0]:.2f} … {values[-1]:.2f})"
                lines.append((name, title, figure, verdict, unit))
    return lines


def table(paths: list[Path]) -> str:
    """In Markdown; the rounds of a case that several files have count together."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in paths:
        for name, rounds in json.loads(path.read_text()).items():
            found.setdefault(name, []).extend(rounds)
    lines = ["| case | ratio | median (range) | bar | divided by |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(line)} |" for line in told(found))])


def restore(folder: str) -> None:
    from mpi4py import MPI

    with pario.Checkpointer(MPI.COMM_WORLD, slow=folder) as ckpt:
        ckpt.restore()
    if MPI.COMM_WORLD.rank == 0:
        print("{}")


def main(argv: list[str] | None = None) -> int:
    if sys.argv[1:2] == ["--restore"]:
        restore(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", help="of what --json has written; nothing is measured")
    parser.add_argument("--mib", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="words of: stall, speed, cost, burst, nodes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.table:
        print(table(args.table))
        return 0
    if args.folder is None:
        parser.error("FOLDER is missing")
    found = measure(args.folder, args.mib << 20, args.rounds, args.only)
    for name, title, figure, verdict, unit in told(found):
        print(f"{name:28s} {title:18s} {figure:26s} {verdict:18s} ({unit})")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
