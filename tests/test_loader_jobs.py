"""How jobs that use the Loader end when something breaks: every rank says why, nobody hangs, nothing stays behind."""

from __future__ import annotations

import os
import re

import lmdb
import pytest
from launch import Job, left_segments, run_job, segments

pytestmark = pytest.mark.side_by_side

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT_S = 120  # a few interpreters start, and may compile kernels first; a hang must not keep a person for long
SOON_S = 15  # a farewell takes 4 s, and four jobs run at once

SHELTER = """
import subprocess, sys, time
status = subprocess.call([sys.executable, "-c", *sys.argv[1:]], close_fds=False)
time.sleep(10 if status == -9 else 0)  # the launcher would kill everybody at once, and nobody could say what it saw
sys.exit(status % 256)
"""

START = """
import os, sys, time
import numpy as np
import pario
from pario.errors import *
from mpi4py import MPI
comm = MPI.COMM_WORLD
def say(*words):
    sys.stdout.write(" ".join(map(str, (comm.rank, *words))) + "\\n"); sys.stdout.flush()
def harm():
    say("harm at", time.monotonic())
options = pario.Options(slot_bytes=64 << 10, slots=3, alive_seconds=0.5)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    place = str(tmp_path_factory.mktemp("set") / "x.lmdb")
    with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(2000):
            txn.put(b"%06d" % i, bytes([i % 251]) * 5000)
    return place


def job(code: str, path: str, ranks: int = 3, sheltered: bool = False, env: dict[str, str] | None = None) -> Job:
    argv = ["-c", *([SHELTER] if sheltered else []), START + code, path]
    python_path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
    before = segments()
    done = run_job(ranks, argv, limit_s=LIMIT_S, env={"PYTHONPATH": python_path, **(env or {})})
    assert left_segments(before) == set(), done.output
    return done


def seconds_after_harm(done: Job) -> float:
    return done.ended_at - min(float(at) for at in re.findall(r"\d harm at ([\d.]+)", done.output))


@pytest.mark.parametrize(
    "victim",
    [pytest.param(0, id="the reading rank"), pytest.param(1, id="a plain rank", marks=pytest.mark.full)],
)
def test_a_rank_is_killed_in_mid_epoch(path, victim):
    code = f"""
begin = time.monotonic()
try:
    with pario.Loader(sys.argv[1], 5, comm=comm, recipe="ring", options=options, shuffle="global") as loader:
        while True:
            for batch in loader:
                time.sleep(0.002)
                if comm.rank == {victim} and batch.step == 7:
                    harm()
                    os.kill(os.getpid(), 9)
except RankError as error:  # the first to look names the dead one, the next may hear it from that rank
    say("heard", error)
    raise
"""
    done = job(code, path, sheltered=True)
    assert done.status not in (0, None), done.output
    heard = set(re.findall(rf"(\d) heard .*?is gone \(process \d+\) \[rank {victim}\]", done.output))
    assert heard == {str(r) for r in range(3)} - {str(victim)}, done.output
    assert seconds_after_harm(done) < SOON_S * done.slowness, done.output


def test_one_rank_fails_while_the_others_are_in_their_own_allreduce(path):
    code = """
def decode(value):
    if comm.rank == 1 and decode.calls > 40:
        harm()
        raise RuntimeError("no such picture")
    decode.calls += 1
    return {"n": len(value)}
decode.calls = 0
with pario.Loader(sys.argv[1], 5, decode, comm=comm, recipe="ring", options=options) as loader:
    for batch in loader:
        comm.Allreduce(np.ones(1), np.empty(1))
"""
    done = job(code, path)
    assert done.status not in (0, None), done.output
    assert "no such picture" in done.output
    assert "record " in done.output
    assert seconds_after_harm(done) < SOON_S * done.slowness, done.output


@pytest.mark.full
def test_storage_that_fails_on_the_reading_rank_is_heard_by_all(path, tmp_path):
    """The file shrinks under the reader: a ReadError with path and offset on rank 0, a PeerError elsewhere."""
    copy = tmp_path / "x.lmdb"
    copy.mkdir()
    with open(f"{path}/data.mdb", "rb") as source:
        content = source.read()
    (copy / "data.mdb").write_bytes(content)
    code = """
