"""Checkpoints beside a copy in memory and fio: `python -m benchmarks.checkpoint FOLDER [--rounds 5] [--json F]`.

    stall      seconds of `save` (second save on) / of a bare copy of the same arrays (bar: at most 1.3)
               / of writing them to a store of 100 MB/s, as `save(); wait()` does there (bar: at least 50 times less)
    write      bytes per second from `save` until the checkpoint is complete / fio, sequential direct writes and fsync
    read       bytes per second of `restore` / fio, sequential direct reads (bars: 0.9 few large, 0.8 many small arrays)
    cost       time of 100 steps of 100 ms with a checkpoint of 100 MB every 10 / without (bar: at most 1.03)

FOLDER lies on the device to measure. Each round takes all measures in turns; the table has medians, min and max. Both
sides read past the page cache.
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
from pathlib import Path
from typing import Any

import numpy as np

import pario

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


def cost(folder: Path, steps: int) -> dict[str, float]:
    """Seconds of a loop of steps of 100 ms of work for one core, without and with a checkpoint of 100 MB every ten."""
    tree = few_large(100 << 20)
    work = np.random.default_rng(0).random((200, 200))

    def step() -> None:
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            work @ work

    def loop(save: Callable[[int], Any] | None) -> float:
        begin = time.perf_counter()
        for k in range(steps):
            step()
            if save is not None and k % 10 == 9:
                save(k)
        return time.perf_counter() - begin

    without = loop(None)
    with pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast", keep=2) as ckpt:
        ckpt.save(0, tree).wait()
        return {"with_s": loop(lambda k: ckpt.save(k, tree)), "without_s": without}


def measure(folder: Path, nbytes: int, rounds: int, only: list[str]) -> dict[str, Any]:
    trees = {"few large": few_large(nbytes), "many small": many_small(nbytes)}
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {"cost": lambda where: cost(where, 50)}
    for name, tree in trees.items():
        kinds[f"stall, {name}"] = lambda where, tree=tree: stall(where, tree)
        kinds[f"speed, {name}"] = lambda where, tree=tree: speed(where, tree)
    kinds = {name: kind for name, kind in kinds.items() if not only or any(word in name for word in only)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            where = folder / "checkpoint-bench"
            where.mkdir(parents=True)
            try:
                found[name].append(kind(where))
            finally:
                shutil.rmtree(where)
    return found


RATIOS = {
    "save / copy": ("save_s", "copy_s", "<=", 1.3),
    "slow store / save": ("slow_s", "save_s", ">=", 50.0),
    "write / fio": ("write", "fio_write", ">=", None),
    "read / fio": ("read", "fio_read", ">=", None),
    "with / without": ("with_s", "without_s", "<=", 1.03),
}


def told(found: dict[str, list[dict[str, float]]]) -> list[str]:
    """A line per ratio."""
    lines = []
    for name, rounds in found.items():
        for title, (over, under, sense, bar) in RATIOS.items():
            if rounds and over in rounds[0]:
                values = sorted(one[over] / one[under] for one in rounds)
                bar = bar or (0.9 if "large" in name else 0.8)
                middle = statistics.median(values)
                met = middle <= bar if sense == "<=" else middle >= bar
                below = statistics.median(one[under] for one in rounds)
                unit = f"{below / 1e6:.0f} MB/s" if below > 1e4 else f"{below:.3f} s"
                lines.append(
                    f"{name:18s} {title:18s} {middle:7.3f} ({values[0]:.3f} ... {values[-1]:.3f})  bar {sense} {bar}"
                    f"  {'met' if met else 'NOT MET'}  ({under} {unit})"
                )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mib", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="words of: stall, speed, cost, few large, many small")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    found = measure(args.folder, args.mib << 20, args.rounds, args.only)
    print("\n".join(told(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
