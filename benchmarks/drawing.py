"""Figures with matplotlib (`pip install ".[figures]"`): colours, axes, error bars, and their files.

The colours are those of Okabe and Ito, which people with any kind of colour vision can distinguish; markers differ as
well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache import Unavailable

COLOURS = ("#999999", "#E69F00", "#56B4E9", "#009E73", "#B8A800", "#0072B2", "#D55E00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
#: inches of one panel
WIDTH, HEIGHT = 4.2, 3.2


def write_figures(draw: Callable[[Any], Iterable[tuple[str, Any]]], folder: str | Path) -> list[Path]:
    """Write all figures that `draw` gives as (name, figure) when it gets pyplot, as SVG with tenths of a point, which
    are a sixth smaller; returns their files.

    Raises Unavailable without matplotlib.
    """
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except Exception as e:  # a build for another numpy raises other errors than ImportError
        raise Unavailable(f"matplotlib cannot be imported ({e!r}): pip install '.[figures]'") from e

    Path(folder).mkdir(parents=True, exist_ok=True)
    made = []
    with pyplot.rc_context({"font.size": 8, "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}):
        for name, figure in draw(pyplot):
            made.append(Path(folder) / f"{name}.svg")
            figure.savefig(made[-1])
            pyplot.close(figure)
            short = re.sub(r"(\d\.\d)\d{2,}", r"\1", made[-1].read_text())
            made[-1].write_text(re.sub(r"\n +", "\n", short))
    return made


def readable(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis with plain numbers, also between powers of ten if there are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axis.set_major_formatter(plain)
    few = high < 30 * low
    axis.set_minor_locator(LogLocator(subs=(0.2, 0.3, 0.5, 0.7) if few else (0.5,)))
    axis.set_minor_formatter(plain if few else NullFormatter())


def errors(found: Sequence[dict[str, float]]) -> list[list[float]]:
    """Error bars of spreads: from the smallest to the largest."""
    return [[one["median"] - one["min"] for one in found], [one["max"] - one["median"] for one in found]]


def points(axes: Any, xs: Sequence[float], found: Sequence[dict[str, float]], **style: Any) -> None:
    """Spreads as a line: medians, with bars from the smallest to the largest. style : label, color, marker, ..."""
    style = {"markersize": 4, "linewidth": 1, "capsize": 2, **style}
    axes.errorbar(xs, [one["median"] for one in found], yerr=errors(found), **style)


def bars(axes: Any, xs: Sequence[float], found: Sequence[dict[str, float]], width: float = 0.6, **style: Any) -> None:
    """The same as columns."""
    axes.bar(xs, [one["median"] for one in found], width, yerr=errors(found), capsize=2, **style)


def legend_below(figure: Any, axes: Any, columns: int) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