try:
    with pario.Loader(sys.argv[1], 5, comm=comm, recipe="ring", options=options) as loader:
        for _ in range(1000):
            for batch in loader:
                if batch.step == 20 and comm.rank == 0:
                    os.truncate(sys.argv[1] + "/data.mdb", 1 << 20)
except (ReadError, SnapshotError, PeerError) as error:
    say("heard", type(error).__name__, error)
    raise SystemExit(3)
"""
    done = job(code, str(copy))
    assert done.status == 3, done.output
    assert {r for r, _ in re.findall(r"(\d) heard (\w+)", done.output)} == {"0", "1", "2"}, done.output
    assert done.output.count("data.mdb") >= 3


def test_ranks_that_are_all_alone_are_told_why(path):
    """mpiexec of one MPI, mpi4py of another: every process believes to be alone. Here its variables are made up."""
    code = """
try:
    pario.Loader(sys.argv[1], 5)
except LauncherError as error:
    say(error)
    raise SystemExit(4)
"""
    done = job(code, path, ranks=1, env={"PALS_SIZE": "4", "PALS_RANKID": "2"})
    assert done.status == 4, done.output
    assert "PALS_SIZE=4" in done.output
    assert "alone" in done.output


@pytest.mark.full
def test_a_ring_larger_than_memory_is_refused_on_all_ranks(path):
    code = """
try:
    options = pario.Options(slots=2**18)
    pario.Loader(sys.argv[1], 2000, pario.decode.Raw("u1", (5000,)), comm=comm, recipe="ring", options=options)
except ParioError as error:
    say("refused", error)
    raise SystemExit(5)
"""
    done = job(code, path)
    assert done.status == 5, done.output
    assert len(set(re.findall(r"(\d) refused", done.output))) == 3
    assert "memory is too small" in done.output or "there is no memory for" in done.output


@pytest.mark.full
def test_waiting_ranks_use_no_processor(path):
    """One rank sleeps; the others wait for it in the ring, the next epoch and close()."""
    code = """
with pario.Loader(sys.argv[1], 5, comm=comm, recipe="ring", options=options) as loader:
    for batch in loader:
        pass
    comm.Barrier()
    used, wall = time.process_time(), time.monotonic()
    if comm.rank == 2:
        time.sleep(1.5)
    for batch in loader:
        if comm.rank == 2 and batch.step == 3:
            time.sleep(1.5)
    busy = (time.process_time() - used) / (time.monotonic() - wall)
say("busy", round(busy, 3))
"""
    done = job(code, path)
    assert done.status == 0, done.output
    busy = [float(b) for b in re.findall(r"\d busy ([\d.]+)", done.output)]
    assert len(busy) == 3
    assert max(busy) < 0.25, done.output


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_error_of_the_user_without_a_with_block(path, failing):
    code = f"""
loader = pario.Loader(sys.argv[1], 5, comm=comm, recipe="ring", options=options)
for _ in range(10000):
    for batch in loader:
        time.sleep(0.001)
        if comm.rank == {failing} and batch.step == 9:
            harm()
            raise ValueError("the network has diverged")
"""
    done = job(code, path)
    assert done.status not in (0, None), done.output
    assert "the network has diverged" in done.output
    assert seconds_after_harm(done) < SOON_S * done.slowness, done.output


def test_an_error_of_the_user_while_the_others_close_a_reader(path):
    code = """
reader = pario.Reader(sys.argv[1], comm=comm, recipe="ring", options=options)
comm.Barrier()  # else a rank may hear it while it still opens the reader
if comm.rank == 1:
    raise ValueError("not this one")
try:
    reader.close()
except PeerError as error:
    say("heard", error)
    raise
"""
    done = job(code, path)
    assert done.status not in (0, None), done.output
    assert done.output.count("heard another rank failed: ValueError: not this one") == 2, done.output
