"""The one figure of the README, from a study: pario beside the strongest readers that need no pario."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import spread
from benchmarks.study.cells import LOOPS, words
from benchmarks.study.verdicts import best_loop, rates

__all__ = ["headline"]

#: What the figure shows: the store where reading is hardest, with large records. One column per order.
_WHERE = {"store": "latency", "dataset": "197k", "state": "cold"}
_ORDERS = {"none": "key order", "global": '`shuffle="global"`'}
_ROWS = {
    "auto": "pario",
    **{name: loop.title for name, loop in LOOPS.items()},
    "plain": "py-lmdb, every rank's cursor walks over all records (the paper's baseline), read-ahead 128 KiB",
}


def headline(document: dict[str, Any]) -> str:
    """Markdown; empty if the study lacks the cell in key order."""
    cells = {
        cell["order"]: cell
        for cell in document["cells"]
        if all(cell[name] == value for name, value in _WHERE.items()) and cell["runs"].get("auto")
    }
    if "none" not in cells:
        return ""
    first = cells["none"]
    lines = [
        "A store answers each read after 20 ms and carries 200 MB/s for all readers together; "
        f"{words(first['ranks'], first['nodes'])} read values of 197 KB, and no cache holds the file.",
        f"MB/s of values, median (min … max) of {len(rates(first, 'auto'))} runs in turns:",
        "",
        "| reader | " + " | ".join(_ORDERS.values()) + " |",
        "|---|---|---|",
    ]
    for name, title in _ROWS.items():
        found = [_rate(cells.get(order), name) for order in _ORDERS]
        if any(found):
            lines.append(f"| {title} | " + " | ".join(found) + " |")
    return "\n".join([*lines, *_from_memory(document)])


def _rate(cell: dict[str, Any] | None, name: str) -> str:
    values = rates(cell, name) if cell is not None else []
    if not values:
        return ""
    low, middle, high = (_short(spread(values)[what] / 1e6) for what in ("min", "median", "max"))
    return f"{middle} ({low} … {high})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _from_memory(document: dict[str, Any]) -> list[str]:
    """How pario stands when the data is in memory already, which is what a loop written by hand is best at."""
    found = []
    for cell in document["cells"]:
        best = best_loop(cell)
        if cell["state"] == "warm" and best is not None and rates(cell, "auto"):
            pairs = zip(rates(cell, "auto"), rates(cell, best), strict=False)
            found.append(statistics.median(mine / theirs for mine, theirs in pairs))
    if not found:
        return []
    return [
        "",
        "With the file in the page cache, pario has "
        f"{min(found):.2f} to {max(found):.2f} times the rate of the loop over",
        f"a contiguous shard ({len(found)} cases), which copies each value once and does nothing else.",
    ]
