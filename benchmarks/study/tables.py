"""A study's figures as tables, for the screen and as Markdown for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.marked import fill_marked
from benchmarks.measure import Row, spread
from benchmarks.study.cells import LOOPS, RECIPES, STATES, STORES, words
from benchmarks.study.headline import headline
from benchmarks.study.verdicts import best_loop, rates, title, verdicts, worst
from pario.text import table

__all__ = ["fill", "gain", "machine_line", "markdown", "on_screen", "parts", "per_record", "speculated"]

Table = list[list[str]]  # the header, then the rows


def on_screen(document: dict[str, Any]) -> str:
    """The bars and the rates, as text for a terminal."""
    blocks = [machine_line(document)]
    for name, rows in _rates(document, short=True):
        blocks.append(f"{name}\n{table(rows)}")
    blocks.append("Bars, each with the case of the least margin\n" + "\n".join(_bar_lines(document)))
    if document["notes"]:
        blocks.append("\n".join(f"note: {note}" for note in document["notes"]))
    return "\n\n".join(blocks)


def markdown(document: dict[str, Any]) -> str:
    """Everything, as one page."""
    made = parts(document)
    titles = {
        "bars": "Bars",
        "missed": "Not met, case by case",
        "rates": "Rates",
        "by_hand": "Beside loops written by hand",
        "gains": "Gain over the plain reader",
        "starts": "Time to the first batch without an index",
        "switches": "Context switches",
        "times": "Where the time goes",
        "store": "At the store",
        "speculation": "Missed and extra pages of the speculation",
        "requests": "Read time against request size",
        "groups": "Staggering",
    }
    blocks = ["# Study of the recipes", made["machine"]]
    blocks += [f"## {titles[name]}\n\n{made[name]}" for name in titles if made[name]]
    if document["notes"]:
        blocks.append("## Notes\n\n" + "\n".join(f"* {note}" for note in document["notes"]))
    return "\n\n".join(blocks) + "\n"


def parts(document: dict[str, Any]) -> dict[str, str]:
    """Name -> Markdown, for `fill`."""
    kinds: dict[str, Callable[[dict[str, Any]], Iterator[tuple[str, Table]]]] = {
        "missed": _not_met,
        "rates": _rates,
        "by_hand": _by_hand,
        "gains": _gains,
        "starts": _starts,
        "switches": _switches,
        "times": _times,
        "store": _store,
        "speculation": _speculation,
        "requests": _requests,
        "groups": _groups,
    }
    found = {
        name: "\n\n".join(f"**{title}**\n\n{_markdown(rows)}" for title, rows in make(document))
        for name, make in kinds.items()
    }
    front = {"machine": machine_line(document), "bars": _markdown(_bars(document)), "figure": headline(document)}
    return front | found


def fill(page: str, document: dict[str, Any]) -> str:
    """`page` with new text between each `<!-- study: NAME -->` and `<!-- end -->`."""
    return fill_marked(page, "study", parts(document))


def machine_line(document: dict[str, Any]) -> str:
    """The machine and the versions behind the figures."""
    facts = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    sets = ", ".join(
        f"{which} {held['records']:,} records, {held['file_bytes'] / 1e6:,.0f} MB"
        for which, held in document["sets"].items()
    )
    ahead = facts.get("read_ahead_bytes")
    disk = f" The kernel reads ahead {ahead >> 10:,} KiB on the bare disk." if ahead is not None else ""
    cut = "" if document["complete"] else " Cut short."
    commit = f", commit {facts['commit'][:9]}" if facts.get("commit") else ""
    return (
        f"Measured {facts['date']} on {facts['cpus']} cores ({facts['cpu'] or 'unknown processor'}), "
        f"{facts['memory_bytes'] / (1 << 30):.0f} GiB, Linux {facts['kernel']}, Python {facts['python']}, {versions}"
        f"{commit}. Preset {document['preset']}, seed {document['seed']}: {document['rounds']} interleaved rounds, "
        f"median (min … max), {document['seconds'] / 60:.1f} minutes. Data: {sets}.{disk}{cut}"
    )


def _markdown(rows: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# -- the tables -------------------------------------------------------------------------------------------------------


def _bars(document: dict[str, Any]) -> Table:
    made: Table = [["", "bar", "worst case", "figure (min … max)", "met in", ""]]
    for name, rows in verdicts(document).items():
        least = worst(rows)
        if least is None:
            made.append(["not measured", name, "", "", "", ""])
            continue
        met = sum(row.met is True for row in rows)
        verdict = "met" if met == len(rows) else "NOT MET"
        sides = "; ".join(side for side in (least.ours, least.theirs) if side)
        made.append([verdict, name, least.case, _figure(least), f"{met} of {len(rows)}", sides])
    return made


def _bar_lines(document: dict[str, Any]) -> Iterator[str]:
    """For the screen: two lines per bar."""
    for verdict, name, case, figure, met, sides in _bars(document)[1:]:
        yield f"  {verdict:14}{name}" + (f": met in {met}" if met else "")
        if case:
            yield " " * 16 + f"{case}: {figure}" + (f"; {sides}" if sides else "")


def _not_met(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Every case in which a bar is not met."""
    for name, rows in verdicts(document).items():
        bad = [row for row in rows if row.met is False]
        if bad:
            lines = [[row.case, _figure(row), row.ours, row.theirs] for row in bad]
            yield name, [["case", "figure (min … max)", "", ""], *lines]


