"""The memory tier beside the tightest py-lmdb loop, and beside pario without tiers.

    python -m benchmarks.tiers --data DIR [--rounds 5] [--ranks 1,2,4] [--sets 100b,3k,197k] [--only SECTION] [--out F]

Sections: `tiers`, epochs after the first, everything in memory; `tiers_first`, the first epoch, from a cold file on the
disk of DIR and from the page cache; `tiers_disk`, an epoch out of a complete copy on the disk of DIR. The data sets are
those of benchmarks/bars.py, and 100-byte records for `tiers`. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.measure import Section, interleave, missed, save
from benchmarks.sides import BATCH, SHUFFLES, Bench, compare, epoch_seconds, from_cold, records_of
from benchmarks.stores import throttled
from benchmarks.stores.throttled import Group
from benchmarks.study.sets import DataSet

#: The loops that reuse an array; in key order a walk over a shard's keys in a row, which a cursor does no faster.
TIGHT = ("slice-buffers", "whole-buffers")
TIERS = ("--tiers", "memory:8GiB")
BARS = {"100b": 1.0, "3k": 1.0, "197k": 0.95}
#: of the small sets
RECORDS = {"100b": 20_000, "3k": 4000, "197k": 100}
#: fio's long reads, its depth, and the records that are read one by one in "global" order
LONG_BYTES, DEPTH, SINGLE_BYTES = 4 << 20, 8, 64 << 10
UNIT: dict[str, Any] = {"unit": 1e3, "name": "k records/s"}


def rate_of(run: dict[str, Any], first: bool = False) -> float:
    """Records/s of the middle one of the later epochs, or of the first."""
    epochs = range(1) if first else range(1, len(run["ranks"][0]["epochs"]))
    rates = sorted(records_of(run, i) / epoch_seconds(run, i) for i in epochs)
    return rates[len(rates) // 2]


def later(bench: Bench, section: Section, ranks: tuple[int, ...]) -> None:
    for which, held in bench.sets.items():
        cache.warm_file(held.file)
        for shuffle in SHUFFLES:
            for n in ranks:
                with bench.order(which, shuffle, n) as order:
                    sides = {"pario": partial(bench.pario, held.path, which, shuffle, "--epochs", "4", *TIERS, ranks=n)}
                    for variant in TIGHT:
                        more = ("--order", order, "--variant", variant, "--epochs", "4")
                        sides[variant] = partial(bench.py_lmdb, which, *more, ranks=n)
                    found = interleave(sides, bench.rounds)
                rates = {name: [rate_of(run) for run in runs] for name, runs in found.items()}
                tight = max(TIGHT, key=lambda variant: sorted(rates[variant])[bench.rounds // 2])
                case = f"{held.name}, {SHUFFLES[shuffle]}, {n} {'rank' if n == 1 else 'ranks'}"
                compare(section, case, rates["pario"], rates[tight], BARS[which], f"py-lmdb {tight}", **UNIT)


def _first_epoch(bench: Bench, which: str, shuffle: str, state: str, *more: str) -> float:
    held = bench.sets[which]
    (cache.drop_file if state == "cold" else cache.warm_file)(held.file)
    run = bench.pario(held.path, which, shuffle, "--warmup", bench.small[which].path, *more)
    return rate_of(run, first=True)


def first(bench: Bench, section: Section, state: str) -> None:
    for which, held in bench.sets.items():
        for shuffle in SHUFFLES:
            one = partial(_first_epoch, bench, which, shuffle, state)
            found = interleave({"tiers": partial(one, *TIERS), "none": one}, bench.rounds)
            case = f"{held.name}, {SHUFFLES[shuffle]}, {state}"
            compare(section, case, found["tiers"], found["none"], None, "without tiers", **UNIT)


def disk(bench: Bench, section: Section) -> None:
    """A copy on a disk, filled before and not in the page cache, beside fio on the copy."""
    for which, held in bench.sets.items():
        with tempfile.TemporaryDirectory(dir=bench.folder, prefix="pario-tier-") as folder:
            tier = ("--tiers", f"{folder}:64GiB", "--warmup", bench.small[which].path)
            bench.pario(held.path, which, "none", *tier)
            size = held.record_bytes // held.records
            copy = max(Path(folder).rglob("data"), key=lambda file: file.stat().st_size)
            assert os.stat(copy).st_blocks * 512 >= held.record_bytes, f"{copy} is not complete"

            def by_fio(group: Group | None, read: int, copy: str = str(copy)) -> tuple[float, float]:
                run = throttled.fio(copy, random=read < LONG_BYTES, read_bytes=read, depth=DEPTH, group=group)
                return run["bytes"], run["seconds"]

            def by_pario(group: Group | None, words: tuple[str, ...], held: DataSet = held) -> tuple[float, float]:
                cache.drop_file(held.file)
                return held.record_bytes, epoch_seconds(bench.pario(held.path, *words, group=group))

            runs: dict[str, Any] = {"long": partial(by_fio, read=LONG_BYTES)}
            if size >= SINGLE_BYTES:  # smaller ones come by chunks or blocks
                runs["random"] = partial(by_fio, read=size)
            runs |= {shuffle: partial(by_pario, words=(which, shuffle, *tier)) for shuffle in SHUFFLES}
            found = interleave({name: partial(from_cold, str(copy), run) for name, run in runs.items()}, bench.rounds)
        section.raw[held.name] = found
        for shuffle, name in SHUFFLES.items():
            by = "random" if shuffle == "global" and "random" in found else "long"
            words = f"fio random {size >> 10} KiB" if by == "random" else f"fio {LONG_BYTES >> 20} MiB"
            compare(section, f"{held.name}, {name}", found[shuffle], found[by], 0.95, f"{words}, depth {DEPTH}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of `python -m benchmarks.data`; made there if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--sets", default="100b,3k,197k")
    parser.add_argument("--out", help="JSON file (default: tiers.json in the data folder)")
    parser.add_argument("--only", default="", help="one section: tiers, tiers_first or tiers_disk")
    parser.add_argument("--quick", action="store_true", help="tiny data sets: does it run at all?")
    options = parser.parse_args()
    bench = Bench(options.data, options.rounds, options.quick, False, [])
    bench.make({which: RECORDS[which] for which in options.sets.split(",")}, {})
    sections = [
        Section("tiers", "Out of the memory tier ÷ the tightest py-lmdb loop", "warm"),
        Section("tiers_first", "The first epoch with a memory tier ÷ without tiers, 1 rank", "as stated"),
        Section("tiers_disk", "Out of a tier on the disk ÷ fio on the same copy, O_DIRECT, 1 rank", "cold"),
    ]
    sections = [section for section in sections if options.only in ("", section.name)]
    ranks = tuple(int(n) for n in options.ranks.split(","))
    for section in sections:
        begin = time.monotonic()
        print(f"{section.name}: {section.title}", flush=True)
        if section.name == "tiers":
            later(bench, section, ranks)
            bench.sets.pop("100b", None)  # for that section only
        elif section.name == "tiers_disk":
            disk(bench, section)
        else:
            for state in ("cold", "in the page cache"):
                first(bench, section, state)
        section.seconds = time.monotonic() - begin
    out = options.out or Path(options.data) / "tiers.json"
    save(out, sections, command=sys.argv, rounds=bench.rounds, quick=bench.quick, batch=BATCH)
    return int(missed(sections))


if __name__ == "__main__":
    sys.exit(main())
