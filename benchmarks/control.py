"""The control plane: its cycle with a thousand clients, the cost of the bucket, a storm of opens, PAIO's experiment.

    python -m benchmarks.control [--only cycle|cost|storm|bucket|jobs] [--rounds 5] [--seconds 130] [--data DIR]
                                 [--json FILE]
    python -m benchmarks.control --smoke        every part for some seconds, without bars

cycle     1,000 connections from one process to a plane that is another one, each a job of its own. All report at
          once, four times a second. The processor time of the plane per cycle holds all that it does for that: a
          thousand reports read, shares computed, a thousand grants sent. Beside it the time from the first report to
          the last grant of a plane that computes as often as it can; the clients' side, in Python too, is part of it.
cost      processor time of the bucket per read, from a file in memory, by paired blocks (control_cost.py).
storm     one job opens 10,000 files of a FUSE mount with 48 threads while another one, whose operations per second are
          guaranteed, opens files with three; without a plane and with one, in turn (control_storm.py). As root.
bucket    a file, read through a fetcher and through the same fetcher behind the bucket, in turn; the bucket's rates are
          so high that nobody waits for tokens. From the disk past the page cache, with eight reads in flight; and, for
          information, out of the page cache by one thread, which is as fast as a read can be.
jobs      PAIO's experiment: four jobs with guarantees, started one after another, on a throttled disk, as root. Without
          a plane, with fixed shares, with max-min shares (control_jobs.py).
Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import control_cost, control_jobs, control_storm, data
from benchmarks.cache import Unavailable
from benchmarks.control_plane import SECRET, USER, plane, processor_s
from benchmarks.measure import Row, Section, interleave, machine, ratios, save
from benchmarks.stores.throttled import throttled_disk
from pario.fetch.direct import DirectFetcher
from pario.fetch.limited import open_limited
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.plane.agent import Agent
from pario.plane.session import Session, Who
from pario.plane.words import PlaneAddress
from pario.records import EXTENT

CLIENTS = 1000
#: bars: seconds of a cycle; part of the rate; part of the windows; total time ÷ uncontrolled
CYCLE_S, COST, WINDOWS, TOTAL = 0.050, 0.01, 0.95, 1.1
#: of the reads, in bytes
SIZES = (1 << 20, 192 << 10, 3 << 10)


# -- cycle -------------------------------------------------------------------------------------------------------------


def cycle(folder: Path, clients: int, rounds: int) -> dict[str, Any]:
    """rounds : of reports of all clients"""
    rules = (
        "lease_s = 10\ncycle_s = {}\n[store]\nbytes_per_s = 1e9\noperations_per_s = 1e5\n[limits]\n"
        f"connections = {4 * clients}\nconnections_per_user = {2 * clients}\njobs_per_user = {2 * clients}\n"
        '[[job]]\nname = "1*"\nbytes_per_s = 2e5\n'
    )
    found: dict[str, Any] = {"clients": clients, "rounds": rounds}
    with plane(folder, rules.format(0.25)) as (address, pid):
        lines = _join(address, clients)
        _round(lines, 0, 0.25)
        before, begin = processor_s(pid), time.monotonic()
        for k in range(1, rounds + 1):
            _round(lines, k, 0.25)
            time.sleep(max(0.0, begin + 0.25 * k - time.monotonic()))
        seconds = time.monotonic() - begin
        found["processor_s"] = (processor_s(pid) - before) / (seconds / 0.25)
        found["core"] = (processor_s(pid) - before) / seconds
        _close(lines)
    with plane(folder, rules.format(0.01)) as (address, _):
        lines = _join(address, clients)
        found["answered_s"] = [_round(lines, k, 0.25) for k in range(rounds)][1:]
        _close(lines)
    return found


def _join(address: PlaneAddress, clients: int) -> list[Session]:
    return [
        Session(
            address,
            Who(USER, SECRET, str(k), str(k), "node"),
            {"do": "join", "member": f"{k:032x}", "job": str(k), "name": str(k), "node": "node", "holds": None},
            1 << 16,
        )
        for k in range(clients)
    ]


def _close(lines: list[Session]) -> None:
    for line in lines:
        line.close()


def _round(lines: list[Session], number: int, over_s: float) -> float:
    """All report; seconds until all have a grant. Every third one wants more than it gets, each time another one."""
    poll = select.epoll()
    by_fd = {line.sock.fileno(): line for line in lines}
    for line in lines:  # what has come since
        poll.register(line.sock.fileno(), select.EPOLLIN)
    for fd, _ in poll.poll(0, len(lines)):
        by_fd[fd].come()
    begin = time.monotonic()
    for k, line in enumerate(lines):
        hungry = (k + number) % 3 == 0
        used = [1e6 * number * over_s, 10.0 * number * over_s]
        line.send({"at": number * over_s + 1e-3, "used": used, "demand": [None if hungry else 1.25e6, 12.5]})
    left = set(by_fd)
    while left:
        for fd, _ in poll.poll(5, len(lines)):
            if by_fd[fd].come():
                left.discard(fd)
                poll.unregister(fd)
        if time.monotonic() > begin + 10:
            raise RuntimeError(f"{len(left)} clients got no grant within 10 s")
    poll.close()
    return time.monotonic() - begin


# -- bucket ------------------------------------------------------------------------------------------------------------


def bucket(folder: Path, rounds: int, mib: int) -> dict[str, Any]:
    """mib : of the file, which is read through once per side and round"""
    path = folder / "file"
    path.write_bytes(bytes(mib << 20))
    subprocess.run(["sync", str(path)], check=True)
    found: dict[str, Any] = {}
    with _joined(folder) as agent:
        for kind, nbytes in product(READS, SIZES):
            if kind == "disk" and nbytes % 4096:
                continue
            sides: dict[str, Callable[[], float]] = {}
            opened = []
            for name, gate in (("plain", None), ("bucket", agent)):
                fetcher_class = DirectFetcher if kind == "disk" else PosixFetcher
                fetcher = open_limited(partial(fetcher_class, str(path)), gate)
                opened.append(fetcher)
                sides[name] = partial(READS[kind], fetcher, nbytes, mib << 20)
                sides[name]()
            found[f"{kind} {nbytes}"] = interleave(sides, rounds)
            for fetcher in opened:
                fetcher.close()
        calls = 200_000
        begin = time.perf_counter()
        for _ in range(calls):
            agent.take(1000, 1)
        found["take_s"] = (time.perf_counter() - begin) / calls
    path.unlink()
    return found


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


def _read(fetcher: Any, nbytes: int, total: int) -> float:
    """Seconds for the whole file, in reads of this size, 8 MiB in one call if they are small, as the ring does."""
    per_call = max(1, min(total, (8 << 20) if nbytes < 64 << 10 else nbytes) // nbytes)
    out = np.empty(per_call * nbytes, np.uint8)
    starts = np.arange(per_call) * nbytes
    reads = np.empty(per_call, EXTENT)
    reads["nbytes"] = nbytes
    begin = time.perf_counter()
    for first in range(0, total - len(out) + 1, len(out)):
        reads["offset"] = first + starts
        fetcher.read(reads, out, starts)
    return time.perf_counter() - begin


READS = {"disk": _read_disk, "cached": _read}


# -- all ---------------------------------------------------------------------------------------------------------------


def measure_cycle(options: argparse.Namespace, folder: Path, sections: list[Section]) -> None:
    section = Section("cycle", "Control cycle", "")
    sections.append(section)
    clients = 40 if options.smoke else CLIENTS
    found = cycle(folder, clients, 4 if options.smoke else 40)
    section.raw = found
    bar = None if options.smoke else CYCLE_S
    own = found["processor_s"]
    section.add(Row(f"{clients:,} clients, processor time", own, own, own, "<=" if bar else "", bar, "s",
                    f"{found['core']:.1%} of a core"))  # fmt: skip
    answered = found["answered_s"]
    section.add(Row(f"{clients:,} clients, first report to last grant", statistics.median(answered), min(answered),
                    max(answered), "", None, "s"))  # fmt: skip


def measure_cost(options: argparse.Namespace, folder: Path, sections: list[Section]) -> None:
    section = Section("cost", "Processor time of the bucket", "file in memory")
    sections.append(section)
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
                bar = None if options.smoke else COST
                rate = f"{calls:.0f} calls for {total >> 20} MiB at {total / statistics.median(seconds) / 1e9:.1f} GB/s"
                section.add(Row(f"part of the time, reads of {nbytes >> 10} KiB by the pool", part, part, part,
                                "<=" if bar else "", bar, "", rate))  # fmt: skip


def measure_storm(options: argparse.Namespace, folder: Path, sections: list[Section]) -> None:
    section = Section("storm", "A storm of opens", "no cache")
    sections.append(section)
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
        bar = name == "plane" and not options.smoke
        about = f"of {len(quiet)}; a run took {min(seconds):.0f} to {max(seconds):.0f} s"
        section.add(Row(f"{name}: windows with the guarantee", part, part, part, ">=" if bar else "",
                        WINDOWS if bar else None, "", about))  # fmt: skip
        for what, values in (("quiet job in the storm", quiet), ("the storm", storm), ("quiet job alone", alone)):
            if values:
                section.add(Row(f"{name}: {what}", statistics.median(values), min(values), max(values), unit="opens/s"))


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


def measure_bucket(options: argparse.Namespace, folder: Path, sections: list[Section]) -> None:
    section = Section("bucket", "Cost of the bucket", "")
    sections.append(section)
    found = bucket(folder, 2 if options.smoke else options.rounds, 16 if options.smoke else 512)
    section.raw = found
    for case, one in found.items():
        if case == "take_s":
            continue
        kind, nbytes = case.split()
        cost = ratios(one["bucket"], one["plain"])
        bar = 1 + COST if kind == "disk" and not options.smoke else None
        best = min(one["bucket"]), min(one["plain"])
        section.add(Row(f"{kind}, reads of {int(nbytes) >> 10} KiB, time ÷ without", cost["median"], cost["min"],
                        cost["max"], "<=" if bar else "", bar, "×", f"best {best[0]:.4f} s",
                        f"{best[1]:.4f} s"))  # fmt: skip
    take = found["take_s"] * 1e6
    section.add(Row("one call", take, take, take, unit="us"))


def measure_jobs(options: argparse.Namespace, folder: Path, sections: list[Section]) -> None:
    section = Section("jobs", "Four jobs with guarantees on a store of 100 MB/s", "past the page cache")
    sections.append(section)
    seconds = 8.0 if options.smoke else options.seconds
    try:
        made = data.make(options.data or folder, "197k", 150 if options.smoke else 1000)
        with throttled_disk(options.data or str(folder), (64 << 20) + 2 * made.file_bytes) as disk:
            path, total = disk.copy(made.path), control_jobs.STORE * seconds
            runs = {
                name: control_jobs.jobs(path, folder, disk.device, "" if name == "none" else name, total, seconds / 16)
                for name in options.policies.split(",")
            }
    except Unavailable as reason:
        section.note(f"not run: {reason}")
        return
    section.raw = runs
    bars = not options.smoke
    for name, run in runs.items():
        part = control_jobs.met(run)
        mine = name == "max-min" and bars
        ends = ", ".join(f"{end:.0f}" for end in run["ends"])
        section.add(Row(f"{name}: windows with the guarantee", part, part, part, ">=" if mine else "",
                        WINDOWS if mine else None, "", f"jobs ended after {ends} s"))  # fmt: skip
    for name in runs.keys() - {"none"}:
        if "none" not in runs:
            break
        ratio = runs[name]["seconds"] / runs["none"]["seconds"]
        mine = name == "max-min" and bars
        section.add(Row(f"{name}: total time ÷ uncontrolled", ratio, ratio, ratio, "<=" if mine else "",
                        TOTAL if mine else None, "×", f"{runs[name]['seconds']:.1f} s"))  # fmt: skip


PARTS = {
    "cycle": measure_cycle,
    "cost": measure_cost,
    "storm": measure_storm,
    "bucket": measure_bucket,
    "jobs": measure_jobs,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=130.0, help="of a run of four jobs at the store's full rate")
    parser.add_argument("--policies", default="none,static,max-min", help="static takes twice as long")
    parser.add_argument("--data", help="a folder on a disk. Default: a temporary one")
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(argv)
    # Ended from outside, it must not leave a disk mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sections: list[Section] = []
    for name, part in PARTS.items():
        if options.only in (None, name):
            print(f"{name}:", flush=True)
            with tempfile.TemporaryDirectory(prefix="pario-control-", dir=options.data) as folder:
                begin = time.monotonic()
                part(options, Path(folder), sections)
                sections[-1].seconds = time.monotonic() - begin
    if options.json:
        save(options.json, sections)
    else:
        print(json.dumps(machine()))
    return 0 if all(row.met is not False for section in sections for row in section.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
