"""The parts that run in pario's own environment. Started by __main__.py."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.peers import sets
from benchmarks.peers.behaviour import behave
from benchmarks.peers.conduct import Bench, check, speed, write
from benchmarks.peers.report import fill

#: the cell of a smoke test, unless others are named
_SMOKE = "jpeg/cold/1x1"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--cells", default="")
    parser.add_argument("--only")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    bench = Bench(
        options.out, options.only.split(",") if options.only else None, 1 if options.smoke else options.rounds,
        options.limit, options.smoke,
    )  # fmt: skip
    parts = options.parts
    if "write" in parts:
        write(bench, [bench.set(name) for name in sets.SETS])
    if "check" in parts:
        for name, ranks in (("3k", 1), ("3k", 2)) if options.smoke else itertools.product(sets.SETS, (1, 2)):
            check(bench, name, ranks)
    if "speed" in parts:
        speed(bench, (options.cells or (_SMOKE if options.smoke else "")).split(","))
    if "behaviour" in parts:
        behave(bench)
    if "fill" in parts:
        fill(bench.found, ROOT / "measurements")
    broken = [*bench.found["errors"].items()] + [
        (key, one)
        for held in bench.found["checks"].values()
        for key, one in held.items()
        if not one.get("exactly_once")
    ]
    if options.smoke:
        for name, why in broken:
            print(f"FAILED: {name}: {why}", file=sys.stderr)
        return 1 if broken else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
