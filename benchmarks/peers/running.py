"""The processes of one variant on some ranks, which do what they are asked to, all ranks at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.called import Called
from benchmarks.measure import WorkerError, job_environment, mpiexec
from benchmarks.peers.table import Variant

__all__ = ["Running"]


class Running(Called):
    """A context manager. `ready` waits until all ranks have loaded their library."""

    def __init__(self, variant: Variant, python: str, ranks: int, log: Path) -> None:
        super().__init__(variant.key, ranks, log)
        self.variant = variant
        command = [python, "-m", f"benchmarks.peers.{variant.peer.module}", "serve", self.address]
        environment = job_environment(ranks, 1)
        environment |= {"PEERS_RANKS": str(ranks), "OMP_NUM_THREADS": "1"}
        if variant.peer.mpi and ranks > 1:
            self.start([mpiexec(), "-n", str(ranks), *command], environment)
        else:
            for rank in range(ranks):
                self.start(command, {**environment, "PEERS_RANK": str(rank)})

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, wait_s: float = 5.0) -> None:
        super().end(wait_s)

    @property
    def versions(self) -> dict[str, str]:
        found: dict[str, str] = self.hello["versions"]
        return found

    def ask(self, limit_s: float = 120.0, **asked: Any) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order. Raises WorkerError."""
        answers = self.request([{"variant": self.variant.name, **asked}] * self.calls, limit_s)
        for answer in answers:
            if "error" in answer:
                raise WorkerError(answer["error"])
        return answers
