"""Short epochs on a slow store: how long each epoch's first batch takes, and what its edges cost of the bandwidth.

    python -m benchmarks.short_epochs --data DIR [--rounds 5] [--only TEXT]

A run is a new process per node that reads EPOCHS epochs of about a second from a store of 20 ms per read and 200 MB/s
for all nodes together, without a page cache, so that every epoch is cold. The rate is that of all epochs together, from
the first loop's beginning to the last one's end, gaps between loops included: the bytes that were read ahead before a
loop began are in it, and so is their time. Needs root,
fuse3 and mfusepy.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks import data
from benchmarks.measure import launch, parser_of, save_facts, told
from benchmarks.sides import BATCH, SMALL
from benchmarks.tuning import STORES, Cell, cells, mounted

EPOCHS = 4
STORE = "20 ms, 200 MB/s"


def run(folder: str, small: str, cell: Cell, record_bytes: int) -> dict[str, float]:
    """Seconds to the first batch of the first epoch and of the later ones (the longest of the ranks, the mean of the
    epochs), and the rate ÷ the store's bandwidth."""
    given = ["--shuffle", cell.shuffle, "--batch", str(BATCH[cell.which]), "--epochs", str(EPOCHS), "--warmup", small]
    found = launch("benchmarks.worker_pario", [folder, *given], ranks=cell.nodes, nodes=cell.nodes)
    ranks = found["ranks"]
    assert all(sum(rank["epochs"][epoch]["records"] for rank in ranks) == cell.records for epoch in range(EPOCHS))
    first = [max(rank["epochs"][epoch]["first_batch"] for rank in ranks) for epoch in range(EPOCHS)]
    seconds = max(rank["total"] - rank["construct"] for rank in ranks)
    cap = STORES[STORE].bytes_per_s
    assert cap is not None
    return {"first": first[0], "later": statistics.mean(first[1:]), "rate": EPOCHS * record_bytes / seconds / cap}


def line(cell: Cell, runs: list[dict[str, float]]) -> str:
    """A row of the table: medians, and the spread of the rate."""
    cols = [told([one[what] for one in runs], ".3f") for what in ("first", "later", "rate")]
    return f"| {cell.name} | {' | '.join(cols)} |"


def main() -> int:
    parser = parser_of("short_epochs", __doc__, 5)
    parser.add_argument("--only", default="", help="cells whose name has this text")
    options = parser.parse_args()
    found = {}
    print("| records, order, nodes | first batch, s | of later epochs, s | rate ÷ cap |\n|---|---|---|---|")
    for cell in cells():
        if cell.store != STORE or options.only not in cell.name or (cell.which, cell.shuffle) == ("3k", "global"):
            continue
        if options.smoke and (cell.which, cell.nodes) != ("197k", 1):
            continue
        held = data.make(options.data, cell.which, cell.records)
        small = data.make(options.data, cell.which, SMALL[cell.which])
        with mounted(STORES[STORE], held) as folder:
            rounds = range(1 if options.smoke else options.rounds)
            found[cell.name] = [run(folder, small.path, cell, held.record_bytes) for _ in rounds]
        print(line(cell, found[cell.name]), flush=True)
    save_facts(options.out or Path(options.data) / "short_epochs.json", runs=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
