"""`bench checkpoint`: progress, table, figure and sentence of that instrument (bench/micro/checkpoint.py)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pario.bench.micro import checkpoint as micro
from pario.bench.study.facts import machine
from pario.commands.micro import refused, tell, tidy
from pario.commands.screen import decimal_bytes, screen, seconds

__all__ = ["checkpoint"]


def checkpoint(
    what: micro.Training, folders: tuple[str, str | None], rounds: int, out: str | None, as_json: bool
) -> int:
    """folders : the slow one, and the fast one or None. Exit status: 2 under a launcher, or without one of them."""
    slow, fast = folders
    if refused(slow, fast):
        return 2
    ways, missing = micro.ways_here(fast)
    words = (
        f"{what.checkpoints} of {decimal_bytes(what.nbytes)}, one after every {what.every} iterations of "
        f"{seconds(what.step_s)}"
    )
    if not as_json:
        screen.say(f"{words}; slow: {slow}, fast: {fast or 'none'}")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tidy(), screen.bar(rounds * len(ways), "checkpoint", "run") as bar:
        for number in range(rounds):
            for way in ways:
                bar.set_postfix_str(way, refresh=False)
                found[way].append(micro.run_way(way, what, slow, fast, number))
                bar.update(1)
    rows = [
        {"way": way, **{name: [run[name] for run in runs] for name in ("total", "stall", "durable")}}
        for way, runs in found.items()
    ]
    document = {
        "format": 1, "instrument": "checkpoint", "machine": machine(), "what": words, "rounds": rounds, "rows": rows,
        "missing": missing,
    }  # fmt: skip
    said = _checkpoint_words(rows, missing)
    return tell({**document, "sentences": said}, _checkpoint_table(rows), said, out, as_json)


def _checkpoint_table(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [("", "whole loop", "stall per checkpoint", "all durable after")]
    for row in rows:
        numbers = (seconds(statistics.median(row[name])) for name in ("total", "stall", "durable"))
        lines.append((f"{row['way']}: {micro.WAYS[row['way']]}", *numbers))
    return lines


def _checkpoint_words(rows: Sequence[Mapping[str, Any]], missing: Mapping[str, str]) -> list[str]:
    of = {row["way"]: {name: statistics.median(row[name]) for name in ("total", "stall")} for row in rows}
    best = "burst buffer" if "burst buffer" in of else "background"
    direct = of["direct"]
    said = (
        f"Straight to the slow store each checkpoint stops the loop for {seconds(direct['stall'])}; "
        f"{'through the burst buffer' if best == 'burst buffer' else 'written in the background'} for "
        f"{seconds(of[best]['stall'])}, and the whole loop takes {direct['total'] / of[best]['total']:.1f} × less "
        f"time, {of[best]['total'] / of['none']['total']:.2f} × that without checkpoints."
    )
    return [said, *(f"Not measured: {way} ({why})." for way, why in missing.items())]
