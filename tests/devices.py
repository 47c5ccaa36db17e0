"""A device below a folder that stops answering, or answers with errors, when a test says so."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pario.tiers import disk_reads


class Device:
    """All calls that reach the storage through open files below `folder`, of this process.

    errors : errno by name of the system call, or of all if "all"
    asked : the calls that reached it
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = os.fspath(folder)
        self._answers = threading.Event()
        self._answers.set()
        self.errors: dict[str, int] = {}
        self.asked: list[str] = []
        for name in ("preadv", "pwrite", "posix_fallocate", "fstatvfs", "ftruncate"):
            monkeypatch.setattr(os, name, self._behind(name, getattr(os, name)))
        monkeypatch.setattr(disk_reads, "read_spans", self._kernel(disk_reads.read_spans))

    def stall(self) -> None:
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def _kernel(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(fd: int, offsets: Any, *arguments: Any) -> tuple[int, int, int]:
            preadv = self._behind("preadv", lambda _: call(fd, offsets, *arguments))
            try:
                return preadv(fd)  # type: ignore[no-any-return]
            except OSError as e:
                return 0, e.errno or 0, 0

        return reached

    def _behind(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(fd: int, *arguments: Any) -> Any:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(self._folder):
                if name == "preadv" and len(arguments) > 2 and arguments[2]:
                    raise BlockingIOError  # the page cache has nothing
                self.asked.append(name)
                assert self._answers.wait(60)
                number = self.errors.get(name, self.errors.get("all", 0))
                if number:
                    raise OSError(number, os.strerror(number))
            return call(fd, *arguments)

        return reached
