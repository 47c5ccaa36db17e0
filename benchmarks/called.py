"""Processes that stay, call back on a socket in a private folder, and answer each request, a line of JSON, by another
one: what they print is nobody's answer. They are gone at the end, with all their ranks, whatever happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, WorkerError, kill_tree

__all__ = ["Called"]

#: Seconds until all have called: imports and MPI, on a machine that may be busy.
START_S = 120.0


class Called:
    """name : in errors
    calls : how many call back; the first line of each is JSON with its "rank"
    log : gets what the processes print; None: a file of its own
    """

    def __init__(self, name: str, calls: int, log: Path | None = None) -> None:
        self.name, self.calls = name, calls
        self.folder = tempfile.mkdtemp(prefix="pario-called-")
        self.log = log or Path(self.folder, "log")
        self.address = os.path.join(self.folder, "s")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(calls)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: dict[int, tuple[socket.socket, Any]] = {}
        self.hello: dict[str, Any] = {}

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        with open(self.log, "ab") as file:
            self._processes.append(
                subprocess.Popen(
                    words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,  # a Ctrl-C is for who has started them
                )
            )  # fmt: skip

    def ready(self) -> None:
        """Wait until all have called."""
        end = time.monotonic() + START_S
        self._listener.settimeout(0.2)
        while len(self._lines) < self.calls:
            with contextlib.suppress(TimeoutError):
                line, _ = self._listener.accept()
                line.settimeout(START_S)
                file = line.makefile("r")
                self.hello = json.loads(file.readline())
                self._lines[self.hello["rank"]] = line, file
                continue
            for process in self._processes:
                if process.poll() is not None:
                    raise self.failure(f"ended with {process.returncode} before its first run")
            if time.monotonic() > end:
                raise self.failure(f"did not start within {START_S:.0f} s")

    def request(self, asked: Sequence[Any], limit_s: float) -> list[Any]:
        """The answers, in the order of the ranks, each of which gets its request. Raises WorkerError, after which
        nothing can be asked any more."""
        if not self._lines:
            self.ready()
        answers = []
        try:
            for rank, what in enumerate(asked):
                self._lines[rank][0].settimeout(limit_s)
                self._lines[rank][0].sendall(json.dumps(what).encode() + b"\n")
            for rank in range(len(asked)):
                told = self._lines[rank][1].readline()
                if not told:
                    raise self.failure("ended in the middle of a run")
                answers.append(json.loads(told))
        except TimeoutError:
            raise self.failure(f"no end after {limit_s:.0f} s") from None
        except OSError as e:
            raise self.failure(f"is gone ({e})") from None
        return answers

    def failure(self, what: str) -> WorkerError:
        """Ends them."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)  # so that its last output is there
        said = self.log.read_text(errors="replace").strip()[-3000:] if self.log.exists() else ""
        self.end()
        return WorkerError(f"{self.name} {what}:\n{said}")

    def end(self, wait_s: float = 0.0) -> None:
        """wait_s : for those that end by themselves when nobody listens any more"""
        for line, file in self._lines.values():
            with contextlib.suppress(OSError):
                file.close()
                line.shutdown(socket.SHUT_RDWR)
                line.close()
        self._lines = {}
        self._listener.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
