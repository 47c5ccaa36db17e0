"""A memory tier in the first epoch, and a copy on a disk. Later epochs out of memory: in_memory.py.

    python -m benchmarks.tiers --data DIR [--rounds 5] [--out F]

Sections: `tiers_first`, the first epoch with a tier beside one without, from a cold file on the disk of DIR and from
the page cache; `tiers_disk`, an epoch out of a complete copy on the disk of DIR. The data sets are those of
benchmarks/bars.py. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cache
from benchmarks.measure import Section, finish, interleave, parser_of
from benchmarks.sides import BATCH, SHUFFLES, SMALL, UNIT, Bench, compare, epoch_seconds, from_cold, rate_of
from benchmarks.stores import throttled
from benchmarks.stores.throttled import Group
from benchmarks.study.sets import DataSet

TIERS = ("--tiers", "memory:8GiB")
#: fio's long reads, its depth, and the records that are read one by one in "global" order
LONG_BYTES, DEPTH, SINGLE_BYTES = 4 << 20, 8, 64 << 10


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
    options = parser_of("tiers", __doc__, 5).parse_args()
    bench = Bench.of(options)
    bench.make(SMALL, {})
    sections = [
        Section("tiers_first", "The first epoch with a memory tier ÷ without tiers, 1 rank", "as stated"),
        Section("tiers_disk", "Out of a tier on the disk ÷ fio on the same copy, O_DIRECT, 1 rank", "cold"),
    ]
    for state in ("cold", "in the page cache"):
        first(bench, sections[0], state)
    disk(bench, sections[1])
    return finish("tiers", options, sections, batch=BATCH)


if __name__ == "__main__":
    sys.exit(main())
