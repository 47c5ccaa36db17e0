"""The memory tier beside FFCV, which maps a file of its own format: small records in random order, all in memory.

    python -m benchmarks.ffcv --data DIR --python ENV/bin/python [--rounds 5] [--ranks 1,2] [--out DIR/ffcv.json]

FFCV needs OpenCV's and libjpeg-turbo's headers to install, and PyTorch; so it lies in an environment of its own.
`python -m benchmarks.peers --out DIR --part install --only ffcv` makes it (DIR/env/ffcv); it also needs
`pip install pillow mpi4py mpich` there. Its best number of threads counts. measurements/peers.md has more loaders.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks import cache, data
from benchmarks.measure import Section, interleave, launch, missed, save
from benchmarks.sides import BATCH, Bench, compare
from benchmarks.tiers import BARS, TIERS, UNIT, rate_of

WHICH = "3k"
THREADS = (1, 2)


def beside(bench: Bench, section: Section, python: str, ranks: tuple[int, ...]) -> None:
    held = bench.sets[WHICH]
    cache.warm_file(held.file)
    given = [held.path, "--beton", f"{held.path}.beton", "--head", str(held.head), "--pixels", str(held.image_bytes)]
    given += ["--batch", str(BATCH[WHICH])]
    launch("benchmarks.worker_ffcv", [*given, "--epochs", "1"], python=python, timeout_s=1200)  # writes its file
    for n in ranks:
        sides = {"pario": partial(bench.pario, held.path, WHICH, "global", "--epochs", "4", *TIERS, ranks=n)}
        for k in THREADS:
            sides[f"FFCV, {k} threads"] = partial(
                launch, "benchmarks.worker_ffcv", [*given, "--workers", str(k)], python=python, ranks=n
            )
        found = interleave(sides, bench.rounds)
        rates = {name: [rate_of(run) for run in runs] for name, runs in found.items()}
        best = max((name for name in rates if name != "pario"), key=lambda name: sorted(rates[name])[bench.rounds // 2])
        case = f'{held.name}, "global", {n} {"rank" if n == 1 else "ranks"}'
        compare(section, case, rates["pario"], rates[best], BARS[WHICH], best, **UNIT)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ffcv", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of `python -m benchmarks.data`; made there if missing")
    parser.add_argument("--python", required=True, help="the interpreter of the environment that has FFCV")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--out", help="JSON file (default: ffcv.json in the data folder)")
    parser.add_argument("--quick", action="store_true", help="tiny data sets: does it run at all?")
    options = parser.parse_args()
    bench = Bench(options.data, options.rounds, options.quick, False, [])
    made = data.make(options.data, WHICH, 4000 if options.quick else None)
    bench.sets[WHICH] = made
    bench.index(made.path)
    section = Section("ffcv", "Out of the memory tier ÷ FFCV, random order", "warm")
    beside(bench, section, options.python, tuple(int(n) for n in options.ranks.split(",")))
    out = options.out or Path(options.data) / "ffcv.json"
    save(out, [section], command=sys.argv, rounds=bench.rounds, quick=bench.quick, batch=BATCH)
    return int(missed([section]))


if __name__ == "__main__":
    sys.exit(main())
