"""Short epochs on a slow store: how long each epoch's first batch takes, and what its edges cost of the bandwidth.

    python -m benchmarks.short_epochs --data DIR [--rounds 5] [--only TEXT] [--before CHECKOUT] [--json FILE]

A run is a new process per node that reads EPOCHS epochs of about a second from a store of 20 ms per read and 200 MB/s
for all nodes together, without a page cache, so that every epoch is cold. The rate is that of all epochs together, from
the first loop's beginning to the last one's end, gaps between loops included: the bytes that were read ahead before a
loop began are in it, and so is their time. --before: another checkout of pario, whose runs alternate with these. Needs
root, fuse3 and mfusepy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import data, measure
from benchmarks.measure import ROOT
from benchmarks.sides import BATCH, SMALL
from benchmarks.tuning import STORES, Cell, cells, mounted

EPOCHS = 4
STORE = "20 ms, 200 MB/s"


def run(root: str, folder: str, small: str, cell: Cell, record_bytes: int) -> dict[str, float]:
    """Seconds to the first batch of the first epoch and of the later ones (the longest of the ranks, the mean of the
    epochs), and the rate ÷ the store's bandwidth."""
    given = ["--shuffle", cell.shuffle, "--batch", str(BATCH[cell.which]), "--epochs", str(EPOCHS), "--warmup", small]
    found = measure.launch("benchmarks.worker_pario", [folder, *given], ranks=cell.nodes, nodes=cell.nodes, root=root)
    ranks = found["ranks"]
    assert all(sum(rank["epochs"][epoch]["records"] for rank in ranks) == cell.records for epoch in range(EPOCHS))
    first = [max(rank["epochs"][epoch]["first_batch"] for rank in ranks) for epoch in range(EPOCHS)]
    seconds = max(rank["total"] - rank["construct"] for rank in ranks)
    cap = STORES[STORE].bytes_per_s
    assert cap is not None
    return {"first": first[0], "later": statistics.mean(first[1:]), "rate": EPOCHS * record_bytes / seconds / cap}


def line(cell: Cell, runs: dict[str, list[dict[str, float]]]) -> str:
    """A row of the table: of each side the medians, of the ratio of rates its spread, too."""

    def of(side: str, what: str) -> float:
        return statistics.median(one[what] for one in runs[side])

    sides = [side for side in ("before", "after") if side in runs]
    cols = [" → ".join(f"{of(side, what):.3f}" for side in sides) for what in ("first", "later")]
    cols.append(" → ".join(f"{of(side, 'rate'):.2f}" for side in sides))
    spread = [one["rate"] for one in runs["after"]]
    cols.append(f"{min(spread):.2f} … {max(spread):.2f}")
    if len(sides) == 2:
        ratio = [b["rate"] / a["rate"] for a, b in zip(runs["before"], runs["after"], strict=True)]
        cols.append(f"{statistics.median(ratio):.2f} ({min(ratio):.2f} … {max(ratio):.2f})")
    return f"| {cell.name} | " + " | ".join(cols) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", required=True, help="folder of `python -m benchmarks.data`; made there if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    parser.add_argument("--before", help="another checkout, to compare with")
    parser.add_argument("--json", help="append a line per cell there")
    options = parser.parse_args()
    roots = {"before": options.before, "after": str(ROOT)}
    print("| records, order, nodes | first batch, s | of later epochs, s | rate ÷ cap | spread | after ÷ before |")
    print("|---|---|---|---|---|---|")
    for cell in cells():
        if cell.store != STORE or options.only not in cell.name or (cell.which, cell.shuffle) == ("3k", "global"):
            continue
        held = data.make(options.data, cell.which, cell.records)
        small = data.make(options.data, cell.which, SMALL[cell.which])
        with mounted(STORES[STORE], held) as folder:
            sides = {
                side: partial(run, root, folder, small.path, cell, held.record_bytes)
                for side, root in roots.items()
                if root
            }
            runs: dict[str, Any] = measure.interleave(sides, options.rounds)
        print(line(cell, runs), flush=True)
        if options.json:
            with Path(options.json).open("a") as file:
                file.write(json.dumps({"cell": cell.name, "rounds": options.rounds, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
