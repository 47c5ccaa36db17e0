"""D3 of tf_study.py: checkpoints straight to a slow store, to a fast one, through a burst buffer, and none.

The slow store (FUSE): 2 ms per operation, and 16.7 MB/s for all writes together. By the study's model, (computing +
checkpoints ÷ slow) ÷ (computing + checkpoints ÷ fast), the burst buffer gains a factor of 3. The fast one is the disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import COLOURS, HEIGHT, WIDTH, bars
from benchmarks.measure import Row, Section, spread
from benchmarks.micro.checkpoint import Training, run_way, ways_here
from benchmarks.stores.latency import latency_store

__all__ = ["figure", "plan", "section"]

Runs = dict[str, dict[str, Any]]
Pick = Callable[..., dict[int, dict[str, Any]]]

WRITTEN_PER_S = 16.7e6
#: ways that have a bar; the others run in the first two rounds only
BARS = ("none", "direct", "fast only", "burst buffer")
TRAINING = Training(nbytes=20_000_000, arrays=16, checkpoints=5, every=20, step_s=0.03)


def plan(folder: Path, rounds: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """ "d3 ROUND WAY" -> {"total", "stall", "durable"}, seconds; the store is mounted for each run anew."""
    fast, behind = folder / "fast", folder / "slow"
    for each in (fast, behind):
        each.mkdir(exist_ok=True)

    def run(way: str, number: int) -> dict[str, Any]:
        with latency_store(behind, read_s=0.002, metadata_s=0.002, bytes_per_s=None, writable=True) as store:
            store.change(written_per_s=WRITTEN_PER_S)
            return run_way(way, TRAINING, store.folder, str(fast), number)

    for number in range(rounds):
        for way in ways_here(str(fast)):
            if number >= 2 and way not in BARS:
                continue
            yield f"d3 {number} {way}", lambda w=way, n=number: run(w, n)


def section(runs: Runs, into: Section, pick: Pick, ratio: Callable[..., list[float]]) -> Section:
    """The ratios of whole loops and of stalls, with the bars."""
    of = {way: pick(runs, "d3", *way.split()) for way in _ways(runs)}
    if "burst buffer" not in of:
        return into
    burst = of["burst buffer"]

    def add(way: str, value: str, sense: str, bar: float | None, turned: bool = False) -> None:
        above, below = (burst, of[way]) if turned else (of[way], burst)
        found = ratio(above, below, value)
        if not found:
            return
        words = {"total": "whole loop", "stall": "stall per checkpoint", "durable": "all durable"}[value]
        case = f"{words}: " + (f"burst buffer ÷ {way}" if turned else f"{way} ÷ burst buffer")
        ours, theirs = (statistics.median(run[value] for run in which.values()) for which in (burst, of[way]))
        paper = "; paper: 2.6 ×" if (way, value) == ("direct", "total") else ""
        into.rows.append(Row.of(case, found, sense, bar, ours=f"{ours:.3f} s", theirs=f"{theirs:.3f} s{paper}"))

    for way in of:
        if way == "direct":
            add(way, "total", ">=", 2.6)
            add(way, "stall", "", None)
        elif way == "fast only":
            add(way, "total", "<=", 1.05, turned=True)
            add(way, "stall", "<=", 1.2, turned=True)
        elif way == "none":
            add(way, "total", "", None, turned=True)
        elif way != "burst buffer":
            add(way, "total", "", None)
            add(way, "stall", "", None)
    add("direct", "durable", "", None, turned=True)
    return into


def figure(pyplot: Any, runs: Runs, pick: Pick, paper: float) -> Any:
    """Whole loops and stalls, a bar per way. paper : what the study's burst buffer gained over the slow device"""
    figure_, panels = pyplot.subplots(1, 2, figsize=(2 * WIDTH, 1.25 * HEIGHT), layout="constrained")
    ways = _ways(runs)
    for axes, value, title in zip(panels, ("total", "stall"), ("whole loop (s)", "stall (s)"), strict=True):
        found = [spread([run[value] for run in pick(runs, "d3", *way.split()).values()]) for way in ways]
        bars(axes, range(len(ways)), found, color=[COLOURS[5 if way == "burst buffer" else 2] for way in ways])
        axes.set_xticks(range(len(ways)), ways, rotation=30, ha="right")
        axes.set_ylabel(title)
    if "direct" in ways and "burst buffer" in ways:
        direct = statistics.median(run["total"] for run in pick(runs, "d3", "direct").values())
        label = f"direct ÷ {paper}, the paper's gain"
        panels[0].axhline(direct / paper, color="black", linewidth=0.9, linestyle="--", label=label)
        panels[0].legend(frameon=False, loc="upper left")
        panels[0].set_ylim(top=1.35 * max(panels[0].get_ylim()))
    panels[1].set_yscale("log")
    return figure_


def _ways(runs: Runs) -> Sequence[str]:
    return list(dict.fromkeys(" ".join(name.split()[2:]) for name in runs if name.startswith("d3 ")))
