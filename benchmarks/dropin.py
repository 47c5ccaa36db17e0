"""pario.lmdb beside py-lmdb: the same calls, in fresh processes, in turn.

    python -m benchmarks.data DIR
    python -m benchmarks.dropin --data DIR [--only NAME ...] [--out results.json]

"cold": the pages of the file were dropped. "warm": all of it is in the page cache.

What a warm read costs py-lmdb depends on how the page cache was filled, since it maps the file: reading in order leaves
large folios, which are mapped 2 MiB at a time; reading at random, as a training job with readahead=False does, leaves
small ones, and each is mapped by a fault of its own on the first pass. Both are measured, both with the bar; "again" is
a second pass of the same process over the same keys.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks import cache, data
from benchmarks.measure import Row, Section, WorkerError, finish, interleave, launch, parser_of
from benchmarks.sides import SMALL

SMALL_RECORDS = 300_000  # of 100 bytes


@dataclass(frozen=True)
class Case:
    """What is measured, on which set, against which bar."""

    name: str
    what: str
    which: str  # a set of benchmarks.data, or "100b"
    count: int
    bar: float | None
    cold: bool = False
    processes: int = 1
    readahead: bool = False
    passes: int = 1
    scattered: bool = False  # warm, and the page cache was filled by random reads


CASES = (
    Case("cold random get, 197 KB", "get", "197k", 300, 8, cold=True),
    Case("cold random get, 197 KB, 4 processes", "get", "197k", 200, 5, cold=True, processes=4),
    Case("cold random get, 3 KB", "get", "3k", 3000, None, cold=True),
    Case("cold keys-only scan, 197 KB", "keys", "197k", 10_000, 5, cold=True),
    Case("cold keys-only scan, 3 KB", "keys", "3k", 10_000, 5, cold=True),
    Case("cold scan with values, 197 KB, readahead=True", "scan", "197k", 10_000, None, cold=True, readahead=True),
    Case("warm random get, 197 KB", "get", "197k", 10_000, 0.9, passes=2),
    Case("warm random get, 3 KB", "get", "3k", 100_000, 0.4, passes=2),
    Case("warm random get, 197 KB, cached by random reads", "get", "197k", 10_000, 0.9, passes=2, scattered=True),
    Case("warm random get, 3 KB, cached by random reads", "get", "3k", 400_000, 0.4, passes=2, scattered=True),
    Case("warm random get, 100 B", "get", "100b", 100_000, 0.25, passes=2),
    Case("warm getmulti of 1,000 keys, 3 KB", "getmulti", "3k", 100_000, 1.5, passes=2),
    Case("warm scan with values, 3 KB", "scan", "3k", 100_000, 0.5, readahead=True, passes=2),
    Case("warm keys-only scan, 3 KB", "keys", "3k", 100_000, None, passes=2),
)


def scatter(file: str) -> None:
    """Fill the page cache by reads of 200 KB in random order, without read-ahead."""
    cache.drop_file(file)
    piece = 200 << 10
    with open(file, "rb", buffering=0) as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        offsets = list(range(0, os.path.getsize(file), piece))
        random.Random(0).shuffle(offsets)
        for offset in offsets:
            os.pread(source.fileno(), piece, offset)


def measure(case: Case, path: str, records: int, warmup: str, rounds: int, section: Section) -> None:
    count = min(case.count, records)
    file = os.path.join(path, "data.mdb")
    if case.scattered:
        scatter(file)
    elif not case.cold:
        cache.drop_file(file)
        cache.warm_file(file)
    seed = 0

    def side(name: str) -> dict[str, Any]:
        if case.cold:
            cache.drop_file(file)
        words = [name, case.what, path, "--records", str(records), "--count", str(count), "--warmup", warmup]
        words += ["--passes", str(case.passes), "--processes", str(case.processes), "--seed", str(seed)]
        return launch("benchmarks.worker_dropin", words + ["--readahead"] * case.readahead)

    found = interleave({"pario": lambda: side("pario"), "lmdb": lambda: side("lmdb")}, rounds)
    section.raw[case.name] = found
    for number in range(case.passes):
        rates = {
            name: [run["records"] / run["seconds"][number] for run in runs] for name, runs in found.items()
        }  # records/s
        pairs = [ours / theirs for ours, theirs in zip(rates["pario"], rates["lmdb"], strict=True)]
        spent = {name: 1e6 / statistics.median(values) for name, values in rates.items()}
        words = {"ours": f"pario {spent['pario']:.3g} us per record", "theirs": f"py-lmdb {spent['lmdb']:.3g} us"}
        name, bar = (f"{case.name}, again", None) if number else (case.name, case.bar)
        section.add(Row.of(name, pairs, ">=", bar, **words))


def main() -> int:
    parser = parser_of("dropin", __doc__, 5)
    parser.add_argument("--only", action="append", help="part of a case's name; may be given several times")
    options = parser.parse_args()
    small = {which: data.make(options.data, which, few) for which, few in {**SMALL, "100b": 3000}.items()}
    section = Section("dropin", "pario.lmdb beside py-lmdb", "cold or warm, per case")
    failed = bad = 0
    for case in CASES:
        if options.only and not any(part in case.name for part in options.only):
            continue
        held = small[case.which]
        if not options.smoke:
            held = data.make(options.data, case.which, SMALL_RECORDS if case.which == "100b" else None)
        warmup = small["3k" if case.which == "197k" else "197k"].path
        try:
            measure(case, held.path, held.records, warmup, 1 if options.smoke else options.rounds, section)
        except (cache.Unavailable, WorkerError) as problem:
            failed = 1
            section.note(f"NOT MEASURED: {case.name}: {problem}")
        bad = finish("dropin", options, [section])
    return bad or 3 * failed


if __name__ == "__main__":
    sys.exit(main())
