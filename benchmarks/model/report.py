"""What the model says of every published point and of pario, as one document (JSON), as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.marked import fill_marked
from benchmarks.model import here, paper
from benchmarks.model.auto import auto_s, sidecar_s, walk_s
from benchmarks.model.calibrate import (
    RANGES,
    Fit,
    bebop,
    blues,
    direct,
    solve,
    training_s,
)
from benchmarks.model.recipes import KEYS_PER_LEAF, Workload, ior, one_client, reading_s
from pario.options import Options

__all__ = ["figure", "fill", "make", "summary", "tables"]

BAR = 0.25
RECORDS = 50_000_000  # of CIFAR10-Large
HELD_OUT = [ranks for ranks in paper.TRAINING if ranks > paper.CALIBRATION_RANKS]
AUTO_RANKS = [ranks for ranks in paper.TRAINING if ranks >= 288]


def _points(fit: Fit) -> dict[str, dict[int, float]]:
    """Training seconds: recipe -> ranks -> model."""
    return {recipe: {ranks: training_s(fit, ranks, recipe) for ranks in paper.TRAINING} for recipe in paper.NAMES}


def _auto(fit: Fit, ranks: int, inflight: int | None = None) -> float:
    """Seconds of the training with pario's default and a saved index."""
    work = bebop(ranks)
    options = Options() if inflight is None else Options(inflight=inflight)
    step_s = fit.training.seconds(work) / work.iterations
    return sidecar_s(fit.machine, work, RECORDS) + auto_s(fit.machine, work, step_s, options)


def _autos(fit: Fit) -> dict[int, float]:
    return {ranks: _auto(fit, ranks) for ranks in AUTO_RANKS}


def _varied(fit: Fit, name: str, value: int) -> dict[str, Any]:
    """A parameter that was not fitted, set to another value; the linear ones solved for again."""
    changed = solve(replace(fit.machine, wake_s=0.0, **{name: value}))
    found: dict[str, Any] = {"name": name, "value": value, "rms": changed.rms}
    for recipe in ("coal", "stag"):
        found[recipe] = {str(ranks): training_s(changed, ranks, recipe) for ranks in HELD_OUT}
    return found


