"""What a trace costs.

    python -m benchmarks.trace_cost DIR [--seconds 30] [--only NAME]

Cost: one process has three loaders of the same records, one of them with `Options(trace=...)`, and takes an epoch of
each in turns, in an order drawn by chance. What counts is the ratio of two epochs of a turn, of their time and of the
processor's; the median of all turns, with bounds of 95 % (bootstrap). Beside it the ratio of the two that are not
traced, which shows what that can tell. Cases: 3 KB and 197 KB records out of a warm page cache through the node's ring,
and out of the node's memory, and a store that answers after 20 ms (FUSE). Writing the file comes at the end, and is
said apart.

Requests and bytes are compared with strace's and a store's in tests/test_loader_trace.py.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pario
from benchmarks import data
from benchmarks.measure import middle_interval
from benchmarks.stores.latency import latency_store
from pario.options import Recipe

#: case -> (set, order, recipe, slow store)
CASES = {
    "3 KB, ring": ("3k", "block", "ring", False),
    "3 KB, memory": ("3k", False, "auto", False),
    "197 KB, ring": ("197k", "block", "ring", False),
    "197 KB, memory": ("197k", "global", "auto", False),
    "197 KB, slow store": ("197k", "global", "ring", True),
    "3 KB, slow store": ("3k", "block", "ring", True),
}
BATCH = {"3k": 64, "197k": 16}
RECORDS = {"3k": 40_000, "197k": 1_500}
SLOW_RECORDS = {"3k": 40_000, "197k": 600}


@contextmanager
def _folder(path: Path, slow: bool) -> Iterator[str]:
    if not slow:
        yield str(path)
        return
    with latency_store(str(path), read_s=0.020, metadata_s=0.002, bytes_per_s=200_000_000) as store:
        yield store.folder


def _loader(path: str, case: str, trace: str | None) -> pario.Loader:
    """A loader after its first epoch, which starts threads and finds the depth."""
    which, order, recipe, slow = CASES[case]
    n = (SLOW_RECORDS if slow else RECORDS)[which]
    options = pario.Options(trace=trace, once=recipe == "ring")
    given: dict[str, Any] = {"shuffle": order, "options": options, "select": slice(0, n)}
    way = Recipe("ring" if recipe == "ring" else "auto", fetch="posix")
    loader = pario.Loader(path, BATCH[which], pario.decode.Datum(), comm="self", recipe=way, **given)
    _epoch(loader)
    return loader


def _epoch(loader: pario.Loader) -> tuple[float, float]:
    """Seconds and processor seconds of an epoch."""
    work, begin = time.process_time(), time.perf_counter()
    for batch in loader:
        del batch
    return time.perf_counter() - begin, time.process_time() - work


def _ratio(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Of the second side to the first, less 1: median of the pairs and bounds of 95 %."""
    return middle_interval([b / a - 1 for a, b in pairs])


def cost(path: str, case: str, limit_s: float) -> dict[str, Any]:
    """Epochs of three loaders in turns, one of which is traced."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/trace.json"
        loaders = {"plain": _loader(path, case, None), "traced": _loader(path, case, file)}
        loaders["again"] = _loader(path, case, None)
        chance, found = random.Random(0), []
        end = time.monotonic() + limit_s
        while time.monotonic() < end or len(found) < 5:
            sides = list(loaders)
            chance.shuffle(sides)
            found.append({side: _epoch(loaders[side]) for side in sides})
        begin = time.perf_counter()
        loaders["traced"].close()
        closing = time.perf_counter() - begin
        for side in ("plain", "again"):
            loaders[side].close()
        with open(file, "rb") as lines:
            events = sum(1 for _ in lines)
    said: dict[str, Any] = {"case": case, "pairs": len(found), "events": events, "close_s": closing}
    said["epoch_s"] = statistics.median(one["plain"][0] for one in found)
    for name, side in (("trace", "traced"), ("nothing", "again")):
        for which, what in enumerate(("wall", "work")):
            said[f"{name}_{what}"] = _ratio([(one["plain"][which], one[side][which]) for one in found])
    return said


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_cost", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where the data sets of benchmarks.data are, or are made")
    parser.add_argument("--seconds", type=float, default=30.0, help="per case")
    parser.add_argument("--only", help="cases whose names contain this")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    found = []
    for case, (which, _, _, slow) in CASES.items():
        if options.only and options.only not in case:
            continue
        made = data.make(options.folder, which)
        with _folder(Path(made.path), slow) as path:
            said = cost(path, case, options.seconds)
        found.append(said)
        print(_line(said), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0


def _line(said: dict[str, Any]) -> str:
    def words(name: str) -> str:
        return "{:+.1%} ({:+.1%} ... {:+.1%})".format(*said[name])

    return (
        f"{said['case']}: {said['pairs']} epochs of {said['epoch_s']:.2f} s; trace {words('trace_wall')}, processor "
        f"{words('trace_work')}; nothing {words('nothing_wall')}, processor {words('nothing_work')}; "
        f"{said['events']:,} lines, closing {said['close_s']:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
