"""Finds out what started this process, and which MPI library mpi4py loads. Importing this module imports neither.

Launchers describe a job to its processes in environment variables. pario uses them for two decisions: without any, it
starts no MPI; and if they announce several processes while MPI sees one, the launcher belongs to another MPI library
than the one that mpi4py loads (world.get_world).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, NamedTuple

from pario.errors import LauncherError

__all__ = [
    "FIT_HINT",
    "Launcher",
    "interface_address",
    "job_end",
    "job_name",
    "launched_rank",
    "launcher",
    "library",
    "load_mpi",
    "node_name",
    "own_addresses",
    "rank_and_size",
    "started_by_torch",
    "torch_ranks",
]

#: Variables with a scheduler's number of the job, with that of the step in it, and with the job's name.
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "COBALT_JOBID", "JOB_ID")
_STEPS = ("SLURM_STEP_ID", "PALS_APID", "PMIX_NAMESPACE")
#: When the scheduler will end the job, in seconds since 1970. (Slurm has it from 22.05 on.)
_END = "SLURM_JOB_END_TIME"
_JOB_NAMES = ("SLURM_JOB_NAME", "PBS_JOBNAME", "LSB_JOBNAME", "JOB_NAME")

#: Variables with the number of processes.
_SIZES = (
    "PMI_SIZE",  # MPICH, Intel MPI, Slurm's pmi2
    "OMPI_COMM_WORLD_SIZE",  # Open MPI
    "MV2_COMM_WORLD_SIZE",  # MVAPICH
    "PALS_SIZE",  # HPE Cray
    "JSM_NAMESPACE_SIZE",  # IBM jsrun
    "SLURM_STEP_NUM_TASKS",  # srun
)
#: Variables with the rank of this process.
_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "JSM_NAMESPACE_RANK")

#: Variables by which a library of the MPICH family finds its launcher.
_PMI = {"PMI_RANK", "PMI_FD", "PMI_PORT"}

#: (variable, who sets it), innermost launcher first: mpiexec inside a batch job inherits the variables of srun
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

_SIOCGIFADDR = 0x8915  # linux/sockios.h

FIT_HINT = (
    "Use the mpiexec of that library (python -m mpi4py --mpi-library tells its place), or with srun the matching "
    "--mpi=pmi2 or --mpi=pmix (docs/mpi.md)"
)


class Launcher(NamedTuple):
    """The launcher, as the environment describes it.

    name : in words; "" without a launcher
    size : number of processes that it announces; 0 if unknown
    where : the variables that say so, "NAME=value, ..."; "" without a launcher
    """

    name: str
    size: int
    where: str


def launcher() -> Launcher:
    """Find out what started this process."""
    size, seen = 0, []
    for name in _SIZES:
        value = os.environ.get(name, "")
        if value.isdigit():
            size = max(size, int(value))
            seen.append(f"{name}={value}")
    seen += [f"{name}={os.environ[name]}" for name in _RANKS if os.environ.get(name, "").isdigit()]
    name = next((words for variable, words in _NAMES if variable in os.environ), "a launcher") if seen else ""
    return Launcher(name, size, ", ".join(seen))


def torch_ranks() -> str:
    """The variables by which torchrun, accelerate or deepspeed announce more than one process; "" if there are none.

    The processes that they start know nothing of MPI.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if not size.isdigit() or int(size) <= 1:
        return ""
    return ", ".join(f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", "RANK") if name in os.environ)


def started_by_torch() -> bool:
    """Whether torchrun is the parent of this process. An MPI launcher's variables then describe torchrun itself."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int | None:
    """The rank that the launcher gave this process; None without a launcher."""
    for name in (*_RANKS, "SLURM_PROCID"):  # last: it is also set in the batch script itself
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def rank_and_size() -> tuple[int, int]:
    """This process's rank in its job, and the job's processes, as the launcher says; (0, 1) without one."""
    rank = launched_rank() or 0
    return rank, max(rank + 1, launcher().size)


def node_name() -> str:
    """The scheduler's name for this node, if it has one; else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_end() -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None if it does not say so."""
    try:
        return float(os.environ[_END])
    except (KeyError, ValueError):
        return None


def job_name() -> tuple[str, str]:
    """(what tells this job apart from others of its user, its name): the same on all its ranks.

    Both as PARIO_JOB says, else as the scheduler does: its job and the step in it. Without a scheduler the processes of
    one launcher on one node are a job, and every other process is one for itself.
    """
    given = os.environ.get("PARIO_JOB", "")
    job = next((os.environ[name] for name in _JOBS if os.environ.get(name)), "")
    name = given or next((os.environ[name] for name in _JOB_NAMES if os.environ.get(name)), "") or "pario"
    if given:
        return f"{given} {job}".strip(), name
    if job:
        step = next((os.environ[name] for name in _STEPS if os.environ.get(name)), "")
        return f"{job}.{step}" if step else job, name
    number = os.getppid() if launcher().size > 1 else os.getpid()
    return f"{node_name()}.{number}", name


def own_addresses() -> list[str]:
    """This machine's IPv4 address towards the other nodes: that of the network interface PARIO_INTERFACE (ib0, hsn0),
    else the one that the system would use. Sends no packet and looks up no name; empty without a network."""
    name = os.environ.get("PARIO_INTERFACE", "")
    if name:
        found = interface_address(name)
        return [found] if found else []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation: only the route matters
        return [probe.getsockname()[0]]
    return []


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface; "" if there is no such interface, or if it has none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def load_mpi() -> Any:
    """mpi4py.MPI, imported with the user's mpi4py.rc.

    Raises ImportError or RuntimeError if mpi4py finds no library, and LauncherError if MPI_Init would end this process
    without returning to Python. An MPICH that was built without PMIx does that under a launcher that speaks only PMIx
    (Open MPI's mpiexec, srun --mpi=pmix); an Open MPI without its runtime does it under a launcher that does not speak
    PMIx (MPICH's mpiexec, srun --mpi=none). In these cases the library is examined before MPI is started.
    """
    found = launcher()
    pmi, pmix = bool(_PMI & set(os.environ)), "PMIX_RANK" in os.environ
    # Some builds of Open MPI know Slurm's PMI. We do not know what launchers other than these speak.
    plain = not pmix and ("HYDI_CONTROL_FD" in os.environ or (found.name == "srun" and not pmi))
    if found.size > 1 and ((pmix and not pmi) or plain) and "mpi4py.MPI" not in sys.modules:
        MPI, start = _load_unstarted()
        if start is not None:
            # Before it starts, a library reveals its PMI only through the names of its configure options.
            about = MPI.Get_library_version()
            vendor, why = MPI.get_vendor()[0], ""
            if plain and vendor == "Open MPI":
                why = "and without PMIx every one of them is alone"
            elif pmix and vendor == "MPICH" and "MPICH configure:" in about and "pmix" not in about.lower():
                why = "which was built without PMIx, and the launcher speaks nothing else"
            if why:
                raise LauncherError(
                    f"{found.name} started {found.size} processes ({found.where}), but mpi4py loaded {_vendor(MPI)}, "
                    f"{why}: the launcher belongs to another MPI",
                    hint=FIT_HINT,
                )
            start()
    from mpi4py import MPI

    return MPI


def library() -> tuple[str, str]:
    """(vendor and version of the MPI library that mpi4py loads, ""), or ("", why it loads none). Does not start MPI."""
    try:
        MPI, _ = _load_unstarted()
    except (ImportError, RuntimeError) as failure:
        return "", str(failure)
    return _vendor(MPI), ""


def _vendor(MPI: Any) -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _load_unstarted() -> tuple[Any, Any]:
    """(mpi4py.MPI, a function that starts MPI as the import would have; None if it is started, or must not be)."""
    import mpi4py

    rc = mpi4py.rc
    wanted, finalize = rc.initialize, rc.finalize
    if "mpi4py.MPI" in sys.modules or not wanted or "MPI4PY_RC_INITIALIZE" in os.environ:
        from mpi4py import MPI

        return MPI, None
    # mpi4py reads both during the import. MPI must be finalized at exit, as if the import had started it.
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
