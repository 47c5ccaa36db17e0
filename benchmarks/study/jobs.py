"""Jobs of the study: one mpiexec job per number of ranks and nodes, which gets its tasks one after another.

The conductor listens on a socket in a private folder; rank 0 of the job (worker.py) connects to it and receives one
task per line, as JSON. So the figures do not include starting Python, MPI and the compiled kernels, the conductor can
empty caches and read a store's counters between two runs, and it can end a failing job with all its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import ROOT, WorkerError, job_environment, kill_tree

__all__ = ["Job", "Launcher"]

#: Seconds from starting mpiexec until rank 0 connects: imports and MPI, on a machine that may be busy.
START_S = 120.0


def _path() -> str:
    """For a worker, wherever the study was started: benchmarks/ is a folder of the checkout, not of the package."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass(frozen=True)
class Launcher:
    """Starts the ranks of a job.

    command : mpiexec and its options, without the number of ranks; () without mpiexec: one rank runs alone
    emulates_nodes : this mpiexec can emulate several nodes on one machine (MPICH's can)
    """

    command: tuple[str, ...] = ()
    emulates_nodes: bool = False


class Job:
    """A running job. Use it as a context manager: its processes are gone afterwards, whatever happened.

    prefix : turns a command into one that starts in a control group
    """

    def __init__(
        self,
        launcher: Launcher,
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
            command: Sequence[str] = [sys.executable, "-m", "benchmarks.study.worker", address]
            if self.ranks > 1:
                command = [*self._launcher.command, "-n", str(self.ranks), *command]
            if self._prefix is not None:
                command = self._prefix(command)
            self._process = subprocess.Popen(
                command,
                # Indexes lie beside the data; hide those in the user's cache directory.
                env=job_environment(self.ranks, self.nodes) | {"XDG_CACHE_HOME": folder, "PYTHONPATH": _path()},
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
        """The answers of all ranks to the task. Raises WorkerError, after which the job is unusable."""
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
            self._process.wait(1)  # so that its last output is there
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-3000:]
        return WorkerError(f"the job of {self.ranks} ranks on {self.nodes} nodes {what}:\n{words}")
