"""Jobs of several MPI ranks for the tests, each under a time limit and with nothing left behind.

The launcher stands beside the interpreter when the MPI library came as a wheel (pip install ".[mpich]").
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from pace import Pace

#: More ranks than cores must not keep the processor from the rank that they wait for.
POLITE = {
    # MPICH polls, and gives the processor away every 1000 polls unless told otherwise.
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    # Open MPI: its own name of the same.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Open MPI's wheel says "Error" about an unused transport whenever a window is made (docs/clusters.md).
    "OMPI_MCA_osc": "^ucx",
    # Numerical libraries: one thread per rank.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


#: launchers of the jobs that run now, in whichever thread
_running: set[int] = set()


@dataclass(frozen=True)
class Job:
    """How a job ended: exit status (None: killed at its time limit), standard output and error together, seconds, and
    when, on the machine's one monotonic clock; and how slow the machine was meanwhile, 1 or more (pace.py): a job
    that is promised to end within some seconds has that many times as long."""

    status: int | None
    output: str
    seconds: float
    ended_at: float
    slowness: float = 1.0


def mpiexec(python: str = sys.executable) -> str:
    """The launcher that belongs to the interpreter's environment, else the one on PATH."""
    beside = os.path.join(os.path.dirname(python), "mpiexec")
    found = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise AssertionError(
            "no mpiexec beside this interpreter and none on PATH, so the MPI tests cannot run; "
            'one command installs an MPI library with its launcher: pip install ".[mpich]"'
        )
    return found


def is_open_mpi(launcher: str) -> bool:
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return "Open MPI" in said.stdout + said.stderr or "OpenRTE" in said.stdout + said.stderr


def run_job(
    ranks: int,
    argv: list[str],
    *,
    limit_s: float,
    env: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
    meanwhile: Callable[[int], None] | None = None,
    python: str = sys.executable,
    launcher: str | None = None,
    prefix: tuple[str, ...] = (),
) -> Job:
    """`mpiexec -n ranks python argv...`; `meanwhile(pid of mpiexec)` runs beside it.

    limit_s : after so many seconds, more on a slow machine (pace.py), the job is killed
    prefix : the command that starts mpiexec, by exec
    """
    launcher = launcher or mpiexec(python)
    command = [launcher, *options, "-n", str(ranks)]
    if is_open_mpi(launcher):
        command[1:1] = ["--allow-run-as-root", "--oversubscribe"]
    # A job inside a job (pytest under srun or mpiexec) must not take the outer launcher's variables for its own.
    outer = ("PMI_", "PMIX_", "OMPI_", "PALS_", "MPI_LOCAL", "HYDRA_", "HYDI_", "SLURM_")
    own = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    before = segments()
    pace, start = Pace(), time.monotonic()
    # A file takes the output: a pipe stays open as long as any forgotten process holds it.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [*prefix, *command, python, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**own, **POLITE, **(env or {})},
            start_new_session=True,
        )
        _running.add(process.pid)
        try:
            if meanwhile is not None:
                meanwhile(process.pid)
            status = wait(process, start, limit_s, pace)
        finally:
            ended_at = time.monotonic()
            kill_tree(process.pid)
            process.wait()
            _running.discard(process.pid)
            sweep(before)
        output.seek(0)
        pace.sample()
        return Job(status, output.read(), ended_at - start, ended_at, pace.slowness)


def wait(process: subprocess.Popen, start: float, limit_s: float, pace: Pace) -> int | None:
    """The exit status; None if it has not ended `limit_s` seconds of a fast machine after `start`."""
    while True:
        try:
            return process.wait(max(0.1, start + limit_s * pace.slowness - time.monotonic()))
        except subprocess.TimeoutExpired:
            pace.sample()
            if time.monotonic() > start + limit_s * pace.slowness:
                return None


def tree(pid: int) -> list[int]:
    """A process and all its descendants. MPICH's launcher gives every rank a session of its own, so that killing a
    process group reaches none of them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and all its descendants; those that are gone already are no error."""
    for victim in tree(pid):
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue


def kill_all() -> None:
    """End every job that still runs, as after Ctrl-C in a test run."""
    for pid in list(_running):
        kill_tree(pid)


def segments() -> set[str]:
    """Names of the files in /dev/shm: segments are files, a directory there is somebody's temporary one."""
    try:
        with os.scandir("/dev/shm") as entries:
            return {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    except OSError:
        return set()


def unmapped(names: set[str]) -> set[str]:
    """Those of these segments that no living process maps: nobody's, if their job has ended."""
    for pid in filter(str.isdigit, os.listdir("/proc")) if names else ():
        try:
            with open(f"/proc/{pid}/maps") as file:
                maps = file.read()
        except OSError:
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in maps}
    return names


def left_segments(before: set[str], seconds: float = 5.0) -> set[str]:
    """What is in /dev/shm, and stays there, that was not there before and that nobody uses.

    Not counted: what MPI libraries leave of their own when they are killed, and what belongs to jobs beside this one.
    """
    end = time.monotonic() + seconds
    theirs = ("mpich_shm_", "ucx_shm", "vader", "sm_", "sem.mp-")
    while left := unmapped({name for name in segments() - before if not name.startswith(theirs)}):
        if time.monotonic() > end:
            return left
        time.sleep(0.1)
    return set()


def sweep(before: set[str]) -> None:
    """Remove what MPICH and Open MPI themselves leave in /dev/shm when their processes are killed (message queues, some
    MiB per rank), so that a test run leaves nothing; only files that came since `before` and that no process maps."""
    for name in unmapped({name for name in segments() - before if name.startswith(("mpich_shm_", "sm_segment."))}):
        path = os.path.join("/dev/shm", name)
        try:
            if time.time() - os.stat(path).st_ctime > 1:  # a younger one may be mapped in a moment, by another job
                os.unlink(path)
        except FileNotFoundError:
            continue
