"""Markdown tables from the JSON of bars.py and dropin.py.

    python -m benchmarks.tables bars.json dropin.json                               prints all of them
    python -m benchmarks.tables bars.json dropin.json --into measurements/benchmarks.md     fills the places of a page

`<!-- bars: NAME -->` and `<!-- end -->`, each alone on its line, enclose a place for a table; NAME is a section,
`machine` (of the first file), `summary` (per section and bar the case with the least margin), or `all`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.marked import fill_marked

__all__ = ["fill", "machine_lines", "summary", "table"]


def _number(value: float, unit: str) -> str:
    text = f"{value:.0f}" if unit == "records" else f"{value:.3f}" if abs(value) < 2 else f"{value:.2f}"
    return f"{text} {unit}" if unit else text


def table(section: dict[str, Any]) -> str:
    """One section as a Markdown table under its title."""
    lines = [
        f"**{section['title']}** (caches: {section['state']})",
        "",
        "| case | figure (min … max) | bar | | pario | compared with |",
        "|---|---|---|---|---|---|",
    ]
    for row in section["rows"]:
        figure = _number(row["figure"], row["unit"])
        if row["low"] != row["high"]:
            figure += f" ({_number(row['low'], '')} … {_number(row['high'], '')})"
        bar = f"{'≥' if row['sense'] == '>=' else '≤'} {row['bar']:g}" if row["bar"] is not None else ""
        verdict = {True: "met", False: "**not met**", None: ""}[row["met"]]
        lines.append(f"| {row['case']} | {figure} | {bar} | {verdict} | {row['ours']} | {row['theirs']} |")
    lines += ["", *(f"*{note}*" for note in section["notes"])]
    return "\n".join(lines).rstrip()


def summary(document: dict[str, Any]) -> str:
    """One line per section and bar: its worst case."""
    lines = ["| | worst case | figure (min … max) | bar | |", "|---|---|---|---|---|"]
    for section in document["sections"]:
        worst: dict[tuple[str, float], dict[str, Any]] = {}
        for row in section["rows"]:
            if row["bar"] is not None:
                sign = 1 if row["sense"] == ">=" else -1
                held = worst.setdefault((row["sense"], row["bar"]), row)
                if sign * row["figure"] < sign * held["figure"]:
                    worst[row["sense"], row["bar"]] = row
        for (sense, bar), row in worst.items():
            figure = _number(row["figure"], row["unit"])
            if row["low"] != row["high"]:
                figure += f" ({_number(row['low'], '')} … {_number(row['high'], '')})"
            limit = f"{'≥' if sense == '>=' else '≤'} {bar:g}"
            verdict = "met" if row["met"] else "**not met**"
            lines.append(f"| {section['title']} | {row['case']} | {figure} | {limit} | {verdict} |")
    return "\n".join(lines)


def machine_lines(document: dict[str, Any]) -> str:
    """Where and with what the figures were made."""
    facts = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    quick = " Small data, one round: not for publication." if document.get("quick") else ""
    with_fio = f"{facts['fio'] or 'no fio'}{_commit(facts)}"
    return (
        f"Measured {facts['date']} on {facts['cpus']} cores ({facts['cpu'] or 'unknown processor'}), "
        f"{facts['memory_bytes'] / (1 << 30):.0f} GiB, Linux {facts['kernel']}, Python {facts['python']}, {versions}, "
        f"{with_fio}; {document['rounds']} interleaved rounds, median (min … max).{quick}"
    )


def _commit(facts: dict[str, Any]) -> str:
    return f", commit {facts['commit'][:9]}" if facts.get("commit") else ""


def fill(text: str, document: dict[str, Any]) -> str:
    """`text` with every marked place filled from `document`; places of sections that were not run stay."""
    sections = {section["name"]: table(section) for section in document["sections"]}
    parts = {
        **sections,
        "machine": machine_lines(document),
        "summary": summary(document),
        "all": "\n\n".join(sections.values()),
    }
    return fill_marked(text, "bars", parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__.split("\n")[0])
    parser.add_argument("json", nargs="+", help="files that do not exist are left out")
    parser.add_argument("--into", action="append", default=[], help="a Markdown file with markers")
    options = parser.parse_args(argv)
    documents = [json.loads(Path(name).read_text()) for name in options.json if Path(name).exists()]
    if not documents:
        parser.error(f"there is no {' and no '.join(options.json)}")
    document = {**documents[0], "sections": [section for one in documents for section in one["sections"]]}
    if not options.into:
        print(machine_lines(document) + "\n")
        print("\n\n".join(table(section) for section in document["sections"]))
    for name in options.into:
        path = Path(name)
        path.write_text(fill(path.read_text(), document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
