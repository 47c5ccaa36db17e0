"""What stands in place of a PATH after `bench`: `study` and the instruments, their arguments and help texts, for click.

study.py and micro.py do the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pario.options import RECIPES

__all__ = ["Bench", "checkpoint", "overlap", "study", "threads"]


@click.command(name="study")
@click.option(
    "--preset",
    default="small",
    show_default=True,
    type=click.Choice(["small", "full", "tiny"]),
    help="small: under 10 minutes on 2 cores; full: all ranks, nodes, stores and sets, hours; tiny: a trial run.",
)
@click.option("--out", metavar="DIR", default="pario-study", show_default=True, help="JSON, tables and figures.")
@click.option("--data", metavar="DIR", help="Make and keep the data sets here. Default: in DIR of --out, for this run.")
@click.option("--recipes", metavar="NAME,...", help="Only these.")
@click.option("--stores", metavar="NAME,...", help="Only these: disk, throttled, latency, latency-cached.")
@click.option("--ranks", metavar="N,...", help="Only cells with these numbers of ranks.")
@click.option("--rounds", type=click.IntRange(1), help="Timed runs of each recipe in a cell. Default: the preset's, 5.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Seed of the shuffled orders.")
def study(
    preset: str,
    out: str,
    data: str | None,
    recipes: str | None,
    stores: str | None,
    ranks: str | None,
    rounds: int | None,
    seed: int,
) -> int:
    """Compare all recipes on this machine.

    A recipe is a way to read: `plain` is py-lmdb on every rank, `lmm`, `dm`, `dio`, `prov`, `coal` and `stag` are the
    steps of LMDBIO, `auto` is pario's own. Data sets are made, jobs of several ranks are started by mpiexec, and the
    recipes read in turns, cold and warm; their content is compared with what py-lmdb reads. The bare disk is always
    measured; a throttled block device needs root, and a store with latency `pip install "pario[latency-store]"` and
    fuse3. Ends with tables and bars; figures need `pip install "pario[study]"`.

    Ctrl-C keeps what has been measured so far.

    \b
    Examples:
      python -m pario bench study
      python -m pario bench study --preset full --out results --data /scratch/sets
      python -m pario bench study --recipes plain,auto --stores disk --ranks 1,4
    """
    from pario.bench.study.cells import LOOPS, PRESETS, STORES
    from pario.commands import study as room

    try:
        chosen = room.chosen(recipes, (*RECIPES, *LOOPS), "recipe")
        places = room.chosen(stores, tuple(STORES), "store")
        known = [str(number) for number in PRESETS[preset].ranks]
        numbers = [int(number) for number in room.chosen(ranks, known, "number of ranks")]
    except ValueError as e:
        raise click.UsageError(str(e)) from None
    return room.study(preset, out, data, recipes=chosen, stores=places, ranks=numbers, rounds=rounds, seed=seed)


_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _all_of(*options: _Decorator) -> _Decorator:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_rounds = click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each variant, in turns."
)
_results = _all_of(
    click.option("--out", metavar="DIR", help="Save figure, table and JSON here. Default: pario-NAME."),
    click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text; save nothing."),
)
#: arguments of the instruments that read
_data = _all_of(
    click.argument("path", required=False),
    click.option("--db", metavar="NAME", help="Named database. Default: the main one."),
    click.option("--decoder", metavar="NAME", help="As for `bench`; image for made data. none: only read."),
    click.option("--size", type=click.IntRange(1), help="image: scale to so many pixels."),
    click.option("--store", metavar="FOLDER", help="Make data here, without PATH. Default: the current folder."),
    click.option("--files", default=512, show_default=True, type=click.IntRange(1), help="Without PATH: so many."),
    click.option("--bytes", "nbytes", type=click.IntRange(1024), help="Without PATH: of each file."),
    click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the shuffled orders."),
)


@click.command(name="threads")
@_data
@click.option("--threads", "numbers", default="1,2,4,8,16,32,64", show_default=True, metavar="N,...", help="To try.")
@click.option("--seconds", default=2.0, show_default=True, type=click.FloatRange(0.05), help="Of a run, at most.")
@click.option("--order", default="both", type=click.Choice(["both", "in-order", "shuffled"]), help="Default: both.")
@_rounds
@_results
def threads(
    numbers: str, seconds: float, order: str, rounds: int, seed: int, out: str | None, as_json: bool, **options: Any
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
    return micro.threads(micro.Data(**options), Sweep(found, rounds, seconds, orders, seed=seed), out, as_json)


@click.command(name="overlap")
@_data
@click.option("-b", "--batch-size", "batch", default=32, show_default=True, type=click.IntRange(1), help="Items.")
@click.option("--threads", "numbers", default=16, show_default=True, type=click.IntRange(1, 512), help="That read.")
@click.option("--batches", default=50, show_default=True, type=click.IntRange(2), help="Of a run.")
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

    as_json = options.pop("as_json")
    what = Application(batch, numbers, batches, rounds=rounds, seed=seed)
    return micro.overlap(micro.Data(**options), what, network, out, as_json)


@click.command(name="checkpoint")
@click.option("--slow", metavar="FOLDER", default=".", show_default=True, help="On the shared store.")
@click.option("--fast", metavar="FOLDER", help="On a disk of the node, or in its memory: the burst buffer.")
@click.option("--bytes", "nbytes", default=100_000_000, show_default=True, type=click.IntRange(4), help="Of each.")
@click.option("--arrays", default=16, show_default=True, type=click.IntRange(1), help="Arrays of a checkpoint.")
@click.option("--checkpoints", default=5, show_default=True, type=click.IntRange(1), help="Of a run.")
@click.option("--every", default=20, show_default=True, type=click.IntRange(1), help="Iterations between two.")
@click.option("--step-ms", default=30.0, show_default=True, type=click.FloatRange(0), help="Of one iteration.")
@_rounds
@_results
def checkpoint(
    slow: str, fast: str | None, step_ms: float, rounds: int, out: str | None, as_json: bool, **training: Any
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
    from pario.commands.micro_checkpoint import checkpoint as run

    return run(Training(step_s=step_ms / 1000, **training), (slow, fast), rounds, out, as_json)


class Bench(click.Command):
    """`bench PATH`, and under the same name `bench study` and the instruments."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        found = {one.name: one for one in (study, threads, overlap, checkpoint)}.get(args[0] if args else "")
        if found is not None:
            return found.make_context(f"{info_name} {found.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)
