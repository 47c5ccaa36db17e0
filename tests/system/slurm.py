"""A real Slurm of four virtual nodes on this machine, for the tests: munged, slurmctld and four slurmds.

All of them have their sockets, state, spool and logs in one temporary folder and listen on free ports, so that they
disturb nothing else that runs here. To Slurm, and to an MPI library that it starts, the four slurmds are four nodes:
`Split_type(COMM_TYPE_SHARED)` gives one communicator for each of them. They share the machine's cores, memory and file
systems.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import launch
from launch import segments, sweep

NODES = 4
PACKAGES = "slurm-wlm munge"
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "scancel")
#: where Debian keeps daemons; not on the PATH of every shell
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
#: what ends a job, in Slurm's words
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

CONF = """\
ClusterName=pario
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=pmi2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
SlurmdParameters=config_overrides
JobRequeue=1
FirstJobId={first_job}
KillWait=5
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
{nodes}
PartitionName=all Nodes=node[1-{count}] Default=YES MaxTime=INFINITE State=UP
"""


class Unavailable(Exception):
    """Slurm cannot run here; the message says why."""


@dataclass(frozen=True)
class Ended:
    """How a job ended: its number, Slurm's word for it, exit status, and what it wrote to its output file."""

    number: int | str
    state: str
    status: int
    output: str


class Cluster:
    """The running cluster; made by `cluster()`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
        # Also how the processes of this cluster are told from all others.
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def say(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Standard output of a command of Slurm; an AssertionError with its words if it fails."""
        whole = {**self.env, **(env or {})}
        done = subprocess.run(words, env=whole, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """`sbatch words...` in the folder `cwd`; the job's number."""
        return int(self.say("sbatch", "--parsable", *map(str, words), cwd=cwd, env=env).split(";")[0])

    def show(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` tells."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.say("scontrol", "--oneliner", "show", "job", str(job))))

    def wait(self, job: int | str, *, limit_s: float, output: Path | None = None) -> Ended:
        """Wait for the job's end; cancelled, and an AssertionError, after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while (known := self.show(job))["JobState"] not in ENDED:
            if time.monotonic() > end:
                self.say("scancel", str(job))
                time.sleep(2)
                said = self.output(known, output)
                raise AssertionError(f"job {job} is {known['JobState']} after {limit_s} s, {known}\n{said}")
            time.sleep(0.2)
        status, by_signal = map(int, known["ExitCode"].split(":"))
        return Ended(job, known["JobState"], status or -by_signal, self.output(known, output))

    def run(self, *words: str | Path, cwd: Path, limit_s: float, env: Mapping[str, str] | None = None) -> Ended:
        """Submit and wait."""
        return self.wait(self.submit(*words, cwd=cwd, env=env), limit_s=limit_s)

    @staticmethod
    def output(known: Mapping[str, str], path: Path | None = None) -> str:
        path = path or Path(known["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self) -> list[int]:
        """All processes of this cluster: daemons, job steps, and whatever these started."""
        mark = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
        return found

    def logs(self) -> str:
        """The ends of all daemons' logs."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(self.folder.glob("*.log"))
        )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Start the cluster; stopped, its processes ended and its files removed on the way out."""
    if os.geteuid() != 0:
        raise Unavailable("slurmd needs root")
    missing = [name for name in COMMANDS if shutil.which(name, path=PATH) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found: apt-get install {PACKAGES}")
    before = segments()
    # Not pytest's folder: munged wants one that everybody may enter, and a short path for its socket.
    folder = Path(tempfile.mkdtemp(prefix="pario-slurm-"))
    folder.chmod(0o755)
    made = Cluster(folder)
    # A pytest that is killed cleans nothing up: then this one does, when the pipe between them closes.
    heir = subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(launch.__file__).parent)},
        start_new_session=True,
    )
    try:
        _start_on_free_ports(made)
        yield made
    finally:
        _stop(made)
        sweep(before)
        shutil.rmtree(folder)
        heir.communicate()


def _start_on_free_ports(made: Cluster, tries: int = 3) -> None:
    """Start the daemons; with other ports if one of them ended at once: somebody may have taken its port meanwhile."""
    for left in reversed(range(tries)):
        try:
            return _start(made)
        except Unavailable:
            if not left or all(daemon.poll() is None for daemon in made.daemons):
                raise
            _stop(made)
            made.daemons.clear()
            for path in made.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _start(made: Cluster) -> None:
    folder, host = made.folder, socket.gethostname()
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = _free_ports(NODES + 1)
    # Two cores for each, however many there are: a rank's core must exist to be pinned to it.
    cores = min(2, os.cpu_count() or 1)
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} "
        f"Sockets=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
        for i in range(1, NODES + 1)
    )
    # MPICH's files in /dev/shm are named after the job: ranks of two clusters that both run a job 1 would meet there.
    first_job = random.SystemRandom().randrange(1, 60_000_000)
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=host, ports=ports, nodes=nodes, count=NODES, first_job=first_job)
    )
    for i in range(1, NODES + 1):
        for kind in ("spool", "tmp"):
            (folder / f"{kind}-node{i}").mkdir()
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    _daemon(made, "munged", "--foreground", f"--socket={folder}/munge.socket", *munge)
    _until(made, lambda: (folder / "munge.socket").exists(), "munged makes no socket")
    _daemon(made, "slurmctld", "-D", "-i")
    for i in range(1, NODES + 1):
        _daemon(made, "slurmd", "-D", "-N", f"node{i}")
    _until(made, lambda: _idle(made) == NODES, f"not all of {NODES} nodes are idle")


def _daemon(made: Cluster, *words: str) -> None:
    with open(made.folder / "daemons.log", "a") as log:
        process = subprocess.Popen(
            words, env=made.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    made.daemons.append(process)


def _idle(made: Cluster) -> int:
    said = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"], env=made.env, capture_output=True, text=True, timeout=60
    )
    return said.stdout.split().count("idle")


def _until(made: Cluster, done: Callable[[], bool], why: str, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not done():
        ended = [daemon.args for daemon in made.daemons if daemon.poll() is not None]
        if ended or time.monotonic() > end:
            what = f"{ended} ended by themselves" if ended else f"after {limit_s} s"
            raise Unavailable(f"{why}: {what}\n{made.logs()}")
        time.sleep(0.1)


def _stop(made: Cluster) -> None:
    """End the jobs, the daemons, and whatever else they started."""
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], env=made.env, timeout=10)
    for how in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + 5
        while (left := made.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
            time.sleep(0.1)
    for daemon in made.daemons:
        daemon.wait(5)
    assert not made.processes(), made.processes()


def _free_ports(count: int) -> list[int]:
    """Ports that no connection of another program gets meanwhile: the kernel gives those out from another range."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    numbers = list(range(max(1024, first_given // 2), first_given))
    random.SystemRandom().shuffle(numbers)
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in numbers:
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("", number))
                found.append(number)
            if len(found) == count:
                return found
    raise Unavailable(f"there are no {count} free ports below {first_given}")


if __name__ == "__main__":
    sys.stdin.read()
    left = Path(sys.argv[1])
    if left.exists():
        _stop(Cluster(left))
        shutil.rmtree(left)
