"""The conductor of a study: stores, jobs, cells, rounds. It starts everything and reads no data itself.

Within a cell the recipes run in turns, A B C A B C ..., so that drift of the machine affects all of them. Before it is
timed, each recipe has an untimed run in the same job, which loads its compiled kernels, and whose content is compared
record by record with what py-lmdb reads.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cache import Unavailable, cached_bytes, drop_file, warm_file
from benchmarks.facts import machine
from benchmarks.measure import WorkerError
from benchmarks.study.cells import LOOPS, Cell, Preset, words
from benchmarks.study.jobs import Job, Launcher
from benchmarks.study.requests import measure_requests
from benchmarks.study.sets import STEPS, Held, held
from benchmarks.study.stores import Store, open_store
from pario.comm.solo import Solo
from pario.dataset.reader import Reader
from pario.locate.sidecar import sidecar_places
from pario.options import RECIPES, USUAL_INFLIGHT

__all__ = ["Study", "Watcher"]

#: A task that takes longer counts as a hang.
TASK_S = 120.0
#: Steps of the run that estimates the time of a whole epoch.
PROBE_STEPS = 2
#: A run that takes this many times the limit is not extended, and a whole epoch that takes no longer is not cut.
ENOUGH = 4
#: A content check may take this many times a timed run's limit.
CHECK_TIMES = 4
#: Warm runs: epochs of one loader; the first does not count.
WARM_EPOCHS = 3


class Watcher:
    """Observes a running study; this base class does nothing."""

    def say(self, line: str) -> None:
        """A message for the user."""

    def tick(self, runs: int) -> None:
        """This many more runs have ended, of `Study.ticks`."""

    def keep(self, document: dict[str, Any]) -> None:
        """A cell or the study has ended: save `document`, so that no measurement is lost."""


class Study:
    """One study. `run()` fills `document`, which is valid even if the study is interrupted.

    name : name of the preset
    data : folder for the data sets; they stay there
    """

    def __init__(
        self,
        preset: Preset,
        *,
        name: str,
        launcher: Launcher,
        data: str | os.PathLike[str],
        seed: int = 0,
        watcher: Watcher | None = None,
    ) -> None:
        self._preset = preset
        self._launcher = launcher
        self._data = os.path.abspath(data)
        self._seed = seed
        self._watcher = watcher or Watcher()
        self._sets: dict[str, Held] = {}
        self._checked: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._notes: Counter[str] = Counter()
        self.document: dict[str, Any] = {
            "format": 1,
            "kind": "study",
            "machine": machine(),
            "preset": name,
            "rounds": preset.rounds,
            "seed": seed,
            "limit_s": preset.limit_s,
            "sets": {},
            "cells": [],
            "requests": [],
            "groups": [],
            "checks": [],
            "notes": [],
            "complete": False,
            "seconds": 0.0,
        }

    @property
    def ticks(self) -> int:
        """Number of runs that `Watcher.tick` reports."""
        preset = self._preset
        runs = sum(len(cell.recipes) * (preset.rounds + 1) for cell in preset.cells)
        runs += sum(len(preset.groups) * (preset.rounds + 1) for _ in preset.group_cells)
        return runs + len(preset.requests) * preset.rounds

    def run(self) -> None:
        begun = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="pario-study-") as work:
                self._work = work
                self._make_sets()
                everything = [(cell, False) for cell in self._preset.cells]
                everything += [(cell, True) for cell in self._preset.group_cells]
                everything.sort(key=lambda one: one[0].store)  # stable: the order of the preset within each store
                for name, of_store in groupby(everything, key=lambda one: one[0].store):
                    self._on_store(name, list(of_store))
                self._requests()
            self.document["complete"] = True
        finally:
            self.document["seconds"] = time.monotonic() - begun
            self._watcher.keep(self.document)

    # -- data ------------------------------------------------------------------------------------------------------

    def _make_sets(self) -> None:
        wanted = {cell.dataset for cell in (*self._preset.cells, *self._preset.group_cells)}
        if self._preset.requests:
            wanted.add("3k")
        for which in (which for which in STEPS if which in wanted):
            made = held(self._data, which, self._preset.records[which], self._watcher.say)
            for _, away in _sidecars(made.folder):  # left by a study that was killed while an index was hidden
                with suppress(OSError):
                    os.unlink(away)
            self._sets[which] = made
            np.save(self._digests(made), made.digests())
            in_order = _save_index(made.folder)
            self.document["sets"][which] = asdict(made) | {"folder": "", "in_order": in_order}
        self.document["machine"]["read_ahead_bytes"] = _read_ahead_bytes(self._data)

    def _digests(self, made: Held) -> str:
        return os.path.join(self._work, f"{made.which}.npy")

    # -- stores and jobs -------------------------------------------------------------------------------------------

    def _on_store(self, name: str, cells: list[tuple[Cell, bool]]) -> None:
        sets = {cell.dataset: self._sets[cell.dataset] for cell, _ in cells}
        try:
            with open_store(name, sets, self._data) as store:
                for made in sets.values():
                    _save_index(store.folder(made, "prov"))
                for (ranks, nodes), of_job in groupby(
                    sorted(cells, key=lambda one: (one[0].ranks, one[0].nodes)),
                    key=lambda one: (one[0].ranks, one[0].nodes),
                ):
                    self._job(store, ranks, nodes, list(of_job))
        except Unavailable as reason:
            self._note(f"store {name}: not measured, {reason}")
            self._skip(cells)

    def _job(self, store: Store, ranks: int, nodes: int, cells: list[tuple[Cell, bool]]) -> None:
        launcher = self._launcher
        if (ranks > 1 and not launcher.command) or (nodes > 1 and not launcher.emulates_nodes):
            why = "no mpiexec" if not launcher.command else "this mpiexec emulates no nodes (MPICH's does)"
            self._note(f"{words(ranks, nodes)}: not measured, {why}")
            self._skip(cells)
            return
        jobs = _Jobs(lambda: Job(launcher, ranks, nodes, store.command))
        try:
            for cell, by_groups in cells:
                variants = (
                    [(f"G={group}", "stag", {"stagger": group}) for group in self._preset.groups]
                    if by_groups
                    else [(recipe, recipe, {}) for recipe in cell.recipes]
                )
                found = self._new_cell(store, cell, [name for name, *_ in variants])
                self.document["groups" if by_groups else "cells"].append(found)
                try:
                    self._cell(store, jobs, cell, variants, found)
                except Unavailable as reason:
                    self._note(f"{cell.title}: cut short, {reason}")
                self._watcher.keep(self.document)
        finally:
            jobs.close()

    def _skip(self, cells: Iterable[tuple[Cell, bool]]) -> None:
        for cell, by_groups in cells:
            variants = self._preset.groups if by_groups else cell.recipes
            self._watcher.tick(len(variants) * (self._preset.rounds + 1))

    # -- cells -----------------------------------------------------------------------------------------------------

    def _new_cell(self, store: Store, cell: Cell, names: list[str]) -> dict[str, Any]:
        return {
            **{name: value for name, value in asdict(cell).items() if name != "recipes"},
            "cap": store.cap,
            "batch": max(1, self._sets[cell.dataset].step_records // cell.ranks),
            "runs": {name: [] for name in names},
            "steps": {},
            "options": {},
            "failed": {},
        }

    def _cell(
        self,
        store: Store,
        jobs: _Jobs,
        cell: Cell,
        variants: list[tuple[str, str, dict[str, Any]]],
        found: dict[str, Any],
    ) -> None:
        """Fill `found`. variants : (name, recipe, options)"""
        tasks: dict[str, dict[str, Any]] = {}
        for name, recipe, options in variants:
            self._watcher.tick(1)
            try:
                task = self._task(store, cell, found["batch"], recipe, options)
            except Unavailable as reason:  # a loop needs a mount that only root can have
                self._note(f"{name}: not measured, {reason}", f" ({cell.title})")
                continue
            try:
                tasks[name] = self._prepare(store, jobs, cell, task)
                found["steps"][name], found["options"][name] = tasks[name]["steps"], tasks[name]["options"]
            except WorkerError as e:
                self._failed(found, cell, name, e)
        for _ in range(self._preset.rounds):
            for name, *_ in variants:
                if name in tasks and name not in found["failed"]:
                    try:
                        found["runs"][name].append(self._timed(store, jobs, cell, tasks[name]))
                    except WorkerError as e:
                        self._failed(found, cell, name, e)
                self._watcher.tick(1)

    def _failed(self, found: dict[str, Any], cell: Cell, name: str, error: WorkerError) -> None:
        text = str(error)
        found["failed"][name] = text
        found["runs"][name] = []
        self._note(f"{name} failed: {text.strip().splitlines()[-1]}", f" ({cell.title})")

    def _task(self, store: Store, cell: Cell, batch: int, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
        made, loop = self._sets[cell.dataset], LOOPS.get(recipe)
        if loop is not None:
            if not loop.in_order and store.in_flight is not None:
                batch = 1  # a record may take a second there
        elif store.in_flight is not None and recipe != "auto":  # which finds its number by itself
            options = {"inflight": max(1, min(USUAL_INFLIGHT, store.in_flight // cell.nodes)), **options}
        return {
            "path": store.folder(made, recipe),
            "recipe": "" if loop else recipe,
            "loop": recipe if loop else "",
            "head": made.head,
            "pixels": made.pixels,
            "options": options,
            "order": cell.order,
            "seed": self._seed,
            "batch": batch,
            "decoder": made.decoder,
            "steps": 0,
            "epochs": 1,
            "save_index": True,
            "check": "",
            "drop": "",
        }

    def _prepare(self, store: Store, jobs: _Jobs, cell: Cell, task: dict[str, Any]) -> dict[str, Any]:
        """Untimed runs: kernels, content, and what a recipe chooses by trial. Returns the task for the timed runs."""
        made = self._sets[cell.dataset]
        steps = math.ceil(made.records / (task["batch"] * cell.ranks))
        recipe = RECIPES.get(task["recipe"])  # None: a loop written by hand
        name = task["recipe"] or task["loop"]
        key = (cell.dataset, cell.order, cell.ranks, cell.nodes, name, str(task["options"]))
        if recipe is not None and recipe.stagger == 0 and "stagger" not in task["options"]:
            # A trial at the start of an epoch finds the best number of readers; once is enough.
            tried = jobs.do({**task, "steps": PROBE_STEPS, "drop": _file(task)})
            task = {**task, "options": {**task["options"], "stagger": tried[0]["settings"]["stagger"]}}
        slow = cell.store not in ("disk", "throttled") or cell.order != "none"
        # Not with much read-ahead: the first steps would include the time of later ones.
        ahead = recipe.ahead if recipe is not None else LOOPS[name].read_ahead_bytes is not None
        limit = self._affordable(jobs, task, steps) if slow and not ahead else 0
        if key not in self._checked and not 0 < limit * CHECK_TIMES < steps:
            ranks = jobs.do({**task, "check": self._digests(made)})
            check = {name: ranks[0][name] for name in ("missing", "repeated", "wrong")}
            self._checked[key] = check
            names = ("dataset", "order", "ranks", "nodes", "recipe", "options")
            self.document["checks"].append({**dict(zip(names, key, strict=True)), "records": made.records, **check})
        elif not slow:
            jobs.do({**task, "steps": PROBE_STEPS})
        return {**task, "steps": limit}

    def _affordable(self, jobs: _Jobs, task: dict[str, Any], steps: int) -> int:
        """Number of steps that fit into the preset's limit; 0: all. Estimated from runs of growing length, by the cost
        of the later steps: the first ones of a recipe that reads many steps at once, or ahead, are not typical."""
        limit = self._preset.limit_s
        before, since, tried = 0, 0.0, min(PROBE_STEPS, steps)
        while True:
            took = _seconds(jobs.do({**task, "steps": tried, "drop": _file(task)}), 0)
            if tried == steps and took <= ENOUGH * limit:
                return 0
            # In the first run, or while four times the steps take less than twice the time, the start dominates.
            if took > ENOUGH * limit or (took > limit and before and took > 2 * since):
                each = max(1e-6, took - since) / (tried - before)
                if took + each * (steps - tried) <= ENOUGH * limit:
                    return 0
                return max(PROBE_STEPS, min(tried, before + int((limit - since) / each)))
            before, since, tried = tried, took, min(steps, 4 * tried)

    def _timed(self, store: Store, jobs: _Jobs, cell: Cell, task: dict[str, Any]) -> dict[str, Any]:
        file = _file(task)
        hidden = []
        if cell.state == "warm":
            if (cached_bytes(file) or 0) < 0.999 * self._sets[cell.dataset].file_bytes:
                warm_file(file)
            task = {**task, "epochs": WARM_EPOCHS}
        else:
            drop_file(file)
            if cell.state == "cold":
                task = {**task, "drop": file}
        try:
            if cell.state == "first":
                hidden = self._hide_index(store, task)
                task = {**task, "save_index": False}
            store.reset()
            ranks = jobs.do(task)
            counted = store.counts()
        finally:
            for there, away in hidden:
                os.replace(away, there)
        return self._summary(cell, ranks, counted)

    def _hide_index(self, store: Store, task: dict[str, Any]) -> list[tuple[str, str]]:
        """Rename side-cars out of the way; returns (name, name meanwhile) of each, for putting them back."""
        moved = []
        for folder in {task["path"], os.path.join(self._data, os.path.basename(task["path"]))}:
            for there, away in _sidecars(folder):
                with suppress(OSError):
                    os.replace(there, away)
                    moved.append((there, away))
        if moved and store.settle_s:
            time.sleep(store.settle_s)
        return moved

    def _summary(self, cell: Cell, ranks: list[dict[str, Any]], counted: dict[str, int] | None) -> dict[str, Any]:
        """One run of all ranks: sums over its timed epochs and ranks, except for the times."""
        made = self._sets[cell.dataset]
        epochs = range(1, len(ranks[0]["epochs"])) if cell.state == "warm" else range(1)
        mine = [rank["epochs"][k] for rank in ranks for k in epochs]
        opened = max(rank["opened"] for rank in ranks) - max(rank["began"] for rank in ranks)
        took = sum(_seconds(ranks, k) for k in epochs) + (opened if cell.state == "first" else 0.0)
        records = sum(one["records"] for one in mine)
        sums = ("collectives", "voluntary", "involuntary", "minor_faults", "major_faults", "user_us", "system_us")
        first = max(rank["epochs"][epochs[0]]["first"] for rank in ranks)
        return {
            "seconds": took,
            "open_seconds": opened,
            "first_batch_seconds": first - max(rank["epochs"][epochs[0]]["start"] for rank in ranks),
            "epochs": len(epochs),
            "records": records,
            "bytes": round(made.value_bytes * records / made.records),
            "rate": made.value_bytes * records / made.records / took,
            "page_rate": made.page_bytes * records / made.records / took,
            "batches": sum(one["steps"] for one in mine),
            **{name: sum(one[name] for one in mine) for name in (*sums, "asked", "asked_calls", "device")},
            "by_rank": {
                name: [rank["epochs"][epochs[-1]][name] for rank in ranks] for name in ("voluntary", "records")
            },
            "store": counted,
            **{
                when: {name: sum(one[when][name] for one in mine) for name in mine[0][when]}
                for when in ("stats", "stats_late")
            },
            "cached": ranks[0]["cached"],
            "settings": ranks[0]["settings"],
        }

    # -- the rest --------------------------------------------------------------------------------------------------

    def _requests(self) -> None:
        if not self._preset.requests:
            return
        try:
            for row in measure_requests(
                self._sets["3k"].file,
                self._preset.requests,
                self._preset.request_bytes,
                self._preset.rounds,
                lambda: self._watcher.tick(1),
            ):
                self.document["requests"].append(row)
        except Unavailable as reason:
            self._note(f"read time against request size: not measured, {reason}")

    def _note(self, text: str, where: str = "") -> None:
        """Report and keep a note once, however often it happens."""
        self._notes[text] += 1
        if self._notes[text] == 1:
            self._watcher.say(f"note: {text}{where}")
            self.document["notes"].append(f"{text}{where}")


class _Jobs:
    """A job that starts on first use, and again after a failure."""

    def __init__(self, make: Callable[[], Job]) -> None:
        self._make = make
        self._job: Job | None = None

    def do(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        """Raises WorkerError."""
        try:
            if self._job is None:
                self._job = self._make().__enter__()
            ranks = self._job.do(task, TASK_S)
        except BaseException:
            self.end()
            raise
        errors = {rank["error"] for rank in ranks if "error" in rank}
        if errors:
            self.end()  # ranks may still hold resources that others have dropped
            raise WorkerError("\n".join(sorted(errors, key=lambda text: "PeerError" not in text)))
        return ranks

    def end(self) -> None:
        """At once."""
        job, self._job = self._job, None
        if job is not None:
            job.__exit__(WorkerError, None, None)

    def close(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.__exit__(None, None, None)


def _save_index(folder: str) -> bool:
    """Build the side-car if it is missing: all cells but "first" need it. Returns whether the file is in key order."""
    with Reader(folder, comm=Solo(), recipe="prov") as reader:
        return reader.index.by_offset is None


def _sidecars(folder: str) -> list[tuple[str, str]]:
    """Possible paths of a set's index, beside the data and in the user's cache directory, with their names while
    hidden."""
    return [(name, f"{name}.away") for name in sidecar_places(os.path.join(folder, "data.mdb"))]


def _file(task: dict[str, Any]) -> str:
    return str(Path(task["path"]) / "data.mdb")


def _seconds(ranks: list[dict[str, Any]], epoch: int) -> float:
    """Seconds from the last rank's start to the last rank's end."""
    return max(rank["epochs"][epoch]["end"] for rank in ranks) - max(rank["epochs"][epoch]["start"] for rank in ranks)


def _read_ahead_bytes(path: str) -> int | None:
    """How far the kernel reads ahead on the file system of `path`; None if unknown. The speed of recipes that fault
    their pages in depends on it."""
    number = os.stat(path).st_dev
    try:
        told = Path(f"/sys/class/bdi/{os.major(number)}:{os.minor(number)}/read_ahead_kb").read_text()
    except OSError:
        return None
    return int(told) * 1024