def _figure(row: Row) -> str:
    sign = "≥" if row.sense == ">=" else "≤"
    text = _short(row.figure)
    if row.low != row.high:
        text += f" ({_short(row.low)} … {_short(row.high)})"
    return f"{text} {row.unit}, bar {sign} {_short(row.bar or 0.0)}"


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _groups_of_cells(document: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Groups of cells that differ only in ranks and nodes, with their common title."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        found.setdefault((cell["store"], cell["dataset"], cell["state"], cell["order"]), []).append(cell)
    for (store, dataset, state, order), cells in found.items():
        shuffled = "" if order == "none" else f', shuffle="{order}"'
        yield f"{dataset}, {STORES[store]}, {state} ({STATES[state]}){shuffled}", cells


def _recipes(cells: Sequence[dict[str, Any]]) -> list[str]:
    return [name for name in RECIPES if any(cell["runs"].get(name) for cell in cells)]


def _per_recipe(
    document: dict[str, Any], one: Callable[[dict[str, Any], str], str], unit: str
) -> Iterator[tuple[str, Table]]:
    """one : (cell, recipe) -> text of the table's cell"""

    def told(cell: dict[str, Any], recipe: str) -> str:
        if not cell["runs"].get(recipe):
            return ""
        return one(cell, recipe) + (" not guessed" if _never_guessed(cell, recipe) else "")

    for name, cells in _groups_of_cells(document):
        recipes = _recipes(cells)
        rows = [["", *recipes]]
        rows += [[words(cell["ranks"], cell["nodes"]), *(told(cell, r) for r in recipes)] for cell in cells]
        yield f"{name}, {unit}", rows


def _never_guessed(cell: dict[str, Any], recipe: str) -> bool:
    """True if the guessing recipe did not guess here: its figure is that of the walk, or of leaf after leaf."""
    return recipe == "dm" and not any(run["stats"].get("guessed") for run in cell["runs"][recipe])


def _rates(document: dict[str, Any], short: bool = False) -> Iterator[tuple[str, Table]]:
    """short : without the spread"""

    def one(cell: dict[str, Any], recipe: str) -> str:
        return f"{statistics.median(rates(cell, recipe)) / 1e6:,.0f}" if short else _megabytes(cell, recipe)

    yield from _per_recipe(document, one, "MB/s")


def _megabytes(cell: dict[str, Any], name: str) -> str:
    """Median and spread of a recipe's or loop's rate; empty if there is none."""
    values = [rate / 1e6 for rate in rates(cell, name)]
    if not values:
        return ""
    digits = 0 if max(values) >= 10 else 1
    low, middle, high = (f"{spread(values)[what]:,.{digits}f}" for what in ("min", "median", "max"))
    return f"{middle} ({low} … {high})"


def _by_hand(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """pario's default beside the loops, in the cells that have any."""
    rows: Table = [["", "auto", *LOOPS, "auto ÷ the fastest loop"]]
    for cell in document["cells"]:
        best = best_loop(cell)
        if best is not None and rates(cell, "auto"):
            ratio = gain(cell, "auto", best)
            assert ratio is not None
            figure = f"{ratio['median']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f})"
            rows.append([title(cell), *(_megabytes(cell, name) for name in ("auto", *LOOPS)), figure])
    if len(rows) > 1:
        yield "MB/s", rows


def _starts(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Time to the first batch, for the cells without an index."""

    def one(cell: dict[str, Any], recipe: str) -> str:
        found = spread([run["open_seconds"] + run["first_batch_seconds"] for run in cell["runs"][recipe]])
        return f"{found['median']:.2f} ({found['min']:.2f} … {found['max']:.2f})"

    first = {**document, "cells": [cell for cell in document["cells"] if cell["state"] == "first"]}
    yield from _per_recipe(first, one, "seconds from Loader(...) to the first batch of the last rank")


def _gains(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    def one(cell: dict[str, Any], recipe: str) -> str:
        found = gain(cell, recipe)
        return f"{found['median']:.2f} ({found['min']:.2f} … {found['max']:.2f})" if found else ""

    yield from _per_recipe(document, one, "× plain")


def gain(cell: dict[str, Any], recipe: str, over: str = "plain") -> dict[str, float] | None:
    """The recipe's rate in one cell as a multiple of another's, round by round."""
    pairs = list(zip(rates(cell, recipe), rates(cell, over), strict=False))
    return spread([mine / theirs for mine, theirs in pairs]) if pairs else None


def per_record(cell: dict[str, Any], recipe: str, what: str) -> dict[str, float]:
    """A counter per delivered record."""
    return spread([run[what] / run["records"] for run in cell["runs"][recipe]])


def _switches(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    def one(cell: dict[str, Any], recipe: str) -> str:
        return " / ".join(
            f"{per_record(cell, recipe, what)['median']:.3g}" for what in ("voluntary", "involuntary", "major_faults")
        )

    yield from _per_recipe(document, one, "per record: voluntary / involuntary context switches / major page faults")


def _times(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Rank seconds as a share of all ranks' time; the parts of a recipe that prefetches overlap."""

    def one(cell: dict[str, Any], recipe: str) -> str:
        shares = []
        for name in ("locate", "turn", "read", "share", "decode"):
            of_runs = [run["stats"][name] / (run["seconds"] * cell["ranks"]) for run in cell["runs"][recipe]]
            shares.append(f"{statistics.median(of_runs):.0%}")
        return " / ".join(shares)

    yield from _per_recipe(document, one, "of the ranks' time: locate / turn / read / share / decode")


def _store(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Bytes that the store delivered, per byte of the records' pages."""

    def one(cell: dict[str, Any], recipe: str) -> str:
        made = document["sets"][cell["dataset"]]
        runs = cell["runs"][recipe]
        needed = [made["page_bytes"] * run["records"] / made["records"] for run in runs]
        asked = statistics.median(run["stats"]["bytes_read"] / need for run, need in zip(runs, needed, strict=True))
        calls = statistics.median(run["stats"]["reads"] / run["epochs"] for run in runs)
        if any(run["store"] is None for run in runs):
            got = statistics.median(run["device"] / need for run, need in zip(runs, needed, strict=True))
            return f"{asked:.2f} / {calls:,.0f} / {got:.2f}"
        got = statistics.median(run["store"]["bytes"] / need for run, need in zip(runs, needed, strict=True))
        many = statistics.median(run["store"]["operations"] for run in runs)
        return f"{asked:.2f} / {calls:,.0f} / {got:.2f} / {many:,.0f}"

    cold = {**document, "cells": [cell for cell in document["cells"] if cell["state"] != "warm"]}
    what = "bytes asked for ÷ the records' pages / reads / bytes at the store ÷ the records' pages / operations there"
    yield from _per_recipe(cold, one, what)


def speculated(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells and recipes that guessed pages: "case", "recipe", "state", the spreads of pages "missed", "late"
    (missed after two steps) and "extra" (read in vain), and "part", the extra pages as a fraction of the file's."""
    found = []
    for cell in document["cells"]:
        pages = document["sets"][cell["dataset"]]["file_bytes"] / 4096
        for recipe in _recipes([cell]):
            runs = cell["runs"][recipe]
            if any(run["stats"].get("guessed") for run in runs):
                case = f"{cell['dataset']}, {cell['store']}, {words(cell['ranks'], cell['nodes'])}"
                one: dict[str, Any] = {"case": case, "recipe": recipe, "state": cell["state"]}
                one["missed"] = spread([run["stats"]["missed"] for run in runs])
                one["late"] = spread([run["stats_late"]["missed"] for run in runs])
                one["extra"] = spread([run["stats"]["extra"] for run in runs])
                found.append(one | {"part": one["extra"]["median"] / pages})
    return found


def _speculation(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    rows: Table = [["", "recipe", "pages missed", "of them after two steps", "pages extra", "of the file's pages"]]
    for one in speculated(document):
        middle = [f"{one[name]['median']:,.0f}" for name in ("missed", "late", "extra")]
        rows.append([f"{one['case']}, {one['state']}", one["recipe"], *middle, f"{one['part']:.2%}"])
    if len(rows) > 1:
        yield "per run", rows


def _requests(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    rows = document["requests"]
    if not rows:
        return
    ways = list(dict.fromkeys(row["way"] for row in rows))
    sizes = sorted({row["size"] for row in rows})
    made: Table = [["request", *ways]]
    for size in sizes:
        line = [f"{size >> 10} KiB"]
        for way in ways:
            row = next(row for row in rows if row["size"] == size and row["way"] == way)
            found = spread([row["bytes"] / took / 1e6 for took in row["seconds"]])
            line.append(f"{found['median']:,.0f} ({found['min']:,.0f} … {found['max']:,.0f})")
        made.append(line)
    yield "one process, sequential, cold, bare disk, MB/s", made


def _groups(document: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    cells = document["groups"]
    if not cells:
        return
    names = list(dict.fromkeys(name for cell in cells for name in cell["runs"]))
    made: Table = [["", *names]]
    for cell in cells:
        line = [f"{cell['dataset']}, {STORES[cell['store']]}, {words(cell['ranks'], cell['nodes'])}"]
        for name in names:
            found = [rate / 1e6 for rate in rates(cell, name)]
            of_runs = spread(found) if found else None
            line.append(f"{of_runs['median']:,.0f} ({of_runs['min']:,.0f} … {of_runs['max']:,.0f})" if of_runs else "")
        made.append(line)
    yield "recipe stag, readers that may read at once, MB/s", made
