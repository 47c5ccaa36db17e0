"""What started this process, and the MPI library that mpi4py loads. Light: neither mpi4py nor MPI is touched by import.

Launchers tell their processes who they are by environment variables. They are looked at for two things: without any of
them no MPI is started, and if they announce several processes of which MPI sees one, the launcher belongs to another
MPI library than mpi4py loads (world.get_world).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, NamedTuple

from pario.errors import LauncherError

__all__ = ["FIT_HINT", "Launcher", "launched_rank", "launcher", "library", "load_mpi", "node_name"]

#: Number of processes.
_SIZES = (
    "PMI_SIZE",  # MPICH, Intel MPI, Slurm's pmi2
    "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "MV2_COMM_WORLD_SIZE",  # MVAPICH
    "PALS_SIZE",  # HPE Cray
    "JSM_NAMESPACE_SIZE",  # IBM jsrun
    "SLURM_STEP_NUM_TASKS",  # srun
)
#: This one's number.
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK")

#: (variable, who sets it), the innermost first: mpiexec inside of a batch job has srun's variables around it
_NAMES = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpiexec"),
    ("PALS_SIZE", "HPE Cray's mpiexec"),
    ("JSM_NAMESPACE_SIZE", "jsrun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpiexec"),
    ("HYDI_CONTROL_FD", "MPICH's mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
    ("PMI_SIZE", "a PMI launcher"),
    ("PMIX_RANK", "a PMIx launcher"),
)

FIT_HINT = (
    "Use the mpiexec of that library (python -m mpi4py --mpi-library tells its place), or with srun the matching "
    "--mpi=pmi2 or --mpi=pmix (docs/mpi.md)"
)


class Launcher(NamedTuple):
    """What the environment tells.

    name : in words; "" without a launcher
    size : number of processes that it announces, 0 if unknown
    where : "NAME=value, ..."; "" without a launcher
    """

    name: str
    size: int
    where: str


def launcher() -> Launcher:
    """What started this process."""
    size, seen = 0, []
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value.isdigit():
            size = max(size, int(value))
            seen.append(f"{name}={value}")
    seen += [f"{name}={os.environ[name]}" for name in _RANKS if os.environ.get(name, "").isdigit()]
    name = next((words for variable, words in _NAMES if variable in os.environ), "a launcher") if seen else ""
    return Launcher(name, size, ", ".join(seen))


def launched_rank() -> int | None:
    """This process's rank as the launcher told it, None without a launcher."""
    for name in (*_RANKS, "SLURM_PROCID"):  # that one last, since it is also set in a batch script itself
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def node_name() -> str:
    """The scheduler's name of this node where it has one, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def load_mpi() -> Any:
    """mpi4py.MPI, imported with the user's mpi4py.rc.

    Raises ImportError or RuntimeError where mpi4py finds no library, and LauncherError where MPI_Init would end this
    process without a word to Python: an MPICH that was built without PMIx does so below a launcher that speaks PMIx
    only (Open MPI's mpiexec, srun --mpi=pmix). Hence such a process looks at the library before MPI is started.
    """
    found = launcher()
    variables = os.environ
    pmix_only = "PMIX_RANK" in variables and not {"PMI_RANK", "PMI_FD", "PMI_PORT"} & set(variables)
    if found.size > 1 and pmix_only and "mpi4py.MPI" not in sys.modules:
        MPI, start = _load_unstarted()
        if start is not None:
            # The names of configure's options are the only thing that a library tells about its PMI before it starts.
            about = MPI.Get_library_version()
            if MPI.get_vendor()[0] == "MPICH" and "MPICH configure:" in about and "pmix" not in about.lower():
                raise LauncherError(
                    f"{found.name} started {found.size} processes ({found.where}) and speaks PMIx, but mpi4py loaded "
                    f"{_vendor(MPI)}, which was built without PMIx: the launcher belongs to another MPI",
                    hint=FIT_HINT,
                )
            start()
    from mpi4py import MPI

    return MPI


def library() -> tuple[str, str]:
    """(vendor and version of the MPI library that mpi4py loads, ""), or ("", why it loads none). Starts no MPI."""
    try:
        MPI, _ = _load_unstarted()
    except (ImportError, RuntimeError) as failure:
        return "", str(failure)
    return _vendor(MPI), ""


def _vendor(MPI: Any) -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _load_unstarted() -> tuple[Any, Any]:
    """(mpi4py.MPI, the function that starts MPI as the import would have; None where that is done or not wanted)."""
    import mpi4py

    rc = mpi4py.rc
    wanted, finalize = rc.initialize, rc.finalize
    if "mpi4py.MPI" in sys.modules or not wanted or "MPI4PY_RC_INITIALIZE" in os.environ:
        from mpi4py import MPI

        return MPI, None
    # mpi4py reads both during the import: MPI is to end with Python, as if the import had started it.
    rc.initialize, rc.finalize = False, finalize is not False
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = wanted, finalize

    def start() -> None:
        if rc.threads:
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
        else:
            MPI.Init()

    return MPI, start
