"""The paper's figures, drawn from a study's JSON with matplotlib (`pip install ".[figures]"`).

Points are medians of the rounds, bars extend from the smallest to the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import COLOURS, HEIGHT, MARKERS, WIDTH, bars, legend_below, points, readable, write_figures
from benchmarks.measure import spread
from benchmarks.study.cells import RECIPES, STATES, STORES
from benchmarks.study.tables import gain, per_record, speculated
from benchmarks.study.verdicts import rates

__all__ = ["plot"]

_STYLE = {name: {"color": c, "marker": m} for name, c, m in zip(RECIPES, COLOURS, MARKERS, strict=True)}


def plot(document: dict[str, Any], folder: str | Path) -> list[Path]:
    """Write all figures that have data; returns their files. Raises Unavailable without matplotlib."""
    return write_figures(lambda pyplot: _figures(pyplot, document), folder)


def _figures(pyplot: Any, document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for store in STORES:
        for state in STATES:
            panels = _panels(document, store, state)
            if panels:
                where = f"{STORES[store]}, {state}"
                yield f"gain-{store}-{state}", _gains(pyplot, panels, where)
                yield f"switches-{store}-{state}", _switches(pyplot, panels, where)
    speculation = speculated(document)
    if speculation:
        yield "speculation", _speculation(pyplot, speculation)
    if document["requests"]:
        yield "requests", _requests(pyplot, document["requests"])
    if any(rates(cell, name) for cell in document["groups"] for name in cell["runs"]):
        yield "staggering", _groups(pyplot, document["groups"])


def _panels(document: dict[str, Any], store: str, state: str) -> dict[str, list[dict[str, Any]]]:
    """Set -> cells in key order, by ranks and nodes."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        if (cell["store"], cell["state"], cell["order"]) == (store, state, "none") and any(cell["runs"].values()):
            found.setdefault(cell["dataset"], []).append(cell)
    for cells in found.values():
        cells.sort(key=lambda cell: (cell["ranks"], cell["nodes"]))
    return found


def _lines(axes: Any, cells: Sequence[dict[str, Any]], value: Any) -> None:
    """A line per recipe over the cells; value : (cell, recipe) -> spread or None."""
    for number, recipe in enumerate(RECIPES):
        tried = [(k, value(cell, recipe)) for k, cell in enumerate(cells) if cell["runs"].get(recipe)]
        measured = [(k, found) for k, found in tried if found is not None]
        if measured:
            shift = (number - len(RECIPES) / 2) * 0.05  # so that error bars stand side by side
            xs, found = [k + shift for k, _ in measured], [one for _, one in measured]
            points(axes, xs, found, label=recipe, **_STYLE[recipe])
    axes.set_xticks(range(len(cells)), [f"{cell['ranks']}\n{cell['nodes']}" for cell in cells])
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.set_yscale("log")
    readable(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("ranks, and below them nodes")


def _gains(pyplot: Any, panels: dict[str, list[dict[str, Any]]], where: str) -> Any:
    figure = _row_of_panels(pyplot, panels, gain, "gain over plain (×)")
    for axes in figure.axes:
        axes.axhline(1.0, color="#999999", linewidth=0.8)
    figure.suptitle(f"What each step brings: {where}")
    return figure


def _switches(pyplot: Any, panels: dict[str, list[dict[str, Any]]], where: str) -> Any:
    def value(cell: dict[str, Any], recipe: str) -> dict[str, float] | None:
        found = per_record(cell, recipe, "voluntary")
        return found if found["median"] > 0 else None  # a logarithmic axis cannot show zero

    figure = _row_of_panels(pyplot, panels, value, "voluntary switches per record")
    figure.suptitle(f"Context switches of all ranks: {where}")
    return figure


def _row_of_panels(pyplot: Any, panels: dict[str, list[dict[str, Any]]], value: Any, unit: str) -> Any:
    size = (WIDTH * len(panels) + 0.5, HEIGHT + 0.6)
    figure, every = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, (which, cells) in zip(every[0], panels.items(), strict=True):
        _lines(axes, cells, value)
        axes.set_title(which)
    every[0][0].set_ylabel(unit)
    legend_below(figure, every[0][0], len(RECIPES))
    return figure


def _speculation(pyplot: Any, cases: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(2 * WIDTH, HEIGHT + 1.2), layout="constrained")
    names = [f"{case['case']}\n{case['recipe']}, {case['state']}" for case in cases]
    for shift, what, colour in ((-0.2, "missed", COLOURS[6]), (0.2, "extra", COLOURS[5])):
        found = [case[what] for case in cases]
        places = [k + shift for k in range(len(cases))]
        bars(axes, places, found, 0.4, label=what, color=colour)
    axes.set_xticks(range(len(cases)), names, rotation=40, ha="right")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("pages per epoch")
    axes.legend(frameon=False)
    figure.suptitle("Speculation: pages that were missed, pages that were read in vain")
    return figure


def _requests(pyplot: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.5 * WIDTH, HEIGHT + 0.4), layout="constrained")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for way, colour, marker in zip(ways, (COLOURS[5], COLOURS[6], COLOURS[2], COLOURS[1]), "osD^", strict=False):
        mine = sorted((row for row in rows if row["way"] == way), key=lambda row: row["size"])
        found = [spread([took / row["bytes"] * 1e9 for took in row["seconds"]]) for row in mine]
        points(axes, [row["size"] / 1024 for row in mine], found, label=way, color=colour, marker=marker)
    sizes = sorted({row["size"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks([size / 1024 for size in sizes], [str(size >> 10) for size in sizes])
    axes.set_yscale("log")
    readable(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("request size (KiB)")
    axes.set_ylabel("read time (s per GB)")
    axes.legend(frameon=False)
    figure.suptitle("Read time against request size: one process, in order, cold, bare disk")
    return figure


def _groups(pyplot: Any, cells: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.5 * WIDTH, HEIGHT + 0.4), layout="constrained")
    for number, cell in enumerate(cells):
        names = [name for name in cell["runs"] if rates(cell, name)]
        if not names:
            continue
        best = max(statistics.median(rates(cell, name)) for name in names)
        found = [spread([rate / best for rate in rates(cell, name)]) for name in names]
        points(
            axes, [int(name.removeprefix("G=")) for name in names], found,
            label=f"{cell['dataset']}, {STORES[cell['store']]}, {cell['nodes']} nodes ({best / 1e6:,.0f} MB/s)",
            color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
        )  # fmt: skip
    groups = sorted({int(name.removeprefix("G=")) for cell in cells for name in cell["runs"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(groups, [str(group) for group in groups])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("readers that may read at once, G")
    axes.set_ylabel("rate ÷ the best G's (×)")
    axes.legend(frameon=False)
    figure.suptitle("Staggering")
    return figure
