"""Writes every set in every format, checks what is delivered, and lets the peers take turns. Started by command.py.

results.json keeps every turn; a later call goes on where an earlier one stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cache
from benchmarks.measure import ROOT, WorkerError, machine
from benchmarks.peers import environments, sets
from benchmarks.peers.judging import judge
from benchmarks.peers.running import Running
from benchmarks.peers.table import Variant, variants
from benchmarks.stores.latency import latency_store

__all__ = ["CELLS", "STATES", "Bench", "Cell", "check", "cpu_us", "rate", "speed", "write"]

STATES = ("warm", "cold", "slow")
#: seconds of a turn at most (on a slow store a batch alone may take longer than elsewhere an epoch) and, if warm, at
#: least; of a turn that only warms up
MOST_S, LEAST_S, WARM_UP_S = {"warm": 1.5, "cold": 1.5, "slow": 5.0}, 0.5, 1.0
READ_S, BYTES_PER_S = 0.020, 200_000_000


@dataclass(frozen=True)
class Cell:
    set: str
    state: str
    ranks: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.set}/{self.state}/{self.ranks}x{self.threads}"

    def has(self, variant: Variant) -> bool:
        """A memory tier is for what is warm, a crop of pictures."""
        if variant.name == "crop":
            return self.set == "jpeg"
        return variant.name != "memory" or self.state == "warm"


#: in the order of measuring
CELLS = (
    *(Cell(name, state, 1, 1) for state in STATES for name in sets.SETS),
    *(Cell(name, "warm", ranks, threads) for ranks, threads in ((2, 1), (1, 2)) for name in sets.SETS),
    *(Cell(name, state, 2, 1) for state in ("cold", "slow") for name in sets.SETS),
)


class Bench:
    """The folder, what is installed there, and the results so far."""

    def __init__(self, out: Path, only: list[str] | None, rounds: int, limit_s: float, smoke: bool) -> None:
        self.out, self.rounds, self.smoke = out, rounds, smoke
        self.end = time.monotonic() + limit_s
        self.file = out / "results.json"
        self.found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        for part in ("versions", "left_out", "checks", "cells", "errors", "behaviour"):
            self.found.setdefault(part, {})
        self.pythons: dict[str, str] = {}
        self.variants = []
        for variant in variants(only):
            python = environments.installed(out, variant.peer)
            if smoke and variant.peer.pip:
                python = None
            if python is not None:
                self.pythons[variant.peer.module] = python
                self.variants.append(variant)
        left_out = out / "left_out.json"
        if left_out.exists():
            self.found["left_out"] = json.loads(left_out.read_text())

    def save(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.found) + "\n")
        os.replace(new, self.file)

    def note_machine(self) -> None:
        """The machine's facts now, beside those of earlier calls."""
        self.found.setdefault("machines", []).append(machine())
        self.save()

    def set(self, name: str) -> Path:
        return sets.make(self.out / "sets", name, 512 if self.smoke else 0)

    def late(self) -> bool:
        return time.monotonic() > self.end

    def start(self, variant: Variant, ranks: int) -> Running:
        logs = self.out / "logs"
        logs.mkdir(exist_ok=True)
        return Running(variant, self.pythons[variant.peer.module], ranks, logs / f"{variant.peer.module}.log")


def write(bench: Bench, paths: Sequence[Path]) -> None:
    """The sets in the format of every peer that is installed, unless they are there; two peers at once."""
    modules = {one.peer.module: one.peer for one in bench.variants if one.peer.own_format}

    def one(module: str) -> None:
        missing = [path for path in paths if not (path / f"{module}.written").exists()]
        if not missing:
            return
        for path in missing:
            shutil.rmtree(path / module, ignore_errors=True)
        print(f"writing {', '.join(path.name for path in missing)} for {modules[module].title}", flush=True)
        command = [bench.pythons[module], "-m", f"benchmarks.peers.{module}", "write", *map(str, missing)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        if said.returncode:
            bench.found["errors"][f"write/{module}"] = said.stderr.strip()[-300:]
            print(said.stderr[-1500:], file=sys.stderr)
            return
        bench.found["errors"].pop(f"write/{module}", None)
        for path in missing:
            (path / f"{module}.written").touch()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, modules))
    bench.save()


def check(bench: Bench, name: str, ranks: int) -> None:
    """Two untimed epochs of every variant: what was delivered, and whether the second has another order."""
    path, held = bench.set(name), bench.found["checks"].setdefault(f"{name}/{ranks}", {})
    n = json.loads((path / "set.json").read_text())["records"]
    for variant in bench.variants:
        done = "error" not in held.get(variant.key, {"error": ""})
        if bench.late() or done:
            continue
        try:
            with bench.start(variant, ranks) as running:
                asked = {"do": "check", "folder": str(path), "truth": str(path / "truth.npy"), "keep": True}
                first = running.ask(**asked)
                second = running.ask(**{**asked, "keep": False})
                bench.found["versions"][variant.peer.module] = running.versions
            told = judge([one["ids"] for one in first], n, sum(one["wrong"] for one in first))
            again = judge([one["ids"] for one in second], n, sum(one["wrong"] for one in second))
            anew = any(a["ids"] != b["ids"] for a, b in zip(first, second, strict=True))
            held[variant.key] = {
                **asdict(told),
                "exactly_once": told.exactly_once and again.exactly_once,
                "anew": anew,
            }
        except WorkerError as e:
            held[variant.key] = {"error": str(e)[:300]}
        print(f"check {name}, {ranks} ranks, {variant.key}: {held[variant.key]}", flush=True)
        bench.save()


