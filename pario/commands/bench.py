"""`bench run`: read epochs as a training job would, and show how fast it was and where the time went (pario/bench); and
the arguments of `bench threads | overlap | checkpoint`, whose work micro.py does."""

from __future__ import annotations

from typing import Any

import click

from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds, table
from pario.options import RECIPES, Options

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

_rounds = click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each variant, in turns."
)
_results = arguments.all_of(
    click.option(
        "--out", metavar="DIR", help="Save figure, table and JSON here. Default: pario-NAME. (With --json nothing.)"
    ),
    arguments.as_json,
)
#: arguments of the instruments that read
_data = arguments.all_of(
    click.argument("path", required=False, type=click.Path()),
    arguments.db,
    click.option("--decoder", metavar="NAME", help="Decoder of `bench run`; none: only read. For made data: image."),
    click.option("--size", type=click.IntRange(1), help="Pixels to which the decoder image scales."),
    click.option("--store", metavar="FOLDER", help="Without PATH: make data here. Default: the current folder."),
    arguments.number("--files", help="Without PATH: number of files to make.", default=512),
    click.option("--bytes", "nbytes", type=click.IntRange(1024), help="Without PATH: bytes of each file."),
    arguments.number("--seed", help="Seed of the shuffled orders.", default=0, kind=click.IntRange(0)),
)


@click.group()
def bench() -> None:
    """Measure how fast a dataset is read, and characterise a job on its store."""


@bench.command(name="threads")
@_data
@click.option(
    "--threads", "numbers", default="1,2,4,8,16,32,64", show_default=True, metavar="N,...", help="Numbers to try."
)
@arguments.number("--seconds", help="Longest time of a run, in seconds.", default=2.0, kind=click.FloatRange(0.05))
@click.option(
    "--order", default="both", show_default=True, type=click.Choice(["both", "in-order", "shuffled"]), help="Orders."
)
@_rounds
@_results
def threads(
    numbers: str, seconds: float, order: str, rounds: int, seed: int, out: str | None, **options: Any
) -> int:
    """Measure how reading scales with threads.

    PATH is an LMDB, or a folder of files. Each is read whole, by one read, in 1 to 64 threads, with cold caches, in
    order and shuffled, with decoding and without; an LMDB also by a Loader with as many reads in flight. fio, if it is
    installed, says what the device itself gives. Names the limit, and the settings that follow. Without PATH, files
    and an LMDB are made in --store, and removed afterwards.

    \b
    Examples:
      python -m pario bench threads train.lmdb --decoder image
      python -m pario bench threads --store /scratch/me --threads 1,8,32
    """
    from pario.bench.micro.threads import Sweep
    from pario.commands import micro

    try:
        found = sorted({int(number) for number in numbers.split(",") if number.strip()})
    except ValueError:
        found = []
    if not found or found[0] < 1 or found[-1] > micro.MOST_THREADS:
        raise click.BadParameter(f"numbers from 1 to {micro.MOST_THREADS}, got {numbers!r}", param_hint="--threads")
    orders = {"both": (False, True), "in-order": (False,), "shuffled": (True,)}[order]
    return micro.threads(micro.Data(**options), Sweep(found, rounds, seconds, orders, seed=seed), out)


@bench.command(name="overlap")
@_data
@arguments.number("-b", "--batch-size", "batch", help="Items per batch.", default=32)
@arguments.number("--threads", "numbers", help="Threads that read.", default=16, kind=click.IntRange(1, 512))
@arguments.number("--batches", help="Batches of a run.", default=50, kind=click.IntRange(2))
@click.option("--network", is_flag=True, help="Compute with a small network (torch) instead of a sleep.")
@_rounds
@_results
def overlap(
    batch: int, numbers: int, batches: int, network: bool, rounds: int, seed: int, out: str | None, **options: Any
) -> int:
    """Measure what input costs beside computing, and how much computing hides it.

    A mini-application reads batches and computes on each for 0.5, 1 and 2 times as long as reading one
    takes, with 0, 1 and 4 batches prefetched, and beside it with a Loader. PATH is an LMDB, or a folder of files;
    without PATH, files and an LMDB are made in --store, and removed afterwards.

    \b
    Examples:
      python -m pario bench overlap train.lmdb --decoder image --batch-size 64
      python -m pario bench overlap --store /scratch/me --bytes 12288 --network
    """
    from pario.bench.micro.overlap import Application
    from pario.commands import micro

    what = Application(batch, numbers, batches, rounds=rounds, seed=seed)
    return micro.overlap(micro.Data(**options), what, network, out)


