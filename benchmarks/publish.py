"""Every table and figure of the README and the documentation, measured anew by today's code.

    python -m benchmarks.publish DIR                  measures all parts in turn and fills the pages
    python -m benchmarks.publish DIR --only study     one part; may be given several times
    python -m benchmarks.publish DIR --fill           fills the pages from the JSON that an earlier run left in DIR

Needs root and an idle machine. DIR must lie on the disk that is to be measured; data sets of 4.5 GB are made there and
kept. A bar that is not met is no failure here: the tables say so. measurements/benchmarks.md lists which page has its
figures from which part.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

Command = tuple[str, ...]


def _bars(page: str, names: Sequence[str], *measures: str) -> tuple[Command, Command]:
    """What `measures`, with its JSON in DIR, and benchmarks.tables, which fills a page from that of all `names`."""
    module = measures[0].removeprefix("benchmarks.")
    fill = ("benchmarks.tables", *(f"{{dir}}/{name}.json" for name in names), "--into", f"measurements/{page}.md")
    return (*measures, "--out", f"{{dir}}/{module}.json"), fill


_BARS, _TIERS = ("bars", "dropin"), ("in_memory", "tiers", "nodes", "jobs", "node_peers")

#: part -> (what measures it, what fills the pages from its JSON); {dir} is DIR
PARTS: dict[str, tuple[Command, Command]] = {
    "study": (
        ("benchmarks.study", "--out", "{dir}/study", "--data", "{dir}/sets"),
        (
            *("benchmarks.study.page", "{dir}/study/study.json", "--figures", "measurements/figures"),
            *("--into", "README.md", "--into", "measurements/study.md", "--into", "measurements/first-epoch.md"),
        ),
    ),
    **{name: _bars("benchmarks", _BARS, f"benchmarks.{name}", "--data", "{dir}") for name in _BARS},
    "in-memory": _bars("tiers", _TIERS, "benchmarks.in_memory", "{dir}"),
    **{name: _bars("tiers", _TIERS, f"benchmarks.{name}", "--data", "{dir}") for name in ("tiers", "nodes", "jobs")},
    "node-peers": _bars("tiers", _TIERS, "benchmarks.node_peers"),
    "peers": (
        ("benchmarks.peers", "--out", "{dir}/peers"),
        ("benchmarks.peers", "--out", "{dir}/peers", "--part", "fill"),
    ),
    "startup": (
        ("benchmarks.startup", "--json", "{dir}/startup.json"),
        ("benchmarks.startup", "--from", "{dir}/startup.json", "--into", "measurements/startup.md"),
    ),
    "failures": (
        ("benchmarks.failures", "--keep", "{dir}/failures.json"),
        ("benchmarks.failures", "--rows", "{dir}/failures.json"),
    ),
    "beside": (
        ("benchmarks.checkpoint_beside", "{dir}", "--json", "{dir}/beside.json"),
        ("benchmarks.checkpoint_beside", "--from", "{dir}/beside.json", "--into", "measurements/checkpoints.md"),
    ),
    "codecs": (
        ("benchmarks.codecs", "all", "--rounds", "3", "--out", "{dir}/codecs.json"),
        ("benchmarks.codecs", "none", "--out", "{dir}/codecs.json", "--into", "measurements/packing.md"),
    ),
    "dlio": (
        ("benchmarks.dlio", "--out", "{dir}/dlio"),
        ("benchmarks.dlio", "--out", "{dir}/dlio", "--fill", "measurements/dlio.md"),
    ),
    "model": ((), ("benchmarks.model", "--stored", "--docs")),
    "model-tiers": ((), ("benchmarks.model", "--tiers", "--docs")),
}


def commands(folder: str, parts: Sequence[str], measure: bool) -> list[list[str]]:
    """What to run, in this order: a part's pages are filled as soon as it is measured."""
    chosen = [command for part in parts for command in (PARTS[part] if measure else PARTS[part][1:]) if command]
    return [[sys.executable, "-m", *(word.format(dir=folder) for word in command)] for command in chosen]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="may be given several times")
    parser.add_argument("--fill", action="store_true", help="measure nothing: fill the pages from what is in DIR")
    options = parser.parse_args(argv)
    folder = Path(options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    broken = []
    for command in commands(str(folder), options.only or list(PARTS), not options.fill):
        words = " ".join(command[2:])
        print(f"== {time.strftime('%H:%M:%S')} {words}", flush=True)
        # 1 and 3: a bar is not met, or something cannot be measured here. The JSON is there and says so.
        if subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, 1, 3):
            broken.append(words)
    for words in broken:
        print(f"FAILED: {words}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