@contextlib.contextmanager
def opened(cell: Cell, path: Path) -> Iterator[str]:
    """The folder that the peers are told to read."""
    if cell.state != "slow":
        yield str(path)
        return
    with latency_store(path, read_s=READ_S, bytes_per_s=BYTES_PER_S, page_cache=True, threads=128) as store:
        yield store.folder


def files_of(folder: str) -> list[str]:
    return [str(file) for file in sorted(Path(folder).rglob("*")) if file.is_file()]


def drop(files: list[str]) -> None:
    for file in files:
        if os.path.getsize(file):
            cache.drop_file(file)


def warm(files: list[str]) -> None:
    """Read from beginning to end, by nobody else before: how a read out of the page cache performs depends on how its
    pages came there (150 KB records: 14 us each after this, 34 us after single page faults)."""
    drop(files)
    for file in files:
        cache.warm_file(file)


def measure(bench: Bench, cell: Cell, running: dict[str, Running]) -> None:
    """The rounds of one cell that are missing."""
    held = bench.found["cells"].setdefault(cell.name, {})
    path = bench.set(cell.set)
    taking = [one for one in bench.variants if cell.has(one) and f"{cell.name}/{one.key}" not in bench.found["errors"]]
    if not any(len(held.get(one.key, [])) < bench.rounds for one in taking):
        return
    is_warm = cell.state == "warm"
    for name in dict.fromkeys(variant.peer.folder for variant in taking) if is_warm else ():
        files = files_of(str(path / name))
        try:
            warm(files)
        except cache.Unavailable:  # some loaders keep their files mapped until their process ends
            for one in running.values():
                one.end()
            running.clear()
            warm(files)
    for variant in taking:  # all at once: starting takes longest
        if variant.key not in running:
            running[variant.key] = bench.start(variant, cell.ranks)
    ready = set()  # open, and warmed up
    with opened(cell, path) as folder:
        for k in range(bench.rounds):
            for variant in taking[k % len(taking) :] + taking[: k % len(taking)]:  # another one begins each round
                turns = held.setdefault(variant.key, [])
                error = f"{cell.name}/{variant.key}"
                if len(turns) > k or bench.late() or error in bench.found["errors"]:
                    continue
                asked = {"do": "turn", "folder": folder, "threads": cell.threads, "keep": is_warm}
                opening: list[dict[str, Any]] = []
                try:
                    if cell.state != "slow" and variant.key not in ready:  # compiles, too, what must be compiled
                        warmed_up = running[variant.key].ask(
                            **asked, seconds=1e9 if variant.name == "memory" else WARM_UP_S
                        )
                        opening = warmed_up if is_warm else []
                        ready.add(variant.key)
                    if not is_warm:
                        running[variant.key].ready()
                        files = files_of(os.path.join(folder, variant.peer.folder))
                        try:
                            drop(files)
                        except cache.Unavailable:  # as above
                            running[variant.key].end()
                            running[variant.key] = bench.start(variant, cell.ranks)
                            running[variant.key].ready()
                            drop(files)
                    limits = {"seconds": MOST_S[cell.state], "least": LEAST_S if is_warm else 0.0}
                    ranks = running[variant.key].ask(**asked, **limits)
                except (WorkerError, cache.Unavailable) as e:
                    bench.found["errors"][error] = str(e)[-300:]
                    print(f"{error}: {e}", file=sys.stderr, flush=True)
                    running.pop(variant.key).end()
                    continue
                opening = opening or ranks
                first = max(rank["open"] + (rank["first"] or 0.0) for rank in opening)
                turns.append({"ranks": ranks, "first_batch": first, "from_opening": not is_warm})
                bench.save()
        for variant in taking:
            if variant.key in running:
                with contextlib.suppress(WorkerError):
                    running[variant.key].ask(do="close")
    middle = np.median
    told = ", ".join(
        f"{key} {middle([rate(turn) for turn in turns]):,.0f}/s ({middle([cpu_us(turn) for turn in turns]):,.0f} us)"
        for key, turns in held.items()
        if turns
    )
    print(f"{cell.name}: {told}", flush=True)


def rate(turn: dict[str, Any]) -> float:
    """Records/s of all ranks together; where the data set was cold, from its opening on: HF datasets bring 83 to 100 %
    of the sets into the page cache while they open them."""
    ranks, opening = turn["ranks"], turn.get("from_opening", False)
    seconds = max(rank["seconds"] + opening * rank["open"] for rank in ranks)
    return float(sum(rank["records"] for rank in ranks) / seconds)


def cpu_us(turn: dict[str, Any]) -> float:
    """Microseconds per record, of all threads and ranks."""
    ranks = turn["ranks"]
    return float(1e6 * sum(rank["cpu"] for rank in ranks) / max(1, sum(rank["records"] for rank in ranks)))


def speed(bench: Bench, names: list[str]) -> None:
    bench.note_machine()
    for name in [name for name in bench.found["errors"] if "/" in name and not name.startswith("write/")]:
        del bench.found["errors"][name]  # an earlier call's: try once more
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}
        stack.callback(lambda: [one.end() for one in running.values()])
        for ranks in sorted({cell.ranks for cell in CELLS}):
            for cell in CELLS:
                if cell.ranks == ranks and cell.name.startswith(tuple(names)) and not bench.late():
                    measure(bench, cell, running)
            for one in running.values():
                one.end()
            running.clear()
