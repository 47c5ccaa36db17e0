"""How whole jobs end: killed ranks, errors that stay uncaught, and what they leave in /dev/shm."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from launch import Job, kill_tree, left_segments, run_job, segments, tree

pytestmark = pytest.mark.side_by_side

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: Jobs of three interpreters start in a second or two and their farewell takes 4 s; three jobs of others may run beside
#: them. A hang must not keep a person for long.
LIMIT_S = 60

START = """
import os, sys, time
from mpi4py import MPI
from pario.comm.slots import Slots
from pario.comm.window import Ring
from pario.comm.world import get_world
from pario.errors import *
world = get_world(MPI.COMM_WORLD)
world.alive_seconds = 0.5
ring, alarm = Ring(world, 4, alive_seconds=0.5), world.alarm
slots = Slots(world, 4, 1 << 20, 4, 4)
slots.allocate()
slots.data[:] = 1
def say(*words):
    sys.stdout.write(" ".join(map(str, (world.rank, *words))) + "\\n"); sys.stdout.flush()
world.barrier()
"""


#: A process between the launcher and the rank, so that the launcher does not see the rank die: it would kill the others
#: at once (MPICH's -disable-auto-cleanup prevents that in some runs only), and nobody could say what they noticed.
SHELTER = """
import subprocess, sys, time
status = subprocess.call([sys.executable, "-c", sys.argv[1]], close_fds=False)  # the launcher's connection stays open
time.sleep(10 if status == -9 else 0)
sys.exit(status % 256)
"""


def job(code: str, ranks: int = 3, sheltered: bool = False, env: dict[str, str] | None = None, **more) -> Job:
    """However it ends, it leaves nothing in /dev/shm; MPICH's own (removed by launch.sweep) is not ours."""
    path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
    argv = ["-c", SHELTER, START + code] if sheltered else ["-c", START + code]
    before = segments()
    done = run_job(ranks, argv, limit_s=LIMIT_S, env={"PYTHONPATH": path, **(env or {})}, **more)
    assert left_segments(before) == set(), done.output
    return done


def test_normal_end() -> None:
    done = job("ring.close(); alarm.close(); world.close(); say('end')")
    assert done.status == 0, done.output
    assert sorted(done.output.split("\n"))[1:] == ["0 end", "1 end", "2 end"]


def test_end_without_free() -> None:
    done = job("say('end')")
    assert done.status == 0, done.output
    assert done.output.count("end") == 3
    assert "WARN" not in done.output  # an MPI library that found the alarm's receive still open


@pytest.mark.parametrize(
    "what", ["ring.wait_group(0, alarm.check)", pytest.param("ring.wait_done(1, alarm.check)", marks=pytest.mark.full)]
)
def test_a_killed_rank(what: str) -> None:
    """kill -9 of one rank: the others of its node name it within seconds, and the job ends."""
    code = f"""
if world.rank == 1:
    say("pid", os.getpid())
    os.kill(os.getpid(), 9)
begin = time.monotonic()
try:
    {what}
except DeadRankError as error:
    say("heard within", round(time.monotonic() - begin, 1), error)
    raise
"""
    done = job(code, sheltered=True)
    assert done.status not in (0, None), done.output
    # No lines are counted on: those of several ranks may run into each other on their way through the launcher.
    (pid,) = re.findall(r"1 pid (\d+)", done.output)
    heard = re.findall(r"(\d) heard within ([\d.]+) .*?process (\d+)\) \[rank 1\]", done.output)
    assert {rank for rank, _, _ in heard} == {"0", "2"}, done.output
    for _, seconds, its_pid in heard:
        assert float(seconds) < 5
        assert its_pid == pid


