"""The bars of a study, applied to its measurements. Each bar gives one row per cell, met or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.measure import Row
from benchmarks.study.cells import LOOPS, RECIPES, Cell
from pario.options import MOST_INFLIGHT

__all__ = ["BARS", "MUST", "best_loop", "best_other", "rates", "title", "verdicts", "worst"]


def verdicts(document: dict[str, Any]) -> dict[str, list[Row]]:
    """Bar of `BARS` -> its rows; none if nothing was measured for it."""
    return {title: list(rows(document)) for title, rows in BARS.items()}


def worst(rows: Sequence[Row]) -> Row | None:
    """The row with the least margin."""
    held = [row for row in rows if row.bar is not None]
    if not held:
        return None

    def margin(row: Row) -> float:
        return row.figure - row.bar if row.sense == ">=" else row.bar - row.figure  # type: ignore[operator]

    return min(held, key=margin)


def title(cell: dict[str, Any]) -> str:
    """A measured cell in words."""
    names = ("store", "dataset", "ranks", "nodes", "state", "order")
    return Cell(**{name: cell[name] for name in names}).title


def rates(cell: dict[str, Any], recipe: str, what: str = "rate") -> list[float]:
    """One figure per round."""
    return [run[what] for run in cell["runs"].get(recipe, [])]


def best_other(cell: dict[str, Any]) -> str | None:
    """The fastest recipe but for auto, by its median."""
    return _fastest(cell, [name for name in RECIPES if name != "auto"])


def best_loop(cell: dict[str, Any]) -> str | None:
    """The fastest loop written by hand, by its median."""
    return _fastest(cell, list(LOOPS))


def _fastest(cell: dict[str, Any], names: Sequence[str]) -> str | None:
    measured = [name for name in names if cell["runs"].get(name)]
    return max(measured, key=lambda name: statistics.median(rates(cell, name)), default=None)


def _against(cell: dict[str, Any], other: str | None, bar: float) -> Iterator[Row]:
    mine = rates(cell, "auto")
    theirs = rates(cell, other) if other is not None else []
    if mine and theirs:
        pairs = [ours / others for ours, others in zip(mine, theirs, strict=False)]
        words = f"auto {_megabytes(mine)}", f"{other} {_megabytes(theirs)}"
        yield _row(cell, pairs, ">=", bar, "×", *words)


def _megabytes(values: Sequence[float]) -> str:
    return f"{statistics.median(values) / 1e6:,.0f} MB/s"


def _best(document: dict[str, Any]) -> Iterator[Row]:
    for cell in document["cells"]:
        yield from _against(cell, best_other(cell), 0.95)


def _plain(document: dict[str, Any]) -> Iterator[Row]:
    for cell in document["cells"]:
        yield from _against(cell, "plain", 0.95 if cell["state"] == "warm" else 1.0)


def _cap(document: dict[str, Any]) -> Iterator[Row]:
    for cell in document["cells"]:
        mine = rates(cell, "auto", "page_rate")
        if cell["store"] == "latency" and cell["state"] == "cold" and mine:
            yield _row(cell, [rate / cell["cap"] for rate in mine], ">=", 0.90, "×", f"auto {_megabytes(mine)}")


def _in_flight(document: dict[str, Any]) -> Iterator[Row]:
    """Each reading rank stays within the bounds in which it looks for its depth."""
    for cell in document["cells"]:
        most = [run["store"]["most"] for run in cell["runs"].get("auto", []) if "most" in (run["store"] or {})]
        if most:
            yield _row(cell, most, "<=", MOST_INFLIGHT * cell["ranks"], "reads")


def _collectives(document: dict[str, Any]) -> Iterator[Row]:
    for cell in document["cells"]:
        calls = [run["collectives"] / max(1, run["batches"]) for run in cell["runs"].get("auto", [])]
        if calls:
            yield _row(cell, calls, "<=", 0, "calls")


def _switches(document: dict[str, Any]) -> Iterator[Row]:
    """Uses the medians of both sides, because the plain reader may have no switch in one run."""
    for cell in document["cells"]:
        mine, plain = (
            [run["voluntary"] / run["records"] for run in cell["runs"].get(name, [])] for name in ("auto", "plain")
        )
        if mine and plain:
            bar = statistics.median(plain)
            yield _row(cell, mine, "<=", bar, "per record", theirs=f"plain {bar:.4f}")


def _missed(document: dict[str, Any]) -> Iterator[Row]:
    """For cells with guesses, on sets whose file is in key order. (With records of one page and several commits,
    records take pages that earlier commits freed.)"""
    for cell in document["cells"]:
        runs = [run for run in cell["runs"].get("dm", []) if run["stats"].get("guessed")]
        if runs and cell["order"] == "none" and document["sets"][cell["dataset"]].get("in_order"):
            yield _row(cell, [run["stats_late"]["missed"] for run in runs], "<=", 0, "pages")


def _read_once(document: dict[str, Any]) -> Iterator[Row]:
    """For whole epochs, relative to the file's pages, which a reader that reads everything once would read."""
    for cell in document["cells"]:
        file_bytes = document["sets"][cell["dataset"]]["file_bytes"]
        read = [
            run["stats"]["bytes_read"] / run["epochs"] / file_bytes
            for run in cell["runs"].get("dm", [])
            if not cell["steps"].get("dm")
        ]
        if read and cell["order"] == "none":
            yield _row(cell, read, "<=", 1.05, "×")


def _content(document: dict[str, Any]) -> Iterator[Row]:
    for check in document["checks"]:
        bad = check["missing"] + check["repeated"] + check["wrong"]
        cell = {**check, "store": check["recipe"], "state": f"{check['records']:,} records"}
        yield _row(cell, [bad], "<=", 0, "records")


def _failures(document: dict[str, Any]) -> Iterator[Row]:
    for cell in document["cells"]:
        many = len(cell["failed"])
        yield Row.of(title(cell), [many], "<=", 0, unit="recipes", ours=", ".join(cell["failed"]))


def _row(
    cell: dict[str, Any], values: Sequence[float], sense: str, bar: float, unit: str, ours: str = "", theirs: str = ""
) -> Row:
    """One value per round."""
    return Row.of(title(cell), values, sense, bar, unit=unit, ours=ours, theirs=theirs)


#: in the order of the tables
BARS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "every record exactly once, every byte as py-lmdb reads it": _content,
    "recipes that failed": _failures,
    "auto ÷ the best other recipe": _best,
    "auto ÷ plain": _plain,
    "latency store: auto ÷ the store's cap": _cap,
    "latency store: reads of auto in flight at once": _in_flight,
    "collective calls of auto per batch": _collectives,
    "voluntary context switches of auto per record, against plain's": _switches,
    "dm: missed pages after two steps, of files in key order": _missed,
    "dm: bytes read ÷ the file's": _read_once,
}

#: bars that a slow machine does not excuse
MUST = tuple(BARS)[:2]
