"""`bench run`: read epochs as a training job would, and show how fast it was and where the time went (pario/bench)."""

from __future__ import annotations

from typing import Any

import click

from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.options import RECIPES, Options

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


@click.group()
def bench() -> None:
    """Measure how fast a dataset is read."""


@bench.command(name="run")
@arguments.path
@arguments.db
@arguments.batch_size
@arguments.choice("--shuffle", known=("none", "global", "block"), help="Order of the records.")
@arguments.decoder
@arguments.choice(
    "--recipe",
    known=RECIPES,
    help="How to read: as pario does, or a step of LMDBIO, or plain py-lmdb (measurements/recipes.md).",
)
@click.option("--size", type=click.IntRange(1), help="Pixels to which the decoder image scales pictures.")
@arguments.number("-e", "--epochs", help="Passes over the data.", default=1)
@arguments.select
@arguments.number("--step-ms", help="Length of a step, a sleep, in ms.", default=0.0, kind=click.FloatRange(0))
@click.option("--cold", is_flag=True, help="Ask the kernel to drop the file from the page cache first.")
@click.option("--inflight", type=int, help="Reads in flight per reading rank. Default: as measured.")
@click.option("--report", is_flag=True, help="Print what each rank did, and the slow part.")
@arguments.as_json
def run(
    path: str, inflight: int | None, report: bool, epochs: int, decoder: str | None, size: int | None, **how: Any
) -> int:
    """Measure how fast a dataset is read, and why.

    Reads epochs as a training job would. Use the batch size, shuffle and decoder of your job, and start it as you start
    your job. A large "share" means that the ranks waited for the storage; a large "turn" means that the storage waited
    for the ranks. --report prints a line per rank, and a sentence that names the slow part.

    \b
    Examples:
      python -m pario bench run train.lmdb --decoder datum
      mpiexec -n 4 python -m pario bench run train.lmdb --shuffle block --batch-size 256 --epochs 2 --report
    """
    from pario.bench.dataset import DatasetBench
    from pario.commands.dataset import selected
    from pario.commands.decoder import find_decoder

    # Collective.
    how["decoder"] = find_decoder(decoder, **({"size": size} if size else {})) if decoder else None
    how["shuffle"] = how["shuffle"] != "none" and how["shuffle"]
    how["select"] = selected(how["select"])
    how["options"] = Options(inflight="auto" if inflight is None else inflight)
    with DatasetBench(path, progress=screen.progress("leaf pages", "page"), **how) as measured:
        screen.running = True
        for number in range(1, epochs + 1):
            bar = screen.bar(measured.batches, f"epoch {number}", "batch")
            epoch = measured.epoch(bar.update)
            screen.end_bar()
            speed = f"{epoch.bytes / epoch.seconds / 1e9:.3f} GB/s, {epoch.records / epoch.seconds:,.0f} records/s"
            screen.say(f"epoch {number}: {counted(epoch.records, 'record')} in {seconds(epoch.seconds)}: {speed}")
        everybody = measured.report()
        result = measured.result(everybody)
    screen.running = False
    screen.tell(result, **({"report": everybody.as_dict()} if report else {}))
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
        f"shuffle {r['shuffle']}, decoder {r['decoder']}"
        + (f", recipe {r['recipe']}" if r["recipe"] != "auto" else ""),
        f"in the page cache before: {state}" + (" (of rank 0's node)" if r["nodes"] > 1 and cached is not None else ""),
        f"time to first batch: {seconds(r['first_batch_seconds'])}, of it opening {seconds(r['open_seconds'])}",
        f"read per epoch: {decimal_bytes(r['bytes_read'] / epochs)} in {r['reads'] / epochs:,.0f} reads "
        f"(the records have {decimal_bytes(r['value_bytes'])}, their pages {decimal_bytes(r['page_bytes'])})",
        "",
        text,
    ]
    return "\n".join(lines)
