"""Four jobs of one node each that read one dataset from one slow store, with and without a service on each node.

    python -m benchmarks.jobs --data DIR [--rounds 5] [--out DIR/jobs.json]

The store answers in 20 ms and gives 200 MB/s to all jobs together (FUSE, as root, fuse3 and mfusepy). Five epochs, each
with as much computing (a pause after each batch) as one pass over the data takes at 200 MB/s. A job's time is that from
opening the Loader to the end of its last epoch, and the slowest job counts. "All local": the same four jobs with the
data in the page cache, and no tiers. Then four jobs that differ: in epochs, in computing, and in when they start.
Nodes are emulated (MPICH ranks that share no memory), with this machine's cores between them.
Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Row, Section, finish, interleave, job_environment, kill_tree, mpiexec, parser_of
from benchmarks.nodes import room_of
from benchmarks.sides import BATCH, SHUFFLES, SMALL, Bench
from benchmarks.stores.latency import LatencyStore, latency_store

JOBS, EPOCHS = 4, 5
RECORDS = {"3k": 60_000, "197k": 1_000}
BYTES_PER_S = 200e6
#: quota per node as a part of the data -> bars: bytes at the store ÷ the data, time ÷ without, time ÷ all local
BARS: dict[float, tuple[float, float | None, float | None]] = {0.3: (1.02, 0.30, 1.15), 0.15: (9.0, None, None)}
#: epochs, computing per epoch as a part of one pass over the data, start in such passes, of each job
DIFFERENT = ((2, 0.5, 0.0), (5, 1.0, 0.5), (10, 0.7, 1.0), (10, 1.0, 1.5))
DIFFERENT_BAR = 1.05


@contextmanager
def services(quota: str) -> Iterator[str]:
    """One on each node; yields what PARIO_SERVICE is to be."""
    with tempfile.TemporaryDirectory(prefix="pario-services-") as folder:
        where = f"{folder}/$PMI_RANK"
        serve = ["-m", "pario", "tiers", "serve", "--at", where, "--tiers", quota]
        command = [mpiexec(), "-n", str(JOBS), sys.executable, *serve]
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=job_environment(JOBS, JOBS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            for _ in range(JOBS):
                line = child.stdout.readline()
                if "jobs find it" not in line:
                    raise RuntimeError(f"{' '.join(command)} said: {line}")
            yield where
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                kill_tree(child.pid)
                child.wait()


def _run(
    bench: Bench, store: LatencyStore | None, which: str, shuffle: str, *more: str, part: float = 0.0
) -> dict[str, Any]:
    path = store.folder if store is not None else bench.sets[which].path
    arguments = ("--jobs", "--warmup", bench.small[which].path, *more)
    if store is not None:
        store.reset()
    if part:
        # The small data set, which is read before the clock starts, has its own room.
        room = room_of(os.path.getsize(bench.sets[which].file), part) + room_of(
            os.path.getsize(bench.small[which].file)
        )
        with services(f"memory:{room}") as where:
            run = bench.pario(path, which, shuffle, *arguments, "--service", where, ranks=JOBS, nodes=JOBS)
    else:
        run = bench.pario(path, which, shuffle, *arguments, ranks=JOBS, nodes=JOBS)
    if store is not None:
        run["store_bytes"] = store.counts().get("/data.mdb", {}).get("bytes", 0)
    run["seconds"] = max(rank["total"] for rank in run["ranks"])
    return run


def same(bench: Bench, store: LatencyStore, which: str, shuffle: str, sections: list[Section]) -> None:
    """Four jobs that do the same."""
    read, taken = sections[:2]
    size = os.path.getsize(bench.sets[which].file)
    alike = ("--epochs", str(EPOCHS), "--compute", str(size / BYTES_PER_S))
    sides = {"local": partial(_run, bench, None, which, shuffle, *alike)}
    # What no service keeps is read by records: of 3 KB, 1.2 million times in all, or 0.4 million.
    minutes = (which, shuffle) == ("3k", "global") and not bench.quick
    if not minutes:
        sides["none"] = partial(_run, bench, store, which, shuffle, *alike)
    parts = [part for part in BARS if part * JOBS > 1 or not minutes]
    for part in parts:
        sides[str(part)] = partial(_run, bench, store, which, shuffle, *alike, part=part)
    found = interleave(sides, bench.rounds)
    name = f"{bench.sets[which].name}, {SHUFFLES[shuffle]}"
    without = [run["seconds"] for run in found.get("none", [])]
    local = [run["seconds"] for run in found["local"]]
    if without:
        read.add(Row.of(f"{name}, no service", [run["store_bytes"] / size for run in found["none"]]))
    for part in parts:
        bytes_bar, time_bar, local_bar = BARS[part]
        runs = found[str(part)]
        read.add(Row.of(f"{name}, quota {part}", [run["store_bytes"] / size for run in runs], "<=", bytes_bar))
        ours = f"{statistics.median(run['seconds'] for run in runs):.2f} s"
        for what, other, bar in (("without", without, time_bar), ("all local", local, local_bar)):
            if not other:
                continue
            ratio = [run["seconds"] / base for run, base in zip(runs, other, strict=True)]
            detail = f"{ours}, {what} {statistics.median(other):.2f} s"
            taken.add(Row.of(f"{name}, quota {part} ÷ {what}", ratio, "<=", bar, ours=detail))


def different(bench: Bench, store: LatencyStore, which: str, shuffle: str, section: Section) -> None:
    """Four jobs that differ."""
    size = os.path.getsize(bench.sets[which].file)
    one_pass = size / BYTES_PER_S
    differ = ",".join(f"{epochs}:{compute * one_pass}:{start * one_pass}" for epochs, compute, start in DIFFERENT)
    found = []
    for _ in range(bench.rounds):
        run = _run(bench, store, which, shuffle, "--differ", differ, part=0.3)
        found.append(run["store_bytes"] / size)
    section.add(Row.of(f"{bench.sets[which].name}, {SHUFFLES[shuffle]}, quota 0.3", found, "<=", DIFFERENT_BAR))


def main() -> int:
    options = parser_of("jobs", __doc__, 5).parse_args()
    bench = Bench.of(options)
    bench.make(SMALL, RECORDS)
    sections = [
        Section("jobs_bytes", f"{JOBS} jobs, {EPOCHS} epochs each: bytes at the store ÷ the data", "cold store"),
        Section("jobs_time", f"{JOBS} jobs, {EPOCHS} epochs each: time of the slowest job", "cold store"),
        Section("jobs_differ", f"{JOBS} jobs of 2, 5, 10 and 10 epochs: bytes at the store ÷ the data", "cold store"),
    ]
    bad = 0
    for which in ["197k"] if options.smoke else RECORDS:
        with latency_store(Path(bench.sets[which].path)) as store:
            for shuffle in ["block"] if options.smoke else SHUFFLES:
                same(bench, store, which, shuffle, sections)
                different(bench, store, which, shuffle, sections[2])
                bad = finish("jobs", options, sections, batch=BATCH)
    return bad


if __name__ == "__main__":
    sys.exit(main())
