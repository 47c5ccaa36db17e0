"""The control plane: its cycle with a thousand clients, the cost of the token bucket, a storm of opens, and PAIO's
experiment.

    python -m benchmarks.control [--only cycle|cost|storm|jobs] [--rounds 5] [--seconds 130] [--data DIR]
                                 [--out FILE]
    python -m benchmarks.control --smoke        every part for some seconds, without bars

cycle     1,000 connections to a plane, each a job of its own (control_cycle.py).
cost      processor time of the bucket per read, from a file in memory, by paired blocks (control_cost.py).
storm     one job opens 10,000 files of a FUSE mount with 48 threads while another one, whose operations per second are
          guaranteed, opens files with three; without a plane and with one, in turn (control_storm.py). As root.
jobs      PAIO's experiment: four jobs with guarantees, started one after another, on a throttled disk, as root. Without
          a plane, and with one (control_jobs.py).
Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import control_cost, control_cycle, control_jobs, control_storm, data
from benchmarks.cache import Unavailable
from benchmarks.control_plane import SECRET, USER, plane
from benchmarks.measure import Row, Section, finish, parser_of
from benchmarks.stores.throttled import throttled_disk
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.plane.agent import Agent
from pario.plane.session import Who
from pario.records import EXTENT

#: bars: seconds of a cycle; part of the rate, of the windows; time ÷ uncontrolled
CYCLE_S, COST, WINDOWS, TOTAL = 0.050, 0.01, 0.95, 1.1
#: of the reads, in bytes
SIZES = (1 << 20, 192 << 10, 3 << 10)


def _read_disk(fetcher: Any, nbytes: int, total: int) -> float:
    """Seconds for the whole file, in reads of this size in random order, eight in flight."""
    memory = np.empty((64 << 20) + 4096, np.uint8)
    out = memory[-memory.ctypes.data % 4096 :][: 64 << 20]
    reads = np.empty(total // nbytes, EXTENT)
    reads["offset"] = np.random.default_rng(0).permutation(len(reads)) * nbytes
    reads["nbytes"] = nbytes
    per_call = len(out) // nbytes
    starts = np.arange(per_call) * nbytes
    pool = ReadPool(fetcher, 8)
    begin = time.perf_counter()
    for first in range(0, len(reads), per_call):
        part = reads[first : first + per_call]
        pool.read(part, out, starts[: len(part)])
    seconds = time.perf_counter() - begin
    pool.close()
    return seconds


def measure_cycle(options: argparse.Namespace, folder: Path, section: Section) -> None:
    clients = 40 if options.smoke else 1000
    found = section.raw = control_cycle.cycle(folder, clients, 4 if options.smoke else 40)
    own, part = [found["processor_s"]], f"{found['core']:.1%} of a core"
    section.add(Row.of(f"{clients:,} clients, processor time", own, "<=", CYCLE_S, unit="s", ours=part))
    section.add(Row.of(f"{clients:,} clients, first report to last grant", found["answered_s"], unit="s"))


def measure_cost(options: argparse.Namespace, folder: Path, section: Section) -> None:
    n, total = (20, 4 << 20) if options.smoke else (400, 64 << 20)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.NamedTemporaryFile(dir=memory, prefix="pario-control-") as file:
        file.write(os.urandom(total))
        file.flush()
        with _joined(folder) as agent:
            for nbytes in SIZES:
                plain, other = (open_limited(partial(PosixFetcher, file.name), None) for _ in range(2))
                limited = open_limited(partial(PosixFetcher, file.name), agent)
                reads = max(16, (16 << 20) // max(nbytes, 64 << 10))
                for name, sides in (("bucket", (plain, limited)), ("nothing", (plain, other))):
                    one = control_cost.pairs(sides, nbytes, total, n, reads)
                    section.raw[f"{name} {nbytes}"] = one
                    more, low, high = (1e6 * one[key] for key in ("more_s", "low_s", "high_s"))
                    of = f"of {1e6 * one['read_s']:.1f} us: {one['more_s'] / one['read_s']:.2%}"
                    section.add(Row(f"{name}, per read of {nbytes >> 10} KiB", more, low, high, "", None, "us", of))
                for fetcher in (plain, other, limited):
                    fetcher.close()
                # As the ring reads: eight threads, each of which asks for a part of its slot in one call.
                gate = control_cost.Counted(agent)
                pooled = open_limited(partial(PosixFetcher, file.name), gate)
                seconds = [_read_disk(pooled, nbytes, total) for _ in range(2 if options.smoke else 9)]
                pooled.close()
                calls = gate.calls / len(seconds)
                part = calls * section.raw[f"bucket {nbytes}"]["more_s"] / statistics.median(seconds)
                rate = f"{calls:.0f} calls for {total >> 20} MiB at {total / statistics.median(seconds) / 1e9:.1f} GB/s"
                name = f"part of the time, reads of {nbytes >> 10} KiB by the pool"
                section.add(Row.of(name, [part], "<=", COST, unit="", ours=rate))


def measure_storm(options: argparse.Namespace, folder: Path, section: Section) -> None:
    source = folder / "files"
    control_storm.prepare(source, 100 if options.smoke else control_storm.FILES)
    opens = 1500 if options.smoke else 10_000
    least = control_storm.MET * control_storm.GUARANTEE
    found: dict[str, list[dict[str, Any]]] = {"none": [], "plane": []}
    try:
        for _ in range(1 if options.smoke else min(options.rounds, 3)):
            for name, runs in found.items():
                runs.append(control_storm.storm(source, folder, opens, name == "plane", 3.0))
    except Unavailable as reason:
        section.note(f"not run: {reason}")
        return
    section.raw = found
    for name, runs in found.items():
        quiet, storm, alone = ([each[k] for run in runs for each in run[key]]
                               for key, k in (("storm", 0), ("storm", 1), ("alone", 0)))  # fmt: skip
        seconds = [run["seconds"] for run in runs]
        part = sum(each >= least for each in quiet) / max(1, len(quiet))
        bar = WINDOWS if name == "plane" else None
        about = f"of {len(quiet)}; a run took {min(seconds):.0f} to {max(seconds):.0f} s"
        section.add(Row.of(f"{name}: windows with the guarantee", [part], ">=", bar, unit="", ours=about))
        for what, values in (("quiet job in the storm", quiet), ("the storm", storm), ("quiet job alone", alone)):
            if values:
                section.add(Row.of(f"{name}: {what}", values, unit="opens/s"))


@contextmanager
def _joined(folder: Path) -> Iterator[Agent]:
    """An agent whose plane grants more than anybody could read."""
    with plane(folder, "[store]\nbytes_per_s = 1e15\noperations_per_s = 1e12\n") as (address, _):
        agent = Agent(address, Who(USER, SECRET, "cost", "cost", "node"))
        agent.hold()
        agent.take(1, 1)
        limit = time.monotonic() + 10
        while not agent.joined and time.monotonic() < limit:
            time.sleep(0.01)
        assert agent.bucket.rates[0] is not None, "the plane has granted something"
        yield agent
        agent.release()


def measure_jobs(options: argparse.Namespace, folder: Path, section: Section) -> None:
    seconds = 8.0 if options.smoke else options.seconds
    try:
        made = data.make(options.data or folder, "197k", 150 if options.smoke else 1000)
        with throttled_disk(options.data or str(folder), (64 << 20) + 2 * made.file_bytes) as disk:
            path, total = disk.copy(made.path), control_jobs.STORE * seconds
            runs = {
                name: control_jobs.jobs(path, folder, disk.device, name == "plane", total, seconds / 16)
                for name in ("none", "plane")
            }
    except Unavailable as reason:
        section.note(f"not run: {reason}")
        return
    section.raw = runs
    for name, run in runs.items():
        bar = name == "plane"
        ends = ", ".join(f"{end:.0f}" for end in run["ends"])
        part, said = control_jobs.met(run), f"jobs ended after {ends} s"
        section.add(Row.of(f"{name}: windows with the guarantee", [part], ">=", WINDOWS if bar else None, ours=said))
        if name != "none" and "none" in runs:
            ratio, said = run["seconds"] / runs["none"]["seconds"], f"{run['seconds']:.1f} s"
            section.add(Row.of(f"{name}: total time ÷ uncontrolled", [ratio], "<=", TOTAL if bar else None, ours=said))


#: name -> (what measures it, title, state of the caches)
PARTS: dict[str, tuple[Callable[[argparse.Namespace, Path, Section], None], str, str]] = {
    "cycle": (measure_cycle, "Control cycle", ""),
    "cost": (measure_cost, "Processor time of the bucket", "file in memory"),
    "storm": (measure_storm, "A storm of opens", "no cache"),
    "jobs": (measure_jobs, "Four jobs with guarantees on a store of 100 MB/s", "past the page cache"),
}


def main() -> int:
    parser = parser_of("control", __doc__, 5, data=False)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--seconds", type=float, default=130.0, help="of a run of four jobs at the store's full rate")
    parser.add_argument("--data", help="a folder on a disk. Default: a temporary one")
    options = parser.parse_args()
    # Ended from outside, it must not leave a disk mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sections: list[Section] = []
    for name, (part, title, state) in PARTS.items():
        if options.only in (None, name):
            print(f"{name}:", flush=True)
            sections.append(Section(name, title, state))
            with tempfile.TemporaryDirectory(prefix="pario-control-", dir=options.data) as folder:
                part(options, Path(folder), sections[-1])
    options.data = options.data or ""
    return finish("control", options, sections)


if __name__ == "__main__":
    sys.exit(main())
