"""One job on several nodes that read a dataset from one slow store, with and without tiers and peers.

    python -m benchmarks.nodes --data DIR [--rounds 5] [--nodes 4] [--out DIR/nodes.json]

The store answers in 20 ms and gives 200 MB/s to all nodes together (FUSE, as root, fuse3 and mfusepy). Nodes are
emulated (MPICH's cliques share no memory): they have this machine's cores between them. Five epochs without computing;
the time is that of all epochs, the bytes are those that the store counted. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, Section, interleave, missed, save
from benchmarks.sides import BATCH, SHUFFLES, Bench, epoch_seconds
from benchmarks.stores.latency import LatencyStore, latency_store

EPOCHS = 5
RECORDS = {"3k": 60_000, "197k": 1_000}
#: quota per node as a part of the data -> bar for bytes at the store ÷ bytes of the data
QUOTAS = {1.0: 1.02, 0.5: 1.02, 0.3: 1.02, 0.15: 2.65}
TIME_BAR = 0.25
CHUNK = 1 << 20


def _run(bench: Bench, store: LatencyStore, which: str, shuffle: str, nodes: int, *more: str) -> dict[str, Any]:
    store.reset()
    arguments = ("--epochs", str(EPOCHS), "--warmup", bench.small[which].path, *more)
    run = bench.pario(store.folder, which, shuffle, *arguments, ranks=nodes, nodes=nodes)
    run["store_bytes"] = store.counts().get("/data.mdb", {}).get("bytes", 0)
    run["seconds"] = sum(epoch_seconds(run, k) for k in range(EPOCHS))
    return run


def room_of(file_bytes: int, part: float = 1.0) -> int:
    """Whole chunks, and one more for what they round."""
    return (int(part * file_bytes) // CHUNK + 1) * CHUNK


def _served(run: dict[str, Any]) -> list[int]:
    return [rank["stats"]["peers"]["served_bytes"] for rank in run["ranks"]]


def _unevenness(run: dict[str, Any]) -> float:
    """Bytes that the busiest node served ÷ the mean."""
    served = _served(run)
    return max(served) / max(1.0, statistics.mean(served))


def row_below(case: str, found: list[float], bar: float | None, ours: str = "") -> Row:
    return Row(case, statistics.median(found), min(found), max(found), "<=" if bar is not None else "", bar, ours=ours)


def job(bench: Bench, store: LatencyStore, which: str, shuffle: str, nodes: int, sections: list[Section]) -> None:
    read, taken, spread = sections
    size = os.path.getsize(bench.sets[which].file)
    one = partial(_run, bench, store, which, shuffle, nodes)
    sides = {"none": one}
    for part in QUOTAS:
        sides[str(part)] = partial(one, "--tiers", f"memory:{room_of(size, part)}")
    # Without tiers the store is asked for each record of 3 KB by itself: minutes.
    found = interleave(sides, 1 if (which, shuffle) == ("3k", "global") else bench.rounds)
    name = f"{bench.sets[which].name}, {SHUFFLES[shuffle]}"
    without = [run["seconds"] for run in found["none"]]
    read.add(row_below(f"{name}, no tiers", [run["store_bytes"] / size for run in found["none"]], None))
    for part, bar in QUOTAS.items():
        runs = found[str(part)]
        read.add(row_below(f"{name}, quota {part}", [run["store_bytes"] / size for run in runs], bar))
        ratio = [run["seconds"] / base for run, base in zip(runs, without, strict=True)]
        bytes_bar = TIME_BAR if part > 0.2 else None
        seconds = statistics.median(run["seconds"] for run in runs)
        detail = f"{seconds:.2f} s, without tiers {statistics.median(without):.2f} s"
        taken.add(row_below(f"{name}, quota {part}", ratio, bytes_bar, detail))
        if part in (0.5, 0.3):
            spread.add(row_below(f"{name}, quota {part}: busiest node ÷ mean", [_unevenness(run) for run in runs], 1.2))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of `python -m benchmarks.data`; made there if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--only", choices=sorted(RECORDS))
    parser.add_argument("--out", help="JSON file (default: nodes.json in the data folder)")
    parser.add_argument("--smoke", action="store_true", help="tiny data, once, no bars: does it run at all?")
    options = parser.parse_args()
    bench = Bench(options.data, 1 if options.smoke else options.rounds, options.smoke, False, [])
    bench.make({"3k": 4000, "197k": 100}, RECORDS)
    sections = [
        Section("nodes_bytes", f"{options.nodes} nodes, {EPOCHS} epochs: bytes at the store ÷ the data", "cold store"),
        Section("nodes_time", f"{options.nodes} nodes, {EPOCHS} epochs: time ÷ without tiers", "cold store"),
        Section("nodes_served", "Bytes served to other nodes", "cold store"),
    ]
    begin = time.monotonic()
    for which in [options.only] if options.only else RECORDS:
        with latency_store(Path(bench.sets[which].path)) as store:
            for shuffle in SHUFFLES:
                job(bench, store, which, shuffle, options.nodes, sections)
    sections[0].seconds = time.monotonic() - begin
    out = options.out or Path(options.data) / "nodes.json"
    save(out, sections, command=sys.argv, rounds=bench.rounds, quick=bench.quick, batch=BATCH)
    return int(not options.smoke and missed(sections))


if __name__ == "__main__":
    sys.exit(main())
