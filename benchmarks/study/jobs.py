"""Jobs of the study: one mpiexec job per number of ranks and nodes, which gets its tasks one after another.

The conductor listens on a socket in a private folder; rank 0 of the job (worker.py) connects to it and receives one
task per line, as JSON. So the figures do not include starting Python, MPI and the compiled kernels, the conductor can
empty caches and read a store's counters between two runs, and it can end a failing job with all its ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.called import Called
from benchmarks.measure import job_environment

__all__ = ["Job", "Launcher"]


@dataclass(frozen=True)
class Launcher:
    """Starts the ranks of a job.

    command : mpiexec and its options, without the number of ranks; () without mpiexec: one rank runs alone
    emulates_nodes : this mpiexec can emulate several nodes on one machine (MPICH's can)
    """

    command: tuple[str, ...] = ()
    emulates_nodes: bool = False


class Job(Called):
    """A running job. Use it as a context manager: its processes are gone afterwards, whatever happened.

    prefix : turns a command into one that starts in a control group
    """

    def __init__(
        self,
        launcher: Launcher,
        ranks: int,
        nodes: int,
        prefix: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> None:
        super().__init__(f"the job of {ranks} ranks on {nodes} nodes", 1)
        command: Sequence[str] = [sys.executable, "-m", "benchmarks.study.worker", self.address]
        if ranks > 1:
            command = [*launcher.command, "-n", str(ranks), *command]
        # Indexes lie beside the data; hide those in the user's cache directory.
        self._start = prefix(command), job_environment(ranks, nodes) | {"XDG_CACHE_HOME": self.folder}

    def __enter__(self) -> Job:
        self.start(*self._start)
        self.ready()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(0 if kind else 10)

    def do(self, task: dict[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks to the task. Raises WorkerError, after which the job is unusable."""
        answer: list[dict[str, Any]] = self.request([task], limit_s)[0]
        return answer