def _side_checks(fit: Fit) -> list[dict[str, Any]]:
    """Published figures besides the training times: what, paper, model, how they were used."""
    machine, at_blues = fit.machine, blues(fit.machine)
    rows: list[dict[str, Any]] = []

    def add(what: str, said: float, model: float, use: str = "check") -> None:
        rows.append({"what": what, "paper": said, "model": model, "error": model / said - 1, "use": use})

    for request, rate in paper.PREAD.items():
        add(f"pread of {request >> 10} KiB, one client, MB/s", rate, one_client(machine, request) / 1e6, "calibration")
    for request, rate in paper.MMAP.items():
        use = "calibration" if request == 4096 else "check"
        add(f"mmap, {request >> 10} KiB at a time, MB/s", rate, one_client(machine, request, mapped=True) / 1e6, use)
    add("IOR on Blues, 512 ranks, MB/s", paper.IOR_BLUES[512], ior(at_blues, 32, 16) / 1e6, "calibration")
    for ranks in (2, 16):
        add(f"IOR on Blues, {ranks} ranks, MB/s", paper.IOR_BLUES[ranks], ior(at_blues, 1, ranks) / 1e6)
    for ranks, rate in paper.LMDB_BLUES.items():
        work = Workload(ranks, max(1, ranks // 16), batch=4096, iterations=64)
        add(f"plain LMDB on Blues, {ranks} ranks, MB/s", rate, work.bytes / reading_s(at_blues, work, "lmdb") / 1e6)
    pages = paper.BATCH * paper.ITERATIONS
    for ranks, count in paper.CONTEXT_SWITCHES.items():
        if ranks > 1:
            add(f"context switches, {ranks} ranks, millions", count, pages * (ranks - 1) / 1e6)
    for readers, gb in paper.EXTRA_GB.items():
        add(f"extra bytes of {readers} readers, GB", gb, (readers - 1) * 4.19e6 / KEYS_PER_LEAF * 4096 / 1e9)
    work = bebop(4608)
    plain = reading_s(machine, work, "lmdb")
    for recipe, gain in paper.GAINS_4608.items():
        add(f"reading alone, 4,608 ranks, LMDB ÷ {recipe}", gain, plain / reading_s(machine, work, recipe), "held out")
    return rows


def make(fits: list[Fit], pool: Executor) -> dict[str, Any]:
    """The whole document. fits : the best first"""
    best = fits[0]
    autos, checks = pool.map(_autos, fits), pool.submit(_side_checks, best)
    inflight = {(9216, k): pool.submit(_auto, best, 9216, k) for k in (2, 32)}
    points = list(pool.map(_points, fits))
    tried = [("segments", value) for value in (16, 64, 128)] + [("depth", value) for value in (16, 64)]
    varied = [pool.submit(_varied, best, name, value) for name, value in tried]
    auto = list(autos)
    document: dict[str, Any] = {
        "fits": [fit.as_json() for fit in fits],
        "direct": direct(),
        "points": [
            {
                "ranks": ranks,
                "recipe": recipe,
                "paper": said,
                "model": points[0][recipe][ranks],
                "error": points[0][recipe][ranks] / said - 1,
                "low": min(of[recipe][ranks] for of in points),
                "high": max(of[recipe][ranks] for of in points),
                "held_out": ranks > paper.CALIBRATION_RANKS,
            }
            for ranks, row in paper.TRAINING.items()
            for recipe, said in zip(paper.NAMES, row, strict=True)
        ],
        "checks": checks.result(),
        "varied": [one.result() for one in varied],
        "auto": [],
        "inflight": [{"ranks": r, "inflight": k, "seconds": one.result()} for (r, k), one in inflight.items()],
        "here": [{"case": row.case, "measured": row.measured, "model": row.model} for row in here.known()],
    }
    for ranks in AUTO_RANKS:
        gains = [of["lmdb"][ranks] / mine[ranks] for of, mine in zip(points, auto, strict=True)]
        document["auto"].append(
            {
                "ranks": ranks,
                "seconds": auto[0][ranks],
                "low": min(mine[ranks] for mine in auto),
                "high": max(mine[ranks] for mine in auto),
                "without_reading": best.training.seconds(bebop(ranks)),
                "gain": gains[0],
                "gain_low": min(gains),
                "gain_high": max(gains),
            }
        )
    best_best = [min(of["lmdb"].values()) / min(mine.values()) for of, mine in zip(points, auto, strict=True)]
    document["best_against_best"] = {"gain": best_best[0], "low": min(best_best), "high": max(best_best)}
    work = bebop(9216)
    document["index"] = {
        "sidecar_s": sidecar_s(best.machine, work, RECORDS),
        "walk_s": walk_s(best.machine, work, RECORDS),
    }
    return document


def _within(points: Iterable[dict[str, Any]]) -> tuple[int, int]:
    errors = [abs(point["error"]) for point in points]
    return sum(error <= BAR for error in errors), len(errors)


def summary(document: dict[str, Any]) -> str:
    """What a reader in a hurry needs."""
    told = [point for point in document["points"] if not point["held_out"]]
    kept = [point for point in document["points"] if point["held_out"]]
    (told_in, told_all), (kept_in, kept_all) = _within(told), _within(kept)
    last, over = document["auto"][-1], document["best_against_best"]
    out = [f"{p['recipe']} at {p['ranks']:,} ({p['error']:+.0%})" for p in kept if abs(p["error"]) > BAR]
    said = paper.TRAINING[9216][paper.NAMES.index("lmdb")]
    return (
        f"* Within 25 %: {told_in} of {told_all} points of at most 1,152 ranks, {kept_in} of {kept_all} held-out ones"
        f"{'; outside: ' + ', '.join(out) if out else ''}.\n"
        f"* pario's default at 9,216 ranks, **by the model**: {last['seconds']:.0f} s (other sets that fit about as "
        f"well: {last['low']:.0f} … {last['high']:.0f}), LMDB ÷ pario {last['gain']:.0f} ({last['gain_low']:.0f} … "
        f"{last['gain_high']:.0f}); with LMDB's published time {said / last['seconds']:.0f} "
        f"({said / last['high']:.0f} … {said / last['low']:.0f}). Published for LMDBIO: 64.\n"
        f"* Best against best over the numbers of ranks, by the model: {over['gain']:.1f} ({over['low']:.1f} … "
        f"{over['high']:.1f}). Published for LMDBIO: 14.8."
    )


def _points_table(document: dict[str, Any], held_out: bool) -> str:
    lines = ["| ranks | recipe | paper, s | model, s | error | other sets, s |", "|---|---|---|---|---|---|"]
    for point in document["points"]:
        if point["held_out"] == held_out:
            error = f"{point['error']:+.0%}" if abs(point["error"]) <= BAR else f"**{point['error']:+.0%}**"
            told = f"{point['ranks']:,} | {point['recipe']} | {point['paper']:,} | {point['model']:,.1f}"
            lines.append(f"| {told} | {error} | {point['low']:,.1f} … {point['high']:,.1f} |")
    return "\n".join(lines)


def _checks_table(document: dict[str, Any]) -> str:
    lines = ["| figure | paper | model | error | use |", "|---|---|---|---|---|"]
    for row in document["checks"]:
        lines.append(f"| {row['what']} | {row['paper']:,} | {row['model']:,.4g} | {row['error']:+.0%} | {row['use']} |")
    return "\n".join(lines)


def _parameters_table(document: dict[str, Any]) -> str:
    fits = document["fits"]
    units: dict[str, tuple[str, float]] = {
        "disk_rate": ("MB/s of the disks of a server", 1e6),
        "net_rate": ("MB/s of a server's network", 1e6),
        "request_s": ("ms per request at a server", 1e-3),
        "seek_s": ("ms per discontinuity, mean", 1e-3),
        "block": ("MiB of a block", 1 << 20),
        "ahead": ("blocks a mapping reads ahead", 1),
        "link_rate": ("MB/s into a node", 1e6),
        "call_s": ("us per read call", 1e-6),
        "fault_s": ("us per page fault", 1e-6),
        "next_s": ("us per cursor step", 1e-6),
        "wake_s": ("us per process woken in vain", 1e-6),
    }
    lines = ["| parameter | what | best | sets that fit about as well | found by |", "|---|---|---|---|---|"]
    for name, (what, unit) in units.items():
        values = [fit["machine"][name] / unit for fit in fits]
        how = "search" if name in RANGES else "closed form" if name in document["direct"] else "least squares"
        lines.append(f"| `{name}` | {what} | {values[0]:,.4g} | {min(values):,.4g} … {max(values):,.4g} | {how} |")
    for name, what, unit in (
        ("compute_s", "s of one rank alone", 1.0),
        ("crowded", "times as long on a full node", 1.0),
        ("exchange_s", "ms per iteration and doubling of the ranks", 1e-3),
    ):
        values = [fit["training"][name] / unit for fit in fits]
        lines.append(
            f"| `{name}` | {what} | {values[0]:,.5g} | {min(values):,.5g} … {max(values):,.5g} | least squares |"
        )
    lines.append(f"| | error in sample, rms of the logarithm | {fits[0]['rms']:.3f} | up to {fits[-1]['rms']:.3f} | |")
    return "\n".join(lines)


def _varied_table(document: dict[str, Any]) -> str:
    lines = ["| not fitted | error in sample | coal beyond, s | stag beyond, s |", "|---|---|---|---|"]
    for one in document["varied"]:
        seconds = [" / ".join(f"{value:.0f}" for value in one[recipe].values()) for recipe in ("coal", "stag")]
        lines.append(f"| `{one['name']}` = {one['value']} | {one['rms']:.3f} | {seconds[0]} | {seconds[1]} |")
    return "\n".join(lines)


def _auto_table(document: dict[str, Any]) -> str:
    said = {(point["ranks"], point["recipe"]): point for point in document["points"]}
    lines = [
        "| ranks | pario, s | without any reading, s | LMDB, model, s | stag: model, paper, s | LMDB ÷ pario |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["auto"]:
        stag = said[row["ranks"], "stag"]
        lines.append(
            f"| {row['ranks']:,} | {row['seconds']:.1f} ({row['low']:.1f} … {row['high']:.1f}) "
            f"| {row['without_reading']:.1f} | {said[row['ranks'], 'lmdb']['model']:,.0f} "
            f"| {stag['model']:.1f}, {stag['paper']} "
            f"| {row['gain']:.1f} ({row['gain_low']:.1f} … {row['gain_high']:.1f}) |"
        )
    index = document["index"]
    lines += [
        "",
        f"At 9,216 ranks loading the saved index takes {index['sidecar_s']:.1f} s (included). Without one, the walk "
        f"over all leaf pages takes {index['walk_s']:.0f} s before the first step (not included).",
    ]
    return "\n".join(lines)


def _inflight_table(document: dict[str, Any]) -> str:
    default = {row["ranks"]: row["seconds"] for row in document["auto"]}
    rows = [*document["inflight"], {"ranks": 9216, "inflight": 8, "seconds": default[9216]}]
    lines = ["| ranks | `inflight` | s |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["ranks"], row["inflight"])):
        lines.append(f"| {row['ranks']:,} | {row['inflight']} | {row['seconds']:.1f} |")
    return "\n".join(lines)


def here_table(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| case | measured, MB/s | model, MB/s | error |", "|---|---|---|---|"]
    for row in rows:
        error = row["model"] / row["measured"] - 1
        lines.append(f"| {row['case']} | {row['measured']:,.4g} | {row['model']:,.4g} | {error:+.0%} |")
    return "\n".join(lines)


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Name -> Markdown."""
    made: dict[str, Callable[[dict[str, Any]], str]] = {
        "summary": summary,
        "parameters": _parameters_table,
        "checks": _checks_table,
        "varied": _varied_table,
        "auto": _auto_table,
        "inflight": _inflight_table,
    }
    return {
        **{name: one(document) for name, one in made.items()},
        "calibrated": _points_table(document, held_out=False),
        "held_out": _points_table(document, held_out=True),
        "here": here_table(document["here"]),
    }


def fill(text: str, document: dict[str, Any]) -> str:
    """`text` with each table between its markers, `<!-- model: NAME -->` and `<!-- end -->`."""
    return fill_marked(text, "model", tables(document))


def figure(document: dict[str, Any], path: Path) -> None:
    """Training time over ranks: the paper's points, the model's lines and their spread, and pario's default."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pario"  # the same file from the same numbers
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(8, 5.2), layout="constrained")
    ranks = [number for number in paper.TRAINING if number >= 36]
    for number, recipe in enumerate(paper.NAMES):
        of = [point for point in document["points"] if point["recipe"] == recipe and point["ranks"] in ranks]
        color = f"C{number}"
        axes.plot(ranks, [point["paper"] for point in of], "o", color=color, markersize=4)
        axes.plot(ranks, [point["model"] for point in of], "-", color=color, label=recipe, linewidth=1)
        axes.fill_between(ranks, [p["low"] for p in of], [p["high"] for p in of], color=color, alpha=0.12, linewidth=0)
    auto = document["auto"]
    at = [row["ranks"] for row in auto]
    axes.plot(at, [row["seconds"] for row in auto], "k--", label="pario's default")
    axes.fill_between(at, [row["low"] for row in auto], [row["high"] for row in auto], color="k", alpha=0.12)
    axes.axvspan(paper.CALIBRATION_RANKS * math.sqrt(2), ranks[-1] * 1.15, color="0.94", zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="ranks (grey: held out)", ylabel="training, s")
    axes.set_xlim(ranks[0] * 0.87, ranks[-1] * 1.15)
    axes.set_xticks(ranks, [f"{number:,}" for number in ranks])
    axes.minorticks_off()
    axes.legend(ncols=2, title="points: paper; lines: model")
    chart.savefig(path, metadata={"Date": None})
    pyplot.close(chart)
