"""Scripts that end while other ranks still count on them: sys.exit, or just the last line, without a `with` block.

Each case is a job of its own, since it ends. All jobs run at once, and each test looks at how its job ended: most of
their time they wait.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import lmdb
import pytest
from launch import Job, run_job

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: What measurements/failures.md promises, counted from the moment at which the first rank leaves.
PROMISED_S = 10.0

LIMIT_S = 100

#: starts ranks that find each other without MPI
NO_MPI = os.path.join(ROOT, "tests", "start_ranks.py")

START = """
import os, sys, time
from mpi4py import MPI
import pario.comm.farewell as farewell
comm = MPI.COMM_WORLD
last = comm.rank == comm.size - 1
def say(*words):
    os.write(1, (" ".join(map(str, (comm.rank, *words))) + "\\n").encode())  # one piece, whoever else writes
def leaves():
    say("leaves at", time.monotonic())
"""

#: A world that is used by something that takes no part: what is tested is how the ranks meet.
WORLD = (
    START
    + """
from pario.comm.world import get_world
class User:
    def _abandon(self, error): self.world.abandon(error)
    def _part(self): pass
def use():
    user = User()
    user.world = get_world(comm)
    farewell.guard(user.world, user)
    return user
user = use()
world = user.world
"""
)

#: Records of 5,000 bytes through the node's ring, as from a parallel file system: rank 0 reads for its node.
LOADER = (
    START
    + """
import gc, pario
options = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=64 << 10)
def make():
    return pario.Loader(sys.argv[1], 5, comm=comm, recipe="ring", options=options, shuffle="global")
"""
)

JOBS = {
    "exit 1, others in a collective of pario": (
        3,
        WORLD
        + """
if last:
    leaves(); sys.exit(1)
world.allgather("waits")
""",
    ),
    "exit with words, others in a collective of their own": (
        2,
        WORLD
        + """
if last:
    leaves(); sys.exit("no more")
comm.Barrier()
""",
    ),
    "exit 3 in a with block, others in a collective of their own": (
        2,
        WORLD
        + """
with world:
    try:
        if last:
            leaves(); sys.exit(3)
        comm.Barrier()
    except BaseException as error:
        world.abandon(error)
        raise
""",
    ),
    "exit 0, others in a collective of pario": (
        3,
        WORLD
        + """
if last:
    leaves(); sys.exit(0)
world.allgather("waits")
""",
    ),
    # The others end later than any error would let them; two worlds, freed in one order by some and left by the rest.
    "all ends in order": (
        3,
        WORLD
        + """
farewell.FAREWELL_S = 0.2
other = use()
try:
    sys.exit(1)
except SystemExit:
    world.barrier()
if last:
    say("end"); sys.exit(0)
if comm.rank == 1:
    time.sleep(1.0)
    other.world.close(); world.close(); say("freed")
else:
    say("end")
""",
    ),
    "exit 1 of a loop, others in a batch": (
        3,
        LOADER
        + """
def train():
    loader = make()
    while True:
        for batch in loader:
            if last and batch.step == 7:
                leaves(); sys.exit(1)
            time.sleep(0.002)
train()
""",
    ),
    # Rank 0, which reads for both, drops its loader in mid-epoch and comes to the end of its script.
    "the reading rank leaves early": (
        2,
        LOADER
        + """
def train():
    taken = []
    for batch in make():
        taken += batch.ids.tolist()
        if comm.rank == 0 and batch.step == 7:
            break
        time.sleep(0.002)
    return taken
taken = train()
gc.collect()
say("took", len(set(taken)))
""",
    ),
}


class Ended(NamedTuple):
    """at : time of the machine's one monotonic clock"""

    job: Job
    at: float


@pytest.fixture(scope="module", params=[None, pytest.param(NO_MPI, marks=pytest.mark.full)], ids=["MPI", "without MPI"])
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    path = str(tmp_path_factory.mktemp("exit") / "x.lmdb")
    with lmdb.open(path, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(1000):
            txn.put(b"%06d" % i, bytes([i % 251]) * 5000)
    env = {"PYTHONPATH": os.pathsep.join([ROOT, os.path.join(ROOT, "tests"), os.environ.get("PYTHONPATH", "")])}
    env["MPIR_CVAR_NUM_CLIQUES"] = "2"  # several nodes: else MPICH does not use UCX

    def run(ranks: int, code: str) -> Ended:
        code = code if request.param is None else f"import no_mpi{code}"
        job = run_job(ranks, ["-c", code, path], limit_s=LIMIT_S, env=env, launcher=request.param)
        return Ended(job, time.monotonic())

    with ThreadPoolExecutor(len(JOBS)) as pool:
        ends = {name: pool.submit(run, *job) for name, job in JOBS.items()}
        return {name: end.result() for name, end in ends.items()}


def check_soon(ended: Ended) -> str:
    """The job has failed, soon after its first rank left; what it printed."""
    job = ended.job
    assert job.status not in (0, None), job
    (left,) = re.findall(r"leaves at ([\d.]+)", job.output)
    assert ended.at - float(left) < PROMISED_S * job.slowness, job
    return job.output


@pytest.mark.parametrize("name", ["exit 1, others in a collective of pario", "exit 1 of a loop, others in a batch"])
def test_others_that_wait_in_pario_raise(jobs: dict[str, Ended], name: str) -> None:
    output = check_soon(jobs[name])
    assert output.count("PeerError: another rank failed: SystemExit: 1 [rank 2]") == 2, output
    assert "MPI_Abort" not in output


@pytest.mark.parametrize(
    "name",
    [
        "exit with words, others in a collective of their own",
        "exit 3 in a with block, others in a collective of their own",
    ],
)
def test_others_that_wait_elsewhere_are_ended(jobs: dict[str, Ended], name: str) -> None:
    """Without MPI they are left to the launcher, and to whatever they wait in."""
    output = check_soon(jobs[name])
    assert ("MPI_Abort ends the whole job" in output) != ("this one still waits for it [rank 1]" in output)


def test_the_library_below_mpi_says_nothing_of_messages_that_nobody_took(jobs: dict[str, Ended]) -> None:
    assert {name: ended.job.output for name, ended in jobs.items() if "UCX  WARN" in ended.job.output} == {}


def test_an_exit_in_order_fails_those_who_wait(jobs: dict[str, Ended]) -> None:
    output = check_soon(jobs["exit 0, others in a collective of pario"])
    assert len(re.findall(r"PeerError: .* is at its end .*, without close\(\) \[rank 2\]", output)) == 2, output
    assert "MPI_Abort" not in output


def test_an_end_in_order_is_no_failure(jobs: dict[str, Ended]) -> None:
    """Also a second after the others, where an error would have ended the job, and after a sys.exit that was caught."""
    job = jobs["all ends in order"].job
    assert job.status == 0, job
    assert sorted(re.findall(r"\d end|\d freed", job.output)) == ["0 end", "1 freed", "2 end"], job
    assert "Error" not in job.output


def test_who_leaves_early_still_reads_for_the_others(jobs: dict[str, Ended]) -> None:
    """1,000 records in 100 steps of 2 x 5."""
    job = jobs["the reading rank leaves early"].job
    assert job.status == 0, job
    assert sorted(re.findall(r"\d took \d+", job.output)) == ["0 took 40", "1 took 500"], job
