"""The instruments' figures. Points are medians of the rounds, bars extend from the smallest to the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import COLOURS, HEIGHT, MARKERS, WIDTH, errors, readable, write_figures
from benchmarks.measure import spread

_LINES = ("-", "--", ":", "-.")


def plot(document: dict[str, Any], folder: str | Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Draw an instrument's document; returns the files. Raises Unavailable without matplotlib."""
    draw = {"threads": _threads, "overlap": _overlap, "checkpoint": _checkpoint}[document["instrument"]]

    def figures(pyplot: Any) -> Iterator[tuple[str, Any]]:
        yield document.get("name", document["instrument"]), draw(pyplot, document)

    return write_figures(figures, folder, kinds)


def _threads(pyplot: Any, document: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.7 * WIDTH, 1.4 * HEIGHT), layout="constrained")
    cases: dict[tuple[str, bool, bool], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        cases.setdefault((row["way"], row["shuffled"], row["decode"]), []).append(row)
    ways = list(dict.fromkeys(way for way, _, _ in cases))
    for (way, shuffled, decode), rows in cases.items():
        found = [spread([rate / 1e6 for rate in row["bytes_per_s"]]) for row in rows]
        axes.errorbar(
            [row["threads"] for row in rows],
            [one["median"] for one in found],
            yerr=errors(found),
            label=f"{way}, {'shuffled' if shuffled else 'in order'}{', decoded' if decode else ''}",
            color=COLOURS[5 - 2 * ways.index(way)] if not shuffled else COLOURS[6 - 2 * ways.index(way)],
            marker=MARKERS[ways.index(way)],
            linestyle=_LINES[decode],
            markersize=4,
            linewidth=1,
            capsize=2,
        )
    ceiling = document.get("ceiling")
    if ceiling:
        words = {"sequential": "fio, long reads in order", "at_size": "fio, reads of this size"}
        for number, (name, label) in enumerate(words.items()):
            axes.axhline(ceiling[name] / 1e6, color="#666666", linewidth=0.9, linestyle=_LINES[number + 1], label=label)
    tried = sorted({row["threads"] for row in document["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tried, [str(number) for number in tried])
    axes.set_yscale("log")
    readable(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("reading threads (pario: reads in flight)")
    axes.set_ylabel("MB/s")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Reading, cold: {document['what']}")
    return figure


def _overlap(pyplot: Any, document: dict[str, Any]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.6 * WIDTH, 1.3 * HEIGHT), layout="constrained")
    rows = document["rows"]
    factors = list(dict.fromkeys(row["factor"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        mine = [row for row in rows if row["way"] == way]
        found = [spread([took * 1e3 for took in row["seconds"]]) for row in mine]
        axes.bar(
            [factors.index(row["factor"]) + (number - (len(ways) - 1) / 2) * width for row in mine],
            [one["median"] for one in found],
            width,
            yerr=errors(found),
            label="pario.Loader" if way == "pario" else f"prefetch {way}",
            color=COLOURS[(0, 2, 5, 3, 1)[number % 5]],
            capsize=2,
        )
    for k, factor in enumerate(factors):
        only = next(row["compute"] for row in rows if row["factor"] == factor) * 1e3
        axes.hlines(only, k - 0.45, k + 0.45, color="#000000", linewidth=1.2, label="" if k else "computing alone")
    axes.set_xticks(range(len(factors)), [f"{factor:g} × input" for factor in factors])
    axes.set_xlabel("computing per batch")
    axes.set_ylabel("time per batch (ms)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"Overlap: {document['what']}; input alone {document['input'] * 1e3:.0f} ms per batch")
    return figure


def _checkpoint(pyplot: Any, document: dict[str, Any]) -> Any:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(2 * WIDTH, 1.2 * HEIGHT), layout="constrained")
    rows = document["rows"]
    for axes, name, title in ((left, "total", "whole job (s)"), (right, "stall", "stall per checkpoint (s)")):
        found = [spread(row[name]) for row in rows]
        axes.bar(
            range(len(rows)),
            [one["median"] for one in found],
            0.6,
            yerr=errors(found),
            color=[COLOURS[(k + 1) % len(COLOURS)] for k in range(len(rows))],
            capsize=2,
        )
        axes.set_xticks(range(len(rows)), [row["way"] for row in rows], rotation=25, ha="right")
        axes.set_ylabel(title)
    figure.suptitle(f"Checkpoints: {document['what']}")
    return figure
