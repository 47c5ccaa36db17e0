"""Finds out what started this process, and which MPI library mpi4py loads. Importing this module imports neither.

Launchers describe a job to its processes in environment variables. pario uses them for two decisions: without any, it
starts no MPI; and if they announce several processes while MPI sees one, the launcher belongs to another MPI library
than the one that mpi4py loads (world.get_world).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pario.errors import LauncherError

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

#: What tells one start of torchrun's processes from the next.
_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")

#: Ports at which ranks without MPI meet if nobody names one: below those that systems lend.
_PORTS = 20_000, 30_000

_SIOCGIFADDR = 0x8915  # linux/sockios.h

FIT_HINT = (
    "Use the mpiexec of that library (python -m mpi4py --mpi-library tells its place), or with srun the matching "
    "--mpi=pmi2 or --mpi=pmix (docs/clusters.md)"
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


def inherited() -> str:
    """Why this process is no rank, although it has a launcher's variables: a rank, or its shell, started it. "" if
    nothing says so. MPI would end it, or speak in the rank's name."""
    found, env = launcher(), os.environ
    job = announced()
    served = any(name.startswith("PMIX_SERVER_URI") for name in env)
    fd = "" if served else env.get("PMI_FD", "")
    pid, line = os.getppid(), _proc("self", f"fd/{fd}")
    pty = any(name.startswith("SLURM_PTY_") for name in env) and not _proc(pid, "comm").startswith("slurmstepd")
    if pty and found.name == "srun" and found.size > 1 and not started_by_torch():
        return "a shell of `srun --pty` started it"
    if job is None and "PMIX_RANK" in env and not served and not _PMI & set(env):
        return "its variables name no server of PMIx (PMIX_SERVER_URI)"
    if job is None and fd and not line.startswith("socket:"):
        return f"PMI_FD={fd} is not open here: a rank started it"
    torch = job is not None and job.names[0] == "RANK"
    names = ("RANK", "WORLD_SIZE") if torch else (*_RANKS, *_STEPS, *_JOBS, "SLURM_PROCID")
    mine = {f"{name}={env[name]}" for name in names if name in env}
    # A launcher between a rank and this process would have given it a line, or the name of a step, of its own.
    while mine and pid > 1 and mine <= set(_proc(pid, "environ").split("\0")):
        same_line = "libmpi" in _proc(pid, "maps") and (not fd or _proc(pid, f"fd/{fd}") == line)
        if same_line or (job is not None and (_has_met(pid) or _is_worker())):
            return f"a rank, process {pid}, started it"
        pid = int(_proc(pid, "stat").rpartition(")")[2].split()[1])
    return ""


