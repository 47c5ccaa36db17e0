"""Jobs in which something goes wrong, and how they end: on every rank, after how many seconds, what is left behind.

The ranks write what happens to them into a file each, with the time of the machine's one monotonic clock; the test does
the harm from outside and compares.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
from launch import Job, left_segments, run_job, segments

from pario.kernels.jit import cache_directory

ROOT = Path(__file__).resolve().parent.parent

#: What measurements/failures.md promises: every rank that lives has its error within so many seconds, and the job has
#: ended. On a slow machine it is more (`Ended.promised_s`).
PROMISED_S = 10.0

#: A hang must not keep a person for long, and a slow machine must not fail the test.
LIMIT_S = 200.0

RECORDS = 2000
RECORD_BYTES = 5000
BATCH = 5

#: A process between the launcher and the rank, so that the launcher does not see a rank die: it would kill the others
#: at once, and nobody could say what they noticed. (MPICH's -disable-auto-cleanup does not help: its launcher then
#: sends SIGUSR1 to the others, which ends them too, and stops itself when two ranks are gone.)
SHELTER = """
import subprocess, sys, time
status = subprocess.call([sys.executable, "-c", *sys.argv[1:]], close_fds=False)  # the launcher's connection stays open
time.sleep(60 if status < 0 else 0)
sys.exit(status % 256)
"""

#: A training script. `here` marks a place of the run; a rank that is to be killed there waits for it.
SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import pario, pario.dataset.reader
from pario.errors import *
from mpi4py import MPI
comm = MPI.COMM_WORLD
job = json.loads(sys.argv[1])
log = open(f"{job['events']}/{comm.rank}", "a", buffering=1)
def note(what, **more):
    log.write(json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **more}) + "\\n")
def here(place, wait=True):
    if place == job["place"] and comm.rank in job["victims"]:
        note("here")
        while wait:
            time.sleep(1)
def pausing(call, place):
    def paused(*args, **options):
        here(place)
        return call(*args, **options)
    return paused
# Through the ring, as from a parallel file system, unless a test says otherwise.
small = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 64 << 10}
options = pario.Options(**{"tiers": (), **small, **job["options"]})
decode = None
epochs, pause = job["epochs"], job["pause_s"]
note("start")
def run():
    records = 0
    pario.dataset.reader.open_index = pausing(pario.dataset.reader.open_index, "start-up")
    how = {"recipe": job["recipe"], "options": options, "shuffle": "global"}
    with pario.Loader(job["path"], job["batch"], decode, comm=comm, **how) as loader:
        note("open")
        for epoch in range(epochs):
            for batch in loader:
                check(batch)
                records += len(batch.ids)
                time.sleep(pause)
                if epoch == 0 and batch.step == 7:
                    here("mid-epoch", wait=False)
                    note("step 7")
        loader._progress.meet = pausing(loader._progress.meet, "close")
        loader._life.world.close = pausing(loader._life.world.close, "the end of close")
    return records
def check(batch):
    offsets, data = batch["offsets"], batch["data"]
    for k, record in enumerate(batch.ids.tolist()):
        assert (data[offsets[k] : offsets[k + 1]] == record % 251).all() and offsets[k + 1] - offsets[k] == 5000
"""

ENDING = """
try:
    records = run()
except BaseException as error:
    note("error", kind=type(error).__name__, text=str(error))
    raise
note("end", records=records)
"""


def make_set(folder: Path, records: int = RECORDS, commits: int = 1) -> str:
    """An LMDB of records of 5,000 bytes, each filled with its number modulo 251, in a new folder."""
    folder.mkdir()
    place = str(folder / "x.lmdb")
    with lmdb.open(place, map_size=1 << 28) as env:
        for part in range(commits):
            with env.begin(write=True) as txn:
                for i in range(part, records, commits):
                    txn.put(b"%06d" % i, bytes([i % 251]) * RECORD_BYTES)
    return place


@dataclass
class Ended:
    """How a job ended; times in seconds after the harm was done."""

    job: Job
    events: dict[int, list[dict]]
    harm_at: float
    ended_at: float
    left: list[str] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.ended_at - self.harm_at

    @property
    def promised_s(self) -> float:
        return PROMISED_S * self.job.slowness

    def of(self, rank: int, what: str) -> list[dict]:
        return [event for event in self.events.get(rank, []) if event["what"] == what]

    def errors(self, ranks: Iterable[int]) -> dict[int, dict]:
        """The one error of each of these ranks, with its "seconds" after the harm."""
        found = {}
        for rank in ranks:
            errors = self.of(rank, "error")
            assert len(errors) == 1, f"rank {rank} has {len(errors)} errors: {self}"
            found[rank] = {**errors[0], "seconds": errors[0]["at"] - self.harm_at}
        return found

    def __str__(self) -> str:
        lines = [
            f"status {self.job.status}, {self.end_s:.1f} s after the harm; left behind: {self.left}",
            f"  the machine was {self.job.slowness:.1f} times as slow as usual",
        ]
        for rank, events in sorted(self.events.items()):
            lines += [f"  rank {rank} {e['at'] - self.harm_at:+7.2f} s {e}" for e in events]
        return "\n".join([*lines, self.job.output])