def test_a_killed_rank_is_heard_of_on_other_nodes() -> None:
    """Two nodes (MPICH's cliques: even and odd ranks): rank 3 dies, rank 1 notices and raises the alarm."""
    code = """
if world.nodes != 2:
    say("one node only"); sys.exit(0)
if world.rank == 3:
    os.kill(os.getpid(), 9)
try:
    ring.wait_group(0, alarm.check)
except DeadRankError as error:
    alarm.raise_all(error)
    say("neighbour", error)
    raise
except PeerError as error:
    say("far", error)
    raise
"""
    done = job(code, ranks=4, sheltered=True, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    if "one node only" in done.output:
        pytest.skip("this MPI shows one node only")
    assert done.status not in (0, None), done.output
    assert re.findall(r"(\d) neighbour ", done.output) == ["1"], done.output
    far = re.findall(r"(\d) far another rank failed: DeadRankError: another rank of this node is gone", done.output)
    assert sorted(far) == ["0", "2"], done.output


def test_a_killed_rank_that_the_launcher_sees() -> None:
    """What happens to a user: launcher and ranks notice at the same time, and the job ends, whoever is first."""
    done = job("if world.rank == 1: os.kill(os.getpid(), 9)\nring.wait_group(0, alarm.check)")
    assert done.status not in (0, None), done.output
    assert done.seconds < 30 * done.slowness


@pytest.mark.full
def test_a_killed_rank_whose_loss_is_swallowed() -> None:
    """MPI_Finalize would wait for the dead rank for ever."""
    code = """
if world.rank == 1:
    os.kill(os.getpid(), 9)
try:
    ring.wait_group(0)
except DeadRankError:
    say("swallowed")
"""
    done = job(code, sheltered=True)
    assert done.status not in (0, None), done.output
    assert done.output.count("swallowed") == 2
    assert done.seconds < 30 * done.slowness


def test_one_fails_while_the_others_wait_in_pario() -> None:
    """All ranks end with a traceback of their own, and without MPI_Abort."""
    code = """
if world.rank == 1:
    error = CorruptedError("bad page", page=7)
    alarm.raise_all(error)
    raise error
ring.wait_group(0, alarm.check)
"""
    done = job(code)
    assert done.status == 1, done.output
    assert done.output.count("CorruptedError: bad page [page 7]") == 3, done.output
    assert done.output.count("another rank failed: CorruptedError: bad page") == 2, done.output
    assert "Abort" not in done.output
    assert "WARN" not in done.output


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param("MPI.COMM_WORLD.Allreduce(np.zeros(3), out)", marks=pytest.mark.full),
        pytest.param("MPI.COMM_WORLD.recv(source=1)", marks=pytest.mark.full),
        "time.sleep(600)",
    ],
)
def test_one_fails_while_the_others_are_in_the_users_own_code(theirs: str) -> None:
    """pario never gets to look there, so the job is ended; the traceback is printed first."""
    code = f"""
import numpy as np
out = np.zeros(3)
if world.rank == 1:
    try:
        error = CorruptedError("bad page", page=7)
        alarm.raise_all(error)
        raise error
    except CorruptedError as cause:
        raise RuntimeError("the user's own words") from cause
{theirs}
"""
    done = job(code)
    assert done.status not in (0, None), done.output
    assert "CorruptedError: bad page [page 7]" in done.output, done.output
    assert "RuntimeError: the user's own words" in done.output, done.output
    assert "MPI_Abort ends the whole job" in done.output, done.output
    assert done.seconds < 30 * done.slowness


@pytest.mark.full
def test_an_agreed_error_that_one_rank_swallows() -> None:
    """Rank 0 goes on alone into a collective that the others, ended by their PeerError, never join."""
    code = """
try:
    world.agree(ValueError("only here") if world.rank == 0 else None, "opening")
except ValueError:
    MPI.COMM_WORLD.Barrier()
"""
    done = job(code)
    assert done.status not in (0, None), done.output
    assert "another rank failed while opening: ValueError: only here" in done.output
    assert done.seconds < 30 * done.slowness


def test_an_agreed_error_ends_the_job_quietly() -> None:
    done = job("world.agree(ValueError('here') if world.rank == 0 else None, 'opening')")
    assert done.status == 1, done.output
    assert "Abort" not in done.output
    assert done.output.count("Traceback") == 3


def test_an_error_of_the_user_is_left_alone() -> None:
    """Only errors that pario spread end the job by the farewell; hooks of others are still called."""
    code = """
def hook(kind, error, traceback): say("hook", error)
sys.excepthook = hook
try:
    world.agree(ValueError("here") if world.rank == 0 else None, "opening")
except Exception:
    pass
ring.close(); alarm.close(); world.close()
raise KeyError("mine")
"""
    done = job(code)
    assert done.output.count("hook 'mine'") == 3, done.output
    assert "Abort" not in done.output


def test_the_whole_job_is_killed() -> None:
    """kill -9 of everything, mid-wait: the windows are gone with the processes (MPICH unlinks them at once)."""
    seen = []

    def kill(pid: int) -> None:
        end = time.monotonic() + LIMIT_S / 2
        while len(tree(pid)) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(2)  # they wait by now
        seen.extend(tree(pid))
        kill_tree(pid)

    done = job("ring.wait_group(0, alarm.check)", meanwhile=kill)
    assert len(seen) >= 4
    assert done.status == -signal.SIGKILL
    end = time.monotonic() + 10
    while (left := [pid for pid in seen if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_ctrl_c() -> None:
    """SIGINT at the launcher, as a terminal sends it: everybody ends."""

    def interrupt(pid: int) -> None:
        time.sleep(4)
        os.kill(pid, signal.SIGINT)

    done = job("ring.wait_group(0, alarm.check)", meanwhile=interrupt)
    assert done.status not in (0, None), done.output
    assert done.seconds < 30 * done.slowness