def _has_met(pid: int) -> bool:
    """Whether a process is a rank that has met others through pario (alive.py)."""
    with suppress(OSError):
        return any("pario-whereabouts" in _proc(pid, f"fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
    return False


def _is_worker() -> bool:
    """Whether a process of Python's multiprocessing."""
    loaded = sys.modules.get("multiprocessing.process")
    return loaded is not None and loaded.parent_process() is not None


def _proc(pid: int | str, name: str) -> str:
    """The text of a file in /proc, or where a link leads; "" if it cannot be read."""
    with suppress(OSError):
        path = f"/proc/{pid}/{name}"
        return os.readlink(path) if os.path.islink(path) else Path(path).read_text(errors="replace")
    return ""


def forget_launcher() -> None:
    """Take the launcher's variables from this process, which has only inherited them and works alone."""
    for name in (*_SIZES, *_RANKS, *_PMI, "SLURM_PROCID", "WORLD_SIZE"):
        os.environ.pop(name, None)


def hush_ucx() -> None:
    """UCX, below MPI, warns at the end of messages that nobody took. After an error these are no news: a rank waited
    for another one that did not come, and MPI takes no collective back. Whoever sets UCX_LOG_LEVEL sees them."""
    if "UCX_LOG_LEVEL" in os.environ:
        return
    import ctypes  # few scripts come here

    with suppress(OSError, AttributeError):  # no /proc; another UCX
        with open("/proc/self/maps") as file:
            found = next((line for line in file if "/libucs.so" in line), "")
        if found:
            ctypes.CDLL(found[found.index("/") :].rstrip("\n")).ucs_global_opts_set_value(b"LOG_LEVEL", b"error")


def torch_ranks() -> str:
    """The variables by which torchrun, accelerate or deepspeed announce more than one process; "" if there are none."""
    size = os.environ.get("WORLD_SIZE", "")
    if not size.isdigit() or int(size) <= 1:
        return ""
    return ", ".join(f"{name}={os.environ[name]}" for name in ("WORLD_SIZE", "RANK") if name in os.environ)


def started_by_torch() -> bool:
    """Whether torchrun is the parent of this process. An MPI launcher's variables then describe torchrun itself."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Announced(NamedTuple):
    """Several processes that no launcher of MPI started, as the environment describes them: they can meet without MPI.

    rank, size : this process, and their number; names : the variables that say so
    name : tells them apart from others of their user; the same on all of them
    near : all are on one machine
    host, port : where those on other machines find the first; "", 0: it says so in a file in `folder`
    secret, folder : the file with the job's secret; "": the first draws one, and writes it into a file in that folder,
        which the machines share
    node : what PARIO_NODE or Slurm calls this process's node; "": the machine
    """

    rank: int
    size: int
    names: tuple[str, ...]
    name: str
    near: bool
    host: str
    port: int
    secret: str
    folder: str
    node: str

    @property
    def where(self) -> str:
        """The variables that say so, "NAME=value, ..."."""
        return ", ".join(f"{name}={os.environ[name]}" for name in self.names)


def announced() -> Announced | None:
    """The job of torchrun, of srun without a PMI, or of PARIO_RENDEZVOUS; None if there is none, or it has one process,
    or a launcher of MPI started it. Raises LauncherError if PARIO_RENDEZVOUS is neither."""
    env, found = os.environ, launcher()
    bare = found.name == "srun" and not _PMI & set(env) and "PMIX_RANK" not in env
    if found.where and not bare and not started_by_torch():
        return None
    rendezvous, secret = env.get("PARIO_RENDEZVOUS", ""), env.get("PARIO_SECRET_FILE", "")
    torch = "RANK" in env and "WORLD_SIZE" in env
    # A batch script has Slurm's two, too, and is one process: only srun says more.
    names = ("RANK", "WORLD_SIZE") if torch else ("SLURM_PROCID", "SLURM_NTASKS")
    who = ("MASTER_ADDR", "MASTER_PORT", *_RUN) if torch else ("SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, size = (int(said) if said.isdigit() else 0 for said in (env.get(name, "") for name in names))
    if not (bare or torch or rendezvous) or rank >= size or size == 1 or not (rendezvous or all(map(env.get, who[:2]))):
        return None
    name = " ".join((*(env.get(each, "") for each in (*who, "PARIO_JOB")), rendezvous, str(size)))
    host, port, folder = _first_host(torch), 0, ""
    if "/" in rendezvous:
        secret, folder = "", rendezvous
    elif rendezvous:
        host, _, number = rendezvous.rpartition(":")
        port = int(number) if number.isdigit() else 0
        if not host or not 0 < port < 1 << 16:
            what = f"PARIO_RENDEZVOUS={rendezvous} is neither HOST:PORT nor the path of a folder"
            raise LauncherError(what, hint="docs/clusters.md#without-mpi")
    elif secret:
        port = _PORTS[0] + zlib.crc32(name.encode()) % (_PORTS[1] - _PORTS[0])
    if not secret and not folder:
        folder = os.path.join(env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "pario")
    near = host == "localhost" or host.startswith("127.")
    if torch:
        near = near or env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]
    else:
        near = near or env.get("SLURM_STEP_NUM_NODES") == "1"
    node = env.get("PARIO_NODE") or env.get("SLURMD_NODENAME", "")
    return Announced(rank, size, names, name, near, host if port else "", port, secret, folder, node)


def _first_host(torch: bool) -> str:
    """Rank 0's machine, as torch's launchers or Slurm call it; "" if they do not."""
    if torch:
        return os.environ.get("MASTER_ADDR", "")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^,[]*)(?:\[(\d+))?", nodes)  # "node[07-09],login"
    return "".join(filter(None, first.groups())) if first else ""


def launched_rank() -> int | None:
    """The rank that the launcher gave this process; None without a launcher."""
    job = announced()
    if job is not None:
        return job.rank
    for name in (*_RANKS, "SLURM_PROCID"):  # last: it is also set in the batch script itself
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return None


def rank_and_size() -> tuple[int, int]:
    """This process's rank in its job, and the job's processes, as the launcher says; (0, 1) without one."""
    rank = launched_rank() or 0
    job = announced()
    return rank, job.size if job else max(rank + 1, launcher().size)


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
    together = announced()
    if together is not None:
        return f"ranks that met at {together.name}", name
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
