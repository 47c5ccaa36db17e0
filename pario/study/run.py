"""The conductor of a study: stores, jobs, cells, rounds. It starts everything and reads no data itself.

Within a cell the recipes run in turns, A B C A B C ..., so that what drifts on the machine hits all of them. Before the
clock counts, each recipe has had an untimed run in the same job, which loads its compiled kernels and whose content is
compared, record by record, with what py-lmdb reads.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pario.comm.world import Solo
from pario.locate.index import sidecar_places
from pario.options import Options
from pario.reader import RECIPES, Reader
from pario.study.cache import Unavailable, cached_bytes, drop_file, warm_file
from pario.study.cells import Cell, Preset, words
from pario.study.facts import machine, read_ahead_bytes
from pario.study.jobs import Job, WorkerError
from pario.study.requests import measure_requests
from pario.study.sets import STEPS, Held, held
from pario.study.stores import Place, open_store

__all__ = ["Study"]

#: A task that takes longer is taken for a hang.
TASK_S = 120.0
#: Steps of the run from which the time of a whole one is estimated.
PROBE_STEPS = 2
#: A run of so many times the limit is not made longer, and a whole epoch that takes no longer is not cut.
ENOUGH = 4
#: A content check may take this many times a timed run's limit.
CHECK_TIMES = 4
#: Warm runs: epochs of one loader, of which the first is not counted.
WARM_EPOCHS = 3


class Study:
    """One study. `run()` fills `document`, which is worth keeping also when it is cut short.

    launcher : mpiexec and its options, [] where there is none: then one rank only
    emulates : that mpiexec emulates nodes (MPICH's)
    data : folder for the data sets; they stay there
    say : hears what a person should know
    tick : called as runs end, `tick(1)`; `ticks` of them in all
    keep : called after each cell, so that nothing measured is lost
    """

    def __init__(
        self,
        preset: Preset,
        *,
        name: str,
        launcher: Sequence[str],
        emulates: bool,
        data: str | os.PathLike[str],
        seed: int = 0,
        say: Callable[[str], None] = lambda _: None,
        tick: Callable[[int], None] = lambda _: None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self._preset = preset
        self._launcher, self._emulates = list(launcher), emulates
        self._data = os.path.abspath(data)
        self._seed = seed
        self._say, self._tick, self._keep = say, tick, keep
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
        """How often `tick` will be called, one for each run."""
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
                    self._store(name, list(of_store))
                self._requests()
            self.document["complete"] = True
        finally:
            self.document["seconds"] = time.monotonic() - begun
            self._keep()

    # -- data ------------------------------------------------------------------------------------------------------

    def _make_sets(self) -> None:
        wanted = {cell.dataset for cell in (*self._preset.cells, *self._preset.group_cells)}
        if self._preset.requests:
            wanted.add("3k")
        for which in (which for which in STEPS if which in wanted):
            made = held(self._data, which, self._preset.records[which], self._say)
            for _, away in _sidecars(made.folder):  # of a study that was killed while an index was hidden
                with suppress(OSError):
                    os.unlink(away)
            self._sets[which] = made
            np.save(self._digests(made), made.digests())
            in_order = _save_index(made.folder)
            self.document["sets"][which] = asdict(made) | {"folder": "", "in_order": in_order}
        self.document["machine"]["read_ahead_bytes"] = read_ahead_bytes(self._data)

    def _digests(self, made: Held) -> str:
        return os.path.join(self._work, f"{made.which}.npy")

    # -- stores and jobs -------------------------------------------------------------------------------------------

    def _store(self, name: str, cells: list[tuple[Cell, bool]]) -> None:
        sets = {cell.dataset: self._sets[cell.dataset] for cell, _ in cells}
        try:
            with open_store(name, sets, self._data) as place:
                for made in sets.values():
                    _save_index(place.where(made, "prov"))
                for (ranks, nodes), of_job in groupby(
                    sorted(cells, key=lambda one: (one[0].ranks, one[0].nodes)),
                    key=lambda one: (one[0].ranks, one[0].nodes),
                ):
                    self._job(place, ranks, nodes, list(of_job))
        except Unavailable as reason:
            self._note(f"store {name}: not measured, {reason}")
            self._skip(cells)

    def _job(self, place: Place, ranks: int, nodes: int, cells: list[tuple[Cell, bool]]) -> None:
        if (ranks > 1 and not self._launcher) or (nodes > 1 and not self._emulates):
            what = "no mpiexec" if not self._launcher else "this mpiexec emulates no nodes (MPICH's does)"
            self._note(f"{words(ranks, nodes)}: not measured, {what}")
            self._skip(cells)
            return
        jobs = _Jobs(lambda: Job(self._launcher, ranks, nodes, place.prefix))
        try:
            for cell, by_groups in cells:
                variants = (
                    [(f"G={group}", "stag", {"stagger": group}) for group in self._preset.groups]
                    if by_groups
                    else [(recipe, recipe, {}) for recipe in cell.recipes]
                )
                found = self._new_cell(place, cell, [name for name, *_ in variants])
                self.document["groups" if by_groups else "cells"].append(found)
                try:
                    self._cell(place, jobs, cell, variants, found)
                except Unavailable as reason:
                    self._note(f"{cell.title}: cut short, {reason}")
                self._keep()
        finally:
            jobs.close()

    def _skip(self, cells: Iterable[tuple[Cell, bool]]) -> None:
        for cell, by_groups in cells:
            self._tick((len(self._preset.groups) if by_groups else len(cell.recipes)) * (self._preset.rounds + 1))

    # -- cells -----------------------------------------------------------------------------------------------------

    def _new_cell(self, place: Place, cell: Cell, names: list[str]) -> dict[str, Any]:
        return {
            **{name: value for name, value in asdict(cell).items() if name != "recipes"},
            "cap": place.cap,
            "batch": max(1, self._sets[cell.dataset].step_records // cell.ranks),
            "runs": {name: [] for name in names},
            "steps": {},
            "options": {},
            "failed": {},
        }

    def _cell(
        self,
        place: Place,
        jobs: _Jobs,
        cell: Cell,
        variants: list[tuple[str, str, dict[str, Any]]],
        found: dict[str, Any],
    ) -> None:
        """Fill `found`. variants : (name, recipe, options)"""
        tasks: dict[str, dict[str, Any]] = {}
        for name, recipe, options in variants:
            task = self._task(place, cell, found["batch"], recipe, options)
            try:
                tasks[name] = self._prepare(place, jobs, cell, task)
                found["steps"][name], found["options"][name] = tasks[name]["steps"], tasks[name]["options"]
            except WorkerError as e:
                self._failed(found, cell, name, e)
            self._tick(1)
        for _ in range(self._preset.rounds):
            for name, *_ in variants:
                if name not in found["failed"]:
                    try:
                        found["runs"][name].append(self._timed(place, jobs, cell, tasks[name]))
                    except WorkerError as e:
                        self._failed(found, cell, name, e)
                self._tick(1)

    def _failed(self, found: dict[str, Any], cell: Cell, name: str, error: WorkerError) -> None:
        text = str(error)
        found["failed"][name] = text
        found["runs"][name] = []
        self._note(f"{name} failed: {text.strip().splitlines()[-1]}", f" ({cell.title})")

    def _task(self, place: Place, cell: Cell, batch: int, recipe: str, options: dict[str, Any]) -> dict[str, Any]:
        made = self._sets[cell.dataset]
        if place.in_flight is not None:
            options = {"inflight": max(1, min(Options().inflight, place.in_flight // cell.nodes)), **options}
        return {
            "path": place.where(made, recipe),
            "recipe": recipe,
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

    def _prepare(self, place: Place, jobs: _Jobs, cell: Cell, task: dict[str, Any]) -> dict[str, Any]:
        """Untimed: kernels, content, what a recipe chooses by measuring. The task of the timed runs."""
        made = self._sets[cell.dataset]
        steps = math.ceil(made.records / (task["batch"] * cell.ranks))
        key = (cell.dataset, cell.order, cell.ranks, cell.nodes, task["recipe"], str(task["options"]))
        if RECIPES[task["recipe"]].stagger and "stagger" not in task["options"]:
            # The number of readers that suits this store is tried out at the start of an epoch; once is enough.
            tried = jobs.do({**task, "steps": PROBE_STEPS, "drop": _file(task)})
            task = {**task, "options": {**task["options"], "stagger": tried[0]["settings"]["stagger"]}}
        slow = cell.store not in ("disk", "throttled") or cell.order != "none"
        # Not where groups are read ahead: the first steps would be told to take what the later ones do.
        limit = self._affordable(jobs, task, steps) if slow and not RECIPES[task["recipe"]].ahead else 0
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
        """Steps that take no longer than the preset's limit; 0: all of them. From runs that grow, by what the later
        steps cost: the first ones of a recipe that reads many steps at once, or ahead, tell nothing about these."""
        limit = self._preset.limit_s
        before, since, tried = 0, 0.0, min(PROBE_STEPS, steps)
        while True:
            took = _seconds(jobs.do({**task, "steps": tried, "drop": _file(task)}), 0)
            if tried == steps and took <= ENOUGH * limit:
                return 0
            # At the first run, or while four times the steps take less than twice the time, most of it is the start.
            if took > ENOUGH * limit or (took > limit and before and took > 2 * since):
                each = max(1e-6, took - since) / (tried - before)
                if took + each * (steps - tried) <= ENOUGH * limit:
                    return 0
                return max(PROBE_STEPS, min(tried, before + int((limit - since) / each)))
            before, since, tried = tried, took, min(steps, 4 * tried)

    def _timed(self, place: Place, jobs: _Jobs, cell: Cell, task: dict[str, Any]) -> dict[str, Any]:
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
                hidden = self._hide_index(place, task)
                task = {**task, "save_index": False}
            place.reset()
            ranks = jobs.do(task)
            counted = place.counts()
        finally:
            for there, away in hidden:
                os.replace(away, there)
        return self._summary(cell, ranks, counted)

    def _hide_index(self, place: Place, task: dict[str, Any]) -> list[tuple[str, str]]:
        """Side-cars are out of the way until they are put back: (their name, their name meanwhile)."""
        moved = []
        for folder in {task["path"], os.path.join(self._data, os.path.basename(task["path"]))}:
            for there, away in _sidecars(folder):
                with suppress(OSError):
                    os.replace(there, away)
                    moved.append((there, away))
        if moved and place.settle_s:
            time.sleep(place.settle_s)
        return moved

    def _summary(self, cell: Cell, ranks: list[dict[str, Any]], counted: dict[str, int] | None) -> dict[str, Any]:
        """One run of all ranks: of its counted epochs, sums over the ranks but for the times."""
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
                lambda: self._tick(1),
            ):
                self.document["requests"].append(row)
        except Unavailable as reason:
            self._note(f"read time against request size: not measured, {reason}")

    def _note(self, text: str, where: str = "") -> None:
        """Said and kept once, however often it happens."""
        self._notes[text] += 1
        if self._notes[text] == 1:
            self._say(f"note: {text}{where}")
            self.document["notes"].append(f"{text}{where}")


class _Jobs:
    """A job that is started when it is needed, and anew after a failure."""

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
            self.end()  # some ranks may still hold what the others have dropped
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
    """Make the side-car if it is not there: cells that do not say "first" have it. Does every record lie behind those
    before it?"""
    with Reader(folder, comm=Solo(), recipe="prov") as reader:
        return reader.index.by_offset is None


def _sidecars(folder: str) -> list[tuple[str, str]]:
    """Where the index of a set may lie, beside the data and in the user's cache directory; its name while hidden."""
    return [(place, f"{place}.away") for place in sidecar_places(os.path.join(folder, "data.mdb"))]


def _file(task: dict[str, Any]) -> str:
    return str(Path(task["path"]) / "data.mdb")


def _seconds(ranks: list[dict[str, Any]], epoch: int) -> float:
    """From the moment when the last rank had come to the end of the last one."""
    return max(rank["epochs"][epoch]["end"] for rank in ranks) - max(rank["epochs"][epoch]["start"] for rank in ranks)
