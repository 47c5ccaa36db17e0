"""What a trace costs, and whether its requests and bytes are those of the kernel.

    python -m benchmarks.trace_cost DIR [--rounds 7] [--seconds 1.5] [--only NAME]

Cost: one process reads the same epochs in turns with and without `Options(trace=...)`, and the first of each pair
changes from pair to pair. What counts is the ratio of the two, of the time in the loop and of the processor time; the
median of all pairs, with bounds of 95 % (bootstrap). Beside it both sides without a trace, which shows what that can
tell. Cases: 3 KB and 197 KB records in a warm page cache, through the node's ring and straight, and a store that answers
after 20 ms (FUSE). Writing the file comes at the end, and is said apart.

Counts: during the epochs of a traced loader nothing else reads in the process, so the requests and bytes of the trace
are compared with /proc/self/io, and on the slow store with what the store itself has counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pario
from benchmarks import data
from pario.bench.stores.latency import LatencyStore, latency_store
from pario.stats.trace import Recorder
from pario.stats.trace_file import read_head
from pario.stats.trace_summary import read_ranks

#: case -> (set, order, Options.own_rows, slow store)
CASES = {
    "3 KB, ring": ("3k", "block", "never", False),
    "3 KB, straight": ("3k", False, "always", False),
    "197 KB, ring": ("197k", "block", "never", False),
    "197 KB, straight": ("197k", "global", "always", False),
    "197 KB, slow store": ("197k", "global", "never", True),
    "3 KB, slow store": ("3k", "block", "never", True),
}
BATCH = {"3k": 64, "197k": 16}
RECORDS = {"3k": 60_000, "197k": 2_000}
SLOW_RECORDS = {"3k": 20_000, "197k": 600}


def _io() -> dict[str, int]:
    return {name: int(value) for name, value in (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())}


@contextmanager
def _folder(path: Path, slow: bool) -> Iterator[tuple[str, LatencyStore | None]]:
    if not slow:
        yield str(path), None
        return
    with latency_store(str(path), read_s=0.020, metadata_s=0.002, bytes_per_s=200_000_000) as store:
        yield store.folder, store


def one_loader(path: str, case: str, trace: str | None, epochs: int) -> dict[str, float]:
    """Epochs with a loader of its own: seconds and processor seconds of the loops, and of close."""
    which, order, own, slow = CASES[case]
    n = (SLOW_RECORDS if slow else RECORDS)[which]
    options = pario.Options(trace=trace, own_rows=own, tiers=(), fetch="posix", next_epoch=False)
    loader = pario.Loader(
        path, BATCH[which], pario.decode.Datum(), shuffle=order, options=options, select=slice(0, n), comm="self"
    )
    for _ in loader:  # the first epoch starts threads, and finds the depth
        pass
    before, work = _io(), time.process_time()
    begin = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            del batch
    took, worked = time.perf_counter() - begin, time.process_time() - work
    after = _io()
    begin = time.perf_counter()
    loader.close()
    return {
        "loop_s": took,
        "work_s": worked,
        "close_s": time.perf_counter() - begin,
        "rchar": after["rchar"] - before["rchar"],
        "syscr": after["syscr"] - before["syscr"],
    }


def _ratio(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of the second side to the first, less 1: median of the pairs and bounds of 95 %."""
    found = np.array([b / a - 1 for a, b in pairs])
    draws = np.median(found[np.random.default_rng(0).integers(0, len(found), (4000, len(found)))], axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {"median": float(np.median(found)), "low": float(low), "high": float(high)}


def cost(path: str, case: str, rounds: int, wanted_s: float) -> dict[str, Any]:
    """Both sides in turns, and two sides without a trace."""
    probe = one_loader(path, case, None, 1)
    epochs = max(1, round(wanted_s / probe["loop_s"]))
    found: dict[str, list[tuple[float, float]]] = {"trace": [], "trace_work": [], "nothing": [], "nothing_work": []}
    events, writing = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(rounds):
            sides: dict[str, dict[str, float]] = {}
            order = ["plain", "traced", "again"][:: 1 if k % 2 else -1]
            for side in order:
                file = f"{folder}/{k}.json" if side == "traced" else None
                sides[side] = one_loader(path, case, file, epochs)
                if file is not None:
                    writing.append(sides[side]["close_s"])
                    events = sum(1 for _ in open(file, "rb"))
            for name, key in (("trace", "traced"), ("nothing", "again")):
                found[name].append((sides["plain"]["loop_s"], sides[key]["loop_s"]))
                found[f"{name}_work"].append((sides["plain"]["work_s"], sides[key]["work_s"]))
    return {
        "case": case,
        "epochs": epochs,
        "loop_s": statistics.median(a for a, _ in found["trace"]),
        **{name: _ratio(pairs) for name, pairs in found.items()},
        "events": events,
        "close_s": statistics.median(writing),
    }


class _Counts:
    """The requests of a recorder's summaries so far, by asking it to write."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, recorder: Recorder) -> tuple[int, int]:
        from pario.stats.trace_file import write_part

        write_part(recorder)
        (rank,) = read_ranks(read_head(self._path), self._path)
        requests = sum(file.reads + file.meta_reads for file in rank.files)
        return requests, sum(file.nbytes + file.meta_bytes for file in rank.files)


def counts(path: str, case: str, store: LatencyStore | None) -> dict[str, Any]:
    """Requests and bytes of an epoch by the trace, by the kernel and by the store."""
    which, order, own, slow = CASES[case]
    n = (SLOW_RECORDS if slow else RECORDS)[which]
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/trace.json"
        options = pario.Options(trace=file, own_rows=own, tiers=(), fetch="posix", next_epoch=False)
        loader = pario.Loader(
            path, BATCH[which], pario.decode.Datum(), shuffle=order, options=options, select=slice(0, n), comm="self"
        )
        for _ in loader:
            pass
        recorder, counted = loader._life.reader.file.recorder, _Counts(file)
        assert recorder is not None
        begun, sent = counted.read(recorder), store.counts() if store else {}
        before = _io()
        for _ in loader:
            pass
        after = _io()
        ended, now = counted.read(recorder), store.counts() if store else {}
        loader.close()
    said: dict[str, Any] = {
        "case": case,
        "trace": [ended[0] - begun[0], ended[1] - begun[1]],
        # A look at the counters is a read, too: one of the file here, and those of the recorder.
        "kernel": [after["syscr"] - before["syscr"], after["rchar"] - before["rchar"]],
    }
    if store is not None:
        mine, earlier = now["/data.mdb"], sent.get("/data.mdb", {})
        said["store"] = [mine.get(name, 0) - earlier.get(name, 0) for name in ("read", "bytes")]
    return said


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_cost", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="where the data sets of benchmarks.data are, or are made")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a side of a pair")
    parser.add_argument("--only", help="cases whose names contain this")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(argv)
    found = []
    for case, (which, _, _, slow) in CASES.items():
        if options.only and options.only not in case:
            continue
        made = data.make(options.folder, which)
        with _folder(Path(made.path), slow) as (path, store):
            said = {**cost(path, case, options.rounds, options.seconds), "counts": counts(path, case, store)}
        found.append(said)
        print(_line(said), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    return 0


def _line(said: dict[str, Any]) -> str:
    def words(name: str) -> str:
        ratio = said[name]
        return f"{ratio['median']:+.1%} ({ratio['low']:+.1%} ... {ratio['high']:+.1%})"

    numbers = said["counts"]
    off = [
        f"{who} {numbers['trace'][0] / max(1, numbers[who][0]) - 1:+.2%} requests, "
        f"{numbers['trace'][1] / max(1, numbers[who][1]) - 1:+.2%} bytes"
        for who in ("kernel", "store")
        if who in numbers
    ]
    return (
        f"{said['case']}: {said['loop_s']:.2f} s, trace {words('trace')}, processor {words('trace_work')}; without "
        f"{words('nothing')}, processor {words('nothing_work')}; {said['events']:,} events, closing {said['close_s']:.2f} s; "
        f"against {'; '.join(off)}"
    )


if __name__ == "__main__":
    sys.exit(main())
