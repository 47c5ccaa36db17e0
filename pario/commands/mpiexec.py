"""Finds the mpiexec for this Python, and checks that it works with the MPI library that mpi4py loads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

#: One write per rank, because the launcher interleaves separate writes.
_PROBE = "import os; from mpi4py import MPI; os.write(1, b'<size %d>' % MPI.COMM_WORLD.size)"


def mpiexec_place() -> str | None:
    """The mpiexec beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def mpiexec_family(mpiexec: str) -> str:
    """ "Open MPI", "MPICH" (and its descendants), or "" if unknown. Starts no job."""
    try:
        done = _ended([mpiexec, "--version"], 20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = done.stdout + done.stderr
    if any(word in said for word in ("Open MPI", "OpenRTE", "PRRTE")):
        return "Open MPI"
    return "MPICH" if any(word in said for word in ("HYDRA", "MPICH", "Intel(R) MPI")) else ""


def find_mpiexec() -> tuple[list[str], str]:
    """(an mpiexec that works with this Python's mpi4py and its options, "") or ([], the reason why there is none)."""
    found = mpiexec_place()
    if found is None:
        return [], "There is no mpiexec beside this Python or on PATH"
    command = [found]
    try:
        if mpiexec_family(found) == "Open MPI":
            # Open MPI refuses more ranks than cores, and its wheel says "Error" about a transport between nodes.
            command += ["--oversubscribe", "--mca", "osc", "^ucx"]
        # Without pario: does this mpiexec belong to the MPI library that mpi4py loads?
        probe = _ended([*command, "-n", "2", sys.executable, "-c", _PROBE], 60)
    except (OSError, subprocess.TimeoutExpired) as e:
        return [], f"{found} does not work ({e})"
    sizes = re.findall(r"<size (\d+)>", probe.stdout)
    if probe.returncode or not sizes:
        lines = [line.strip() for line in probe.stderr.splitlines() if line.strip(" -")]
        # A traceback has its message last, a launcher (one that refuses to run as root, say) first.
        errors = [line for line in lines if "Error" in line] or lines[:1] or [f"exit status {probe.returncode}"]
        return [], f"{found} cannot start mpi4py ({errors[-1]})"
    if sizes != ["2", "2"]:
        return [], f"{found} belongs to another MPI library than the one that mpi4py loads"
    return command, ""


def _ended(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Raises OSError, subprocess.TimeoutExpired."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s)
