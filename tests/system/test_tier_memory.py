"""What tiers take of memory: as much as was stated, and no more than others leave. Control groups tell and limit it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from failing import running
from launch import Job, run_job
from memory_groups import MemoryGroup

import pario

Group = Callable[[int], MemoryGroup]

pytestmark = pytest.mark.skipif(
    os.environ.get("PARIO_REQUIRE_SYSTEM") != "1",
    reason="sets memory limits: set PARIO_REQUIRE_SYSTEM=1 and be root",
)

MiB = 1 << 20
SIZE = 200_000

#: Checks every record, and waits at certain places until the test has done what it does there.
SCRIPT = """
import json, os, sys, time, numpy as np, pario
from mpi4py import MPI
job, world = json.loads(sys.argv[1]), MPI.COMM_WORLD
size = 200_000
base = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
def sign(said, wait=True):
    world.Barrier()
    if world.rank == 0:
        open(f"{job['signs']}/{said}", "w").close()
        while wait and not os.path.exists(f"{job['signs']}/{said} answered"):
            time.sleep(0.005)
    world.Barrier()
blocks = {"block_bytes": 1 << 20, "mix_blocks": 4}  # of which the ring has three slots
# With a depth of its own choice the number of threads, and so of their stacks, would differ from epoch to epoch.
tiers = [pario.Tier(*tier) for tier in job["tiers"]]
options = pario.Options(tiers=tiers, slot_bytes=4 << 20, slots=4, inflight=8, **blocks)
raw = pario.decode.Raw(shape=(size,))
pario.Reader(job["path"]).close()  # imports and compiles what the Loader needs
sign("start")
with pario.Loader(job["path"], job["batch"], raw, shuffle=job["shuffle"], options=options) as loader:
    for epoch in range(job["epochs"]):
        seen = []
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert np.array_equal(batch["data"][k], base ^ np.uint8(i % 251)), i
            seen += batch.ids.tolist()
            if epoch == 0 and batch.step == job.get("step") and world.rank == 0:
                open(f"{job['signs']}/step", "w").close()
        assert sorted(sum(world.allgather(seen), [])) == list(range(job["records"]))
        sign(f"epoch {epoch}")
    if world.rank == 0:
        print("JOB " + json.dumps(loader.stats()["tiers"]))
