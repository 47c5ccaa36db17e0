"""How figures are made, the one harness of all scripts: runs in turns, medians and spread, ratios pair by pair, rows
with bars, JSON with the machine's facts; ranks that run once, or stay and answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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

import numpy as np

from benchmarks.facts import ROOT, machine
from benchmarks.stores.throttled import Group

__all__ = [
    *("ROOT", "Pieces", "Row", "Section", "Standing", "WorkerError", "finish", "interleave", "interval"),
    *("job_environment", "kill_tree", "launch", "machine", "middle_interval", "missed", "mpiexec", "parser_of"),
    *("ratios", "save", "save_facts", "spread", "told"),
]


# -- turns and statistics ----------------------------------------------------------------------------------------------


def interleave(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call the sides in turn, another one first in each round: what drifts on the machine hits all of them."""
    results: dict[str, list[Any]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(sides[name]())
    return results


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median and spread of the ratios of pairs that were measured one after the other."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def told(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """ "1.02 (0.98 … 1.07) s": the median, the least and the most."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} … {max(values):{form}}){unit}"


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """(geometric mean, its 95 % interval) of f64[pairs, rounds], by a bootstrap of pairs of processes and of rounds.

    Two processes of the same code differ by several per cent for as long as they live (where their memory lies), so
    that rounds of one pair alone would give an interval that is too narrow.
    """
    logs = np.log(ratios)
    pairs, rounds = logs.shape
    random = np.random.default_rng(0)
    chosen = random.integers(0, pairs, (10_000, pairs))
    means = logs[chosen[:, :, None], random.integers(0, rounds, (10_000, pairs, rounds))].mean(axis=(1, 2))
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return float(np.exp(logs.mean())), float(low), float(high)


def middle_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """(median, its bounds of 95 %), by a bootstrap."""
    found = np.asarray(values)
    draws = np.median(found[np.random.default_rng(0).integers(0, len(found), (4000, len(found)))], axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(np.median(found)), float(low), float(high)


# -- rows, and the JSON that has them ----------------------------------------------------------------------------------


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
        if self.bar is None:
            self.sense = ""
        else:
            self.met = self.figure >= self.bar if self.sense == ">=" else self.figure <= self.bar

    @classmethod
    def of(cls, case: str, values: Sequence[float], sense: str = "", bar: float | None = None, **more: str) -> Row:
        """One value per round. more : unit, ours, theirs"""
        return cls(case, statistics.median(values), min(values), max(values), sense, bar, **more)

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


class Pieces:
    """Results by name, each measured once and kept in a file at once: a further call goes on from there.

    seconds : after which nothing more is to begin
    sections : makes the rows of what there is so far
    """

    def __init__(
        self,
        path: Path,
        seconds: float = float("inf"),
        sections: Callable[[dict[str, Any]], Sequence[Section]] = lambda runs: (),
    ) -> None:
        self._path, self._until, self._sections = path, time.monotonic() + seconds, sections
        self.runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}

    def get(self, name: str, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Raises TimeoutError if nothing more is to begin."""
        if name not in self.runs:
            if time.monotonic() > self._until:
                raise TimeoutError
            self.runs[name] = measured()
            self.keep()
            print(f"{name}: {json.dumps(self.runs[name])[:200]}", flush=True)
        return self.runs[name]

    def keep(self, **facts: Any) -> None:
        save(self._path, self._sections(self.runs), runs=self.runs, **facts)


def parser_of(name: str, doc: str, rounds: int, data: bool = True) -> argparse.ArgumentParser:
    """The command line of benchmarks.NAME with what most scripts have; `finish` writes what --out says."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.split("\n")[0])
    if data:
        parser.add_argument("--data", required=True, help="folder of the data sets; made there if missing")
    parser.add_argument("--rounds", type=int, default=rounds, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--out", help=f"JSON file (default: {name}.json{' in the data folder' if data else ''})")
    parser.add_argument("--smoke", action="store_true", help="tiny data, once, no bars: does it run at all?")
    return parser


def finish(name: str, options: argparse.Namespace, sections: Sequence[Section], **facts: Any) -> int:
    """Save the sections; returns the exit status, 1 if a bar is not met."""
    out = options.out or Path(getattr(options, "data", "")) / f"{name}.json"
    rounds = 1 if options.smoke else options.rounds
    save(out, sections, command=sys.argv, rounds=rounds, quick=options.smoke, **facts)
    return int(not options.smoke and missed(sections))


# -- ranks -------------------------------------------------------------------------------------------------------------


class WorkerError(RuntimeError):
    """A worker failed or exceeded its time; the message ends with its output."""


def mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise WorkerError("no mpiexec beside this Python nor on the PATH (pip install mpich)")
    return found


def job_environment(ranks: int, nodes: int) -> dict[str, str]:
    """Environment of a job with this many ranks and emulated nodes (MPICH: cliques share no memory)."""
    environment = dict(os.environ)
    if nodes > 1:
        environment["MPIR_CVAR_NUM_CLIQUES"] = str(nodes)
    if ranks > len(os.sched_getaffinity(0)):  # MPICH polls; with more ranks than cores it must yield the core
        environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return environment


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants. MPICH gives every rank its own session, so killing a process group is not
    enough."""
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


def _command(words: Sequence[str], ranks: int) -> list[str]:
    return [mpiexec(), "-n", str(ranks), *words] if ranks > 1 else list(words)


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int = 1,
    nodes: int = 1,
    group: Group | None = None,
    timeout_s: float = 300,
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run a worker module and return its JSON line.

    ranks : 1 runs without a launcher and without MPI
    python : the interpreter of another environment, for what cannot live in this one
    nodes : emulated nodes (MPICH's MPIR_CVAR_NUM_CLIQUES: ranks of different cliques share no memory)
    """
    command = _command([python, "-m", module, *arguments], ranks)
    child = subprocess.Popen(
        group.command(command) if group else command,
        cwd=ROOT,
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


class Standing:
    """A process, or ranks, that stay, and say a line for each line that they are told (`worker.on_request`). A context
    manager: they are gone afterwards.

    words : after `python`
    more : of their environment
    prefix : turns a command into one that starts in a control group
    """

    def __init__(
        self,
        *words: str,
        ranks: int = 1,
        more: Mapping[str, str] | None = None,
        prefix: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self.child = subprocess.Popen(
            prefix(_command([sys.executable, *words], ranks)), cwd=ROOT, env=job_environment(ranks, 1) | (more or {}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def tell(self, line: str = "go") -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `line` says that it has ended
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()

    def line(self) -> str:
        assert self.child.stdout is not None
        said = self.child.stdout.readline().strip()
        if not said:
            raise WorkerError(f"{self.child.args!r} ended with {self.child.wait(60)}")
        return said

    def ask(self, line: str = "go") -> Any:
        """What it answers, out of JSON; other lines are MPI's."""
        self.tell(line)
        while True:
            with contextlib.suppress(ValueError):
                return json.loads(self.line())

    def end(self) -> None:
        try:
            self.child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            kill_tree(self.child.pid)
            self.child.communicate()
