"""PAIO's experiment: four jobs that read without computing from a disk throttled to 100 MB/s (a part of
benchmarks/control.py).

They have guarantees of 15, 20, 30 and 35 %, and read 6, 5, 5 and 4 epochs (PAIO, FAST'22, section 8.2). What each reads
is what the kernel counts for its process (/proc/PID/io), in windows of one second.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.control_plane import plane
from benchmarks.measure import Standing
from benchmarks.stores.throttled import Group

#: bytes per second
STORE = 100e6
#: guarantee as a part of the store, epochs
JOBS = ((0.15, 6), (0.20, 5), (0.30, 5), (0.35, 4))
#: A window counts as met from this part of the guarantee on.
MET = 0.95


def work(path: str, nbytes: int) -> int:
    """A job: waits for a line, then reads so much, in "global" order past the page cache, and ends."""
    from pario import Loader, Options
    from pario.options import Recipe

    options = Options(slot_bytes=2 << 20, slots=4, tiers=())
    recipe = Recipe(fetch="direct")
    with Loader(path, 16, shuffle="global", options=options, recipe=recipe, comm="self") as loader:
        print("ready", flush=True)
        sys.stdin.readline()
        left = nbytes
        while left > 0:
            for batch in loader:
                left -= int(batch["data"].nbytes)
                if left <= 0:
                    break
    print("over", flush=True)
    return 0


def jobs(path: str, folder: Path, device: str, shared: bool, total: float, stagger_s: float) -> dict[str, Any]:
    """total : bytes of all jobs together; shared : by a plane. Per job the bytes of each window of a second."""
    rules = f'lease_s = 5\n[store]\nbytes_per_s = {STORE}\n' + "".join(
        f'[[job]]\nname = "job{k}"\nbytes_per_s = {part * STORE}\n' for k, (part, _) in enumerate(JOBS)
    )
    epochs = sum(each for _, each in JOBS)
    with ExitStack() as stack:
        group = stack.enter_context(Group(device, int(STORE)))
        env: dict[str, str] = {}
        if shared:
            address, _ = stack.enter_context(plane(folder, rules))
            env = {"PARIO_CONTROL": str(address), "PARIO_CONTROL_TOKEN": str(folder / "token")}
        children = []
        for k, (_, each) in enumerate(JOBS):
            words = ("-m", "benchmarks.control_jobs", path, str(int(total * each / epochs)))
            child = Standing(*words, more=env | {"PARIO_JOB": f"job{k}"}, prefix=group.command)
            children.append(stack.enter_context(child))
        for child in children:
            assert child.line() == "ready"
        return _watch([child.child for child in children], stagger_s)


def _watch(children: list[subprocess.Popen[str]], stagger_s: float) -> dict[str, Any]:
    begin = time.monotonic()
    starts, ends = [0.0] * len(children), [0.0] * len(children)
    samples: list[list[tuple[float, int]]] = [[] for _ in children]
    waiting, running = list(range(len(children))), set()
    tick = 0
    while waiting or running:
        now = time.monotonic() - begin
        while waiting and now >= stagger_s * waiting[0]:
            k = waiting.pop(0)
            stdin = children[k].stdin
            assert stdin is not None
            stdin.write("go\n")
            stdin.flush()
            starts[k] = now
            running.add(k)
        for k in sorted(running):
            samples[k].append((now, _read_bytes(children[k].pid)))
            if select.select([children[k].stdout], [], [], 0)[0]:
                ends[k] = now
                running.discard(k)
        tick += 1
        time.sleep(max(0.0, begin + tick * 0.25 - time.monotonic()))
    return {"starts": starts, "ends": ends, "samples": samples, "seconds": max(ends)}


def _read_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def windows(run: dict[str, Any]) -> list[list[float]]:
    """Per job, bytes per second in each whole second of its life. The first one is left out: nothing is read yet when
    it begins."""
    found = []
    for samples, start, ended in zip(run["samples"], run["starts"], run["ends"], strict=True):
        seconds, sums = np.array(samples, float).T
        edges = np.arange(start + 1.0, ended - 0.25, 1.0)
        found.append(np.diff(np.interp(edges, seconds, sums)).tolist())
    return found


def met(run: dict[str, Any]) -> float:
    """The part of all windows in which a job got what is guaranteed to it. All jobs want more than that."""
    good = [rate >= MET * part * STORE for (part, _), rates in zip(JOBS, windows(run), strict=True) for rate in rates]
    return sum(good) / max(1, len(good))


if __name__ == "__main__":
    sys.exit(work(sys.argv[1], int(sys.argv[2])))
