"""A control plane in a process of its own, for benchmarks/control.py and its parts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import ROOT
from pario.plane.joining import user_name
from pario.plane.words import PlaneAddress

SECRET = b"benchmark" * 4
USER = user_name()


@contextmanager
def plane(folder: Path, rules: str) -> Iterator[tuple[PlaneAddress, int]]:
    """A control plane in a process of its own; yields its address and its process."""
    (folder / "token").write_bytes(SECRET)
    (folder / "token").chmod(0o600)
    (folder / "rules.toml").write_text(rules + f'\n[[user]]\nname = "{USER}"\ntoken = "token"\n')
    told = folder / "address"
    told.unlink(missing_ok=True)
    words = ["plane", "serve", "--rules", str(folder / "rules.toml"), "--at", "127.0.0.1:0", "--tell", str(told)]
    child = subprocess.Popen(
        [sys.executable, "-m", "pario", *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 30
        while not told.exists():
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the control plane did not start")
            time.sleep(0.02)
        host, _, port = told.read_text().strip().rpartition(":")
        yield PlaneAddress(host, int(port)), child.pid
    finally:
        child.terminate()
        child.wait(10)


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
