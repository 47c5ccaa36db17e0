"""How figures are made: interleaved runs, medians and spread, ratios pair by pair, JSON with the machine's facts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.facts import machine
from benchmarks.stores.throttled import Group
from benchmarks.study.jobs import WorkerError, job_environment, kill_tree
from benchmarks.study.numbers import Row, ratios, spread

__all__ = ["Row", "Section", "WorkerError", "interleave", "launch", "machine", "ratios", "save", "save_facts", "spread"]

ROOT = Path(__file__).resolve().parent.parent


def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise WorkerError("no mpiexec beside this Python nor on the PATH (pip install mpich)")
    return found


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    nodes: int = 1,
    group: Group | None = None,
    timeout_s: float = 300,
    python: str = sys.executable,
    root: str | Path = ROOT,
) -> dict[str, Any]:
    """Run a worker module and return its JSON line.

    ranks : 1 runs without a launcher and without MPI
    python : the interpreter of another environment, for what cannot live in this one
    root : another checkout, whose pario and benchmarks run
    nodes : emulated nodes (MPICH's MPIR_CVAR_NUM_CLIQUES: ranks of different cliques share no memory)
    """
    command = [python, "-m", module, *arguments]
    if ranks > 1:
        command = [mpiexec(), "-n", str(ranks), *command]
    child = subprocess.Popen(
        group.command(command) if group else command,
        cwd=root,
        env=job_environment(ranks, nodes),
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
            kill_tree(child.pid)
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


def missed(sections: Sequence[Section]) -> bool:
    """Whether a bar is not met."""
    return any(row.met is False for section in sections for row in section.rows)


def save(path: str | Path, sections: Sequence[Section], **facts: Any) -> None:
    """Write everything as JSON, whole or not at all."""
    save_facts(path, **facts, sections=[asdict(section) for section in sections])


def save_facts(path: str | Path, **facts: Any) -> None:
    """The same without sections."""
    document = {"format": 1, "machine": machine(), **facts}
    new = Path(path).with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(new, path)