@bench.command(name="checkpoint")
@click.option("--slow", metavar="FOLDER", default=".", show_default=True, help="Folder on the shared store.")
@click.option("--fast", metavar="FOLDER", help="Folder on a disk of the node or in its memory: the burst buffer.")
@arguments.number("--bytes", "nbytes", help="Bytes of each.", default=100_000_000, kind=click.IntRange(4))
@arguments.number("--arrays", help="Arrays of a checkpoint.", default=16)
@arguments.number("--checkpoints", help="Checkpoints of a run.", default=5)
@arguments.number("--every", help="Steps between two.", default=20)
@arguments.number("--step-ms", help="Time of a step, in milliseconds.", default=30.0, kind=click.FloatRange(0))
@_rounds
@_results
def checkpoint(
    slow: str, fast: str | None, step_ms: float, rounds: int, out: str | None, **training: Any
) -> int:
    """Measure how long checkpoints stop a training.

    A loop that sleeps in place of computing saves checkpoints: not at all, straight to the slow store, in the
    background, to the fast device alone, and through it as a burst buffer; beside these torch.distributed.checkpoint
    and Orbax, if they are installed. What was saved is removed.

    \b
    Example:
      python -m pario bench checkpoint --slow /scratch/me --fast /local/nvme --bytes 2000000000 --step-ms 200
    """
    from pario.bench.micro.checkpoint import Training
    from pario.commands import micro

    return micro.checkpoint(Training(step_s=step_ms / 1000, **training), (slow, fast), rounds, out)


@bench.command(name="run")
@arguments.path
@arguments.db
@arguments.batch_size
@click.option(
    "--shuffle",
    default="none",
    show_default=True,
    type=click.Choice(["none", "global", "block"]),
    help="Order of the records.",
)
@arguments.decoder
@click.option(
    "--recipe",
    default="auto",
    show_default=True,
    type=click.Choice(list(RECIPES)),
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
def run(path: str, db: str | None, inflight: int | None, report: bool, **workload: Any) -> int:
    """Measure how fast a dataset is read, and why.

    Reads epochs as a training job would. Use the batch size, shuffle and decoder of your job, and start it as you start
    your job. A large "share" means that the ranks waited for the storage; a large "turn" means that the storage waited
    for the ranks. --report prints a line per rank, and a sentence that names the slow part.

    \b
    Examples:
      python -m pario bench run train.lmdb --decoder datum
      mpiexec -n 4 python -m pario bench run train.lmdb --shuffle block --batch-size 256 --epochs 2 --report
    """
    from pario.bench.dataset import DatasetBench, Workload
    from pario.commands.dataset import selected
    from pario.commands.decoder import find_decoder

    # Collective.
    decoder, size = workload["decoder"], workload.pop("size")
    workload["decoder"] = find_decoder(decoder, **({"size": size} if size else {})) if decoder else None
    workload["shuffle"] = workload["shuffle"] != "none" and workload["shuffle"]
    workload["select"] = selected(workload["select"])
    what = Workload(**workload, options=Options(inflight="auto" if inflight is None else inflight))
    with DatasetBench(path, what, db=db, progress=screen.progress("leaf pages", "page")) as measured:
        screen.running = True
        for number in range(1, what.epochs + 1):
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