"""


def make_set(folder: Path, records: int) -> str:
    """Not in the page cache."""
    where = folder / "x.lmdb"
    base = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    with lmdb.open(os.fspath(where), map_size=1 << 32, sync=False) as env, env.begin(write=True) as txn:
        for i in range(records):
            txn.put(b"%06d" % i, (base ^ np.uint8(i % 251)).tobytes())
    with pario.Reader(where):
        pass  # saves the index
    with open(where / "data.mdb", "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return os.fspath(where)


class Watched:
    """A job in a control group.

    most_shared : bytes that its processes shared at any time
    """

    def __init__(self, signs: Path, group: MemoryGroup) -> None:
        self._signs, self._group = signs, group
        self.most_shared = 0

    def run(self, ranks: int, job: dict[str, Any], at: dict[str, Callable[[], None]], limit_s: float = 100) -> Job:
        """at : what to do at each sign"""
        for sign in {"start", *(f"epoch {epoch}" for epoch in range(job["epochs"]))} - set(at):
            (self._signs / f"{sign} answered").touch()

        def meanwhile(pid: int) -> None:
            left, end = dict(at), time.monotonic() + limit_s
            while time.monotonic() < end and running(pid):
                for sign in [each for each in left if (self._signs / each).exists()]:
                    left.pop(sign)()
                    (self._signs / f"{sign} answered").touch()
                self.most_shared = max(self.most_shared, self._group.taken()[1])
                time.sleep(0.005)
            assert not left or time.monotonic() > end, f"the job ended before {list(left)}"

        argv = ["-c", SCRIPT, json.dumps({"signs": os.fspath(self._signs), **job})]
        done = run_job(ranks, argv, limit_s=limit_s, meanwhile=meanwhile, prefix=self._group.prefix)
        assert self._group.kills() == 0, done.output
        assert done.status == 0, done.output
        return done


def memory_tier(done: Job) -> dict[str, Any]:
    """What it says of itself at the end."""
    (line,) = [line for line in done.output.splitlines() if line.startswith("JOB ")]
    return json.loads(line[4:])[0]


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_twenty_epochs_take_what_was_stated(tmp_path: Path, memory_group: Group, shuffle: str) -> None:
    """The tier's quota, the ring's slots and the index; and nothing grows."""
    quota, ring, records = 48 * MiB, 4 * 4 * MiB, 400
    path = make_set(tmp_path, records)
    index = os.path.getsize(path + "/data.mdb.pario.index")
    group = memory_group(2048 * MiB)
    seen: list[tuple[int, int]] = []
    at = {sign: lambda: seen.append(group.taken()) for sign in ("start", "epoch 2", "epoch 19")}
    job = {"path": path, "records": records, "batch": 4, "shuffle": shuffle, "epochs": 20, "tiers": [["memory", quota]]}
    watched = Watched(tmp_path, group)
    held = memory_tier(watched.run(2, job, at))["held_bytes"]
    start, early, late = seen
    stated = quota + ring + index
    print(f"stated {stated}, shared {watched.most_shared - start[1]} at most, grown {sum(late) - sum(early)}")
    assert 0.95 * quota < held <= quota
    assert held <= late[1] - start[1] <= watched.most_shared - start[1] <= 1.02 * stated
    assert sum(late) - sum(early) <= 0.02 * stated


def test_a_file_and_a_quota_larger_than_the_limit(tmp_path: Path, memory_group: Group) -> None:
    """The tier gets what the limit leaves."""
    group, records = memory_group(350 * MiB), 5000
    path = make_set(tmp_path, records)
    assert os.path.getsize(path + "/data.mdb") > 2.7 * group.limit
    job = {"path": path, "records": records, "batch": 4, "shuffle": "block", "epochs": 2}
    held = memory_tier(Watched(tmp_path, group).run(1, {**job, "tiers": [["memory", "600 MiB"]]}, {}))["held_bytes"]
    assert held > 60 * MiB


#: Takes a part of what is free in its control group, so many bytes per second, and keeps it until it is killed.
TAKES = """
import mmap, sys, time
nbytes, rate = int(sys.argv[1]), float(sys.argv[2])
step = 8 << 20
begin, kept = time.monotonic(), []
for at in range(0, nbytes, step):
    earliest = time.monotonic() + step / rate  # of the next step: nothing that was late is made up for
    memory = mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(23)  # MADV_POPULATE_WRITE: all pages at once
    kept.append(memory)
    time.sleep(max(0.0, earliest - time.monotonic()))
print(nbytes / (time.monotonic() - begin), flush=True)
time.sleep(1000)
"""


class Taker:
    """Another program in the group: it takes this part of what is free."""

    def __init__(self, group: MemoryGroup, part: float) -> None:
        self.nbytes = int(part * group.free())
        command = [*group.prefix, sys.executable, "-S", "-c", TAKES, str(self.nbytes), "3e9"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def rate(self) -> float:
        """Bytes per second, when it has them all."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def end(self) -> None:
        assert self._process.poll() is None, "it was killed"
        self._process.kill()
        self._process.wait()


@pytest.mark.parametrize("when", ["while it fills", "when it is full"])
def test_another_program_takes_most_of_what_is_free(tmp_path: Path, memory_group: Group, when: str) -> None:
    """At 3 GB/s, or as fast as the machine hands memory out."""
    group, records = memory_group(700 * MiB), 2500
    path = make_set(tmp_path, records)
    takers: list[Taker] = []

    def take() -> None:
        takers.append(Taker(group, 0.8))
        print(f"{takers[0].nbytes / 1e6:.0f} MB at {takers[0].rate() / 1e9:.2f} GB/s")

    job = {"path": path, "records": records, "batch": 4, "shuffle": "global", "epochs": 2}
    job |= {"tiers": [["memory", "400 MiB"]], "step": 30}
    try:
        done = Watched(tmp_path, group).run(1, job, {"step" if when == "while it fills" else "epoch 0": take})
    finally:
        for taker in takers:
            taker.end()
    assert "memory is short" in done.output
    assert memory_tier(done)["held_bytes"] < 360 * MiB, "a part was given back, or not taken"
