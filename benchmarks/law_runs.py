"""The depth that pario's law finds on real emulated stores: rate, time to 90 %, recovery, and jobs that share one.

`python -m benchmarks.tuning --law` measures. All jobs read 197 KB records in `"global"` order with an ordinary Loader
of one rank; benchmarks/worker_laws.py notes every read.

    steady STORE    each depth of HAND for a few seconds; then the best of them and the law, in turns
    bandwidth STORE the store's bandwidth ÷ 3 and back, while a job runs; by hand: 64
    latency STORE   its latency × 5 and back
    shared STORE    four jobs that begin two seconds after each other
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks import data
from benchmarks.drawing import write_figures
from benchmarks.measure import launch, told
from benchmarks.stores.kinds import STORES, Opened, opened
from benchmarks.worker_laws import BIN_S

__all__ = ["jain", "mean_depth", "plot", "smallest", "summary", "time_to", "units"]

HAND = (1, 2, 4, 8, 16, 32, 64)
#: of the set; where pages are dropped between epochs, or reads are slow, fewer do
RECORDS = {"disk": 5000, "NVMe-like": 5000, "HDD-like": 1000}
MANY = 10_000
HAND_S, LAW_S = 2.5, 6.0
#: Seconds of the beginning that do not count for the steady rate.
SETTLED_S = 2.5
#: When the store changes: (seconds, what); a job runs until the last of them.
CHANGES = {
    "bandwidth": ((6.0, 3, 1), (13.0, 1, 1), (20.0, 1, 1)),
    "latency": ((6.0, 1, 5), (22.0, 1, 1), (28.0, 1, 1)),
}
STAGGER_S, SHARED_S = 2.0, 26.0
#: Seconds from the first job's begin until the shares count: eight after the last one's.
SHARED_SETTLED_S = 14.0
#: Seconds from starting a job until it may begin.
READY_S = 10.0
#: The side that the law turns; another one is a depth.
LAW = "law"


# -- figures -----------------------------------------------------------------------------------------------------------

Bins = Sequence[Sequence[float]]  # per BIN_S: bytes, reads, the sum of their seconds


def rate(bins: Bins, first: float, last: float) -> float:
    """Bytes per second from `first` to `last`."""
    of = bins[round(first / BIN_S) : round(last / BIN_S)]
    return sum(each[0] for each in of) / max(BIN_S, len(of) * BIN_S)


def latency(bins: Bins, first: float, last: float) -> float:
    """Mean seconds of a read."""
    of = bins[round(first / BIN_S) : round(last / BIN_S)]
    return sum(each[2] for each in of) / max(1, sum(each[1] for each in of))


def time_to(bins: Bins, wanted: float, after: float, *, over: float = 0.5) -> float | None:
    """Seconds after `after` until half a second has had this rate; None: never."""
    k = 0
    while after + k * BIN_S + over <= len(bins) * BIN_S + 1e-9:
        begin = after + k * BIN_S
        if rate(bins, begin, begin + over) >= wanted:
            return round(k * BIN_S + over, 3)
        k += 1
    return None


def mean_depth(settings: Sequence[Sequence[float]], first: float, last: float, start: int = 2) -> float:
    total = 0.0
    steps = [(0.0, start), *((when, depth) for when, depth in settings), (float("inf"), 0)]
    for (begin, depth), (end, _) in itertools.pairwise(steps):
        total += depth * max(0.0, min(end, last) - max(begin, first))
    return total / (last - first)


def smallest(rates: dict[int, float], part: float = 0.95) -> float:
    """The smallest depth with this part of the best rate; between two that were tried, on a straight line."""
    wanted = part * max(rates.values())
    depths = sorted(rates)
    if rates[depths[0]] >= wanted:
        return depths[0]
    for less, more in itertools.pairwise(depths):
        if rates[more] >= wanted:
            return less + (more - less) * (wanted - rates[less]) / (rates[more] - rates[less])
    raise AssertionError("the best one is among them")


def jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


# -- runs --------------------------------------------------------------------------------------------------------------


def _sets(folder: str, store: str) -> tuple[data.DataSet, data.DataSet]:
    held, small = data.make(folder, "197k", RECORDS.get(store, MANY)), data.make(folder, "197k", 100)
    for one in (held, small):
        launch("benchmarks.worker_pario", [one.path, "--index-only"])
    return held, small


def _run(store: Opened, small: data.DataSet, side: str, seconds: float, *more: str) -> dict[str, Any]:
    """side : LAW, or a depth"""
    which = [] if side == LAW else ["--pin", side]
    drop = ["--drop", store.file] if store.file else []
    words = [store.folder, *which, "--seconds", str(seconds), "--warmup", small.path, *drop, *more]
    return launch("benchmarks.worker_laws", words, group=store.group)["ranks"][0]


def steady(name: str, folder: str, rounds: int) -> dict[str, Any]:
    held, small = _sets(folder, name)
    with opened(name, held) as store:
        tried = {}
        for depth in HAND:
            tried[depth] = rate(_run(store, small, str(depth), HAND_S)["bins"], 1.0, HAND_S)
        best = max(tried, key=tried.__getitem__)
        runs: dict[str, list[Any]] = {"hand": [], LAW: []}
        for _ in range(rounds):
            runs["hand"].append(_run(store, small, str(best), LAW_S))
            runs[LAW].append(_run(store, small, LAW, LAW_S))
    return {"hand": best, "search": tried, "runs": runs}


def change(what: str, name: str, folder: str, rounds: int) -> dict[str, Any]:
    """One run each, and one by hand with 64: what the store can give then."""
    del rounds
    held, small = _sets(folder, name)
    kind = STORES[name]
    assert kind.read_s is not None
    assert kind.bytes_per_s is not None
    runs: dict[str, Any] = {}
    with opened(name, held) as store:
        assert store.latency is not None
        for side in ("64", LAW):
            begin = time.perf_counter() + READY_S
            timers = []
            for (when, slower, later), _ in itertools.pairwise(CHANGES[what]):
                to = {"read_s": kind.read_s * later, "bytes_per_s": kind.bytes_per_s / slower}
                wait = begin + when - time.perf_counter()
                timers.append(threading.Timer(wait, partial(store.latency.change, **to)))
                timers[-1].start()
            try:
                seconds = CHANGES[what][-1][0]
                runs[side] = _run(store, small, side, seconds, "--begin-at", repr(begin))
            finally:
                for timer in timers:
                    timer.cancel()
                    timer.join()
                store.latency.change(read_s=kind.read_s, bytes_per_s=kind.bytes_per_s)
    return {"runs": runs, "changes": CHANGES[what]}


def shared(name: str, folder: str, rounds: int) -> dict[str, Any]:
    held, small = _sets(folder, name)
    runs: list[Any] = []
    with opened(name, held) as store, ThreadPoolExecutor(4) as jobs:
        for _ in range(max(1, rounds - 1)):
            begin = time.perf_counter() + 2 * READY_S  # they start at once, on few cores
            asked = [
                jobs.submit(
                    _run,
                    store,
                    small,
                    LAW,
                    SHARED_S - job * STAGGER_S,
                    *("--begin-at", repr(begin + job * STAGGER_S)),
                )
                for job in range(4)
            ]
            runs.append([each.result() for each in asked])
    return {"runs": runs}


def units(folder: str, rounds: int) -> dict[str, Callable[[], Any]]:
    """What there is to measure: name -> a call."""
    found: dict[str, Callable[[], Any]] = {}
    for what in CHANGES:
        found[f"{what} slow PFS"] = partial(change, what, "slow PFS", folder, rounds)
    found["shared slow PFS"] = partial(shared, "slow PFS", folder, rounds)
    for name in ("slow PFS", "HDD-like", "fast PFS", "NFS-like", "disk", "NVMe-like"):
        found[f"steady {name}"] = partial(steady, name, folder, rounds)
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def summary(found: dict[str, Any]) -> str:
    """Markdown tables of what was measured. found: unit -> measured"""
    texts = [_steady_table(found), _change_table(found), _shared_table(found)]
    return "\n\n".join(text for text in texts if text)


def _steady_table(found: dict[str, Any]) -> str:
    lines = [
        "| store | by hand: best; smallest for 0.95 | rate ÷ the best | time to 90 % | mean depth; ÷ smallest |",
        "|---|---|---|---|---|",
    ]
    for unit, measured in found.items():
        if not unit.startswith("steady "):
            continue
        hand = [rate(run["bins"], SETTLED_S, LAW_S) for run in measured["runs"]["hand"]]
        few = smallest({int(depth): value for depth, value in measured["search"].items()})
        best = f"{measured['hand']} ({statistics.median(hand) / 1e6:.0f} MB/s)"
        runs = measured["runs"][LAW]
        part = [rate(run["bins"], SETTLED_S, LAW_S) / its for run, its in zip(runs, hand, strict=True)]
        times = [time_to(run["bins"], 0.9 * its, 0.0) for run, its in zip(runs, hand, strict=True)]
        worst = None if None in times else max(times)  # type: ignore[type-var]
        depth = statistics.median(mean_depth(run["settings"], SETTLED_S, LAW_S) for run in runs)
        said = f"{told(part)} | ≤ {_seconds(worst)} | {depth:.1f}; {depth / few:.1f}"
        lines.append(f"| {unit.removeprefix('steady ')} | {best}; {few:.1f} | {said} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _change_table(found: dict[str, Any]) -> str:
    lines = ["| change | 90 % again after it | 90 % again after it is back | mean depth: before, during, after |"]
    lines.append("|---|---|---|---|")
    for unit, measured in found.items():
        what = unit.split(" ")[0]
        if what not in CHANGES:
            continue
        (first, *_), (second, *_), (last, *_) = measured["changes"]
        best = measured["runs"]["64"]["bins"]
        during, after = rate(best, second - 4, second), rate(best, last - 4, last)
        run = measured["runs"][LAW]
        times = [time_to(run["bins"][: round(second / BIN_S)], 0.9 * during, first)]
        times.append(time_to(run["bins"], 0.9 * after, second))
        spans = ((2.5, first), (second - 4, second), (last - 4, last))
        depths = ", ".join(f"{mean_depth(run['settings'], *span):.0f}" for span in spans)
        lines.append(f"| {unit} | {_seconds(times[0])} | {_seconds(times[1])} | {depths} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _shared_table(found: dict[str, Any]) -> str:
    lines = ["| 4 jobs | Jain | all together, MB/s | latency ÷ one job alone | depths |"]
    lines.append("|---|---|---|---|---|")
    for unit, measured in found.items():
        if not unit.startswith("shared "):
            continue
        alone = found.get(unit.replace("shared ", "steady "))
        fair, sums, late, depths = [], [], [], []
        for jobs in measured["runs"]:
            spans = [(SHARED_SETTLED_S - job * STAGGER_S, SHARED_S - job * STAGGER_S) for job in range(4)]
            rates = [rate(job["bins"], *span) for job, span in zip(jobs, spans, strict=True)]
            fair.append(jain(rates))
            sums.append(sum(rates) / 1e6)
            late.append(max(latency(job["bins"], *span) for job, span in zip(jobs, spans, strict=True)))
            depths += [mean_depth(job["settings"], *span) for job, span in zip(jobs, spans, strict=True)]
        base = "not measured"
        if alone:
            one = statistics.median(latency(run["bins"], SETTLED_S, LAW_S) for run in alone["runs"][LAW])
            base = f"{max(late) / one:.1f}"
        said = f"{told(fair)} | {told(sums, '.0f')} | {base} | {min(depths):.0f} to {max(depths):.0f}"
        lines.append(f"| {unit.removeprefix('shared ')} | {said} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def plot(found: dict[str, Any], folder: str) -> None:
    """Depth and rate over time while the store changes: FOLDER/tuning.svg."""
    write_figures(lambda pyplot: [("tuning", _changes(pyplot, found))], folder)


def _changes(pyplot: Any, found: dict[str, Any]) -> Any:
    shown = [unit for unit in found if unit.split(" ")[0] in CHANGES]
    figure, axes = pyplot.subplots(2, len(shown), figsize=(4.5 * len(shown), 4.5), sharex="col", squeeze=False)
    titles = {"bandwidth": "bandwidth ÷ 3 and back", "latency": "latency × 5 and back"}
    for column, unit in enumerate(shown):
        measured = found[unit]
        end = measured["changes"][-1][0]
        upper, lower = axes[0][column], axes[1][column]
        upper.set_title(f"{unit.split(' ', 1)[1]}: {titles[unit.split(' ')[0]]}", fontsize=9)
        for side in ("64", LAW):
            run = measured["runs"][side]
            times = [0.5 * k for k in range(int(2 * end))]
            rates = [rate(run["bins"], when, when + 0.5) / 1e6 for when in times]
            style = {"color": "0.7", "label": "by hand: 64"} if side == "64" else {"label": "pario's law"}
            upper.plot([when + 0.25 for when in times], rates, linewidth=1, **style)
            if side == LAW:
                lower.step(*zip(*[(0.0, 2), *run["settings"]], strict=True), where="post", linewidth=1)
        for when, *_ in measured["changes"][:-1]:
            for each in (upper, lower):
                each.axvline(when, color="0.8", linestyle=":", linewidth=1)
        upper.set_ylim(bottom=0)
        lower.set_ylim(0, 66)
        lower.set_xlim(0, end)
        lower.set_xlabel("seconds")
    axes[0][0].set_ylabel("MB/s")
    axes[1][0].set_ylabel("reads in flight")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    return figure
