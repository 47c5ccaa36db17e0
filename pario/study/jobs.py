"""Jobs of the study: one mpiexec job per number of ranks and nodes, which is told run after run what to do.

The conductor listens on a socket of its own folder; rank 0 of the job (worker.py) calls it and gets one task per line,
as JSON. So starting Python, MPI and the compiled kernels costs nothing in what is measured, the conductor can empty
caches and read a store's counters between two runs, and a job that goes wrong is ended whole, its ranks included.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Job", "WorkerError", "job_environment", "kill_tree"]

#: Seconds from starting mpiexec to the call of rank 0: imports, MPI, on a machine that may be busy.
START_S = 120.0


class WorkerError(RuntimeError):
    """A worker failed or ran past its time; the message ends with what it wrote."""


def job_environment(ranks: int, nodes: int) -> dict[str, str]:
    """For a job of so many ranks on so many emulated nodes (MPICH: ranks of different cliques share no memory)."""
    environment = dict(os.environ)
    if nodes > 1:
        environment["MPIR_CVAR_NUM_CLIQUES"] = str(nodes)
    if ranks > len(os.sched_getaffinity(0)):  # MPICH polls; more ranks than cores must give the core away
        environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return environment


def kill_tree(pid: int) -> None:
    """A process and its descendants. MPICH gives every rank a session of its own: a process group is not enough."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    todo = [pid]
    while todo:
        victim = todo.pop()
        todo += children.get(victim, [])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


class Job:
    """A running job. Use as a context manager: its processes are gone afterwards, whatever happened.

    launcher : mpiexec and its options, without the number of ranks; not used for one rank
    prefix : makes of a command one that starts in a control group
    """

    def __init__(
        self,
        launcher: Sequence[str],
        ranks: int,
        nodes: int,
        prefix: Callable[[Sequence[str]], Sequence[str]] | None = None,
    ) -> None:
        self.ranks, self.nodes = ranks, nodes
        self._launcher = launcher
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Job:
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="pario-study-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            self._said = stack.enter_context(tempfile.TemporaryFile())
            address = os.path.join(folder, "call")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(address)
            listener.listen(1)
            command: Sequence[str] = [sys.executable, "-m", "pario.study.worker", address]
            if self.ranks > 1:
                command = [*self._launcher, "-n", str(self.ranks), *command]
            if self._prefix is not None:
                command = self._prefix(command)
            self._process = subprocess.Popen(
                command,
                # Indexes lie beside the data, and none in the user's own cache directory may be taken for one.
                env=job_environment(self.ranks, self.nodes) | {"XDG_CACHE_HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C is for the conductor, which ends the job
            )
            stack.callback(self._end)
            self._line = stack.enter_context(self._called(listener))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._line.sendall(b"null\n")
                assert self._process is not None
                self._process.wait(10)
        self._stack.close()

    def _end(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            kill_tree(self._process.pid)
        self._process.wait()

    def _called(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.2)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            assert self._process is not None
            if self._process.poll() is not None:
                raise self._failure(f"ended with {self._process.returncode} before its first run")
        raise self._failure(f"did not start within {START_S:.0f} s")

    def do(self, task: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """What each rank says about the task. Raises WorkerError, after which the job is of no use."""
        self._line.settimeout(limit_s)
        answer = bytearray()
        try:
            self._line.sendall(json.dumps(task).encode() + b"\n")
            while not answer.endswith(b"\n"):
                part = self._line.recv(1 << 20)
                if not part:
                    raise self._failure("ended in the middle of a run")
                answer += part
        except TimeoutError:
            raise self._failure(f"no end after {limit_s:.0f} s") from None
        except OSError as e:
            raise self._failure(f"is gone ({e})") from None
        return json.loads(answer)

    def _failure(self, what: str) -> WorkerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert self._process is not None
            self._process.wait(1)  # so that its last words are there
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-3000:]
        return WorkerError(f"the job of {self.ranks} ranks on {self.nodes} nodes {what}:\n{words}")
