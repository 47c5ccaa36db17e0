"""One job opens ten thousand files and builds indexes; another one opens files, too, and has a guarantee (a part of
benchmarks/control.py).

The store is a FUSE mount whose metadata operations take 2 ms, and of these its daemon serves only so many per second.
What is counted are the opens that arrive at the store, per job and second.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control_plane import plane
from benchmarks.measure import Standing
from benchmarks.stores.latency import LatencyStore, latency_store
from pario.errors import FileError
from pario.fetch.limited import open_limited
from pario.fetch.posix import PosixFetcher
from pario.plane.joining import store_agent

#: threads of the storm, and of the other job; files of each
THREADS = {"storm": 48, "quiet": 3}
FILES = 2500
#: operations per second: of the store, for the rules; guaranteed to the quiet job
STORE, GUARANTEE = 500.0, 200.0
#: A window of a second counts as met from this part on.
MET = 0.95


def work(folder: str, threads: int, opens: int) -> int:
    """A job: opens the files of a folder in turn. The storm reads the first page of each, too, as the build of an index
    begins, and ends after so many; opens 0: only opens, and ends at a line on stdin."""
    paths = sorted(str(each) for each in Path(folder).iterdir())
    over = threading.Event()
    numbers = iter(range(opens or sys.maxsize))
    lock = threading.Lock()

    def run(gate: Any) -> None:
        while not over.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            fetcher = open_limited(partial(PosixFetcher, paths[number % len(paths)]), gate)
            if opens:
                fetcher.pread(0, 4096)
            fetcher.close()

    with store_agent() as gate:
        if gate is not None:
            gate.take(0, 1)
            end = time.monotonic() + 10
            while not gate.joined and time.monotonic() < end:
                time.sleep(0.01)
        print("ready", flush=True)
        sys.stdin.readline()
        made = [threading.Thread(target=run, args=(gate,)) for _ in range(threads)]
        for each in made:
            each.start()
        if not opens:
            sys.stdin.readline()
            over.set()
        for each in made:
            each.join()
    print("over", flush=True)
    return 0


def prepare(folder: Path, files: int) -> None:
    for name in THREADS:
        (folder / name).mkdir(parents=True)
        for k in range(files):
            (folder / name / f"{k:05d}").write_bytes(bytes(4096))


def storm(source: Path, folder: Path, opens: int, with_plane: bool, alone_s: float) -> dict[str, Any]:
    """opens : of the storm; alone_s : seconds before it, in which the quiet job is alone. Opens per second of each."""
    rules = (
        f"lease_s = 2\ncycle_s = 0.1\n[store]\noperations_per_s = {STORE}\n"
        f'[[job]]\nname = "quiet"\noperations_per_s = {GUARANTEE}\n'
    )
    with ExitStack() as stack:
        store = stack.enter_context(latency_store(source, read_s=0.002, metadata_s=0.002, bytes_per_s=None, cache_s=0))
        env: dict[str, str] = {"PARIO_CONTROL": ""}
        if with_plane:
            address, _ = stack.enter_context(plane(folder, rules))
            env = {"PARIO_CONTROL": str(address), "PARIO_CONTROL_TOKEN": str(folder / "token")}
        children: dict[str, Standing] = {}
        for name, threads in THREADS.items():
            words = (f"{store.folder}/{name}", str(threads), str(opens if name == "storm" else 0))
            child = Standing("-m", "benchmarks.control_storm", *words, more=env | {"PARIO_JOB": name})
            children[name] = stack.enter_context(child)
            assert child.line() == "ready", name
        samples = [_sample(store)]
        begin = time.monotonic()
        children["quiet"].tell()
        _watch(store, samples, lambda: time.monotonic() >= begin + alone_s)
        first = len(samples) - 1
        children["storm"].tell()
        ended = threading.Event()
        threading.Thread(target=lambda: (children["storm"].line(), ended.set()), daemon=True).start()
        _watch(store, samples, ended.is_set)
        last = len(samples) - 1
        children["quiet"].tell()
        children["quiet"].line()
    found = np.array(samples)
    rates = np.diff(found[:, 1:], axis=0) / np.diff(found[:, :1], axis=0)
    # The second in which the storm begins, and the one in which it ends, are left out.
    return {
        "alone": rates[1:first].tolist(),
        "storm": rates[first + 1 : last - 1].tolist(),
        "seconds": found[last, 0] - found[first, 0],
    }


def _sample(store: LatencyStore) -> list[float]:
    """Seconds, opens of the quiet job, opens of the storm, until now."""
    opens = {"quiet": 0, "storm": 0}
    for path, counts in store.counts().items():
        opens[path.split("/")[1]] = opens.get(path.split("/")[1], 0) + counts.get("open", 0)
    return [time.monotonic(), opens["quiet"], opens["storm"]]


def _watch(store: LatencyStore, samples: list[list[float]], over: Any) -> None:
    while not over():
        time.sleep(max(0.0, samples[-1][0] + 1.0 - time.monotonic()))
        samples.append(_sample(store))


if __name__ == "__main__":
    try:
        sys.exit(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    except FileError as e:
        sys.exit(str(e))
