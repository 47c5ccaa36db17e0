"""The three experiments of Chien et al., "Characterizing Deep-Learning I/O Workloads in TensorFlow" (PDSW-DISCS 2018),
on emulated stores: reading over threads (D1), overlap with computing (D2), checkpoints (D3).

    python -m benchmarks.tf_study --data DIR --out DIR/tf-study.json [--rounds 5] [--only d1,d2,d3] [--seconds 140]

Runs of all variants take turns. What has been measured is in the JSON file after each run, and a further call goes on
from there: --seconds says when to stop. Needs root, fuse3 and mfusepy. With --fill nothing is measured: tables go into
the pages of --into, figures into --figures.

The stores (FUSE, no page cache): "Lustre-like" 20 ms per read, 2 ms per metadata operation, 200 MB/s for all readers
together; "HDD-like" 5 ms, 1 ms, 18 MB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables, tf_checkpoints
from benchmarks.drawing import COLOURS, HEIGHT, WIDTH, bars, legend_below, points, write_figures
from benchmarks.marked import fill_marked
from benchmarks.measure import Pieces, Row, Section, spread
from benchmarks.micro.items import Decoding, FileItems
from benchmarks.micro.made import make_files
from benchmarks.micro.overlap import Application, input_seconds, pipeline
from benchmarks.micro.threads import read_once
from benchmarks.stores.latency import latency_store
from pario.decode.image import Image

#: name -> seconds per read, seconds per metadata operation, bytes per second
STORES = {"Lustre-like": (0.020, 0.002, 200e6), "HDD-like": (0.005, 0.001, 18e6)}
THREADS = (1, 2, 4, 8)
#: what the paper's abstract reports: the most that 8 threads gain; burst buffer against the slow device
PAPER = {"Lustre-like": 7.8, "HDD-like": 2.3, "checkpoint": 2.6}
BATCHES, FACTORS, PREFETCH = 50, (0.5, 1.0, 2.0), (0, 1, 4)
TITLES = {
    "d1": "Reading 512 files of 112 KiB over threads: gain over one thread",
    "d2": "Mini-application, 50 batches of 32 files of 12 KB: time beside computing alone",
    "d3": "Checkpoints: 5 of 20 MB, one after every 20 of 100 iterations of 30 ms",
}

Run = tuple[str, Callable[[], dict[str, Any]]]


class Bench(Pieces):
    """Runs by name, each measured once: name -> result. path : where they are kept"""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(path, seconds, lambda runs: [one for one in (d1(runs), d2(runs), d3(runs)) if one.rows])

    def measure(self, planned: Iterator[Run]) -> bool:
        """Measure what is missing; False if the time was over before the end."""
        try:
            for name, run in planned:
                self.get(name, run)
        except TimeoutError:
            return False
        return True

    def keep(self, **facts: Any) -> None:
        super().keep(rounds=max((int(name.split()[1]) for name in self.runs), default=-1) + 1, **facts)


# -- the experiments ---------------------------------------------------------------------------------------------------


def plan_d1(folders: dict[str, str], rounds: int) -> Iterator[Run]:
    """ "d1 ROUND STORE VARIANT THREADS" -> {"bytes_per_s", "cpu"}"""
    for number in range(rounds):
        for decode in (False, True)[: 2 if number < 2 else 1]:  # decoding has no bar
            for store, folder in folders.items():
                for threads in THREADS:
                    name = f"d1 {number} {store} {'decoded' if decode else 'read'} {threads}"
                    yield name, lambda f=folder, d=decode, t=threads, n=number: _read(f"{f}/large", d, t, n)


def _read(folder: str, decode: bool, threads: int, number: int) -> dict[str, Any]:
    items = FileItems(folder)
    decoding = Decoding(Image(size=64), items) if decode else None
    run = read_once(items, items.draw(True, number), threads, decoding)
    return {"bytes_per_s": run.bytes / run.seconds, "cpu": run.cpu / run.seconds / (os.cpu_count() or 1)}


def plan_d2(folders: dict[str, str], rounds: int) -> Iterator[Run]:
    """ "d2 ROUND STORE FACTOR PREFETCH" -> {"seconds", "only", "input"}, per batch"""
    inputs: dict[str, float] = {}
    for number in range(rounds):
        for store, folder in folders.items():
            for factor in FACTORS:
                for prefetch in PREFETCH:
                    if number >= 2 and factor < 1:
                        continue  # less of what has no bar

                    def run(s: str = store, f: str = folder, k: float = factor, p: int = prefetch) -> dict[str, Any]:
                        items = FileItems(f"{f}/small")
                        what = Application(threads=16, batches=BATCHES, decoder=Image(size=224))
                        if s not in inputs:
                            inputs[s] = input_seconds(items, what, 0)
                        return _compute(items, what, k * inputs[s], p) | {"input": inputs[s]}

                    yield f"d2 {number} {store} {factor:g} {prefetch}", run


def _compute(items: FileItems, what: Application, seconds: float, prefetch: int) -> dict[str, float]:
    begin = time.perf_counter()
    for _ in range(10):
        time.sleep(seconds)
    only = (time.perf_counter() - begin) / 10
    order = np.resize(items.draw(True, 0), what.batch * what.batches)
    assert what.decoder is not None
    decoding = Decoding(what.decoder, items)
    begin = time.perf_counter()
    for _ in pipeline(items, order, what, prefetch, decoding):
        time.sleep(seconds)
    return {"seconds": (time.perf_counter() - begin) / what.batches, "only": only}


# -- what they say -----------------------------------------------------------------------------------------------------


def pick(runs: dict[str, dict[str, Any]], first: str, *rest: str) -> dict[int, dict[str, Any]]:
    """Round -> the result of the run "FIRST ROUND REST"."""
    wanted = [name.split() for name in runs]
    return {int(w[1]): runs[" ".join(w)] for w in wanted if w[0] == first and " ".join(w[2:]) == " ".join(rest)}


def ratio(above: dict[int, dict[str, Any]], below: dict[int, dict[str, Any]], value: str) -> list[float]:
    """Round by round; empty if no round has both."""
    return [above[k][value] / below[k][value] for k in sorted(above.keys() & below.keys())]


def d1(runs: dict[str, dict[str, Any]]) -> Section:
    section = Section("d1", TITLES["d1"], "no page cache")
    for variant in ("read", "decoded"):
        for store in STORES:
            of = {threads: pick(runs, "d1", store, variant, str(threads)) for threads in THREADS}
            for threads, than in ((8, 1), (8, 4)):
                found = ratio(of[threads], of[than], "bytes_per_s")
                if not found:
                    continue
                limits: list[tuple[str, float | None]] = [("", None)]
                if variant == "read" and than == 1:
                    limits = [(">=", 6.5)] if store == "Lustre-like" else [(">=", 2.0), ("<=", 2.8)]
                elif variant == "read" and store == "HDD-like":
                    limits = [("<=", 1.15)]
                rates = [statistics.median(run["bytes_per_s"] for run in of[n].values()) / 1e6 for n in (threads, than)]
                busy = statistics.median(run["cpu"] for run in of[threads].values())
                told = f"{rates[0]:.1f} MB/s" + (f", {busy:.0%} of the cores busy" if variant == "decoded" else "")
                paper = f"; paper: {PAPER[store]} ×" if than == 1 and variant == "read" else ""
                case, beside = f"{store}, {variant}, {threads} threads ÷ {than}", f"{rates[1]:.1f} MB/s{paper}"
                section.rows += [Row.of(case, found, sense, bar, ours=told, theirs=beside) for sense, bar in limits]
    return section


def d2(runs: dict[str, dict[str, Any]]) -> Section:
    section = Section("d2", TITLES["d2"], "no page cache")
    for store in STORES:
        for factor in FACTORS:
            for prefetch in PREFETCH:
                of = pick(runs, "d2", store, f"{factor:g}", str(prefetch))
                if not of:
                    continue
                hidden = prefetch > 0
                # Without prefetching the sum of both is expected.
                found = [run["seconds"] / (run["only"] + (0.0 if hidden else run["input"])) for run in of.values()]
                limits: list[tuple[str, float | None]] = [("", None)]
                if not hidden:
                    limits = [(">=", 0.9), ("<=", 1.1)]
                elif factor >= 1:
                    limits = [("<=", 1.05)]
                took, only, alone = (
                    statistics.median(run[name] for run in of.values()) * 1e3 for name in ("seconds", "only", "input")
                )
                beside = f"computing {only:.1f} ms" + ("" if hidden else f" + input {alone:.1f} ms")
                case, mine = f"{store}, computing {factor:g} × input, prefetch {prefetch}", f"{took:.1f} ms"
                section.rows += [Row.of(case, found, sense, bar, ours=mine, theirs=beside) for sense, bar in limits]
    return section


def d3(runs: dict[str, dict[str, Any]]) -> Section:
    return tf_checkpoints.section(runs, Section("d3", TITLES["d3"], "-"), pick, ratio)


def table(section: dict[str, Any]) -> str:
    """Of a section; what it measures is the store as often as pario."""
    return tables.table(section).replace("| | pario | compared with |", "| | measured | beside |")


def fill(page: str, document: dict[str, Any]) -> str:
    parts = {section["name"]: table(section) for section in document["sections"]}
    return fill_marked(page, "bars", {**parts, "machine": tables.machine_lines(document)})


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(runs: dict[str, dict[str, Any]], folder: str) -> None:
    def draw(pyplot: Any) -> Iterator[tuple[str, Any]]:
        if any(name.startswith("d1") for name in runs):
            yield "tf-threads", _threads(pyplot, runs)
        if any(name.startswith("d2") for name in runs):
            yield "tf-overlap", _overlap(pyplot, runs)
        if any(name.startswith("d3") for name in runs):
            yield "tf-checkpoint", tf_checkpoints.figure(pyplot, runs, pick, PAPER["checkpoint"])

    write_figures(draw, folder)


def _threads(pyplot: Any, runs: dict[str, dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.5 * WIDTH, 1.2 * HEIGHT), layout="constrained")
    for store, colour in zip(STORES, (COLOURS[5], COLOURS[6]), strict=True):
        for variant, line in (("read", "-"), ("decoded", "--")):
            of = {threads: pick(runs, "d1", store, variant, str(threads)) for threads in THREADS}
            found = [(threads, ratio(of[threads], of[1], "bytes_per_s")) for threads in THREADS]
            measured = [(threads, spread(one)) for threads, one in found if one]
            if measured:
                points(
                    axes, [threads for threads, _ in measured], [one for _, one in measured],
                    label=f"{store}, {'read only' if variant == 'read' else 'decoded'}",
                    color=colour, linestyle=line, marker="o",
                )  # fmt: skip
        axes.plot([8], [PAPER[store]], marker="*", markersize=10, color=colour, markerfacecolor="none", linestyle="",
                  label=f"the paper's {'Lustre' if store == 'Lustre-like' else 'hard disk'}, 8 threads")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(THREADS, [str(threads) for threads in THREADS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("reading threads")
    axes.set_ylabel("bandwidth ÷ one thread's (×)")
    legend_below(figure, axes, 3)
    return figure


def _overlap(pyplot: Any, runs: dict[str, dict[str, Any]]) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(2 * WIDTH, 1.2 * HEIGHT), layout="constrained")
    for axes, store in zip(panels, STORES, strict=True):
        for number, prefetch in enumerate(PREFETCH):
            found = []
            for factor in FACTORS:
                of = pick(runs, "d2", store, f"{factor:g}", str(prefetch))
                found.append(spread([run["seconds"] * 1e3 for run in of.values()] or [0.0]))
            xs, colour = [k + (number - 1) * 0.27 for k in range(len(FACTORS))], COLOURS[(0, 2, 5)[number]]
            bars(axes, xs, found, 0.27, color=colour, label=f"prefetch {prefetch}")
        for k, factor in enumerate(FACTORS):
            of = pick(runs, "d2", store, f"{factor:g}", "1")
            if of:
                only = statistics.median(run["only"] for run in of.values()) * 1e3
                label = "" if k else "computing alone"
                axes.hlines(only, k - 0.45, k + 0.45, color="black", linewidth=1.2, label=label)
        axes.set_title(store)
        axes.set_xticks(range(len(FACTORS)), [f"{factor:g} × input" for factor in FACTORS])
        axes.set_xlabel("computing per batch")
    panels[0].set_ylabel("time per batch (ms)")
    legend_below(figure, panels[0], 4)
    return figure


# -- the command -------------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """The files of D1 and D2, once."""
    for name, count, nbytes in (("large", 512, 112 << 10), ("small", 1600, 12 << 10)):
        if not (folder / name).exists():
            shutil.rmtree(folder / f"{name}.new", ignore_errors=True)
            make_files(folder / f"{name}.new", count, nbytes)
            os.rename(folder / f"{name}.new", folder / name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tf_study", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder on a disk of this machine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="d1,d2,d3")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--into", action="append", default=[])
    parser.add_argument("--figures", default="")
    options = parser.parse_args()
    bench = Bench(options.out, options.seconds)
    done = True
    if not options.fill:
        if options.data is None:
            parser.error("--data is missing")
        folder = options.data / "tf-study"
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        with ExitStack() as stack:
            folders = {
                name: stack.enter_context(
                    latency_store(folder, read_s=read, metadata_s=metadata, bytes_per_s=rate)
                ).folder
                for name, (read, metadata, rate) in STORES.items()
            }
            plans = {"d1": plan_d1, "d2": plan_d2}
            for name in options.only.split(","):
                if name in plans:
                    done = bench.measure(plans[name](folders, options.rounds)) and done
        if "d3" in options.only.split(","):
            done = bench.measure(tf_checkpoints.plan(folder, options.rounds)) and done
    document = json.loads(options.out.read_text())
    for name in options.into:
        Path(name).write_text(fill(Path(name).read_text(), document))
    if options.figures:
        figures(bench.runs, options.figures)
    for section in document["sections"]:
        print(table(section))
    print("complete" if done else "time is over: call again to go on")
    met = all(row["met"] is not False for section in document["sections"] for row in section["rows"])
    return (0 if met else 1) if done else 3


if __name__ == "__main__":
    sys.exit(main())
