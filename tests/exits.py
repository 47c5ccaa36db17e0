"""Scripts that close nothing, each with one feature and one way of ending: what tests/test_exits.py runs.

    python tests/exits.py FOLDER REPEATS SECONDS [FEATURE:WAY ...]    these cells (all, if none is named), so many times
    python tests/exits.py FOLDER FEATURE:WAY                          one of them in this process; also under mpiexec

The first imports pario once and forks: each run is a child's own end of the interpreter, with its exit handlers and
those of the C libraries. It prints the cells that did not end as they should, SECONDS after their work was done at the
latest, and a summary.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def look() -> None:
    """Registered before pario is imported, so it is called after pario's own exit handlers."""
    alive = [each.name for each in threading.enumerate() if each.name.startswith("pario-")]
    if alive:
        os.write(2, f"threads run: {alive}\n".encode())
    h5py = sys.modules.get("h5py")
    if h5py is not None:
        kinds = h5py.h5f.OBJ_ALL & ~h5py.h5f.OBJ_DATATYPE  # h5py itself keeps some of these
        if count := h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, kinds):
            os.write(2, f"HDF5 has {count} objects open\n".encode())


atexit.register(look)

import numpy as np  # noqa: E402

import pario  # noqa: E402

N, EACH, BATCH = 600, 15_000, 16

Epoch = Callable[[], Iterator[Any]]


