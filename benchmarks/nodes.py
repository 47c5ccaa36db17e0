"""One job on several nodes that read a dataset from one slow store, with and without tiers and peers.

    python -m benchmarks.nodes --data DIR [--rounds 5] [--nodes 4] [--out DIR/nodes.json]

The store answers in 20 ms and gives 200 MB/s to all nodes together (FUSE, as root, fuse3 and mfusepy). Nodes are
emulated (MPICH's cliques share no memory): they have this machine's cores between them. Five epochs without computing;
the time is that of all epochs, the bytes are those that the store counted. Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, Section, finish, interleave, parser_of
from benchmarks.sides import BATCH, SHUFFLES, SMALL, Bench, epoch_seconds
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
    read.add(Row.of(f"{name}, no tiers", [run["store_bytes"] / size for run in found["none"]]))
    for part, bar in QUOTAS.items():
        runs = found[str(part)]
        read.add(Row.of(f"{name}, quota {part}", [run["store_bytes"] / size for run in runs], "<=", bar))
        ratio = [run["seconds"] / base for run, base in zip(runs, without, strict=True)]
        bytes_bar = TIME_BAR if part > 0.2 else None
        seconds = statistics.median(run["seconds"] for run in runs)
        detail = f"{seconds:.2f} s, without tiers {statistics.median(without):.2f} s"
        taken.add(Row.of(f"{name}, quota {part}", ratio, "<=", bytes_bar, ours=detail))
        if part in (0.5, 0.3):
            case = f"{name}, quota {part}: busiest node ÷ mean"
            spread.add(Row.of(case, [_unevenness(run) for run in runs], "<=", 1.2))


def main() -> int:
    parser = parser_of("nodes", __doc__, 5)
    parser.add_argument("--nodes", type=int, default=4)
    options = parser.parse_args()
    bench = Bench.of(options)
    bench.make(SMALL, RECORDS)
    sections = [
        Section("nodes_bytes", f"{options.nodes} nodes, {EPOCHS} epochs: bytes at the store ÷ the data", "cold store"),
        Section("nodes_time", f"{options.nodes} nodes, {EPOCHS} epochs: time ÷ without tiers", "cold store"),
        Section("nodes_served", "Bytes served to other nodes", "cold store"),
    ]
    for which in RECORDS:
        with latency_store(Path(bench.sets[which].path)) as store:
            for shuffle in ["block"] if options.smoke else SHUFFLES:
                job(bench, store, which, shuffle, options.nodes, sections)
    return finish("nodes", options, sections, batch=BATCH)


if __name__ == "__main__":
    sys.exit(main())