def run(
    path: str,
    folder: Path,
    *,
    ranks: int = 4,
    nodes: int = 2,
    code: str = "",
    place: str = "",
    victims: Iterable[int] = (),
    harm: Callable[[int, list[int]], None] | None = None,
    sheltered: bool = False,
    epochs: int = 1000,
    pause_s: float = 0.002,
    batch: int = BATCH,
    options: dict | None = None,
    recipe: str = "ring",
    env: dict[str, str] | None = None,
    rc: str = "",
    prefix: tuple[str, ...] = (),
    settle_s: float = 5.0,
) -> Ended:
    """Run SCRIPT + `code` on `path`; when all `victims` have come to `place`, do harm(launcher's pid, their pids).

    place : "start-up", "mid-epoch", "close", "the end of close"
    harm : without it the harm is done by `code`, which notes "harm"
    sheltered : the launcher does not see ranks die
    rc : a setting of mpi4py.rc
    prefix : the command that starts the launcher
    settle_s : how long after its end something of the job may still be there
    """
    victims = list(victims)
    events, temporary = folder / "events", folder / "tmp"
    for each in (events, temporary):
        each.mkdir()
    before = segments(), set(os.listdir(os.path.dirname(path))), set(os.listdir(path))
    job = {
        "path": path,
        "events": str(events),
        "place": place,
        "victims": victims,
        "epochs": epochs,
        "pause_s": pause_s,
        "batch": batch,
        "options": options or {},
        "recipe": recipe,
    }
    times = []

    def meanwhile(pid: int) -> None:
        end = time.monotonic() + LIMIT_S / 2
        while True:
            seen = read_events(events)
            there = [e["pid"] for r in victims for e in seen.get(r, []) if e["what"] == "here"]
            if len(there) == len(victims) and all(seen.get(r) for r in range(ranks)):
                break
            if time.monotonic() > end or not running(pid):
                return  # the job's own output will tell
            time.sleep(0.02)
        time.sleep(0.5)  # the others wait for them by now
        times.append(time.monotonic())
        assert harm is not None
        harm(pid, there)

    first = f"import mpi4py; mpi4py.rc.{rc}\n" if rc else ""
    argv = ["-c", *([SHELTER] if sheltered else []), first + SCRIPT + code + ENDING, json.dumps(job)]
    ended = run_job(
        ranks,
        argv,
        limit_s=LIMIT_S,
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "MPIR_CVAR_NUM_CLIQUES": str(nodes),
            "PARIO_NUMBA_CACHE": os.path.dirname(cache_directory()),
            "TMPDIR": str(temporary),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **(env or {}),
        },
        meanwhile=meanwhile if harm is not None else None,
        prefix=prefix,
    )
    ended_at = time.monotonic()
    seen = read_events(events)
    harms = times or [e["at"] for es in seen.values() for e in es if e["what"] == "harm"]
    result = Ended(ended, seen, min(harms, default=ended_at), ended_at)
    result.left = left_behind(result, before, path, temporary, settle_s)
    return result


def running(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def read_events(folder: Path) -> dict[int, list[dict]]:
    found = {}
    for file in folder.iterdir():
        lines = file.read_text().splitlines(keepends=True)
        found[int(file.name)] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


def left_behind(ended: Ended, before: tuple[set[str], ...], path: str, temporary: Path, settle_s: float) -> list[str]:
    """Processes, segments and files that are there, and stay there, and were not there before."""
    pids = {event["pid"] for events in ended.events.values() for event in events}
    end = time.monotonic() + settle_s
    while (alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < end:
        time.sleep(0.1)
    return [
        *(f"process {pid}" for pid in alive),
        *(f"/dev/shm/{name}" for name in left_segments(before[0])),
        *(f"file {name}" for name in set(os.listdir(os.path.dirname(path))) - before[1]),
        *(f"file {name}" for name in set(os.listdir(path)) - before[2] - {"data.mdb.pario.index"}),
        *(f"temporary file {file}" for file in temporary.rglob("*")),
    ]


def check(ended: Ended, expected: dict[int, str], text: str = "") -> None:
    """expected : kind of the error, as a regular expression, by rank"""
    assert ended.job.status not in (0, None), ended
    for rank, error in ended.errors(expected).items():
        assert re.fullmatch(expected[rank], error["kind"]), ended
        assert re.search(text, error["text"]), ended
        assert error["seconds"] < ended.promised_s, ended
    assert ended.end_s < ended.promised_s, ended
    assert ended.left == [], ended


class Table:
    """The rows of measurements/failures.md, kept where `python -m benchmarks.failures` says; otherwise nowhere."""

    def __init__(self) -> None:
        self.file = os.environ.get("PARIO_FAILURES_JSON")

    def row(self, what: str, when: str, happens: str, ended: Ended, ranks: Iterable[int] | None = None) -> None:
        """One measurement. ranks : those that must have an error; None: the result is right and there is no time."""
        row: dict = {"what": what, "when": when, "happens": happens, "left": ended.left}
        if ranks is not None:
            row["error_s"] = max((e["seconds"] for e in ended.errors(ranks).values()), default=None)
            row["end_s"] = ended.end_s
        if self.file:
            with open(self.file, "a") as out:
                out.write(json.dumps(row) + "\n")