def make_set(folder: Path) -> None:
    import lmdb

    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        with lmdb.open(str(folder / name), map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in range(N):
                txn.put(b"class%d/photo_%d" % (i % 5, i), rng.bytes(EACH))
    with lmdb.open(str(folder / "fields"), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d.x" % i, rng.bytes(1000))
            txn.put(b"%06d.y" % i, b"%d" % i)


def decode(value: bytes, key: bytes) -> dict[str, int]:
    return {"n": len(value), "label": int(key[5:6])}


def slow_decode(value: bytes, key: bytes) -> dict[str, int]:
    time.sleep(0.002)
    return decode(value, key)


def loader(path: str | list[str], decoder: Any = decode, batch: int = BATCH, **more: Any) -> Epoch:
    made = pario.Loader(path, batch, decoder, **{"shuffle": "global", **more})
    return lambda: iter(made)


def keys(folder: Path) -> Epoch:
    made = pario.Reader(str(folder / "a"))
    batches = [range(i, i + BATCH) for i in range(0, N - BATCH, BATCH)]
    return lambda: ((made.keys(each), made.read(each)) for each in batches)


def name_of_run() -> str:
    return "alone" if len(sys.argv) == 3 else str(os.getpid())


def checkpoints(folder: Path, fast: bool = False) -> Epoch:
    name = name_of_run() + "-fast" * fast  # a folder has one Checkpointer
    ckpt = pario.Checkpointer(slow=folder / "slow" / name, fast=folder / "fast" / name if fast else None)
    numbers, epoch, tree = itertools.count(), loader(str(folder / "a")), {"w": np.zeros(1 << 20)}

    def steps() -> Iterator[Any]:
        for step, batch in enumerate(epoch()):
            if step % 16 == 2:
                ckpt.save(next(numbers), tree)
            yield batch

    return steps


def drop_in(folder: Path, ahead: bool = False) -> Epoch:
    import pario.lmdb

    env = pario.lmdb.open(str(folder / "a"), readonly=True, lock=False)
    names = [b"class%d/photo_%d" % (i % 5, i) for i in range(N)]

    def steps() -> Iterator[Any]:
        if ahead:
            env.will_read(names)
        with env.begin() as txn:
            for name in names[::16]:
                yield txn.get(name)

    return steps


def paths(folder: Path) -> Epoch:
    from pario.files.fsspec import RecordFileSystem

    fs = RecordFileSystem(str(folder / "a"))

    def steps() -> Iterator[Any]:
        for each in range(0, 200, 5):
            with fs.open(f"class{each % 5}/photo_{each}") as file:
                yield file.read()

    return steps


def tensors(folder: Path) -> Epoch:
    from pario.adapters.torch import Loader

    made = Loader(str(folder / "a"), BATCH, decode, shuffle="global")
    return lambda: iter(made)


def traced(folder: Path) -> Epoch:
    trace = str(folder / f"{name_of_run()}.json.gz")
    return loader(str(folder / "a"), options=pario.Options(trace=trace, metrics_file=None))


def part(folder: Path) -> Epoch:
    return loader(str(folder / "a"), select=pario.split(str(folder / "a"), [0.5, 0.5], by="key")[0])


def disk(folder: Path) -> Epoch:
    return loader(str(folder / "a"), options=pario.Options(tiers=(pario.Tier(str(folder / "tier"), 1 << 30),)))


def looked_at(folder: Path) -> Epoch:
    made = pario.Loader(str(folder / "a"), BATCH, decode, shuffle="global")
    made.peek()
    return lambda: iter(made)


def dropped(folder: Path) -> Epoch:
    """A new Loader for each epoch: none is closed, and the last one is in the loop."""
    return lambda: iter(pario.Loader(str(folder / "a"), BATCH, decode, shuffle="global"))


def a(folder: Path) -> str:
    return str(folder / "a")


_RING = pario.Options(slot_bytes=256 << 10, slots=4, block_bytes=256 << 10, alive_seconds=60)

FEATURES: dict[str, Callable[[Path], Epoch]] = {
    "key": lambda folder: loader(a(folder)),
    "slow decoder": lambda folder: loader(a(folder), slow_decode, options=_RING),
    "ring": lambda folder: loader(a(folder), None, shuffle="block", options=_RING),
    "key order, first epoch": lambda folder: loader(a(folder), shuffle=False, save_index=False),
    "fields": lambda folder: loader(
        str(folder / "fields"), None, fields={"x": ("{}.x", pario.decode.Raw("u1", (1000,))), "y": ("{}.y", None)}
    ),
    "prefix": lambda folder: loader(a(folder), select=b"class3/", batch=4),
    "pattern": lambda folder: loader(a(folder), select=re.compile(rb"class.*3"), batch=4),
    "split": part,
    "several": lambda folder: loader([a(folder), str(folder / "b")]),
    "memory tier": lambda folder: loader(a(folder), options=pario.Options(tiers=(pario.Tier("memory"),))),
    "disk tier": disk,
    "trace": traced,
    "peek": looked_at,
    "a Loader for each epoch": dropped,
    "Reader, keys": keys,
    "Checkpointer": checkpoints,
    "Checkpointer, fast": lambda folder: checkpoints(folder, fast=True),
    "drop-in": drop_in,
    "drop-in, will_read": lambda folder: drop_in(folder, ahead=True),
    "fsspec": paths,
    "torch": tensors,
}


def together(folder: Path) -> Epoch:
    """All of them in one process."""
    there = [each for each in FEATURES if importlib.util.find_spec(NEEDS.get(each, "numpy"))]
    epochs = [FEATURES[each](folder) for each in there if each not in ("together", "torch")]
    return lambda: zip(*(epoch() for epoch in epochs), strict=False)


FEATURES["together"] = together
NEEDS = {"fsspec": "fsspec", "torch": "torch"}
#: exit status of each way
WAYS = {"break": 0, "exception": 1, "sys.exit": 3, "whole epoch": 0, "Ctrl-C": -signal.SIGINT}


def run(feature: str, way: str, folder: Path, ready: Callable[[], object]) -> Any:
    """The script. ready : called when the loop runs, for whoever presses Ctrl-C; returns what it would keep."""
    epoch = FEATURES[feature](folder)
    step, batch = 0, None
    while True:
        for batch in epoch():  # noqa: B007  what a script has in its hands when it ends
            step += 1
            if step == 5 and way == "Ctrl-C":
                ready()
            elif step == 5 and way != "whole epoch":
                break
        if way != "Ctrl-C":
            break
    os.write(1, b"the work is done\n")
    if way == "exception":
        raise RuntimeError("of the script")
    if way == "sys.exit":
        sys.exit(3)
    return epoch, batch


class Cell:
    """A run that has been forked. began : of its end"""

    def __init__(self, feature: str, way: str, pid: int, reads: int) -> None:
        self.feature, self.way, self.pid, self.reads = feature, way, pid, reads
        self.said, self.began, self.limit = b"", 0.0, time.monotonic() + 60
        self.status: int | None = None

    def look(self, limit_s: float) -> bool:
        """Whether it has ended."""
        while select.select([self.reads], [], [], 0)[0] and (more := os.read(self.reads, 1 << 16)):
            self.said += more
        if not self.began and b"the work is done" in self.said:
            self.began, self.limit = time.monotonic(), time.monotonic() + limit_s
        if not self.began and self.way == "Ctrl-C" and b"ready" in self.said:
            os.kill(self.pid, signal.SIGINT)
            self.began, self.limit = time.monotonic(), time.monotonic() + limit_s
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > self.limit:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.said += b"\nhangs"
        else:
            return False
        while more := os.read(self.reads, 1 << 16):
            self.said += more
        os.close(self.reads)
        return True

    def wrong(self) -> str:
        said = self.said.decode(errors="replace")
        clean = "threads run" not in said and "HDF5 has" not in said and (WAYS[self.way] != 0 or "Error" not in said)
        if self.status == WAYS[self.way] and clean:
            return ""
        return f"{self.feature}, {self.way}: status {self.status}\n{said[-1500:]}"


def fork(feature: str, way: str, folder: Path) -> Cell | None:
    """None in the child, which then is the script."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return Cell(feature, way, pid, reads)
    os.close(reads)
    os.dup2(writes, 1)
    os.dup2(writes, 2)
    os.close(writes)
    return None


def main(folder: Path, repeats: int, limit_s: float, cells: list[str]) -> Any:
    if not (folder / "a").exists():
        make_set(folder)
    there = [each for each in FEATURES if importlib.util.find_spec(NEEDS.get(each, "numpy"))]
    wanted = [tuple(each.split(":")) for each in cells] or [(each, way) for each in there for way in WAYS]
    if len(wanted) * repeats > len(FEATURES):  # each run then finds its modules and kernels loaded; nothing stays open
        for shuffle in (False, "global", "block"):
            with pario.Loader(str(folder / "a"), BATCH, decode, shuffle=shuffle) as warm:
                list(warm)
        end = time.monotonic() + 60  # a fill's threads take what others leave, and nobody waits for their last chunk
        while threading.active_count() > 1:
            assert time.monotonic() < end, threading.enumerate()
            time.sleep(0.01)
    for feature in dict.fromkeys(feature for feature, _ in wanted):  # kernels are compiled: that takes its time
        if (first := fork(feature, "break", folder)) is None:
            return run(feature, "break", folder, lambda: None)
        first.limit = time.monotonic() + 600
        while not first.look(60):
            time.sleep(0.01)
    queue = wanted * repeats
    running: list[Cell] = []
    failed = 0
    longest = 0.0
    while queue or running:
        while queue and len(running) < 3:
            feature, way = queue.pop()
            cell = fork(feature, way, folder)
            if cell is None:
                return run(feature, way, folder, lambda: os.write(1, b"ready\n"))
            running.append(cell)
        time.sleep(0.003)
        for cell in [each for each in running if each.look(limit_s)]:
            running.remove(cell)
            longest = max(longest, time.monotonic() - cell.began if cell.began else 0.0)
            if wrong := cell.wrong():
                failed += 1
                print(wrong, flush=True)
    runs = len(wanted) * repeats
    python = sys.version.split()[0]
    print(f"{python}: {len(wanted)} cells x {repeats}: {failed} of {runs} wrong; longest end {longest:.2f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        kept = run(*sys.argv[2].split(":"), Path(sys.argv[1]), lambda: os.write(1, b"ready\n"))
    else:
        kept = main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
