"""`bench`: read epochs as a training job would, and show how fast it was and where the time went (pario/bench)."""

from __future__ import annotations

import json
from typing import Any

from pario.bench.dataset import DatasetBench, Workload
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.options import RECIPES

__all__ = ["bench"]

#: (one of dataset.PHASES, its description). The first block belongs to the ranks that read, in the background unless
#: the recipe is synchronous
_READING = (
    ("locate", "which records, their extents, which reads"),
    ("turn", "waited for a free slot, or with stag for its turn: all slots were being filled or in use"),
    ("read", "a read was in flight"),
    ("check", "snapshot and page headers"),
)
_RANKS = (
    ("share", "waited for bytes: reading was slower than the ranks"),
    ("decode", "bytes to arrays"),
    ("consumer", "your own code between two batches"),
)


def bench(path: str, workload: Workload, *, db: str | None, report: bool, as_json: bool) -> int:
    """Collective over all ranks."""
    with DatasetBench(path, workload, db=db, progress=screen.progress("leaf pages", "page")) as measured:
        screen.running = True
        for number in range(1, workload.epochs + 1):
            bar = screen.bar(measured.batches, f"epoch {number}", "batch")
            epoch = measured.epoch(bar.update)
            screen.end_bar()
            if not as_json:
                speed = f"{epoch.bytes / epoch.seconds / 1e9:.3f} GB/s, {epoch.records / epoch.seconds:,.0f} records/s"
                screen.say(f"epoch {number}: {counted(epoch.records, 'record')} in {seconds(epoch.seconds)}: {speed}")
        everybody = measured.report()
        result = measured.result(everybody)
    screen.running = False
    if as_json:
        screen.say(json.dumps({**result, **({"report": everybody.as_dict()} if report else {})}))
    else:
        screen.say(_words(result))
        if report:
            screen.say(f"\n{everybody}")
    return 0


def _words(r: dict[str, Any]) -> str:
    sums, wall, epochs = r["rank_seconds"], sum(e["seconds"] for e in r["epochs"]), len(r["epochs"])
    rows = [("", "rank seconds", "of the wall time", "")]
    reading = "reading, in the background:" if RECIPES[r["recipe"]].ahead else "reading, by the ranks that wait for it:"
    for title, block in ((reading, _READING), ("the ranks:", _RANKS)):
        rows.append((title, "", "", ""))
        whole = wall * (1 if block is _READING else r["ranks"])
        for name, what in block:
            rows.append((f"  {name}", f"{sums[name]:.3f}", f"{sums[name] / whole:.1%}" if whole else "", what))
    text = table(rows, words=True)
    cached = r["cached_before"]
    state = "unknown here" if cached is None else f"{cached:.0%} of the file"
    lines = [
        f"{counted(r['ranks'], 'rank')} on {counted(r['nodes'], 'node')}, "
        f"{counted(r['batch_size'], 'record')} per rank and batch, "
        f"shuffle {r['shuffle']}, decoder {r['decoder']}, fetch {r['fetch']}"
        + (f", recipe {r['recipe']}" if r["recipe"] != "auto" else ""),
        f"in the page cache before: {state}" + (" (of rank 0's node)" if r["nodes"] > 1 and cached is not None else ""),
        f"time to first batch: {seconds(r['first_batch_seconds'])}, of it opening {seconds(r['open_seconds'])}",
        f"read per epoch: {decimal_bytes(r['bytes_read'] / epochs)} in {r['reads'] / epochs:,.0f} reads "
        f"(the records have {decimal_bytes(r['value_bytes'])}, their pages {decimal_bytes(r['page_bytes'])})",
        "",
        text,
    ]
    return "\n".join(lines)
