"""The paper's figures made anew from a study's JSON, with matplotlib (`pip install "pario[study]"`).

Points are medians of the rounds, bars reach from the smallest to the largest. The colours are those of Okabe and Ito,
which people with any kind of colour vision tell apart; markers differ as well.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pario.study.cells import RECIPES, STORES
from pario.study.numbers import spread
from pario.study.tables import gain, per_record, speculated
from pario.study.verdicts import rates

__all__ = ["plot"]

_COLOURS = ("#999999", "#E69F00", "#56B4E9", "#009E73", "#B8A800", "#0072B2", "#D55E00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_STYLE = {name: {"color": c, "marker": m} for name, c, m in zip(RECIPES, _COLOURS, _MARKERS, strict=True)}

#: inches of one panel
_WIDTH, _HEIGHT = 4.2, 3.2


def plot(document: dict[str, Any], folder: str | Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write all figures for which there are numbers; returns their files. [] without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    Path(folder).mkdir(parents=True, exist_ok=True)
    made = []
    with pyplot.rc_context({"font.size": 8, "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}):
        for name, figure in _figures(pyplot, document):
            for kind in kinds:
                made.append(Path(folder) / f"{name}.{kind}")
                figure.savefig(made[-1], dpi=120)
            pyplot.close(figure)
    return made


def _figures(pyplot: Any, document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for store in STORES:
        panels = _panels(document, store)
        if panels:
            yield f"gain-{store}", _gains(pyplot, panels, store)
            yield f"switches-{store}", _switches(pyplot, panels, store)
    speculation = speculated(document)
    if speculation:
        yield "speculation", _speculation(pyplot, speculation)
    if document["requests"]:
        yield "requests", _requests(pyplot, document["requests"])
    if any(rates(cell, name) for cell in document["groups"] for name in cell["runs"]):
        yield "staggering", _groups(pyplot, document["groups"])


def _panels(document: dict[str, Any], store: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(state, set) -> cells in key order, by ranks and nodes."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        if cell["store"] == store and cell["order"] == "none" and any(cell["runs"].values()):
            found.setdefault((cell["state"], cell["dataset"]), []).append(cell)
    for cells in found.values():
        cells.sort(key=lambda cell: (cell["ranks"], cell["nodes"]))
    return found


def _grid(pyplot: Any, panels: dict[tuple[str, str], Any]) -> Iterator[tuple[Any, tuple[str, str], Any]]:
    """(figure, key, axes) of each panel: a line per state, a column per set."""
    states = list(dict.fromkeys(state for state, _ in panels))
    sets = list(dict.fromkeys(which for _, which in panels))
    size = (_WIDTH * len(sets), _HEIGHT * len(states) + 0.6)
    figure, axes = pyplot.subplots(len(states), len(sets), figsize=size, squeeze=False, layout="constrained")
    for row, state in enumerate(states):
        for column, which in enumerate(sets):
            if (state, which) in panels:
                yield figure, (state, which), axes[row][column]
            else:
                axes[row][column].set_axis_off()


def _errors(found: Sequence[dict[str, float]]) -> list[list[float]]:
    return [[one["median"] - one["min"] for one in found], [one["max"] - one["median"] for one in found]]


def _lines(axes: Any, cells: Sequence[dict[str, Any]], value: Any) -> None:
    """A line per recipe over the cells; value : (cell, recipe) -> spread or None."""
    for number, recipe in enumerate(RECIPES):
        points = [(k, value(cell, recipe)) for k, cell in enumerate(cells) if cell["runs"].get(recipe)]
        points = [(k, found) for k, found in points if found is not None]
        if points:
            shift = (number - len(RECIPES) / 2) * 0.05  # so that error bars stand side by side
            found = [one for _, one in points]
            axes.errorbar(
                [k + shift for k, _ in points],
                [one["median"] for one in found],
                yerr=_errors(found),
                label=recipe,
                capsize=2,
                markersize=4,
                linewidth=1,
                **_STYLE[recipe],
            )
    axes.set_xticks(range(len(cells)), [f"{cell['ranks']}\n{cell['nodes']}" for cell in cells])
    axes.set_xlabel("ranks, and below them nodes")


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _gains(pyplot: Any, panels: dict[tuple[str, str], list[dict[str, Any]]], store: str) -> Any:
    for figure, (state, which), axes in _grid(pyplot, panels):  # noqa: B007
        _lines(axes, panels[state, which], gain)
        axes.axhline(1.0, color="#999999", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel("gain over plain (×)")
        axes.set_title(f"{which}, {state}")
    _legend(figure, axes)
    figure.suptitle(f"What each step brings: {STORES[store]}")
    return figure


def _switches(pyplot: Any, panels: dict[tuple[str, str], list[dict[str, Any]]], store: str) -> Any:
    def value(cell: dict[str, Any], recipe: str) -> dict[str, float]:
        return per_record(cell, recipe, "voluntary")

    for figure, (state, which), axes in _grid(pyplot, panels):  # noqa: B007
        _lines(axes, panels[state, which], value)
        axes.set_yscale("log")
        axes.set_ylabel("voluntary switches per record")
        axes.set_title(f"{which}, {state}")
    _legend(figure, axes)
    figure.suptitle(f"Context switches of all ranks: {STORES[store]}")
    return figure


def _speculation(pyplot: Any, cases: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(2 * _WIDTH, _HEIGHT + 1.2), layout="constrained")
    names = [f"{case['case']}\n{case['recipe']}, {case['state']}" for case in cases]
    for shift, what, colour in ((-0.2, "missed", _COLOURS[6]), (0.2, "extra", _COLOURS[5])):
        found = [case[what] for case in cases]
        places = [k + shift for k in range(len(cases))]
        axes.bar(
            places, [one["median"] for one in found], 0.4, yerr=_errors(found), label=what, color=colour, capsize=2
        )
    axes.set_xticks(range(len(cases)), names, rotation=40, ha="right")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("pages per epoch")
    axes.legend(frameon=False)
    figure.suptitle("Speculation: pages that were missed, pages that were read in vain")
    return figure


def _requests(pyplot: Any, rows: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.5 * _WIDTH, _HEIGHT + 0.4), layout="constrained")
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for way, colour, marker in zip(ways, (_COLOURS[5], _COLOURS[6], _COLOURS[2], _COLOURS[1]), "osD^", strict=False):
        mine = sorted((row for row in rows if row["way"] == way), key=lambda row: row["size"])
        found = [spread([took / row["bytes"] * 1e9 for took in row["seconds"]]) for row in mine]
        axes.errorbar(
            [row["size"] / 1024 for row in mine],
            [one["median"] for one in found],
            yerr=_errors(found),
            label=way,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("request size (KiB)")
    axes.set_ylabel("read time (s per GB)")
    axes.legend(frameon=False)
    figure.suptitle("Read time against request size: one process, in order, cold, bare disk")
    return figure


def _groups(pyplot: Any, cells: list[dict[str, Any]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(1.5 * _WIDTH, _HEIGHT + 0.4), layout="constrained")
    for number, cell in enumerate(cells):
        names = [name for name in cell["runs"] if rates(cell, name)]
        if not names:
            continue
        best = max(statistics.median(rates(cell, name)) for name in names)
        found = [spread([rate / best for rate in rates(cell, name)]) for name in names]
        axes.errorbar(
            [int(name.removeprefix("G=")) for name in names],
            [one["median"] for one in found],
            yerr=_errors(found),
            label=f"{cell['dataset']}, {STORES[cell['store']]}, {cell['nodes']} nodes ({best / 1e6:,.0f} MB/s)",
            color=_COLOURS[number % len(_COLOURS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            linewidth=1,
            capsize=2,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("readers that may read at once, G")
    axes.set_ylabel("rate ÷ the best G's (×)")
    axes.legend(frameon=False)
    figure.suptitle("Staggering")
    return figure
