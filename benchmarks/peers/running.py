"""The processes of one variant on some ranks, which do what they are asked to, all ranks at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, WorkerError, job_environment, kill_tree, mpiexec
from benchmarks.peers.table import Variant

__all__ = ["Running"]

_START_S = 120.0


class Running:
    """A context manager: the processes are gone afterwards. `ready` waits until all ranks have loaded their library."""

    def __init__(self, variant: Variant, python: str, ranks: int, log: Path) -> None:
        self.variant, self.ranks, self.log = variant, ranks, log
        self._folder = tempfile.mkdtemp(prefix="pario-peers-")
        self._listener = socket.socket(socket.AF_UNIX)
        address = os.path.join(self._folder, "s")
        self._listener.bind(address)
        self._listener.listen(ranks)
        command = [python, "-m", f"benchmarks.peers.{variant.peer.module}", "serve", address]
        environment = job_environment(ranks, 1) | {"PEERS_RANKS": str(ranks), "OMP_NUM_THREADS": "1"}
        starts = [(command, {**environment, "PEERS_RANK": str(rank)}) for rank in range(ranks)]
        if variant.peer.mpi and ranks > 1:
            starts = [([mpiexec(), "-n", str(ranks), *command], environment)]
        with open(log, "ab") as file:
            self._processes = [
                subprocess.Popen(
                    words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
                for words, env in starts
            ]
        self._lines: dict[int, tuple[socket.socket, Any]] = {}
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ready(self) -> None:
        end = time.monotonic() + _START_S
        self._listener.settimeout(0.5)
        while len(self._lines) < self.ranks:
            with contextlib.suppress(TimeoutError):
                line, _ = self._listener.accept()
                line.settimeout(_START_S)
                file = line.makefile("r")
                hello = json.loads(file.readline())
                self._lines[hello["rank"]] = (line, file)
                self.versions = hello["versions"]
                continue
            if time.monotonic() > end or any(process.poll() for process in self._processes):
                raise self._failure("did not start")

    def ask(
        self, limit_s: float = 120.0, each: Sequence[dict[str, Any]] | None = None, **asked: Any
    ) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order. each: what one rank alone is told, too. Raises WorkerError."""
        if not self._lines:
            self.ready()
        answers = []
        try:
            for rank, (line, _) in self._lines.items():
                line.settimeout(limit_s)
                words = {"variant": self.variant.name, **asked, **(each[rank] if each else {})}
                line.sendall(json.dumps(words).encode() + b"\n")
            for rank in range(self.ranks):
                told = self._lines[rank][1].readline()
                if not told:
                    raise self._failure("ended in the middle of a request")
                answers.append(json.loads(told))
        except (TimeoutError, OSError) as e:
            raise self._failure(f"gave no answer within {limit_s:.0f} s ({e})") from None
        for answer in answers:
            if "error" in answer:
                raise WorkerError(answer["error"])
        return answers

    def _failure(self, what: str) -> WorkerError:
        said = self.log.read_text(errors="replace").strip()[-400:] if self.log.exists() else ""
        self.end()
        return WorkerError(f"{self.variant.key} {what}: {said}")

    def end(self) -> None:
        for line, file in self._lines.values():
            with contextlib.suppress(OSError):
                file.close()
                line.shutdown(socket.SHUT_RDWR)
                line.close()
        self._lines = {}
        self._listener.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
