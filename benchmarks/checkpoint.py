"""Checkpoints beside a copy in memory and fio. Beside DCP and Orbax: checkpoint_beside.py; burst buffers: micro/.

    python -m benchmarks.checkpoint FOLDER [--rounds 5] [--only WORD ...] [--out F]

    stall      seconds of `save` (second save on) / of a bare copy of the same arrays (bar: at most 1.3)
               / of writing them to a store of 100 MB/s, as `save(); wait()` does there (bar: at least 50 times less)
    write      bytes per second from `save` until the checkpoint is complete / fio, sequential direct writes and fsync
    read       bytes per second of `restore` / fio, sequential direct reads (bars: 0.9 few large, 0.8 many small arrays)
    cost       time of 50 steps of 100 ms with a checkpoint of 100 MB every 10 / without (bar: at most 1.03)
    nodes      bytes that a restore on 4 emulated nodes reads from the store / bytes of the checkpoint (at most 1.02)

FOLDER lies on the device to measure. Each round takes all measures in turns. The table has medians, min and max. All
sides read with a page cache that holds none of it.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks.measure import Row, Section, finish, launch, parser_of
from benchmarks.stores.latency import latency_store
from benchmarks.stores.throttled import fio_jobs

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
    words = ["--name=x", f"--filename={file}", f"--rw={mode}", f"--bs={BLOCK}", f"--size={nbytes}"]
    words += ["--ioengine=libaio", "--iodepth=2", "--end_fsync=1", "--fallocate=posix"]
    if mode == "write":
        file.unlink(missing_ok=True)
    return nbytes / (fio_jobs(words, [])[0]["job_runtime"] / 1000)


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
    kinds: dict[str, Callable[[Path], dict[str, float]]] = {"cost": lambda where: cost(where, 50)}
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


#: ratio -> what is divided by what, and the bar; of reading and writing it depends on the arrays
RATIOS = {
    "save ÷ copy": ("save_s", "copy_s", "<=", 1.3),
    "slow store ÷ save": ("slow_s", "save_s", ">=", 50.0),
    "write ÷ fio": ("write", "fio_write", ">=", None),
    "read ÷ fio": ("read", "fio_read", ">=", None),
    "with ÷ without": ("with_s", "without_s", "<=", 1.03),
    "read ÷ checkpoint": ("store_bytes", "own_bytes", "<=", 1.02),
}


def rows(found: dict[str, list[dict[str, float]]]) -> Iterator[Row]:
    for name, rounds in found.items():
        for title, (over, under, sense, bar) in RATIOS.items():
            if rounds and over in rounds[0]:
                values = [one[over] / one[under] for one in rounds]
                below = statistics.median(one[under] for one in rounds)
                theirs = f"{below / 1e6:.0f} MB{'/s' * ('fio' in under)}" if below > 1e4 else f"{below:.3f} s"
                bar = bar or (0.9 if "large" in name else 0.8)
                yield Row.of(f"{name}, {title}", values, sense, bar, theirs=theirs)


def restore(folder: str) -> None:
    from mpi4py import MPI

    with pario.Checkpointer(MPI.COMM_WORLD, slow=folder) as ckpt:
        ckpt.restore()
    if MPI.COMM_WORLD.rank == 0:
        print("{}")


def main() -> int:
    if sys.argv[1:2] == ["--restore"]:
        restore(sys.argv[2])
        return 0
    parser = parser_of("checkpoint", __doc__, 5, data=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words of: stall, speed, cost, nodes")
    options = parser.parse_args()
    nbytes, rounds = (16 << 20, 1) if options.smoke else (640 << 20, options.rounds)
    found = measure(options.folder, nbytes, rounds, options.only)
    section = Section("checkpoint", "Checkpoints ÷ a copy, fio, a loop without", "none of it cached", raw=found)
    for row in rows(found):
        section.add(row)
    return finish("checkpoint", options, [section])


if __name__ == "__main__":
    sys.exit(main())
