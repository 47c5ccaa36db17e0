"""The model of a parallel file system: calibrate, compare with every published point, predict.

    python -m benchmarks.model                        all of it: tables, and benchmarks/model/calibrated.json
    python -m benchmarks.model --docs                 and into measurements/model.md and measurements/figures/model.svg
    python -m benchmarks.model --stored               with the stored parameters, without the search
    python -m benchmarks.model --study study.json     only: a study's cells beside what the model says of this machine
    python -m benchmarks.model --tiers [--docs]       only: tiers and peers, and measurements/model-tiers.md

Needs scipy, and matplotlib for the figure: pip install ".[model]".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.marked import fill_marked
from benchmarks.model import calibrate, here, report, tier_report

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description=__doc__.split("\n")[0])
    parser.add_argument("--stored", action="store_true", help="no search: the parameters of the last one")
    parser.add_argument("--docs", action="store_true", help="fill measurements/model.md and draw its figure")
    parser.add_argument("--tiers", action="store_true", help="only: nodes that keep and share what they read")
    parser.add_argument("--study", help="JSON of `python -m benchmarks.study`")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(argv)

    if options.study:
        rows = here.compare(json.loads(Path(options.study).read_text()))
        print(report.here_table({"case": row.case, "measured": row.measured, "model": row.model} for row in rows))
        return 0
    if options.tiers:
        _tiers(options.docs)
        return 0

    begin = time.monotonic()
    fits = calibrate.load() if options.stored else calibrate.search(options.workers)
    print(f"{len(fits)} parameter sets after {time.monotonic() - begin:.0f} s", file=sys.stderr)
    with ProcessPoolExecutor(options.workers) as pool:
        document = report.make(fits, pool)
    calibrate.STORED.write_text(json.dumps(document, indent=1) + "\n")
    for name, table in report.tables(document).items():
        print(f"\n## {name}\n\n{table}")
    if options.docs:
        page = ROOT / "measurements" / "model.md"
        page.write_text(report.fill(page.read_text(), document))
        report.figure(document, ROOT / "measurements" / "figures" / "model.svg")
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 0


def _tiers(docs: bool) -> None:
    tables, page = tier_report.tables(), ROOT / "measurements" / "model-tiers.md"
    for name, table in tables.items():
        print(f"\n## {name}\n\n{table}")
    if docs:
        page.write_text(fill_marked(page.read_text(), "model-tiers", tables))


if __name__ == "__main__":
    sys.exit(main())
