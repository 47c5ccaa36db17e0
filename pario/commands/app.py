"""The command line as click sees it: names, arguments, help. The work is done by the modules beside this one.

They are imported when a command runs, so that `--help` and a wrong option need no Numba and no MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import pario

__all__ = ["group"]

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_path = click.argument("path")
_db = click.option("--db", metavar="NAME", help="A named database. Without: the main one.")


@click.group(context_settings=_SETTINGS, invoke_without_command=True)
@click.version_option(pario.__version__, prog_name="pario")
@click.pass_context
def group(context: click.Context) -> None:
    """pario reads an LMDB dataset for all ranks of an MPI job.

    New here? Try:  python -m pario demo

    PATH is an LMDB: its folder, or the data file itself. Nothing is ever written to it; `index` writes a small file
    beside it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@group.command()
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1, 64), help="MPI ranks to start.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Keep the LMDBs here, instead of in a temporary directory."
)
def demo(ranks: int, folder: Path | None) -> int:
    """Train a small network on two ranks, in seconds.

    Writes scikit-learn's handwritten digits to an LMDB, starts two MPI ranks by mpiexec, trains a network that reads
    the LMDB through pario, and prints how well it learned. Needs no data, no accelerator and no network.

    \b
    Example:
      python -m pario demo
    """
    from pario.commands.demo import demo as run

    return run(ranks, folder)


@group.command()
@_path
@_db
def info(path: str, db: str | None) -> int:
    """What is in this file?

    Prints the LMDB format, the databases with their entries and pages, the sizes of the records, whether they lie in
    the file in key order, and whether an index is saved.

    \b
    Example:
      python -m pario info train.lmdb
    """
    from pario.commands.info import info as run

    return run(path, db)


@group.command()
@_path
@click.option("-n", "count", default=5, show_default=True, type=click.IntRange(1), help="Number of records.")
@_db
def head(path: str, count: int, db: str | None) -> int:
    """Show the first records and what they seem to be.

    The value is only looked at: a pickle is recognised, never loaded.

    \b
    Example:
      python -m pario head -n 3 train.lmdb
    """
    from pario.commands.head import head as run

    return run(path, count, db)


@group.command()
@_path
@_db
def index(path: str, db: str | None) -> int:
    """Build the index ahead of a job.

    The index says where each record lies. It is made from the LMDB's inner pages, without reading the records, and
    saved beside the dataset (or, if that is not writable, in your cache directory). The Loader makes it by itself when
    it is missing; for a dataset of terabytes you may want to do it once, on many ranks.

    \b
    Examples:
      python -m pario index train.lmdb
      mpiexec -n 8 python -m pario index train.lmdb
    """
    from pario.commands.index import index as run

    return run(path, db)


@group.command()
@_path
@_db
def verify(path: str, db: str | None) -> int:
    """Read everything once, and look for damage.

    Checks the headers and bounds of all pages in use, the order of the keys, the number of records, and that every
    byte can be read. Prints each damage with its page and offset. Exit status 1 if there is any.

    \b
    Examples:
      python -m pario verify train.lmdb
      mpiexec -n 8 python -m pario verify train.lmdb
    """
    from pario.commands.verify import verify as run

    return run(path, db)


@click.command(name="study")
@click.option(
    "--preset",
    default="small",
    show_default=True,
    type=click.Choice(["small", "full", "tiny"]),
    help="small: under 10 minutes on 2 cores; full: all ranks, nodes, stores and sets, hours; tiny: does it run?",
)
@click.option("--out", metavar="DIR", default="pario-study", show_default=True, help="JSON, tables and figures.")
@click.option("--data", metavar="DIR", help="Data sets are made and kept here. Without: in DIR of --out, for this run.")
@click.option("--recipes", metavar="NAME,...", help="Only these.")
@click.option("--stores", metavar="NAME,...", help="Only these: disk, throttled, latency, latency-cached.")
@click.option("--ranks", metavar="N,...", help="Only cells of so many ranks.")
@click.option("--rounds", type=click.IntRange(1), help="Timed runs of each recipe in a cell. Default: the preset's, 5.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the shuffled orders.")
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
    measured; a throttled block device and a store with latency where this machine lets you (a source checkout, root,
    FUSE). Ends with tables and bars; figures need `pip install "pario[study]"`.

    Ctrl-C keeps what is measured by then.

    \b
    Examples:
      python -m pario bench study
      python -m pario bench study --preset full --out results --data /scratch/sets
      python -m pario bench study --recipes plain,auto --stores disk --ranks 1,4
    """
    from pario.commands import study as room
    from pario.study.cells import PRESETS, RECIPES, STORES

    try:
        chosen = room.chosen(recipes, RECIPES, "recipe")
        places = room.chosen(stores, tuple(STORES), "store")
        known = [str(number) for number in PRESETS[preset].ranks]
        numbers = [int(number) for number in room.chosen(ranks, known, "number of ranks")]
    except ValueError as e:
        raise click.UsageError(str(e)) from None
    return room.study(
        preset, out, data, recipes=chosen, stores=places, ranks=numbers, rounds=rounds, seed=seed
    )


class _Bench(click.Command):
    """`bench PATH`, and below the same name `bench study`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["study"]:
            return study.make_context(f"{info_name} study", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@group.command(cls=_Bench)
@_path
@_db
@click.option("-b", "--batch-size", default=64, show_default=True, type=int, help="Records per rank and batch.")
@click.option(
    "--shuffle", default="none", show_default=True, type=click.Choice(["none", "global", "block"]), help="Order."
)
@click.option(
    "--decoder",
    default="raw",
    show_default=True,
    type=click.Choice(["raw", "datum", "image"]),
    help="raw: bytes as they are; datum: Caffe Datum; image: JPEG, PNG, ...",
)
@click.option(
    "--recipe",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "plain", "lmm", "dm", "dio", "prov", "coal", "stag"]),
    help="How to read: as pario does, or a step of LMDBIO, or plain py-lmdb (docs/recipes.md).",
)
@click.option("--size", type=click.IntRange(1), help="image: scale to so many pixels, as unequal images do not stack.")
@click.option("-e", "--epochs", default=1, show_default=True, type=click.IntRange(1), help="Passes over the data.")
@click.option(
    "--fetch",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "posix", "direct"]),
    help="posix: through the page cache; direct: past it (O_DIRECT).",
)
@click.option("--step-ms", default=0.0, type=click.FloatRange(0), help="Sleep so long per batch, as a training step.")
@click.option("--cold", is_flag=True, help="Ask the kernel to drop the file from the page cache first.")
@click.option("--inflight", type=int, help="Reads under way at once per reading rank.")
@click.option("--readers-per-node", type=int, help="Ranks of a node that read.")
@click.option("--report", is_flag=True, help="What each rank did, and which part was the slow one.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of text.")
def bench(
    path: str,
    db: str | None,
    batch_size: int,
    shuffle: str,
    decoder: str,
    recipe: str,
    size: int | None,
    epochs: int,
    fetch: str,
    step_ms: float,
    cold: bool,
    inflight: int | None,
    readers_per_node: int | None,
    report: bool,
    as_json: bool,
) -> int:
    """Measure how fast a dataset is read, and why.

    Reads epochs as a training job would. Give it the batch size, the shuffle and the decoder of your job, and start it
    the way you start your job. A large "share" means that the ranks waited for the storage; a large "turn" means that
    the storage waited for the ranks. --report has a line per rank, and says in a sentence what was slow.

    "study" instead of a PATH compares all ways to read (`bench study --help`); a dataset of that name is ./study.

    \b
    Examples:
      python -m pario bench train.lmdb --decoder datum
      mpiexec -n 4 python -m pario bench train.lmdb --shuffle block --batch-size 256 --epochs 2 --report
      python -m pario bench study
    """
    from pario.commands.bench import bench as run

    knobs = {"inflight": inflight, "readers_per_node": readers_per_node}
    return run(
        path,
        db=db,
        batch_size=batch_size,
        shuffle=shuffle,
        decoder=decoder,
        recipe=recipe,
        size=size,
        epochs=epochs,
        fetch=fetch,
        step_ms=step_ms,
        cold=cold,
        report=report,
        as_json=as_json,
        options={name: value for name, value in knobs.items() if value is not None},
    )


@group.command()
@click.argument("path", required=False)
@_db
@click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of text.")
def doctor(path: str | None, db: str | None, as_json: bool) -> int:
    """What is off on this machine?

    Looks at the launcher and the MPI library, the nodes and ranks as pario sees them, cores, memory, shared memory and
    the place of the compiled kernels; with PATH also at the dataset, its file system and its index. Reads no records
    and writes nothing to the dataset. Exit status 1 if something is off.

    \b
    Examples:
      python -m pario doctor
      mpiexec -n 4 python -m pario doctor train.lmdb
    """
    from pario.commands.doctor import doctor as run

    return run(path, db, as_json)


@group.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(1), help="Start so many MPI ranks by mpiexec.")
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(ranks: int | None, module: bool, target: str, arguments: tuple[str, ...]) -> int | Callable[[], int]:
    """Run a script unchanged; what it reads through lmdb, pario reads.

    In the script, `lmdb.open(..., readonly=True)` opens with pario: without a memory map, and faster on cold random
    reads. Environments for writing go to the real lmdb. Holds for the workers of a PyTorch DataLoader, too.

    \b
    Examples:
      python -m pario run train.py --epochs 3
      python -m pario run -n 4 train.py
      python -m pario run -m my_package.train
    """
    from pario.commands import run as script

    if ranks is not None:
        return script.launch(ranks, module, target, arguments)
    # Called when click is done, since it would change some of the script's exceptions.
    return lambda: script.run(module, target, arguments)


@group.command()
@click.argument("name", required=False)
@click.option("--nodes", metavar="N", help="Nodes.")
@click.option("--ntasks-per-node", metavar="N", help="Ranks per node.")
@click.option("--cpus-per-task", metavar="N", help="Cores per rank.")
@click.option("--time", metavar="HH:MM:SS", help="Time limit.")
@click.option("--partition", metavar="NAME")
@click.option("--account", metavar="NAME")
@click.option("--gpus-per-task", metavar="N", help="Accelerators per rank.")
@click.option("--array", metavar="RANGE", help="Of job_array: for example 0-19%4.")
@click.option("--signal", metavar="B:USR1@SECONDS", help="Of train_requeue: how long before the limit to save.")
@click.option("--data", metavar="PATH", help="The LMDB.")
@click.option("--script", metavar="FILE", help="Your training script. Without: one of pario's examples, copied.")
@click.option("--set", "others", metavar="KNOB=VALUE", multiple=True, help="Any other knob of the template.")
@click.option("-o", "--output", metavar="FILE", help="Instead of NAME.slurm; - for standard output.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def jobscript(
    name: str | None,
    data: str | None,
    script: str | None,
    others: tuple[str, ...],
    output: str | None,
    force: bool,
    **sbatch: str | None,
) -> int:
    """Write out a Slurm job script, filled in.

    Without a NAME it lists the templates.

    \b
    Examples:
      python -m pario jobscript
      python -m pario jobscript train --nodes 4 --ntasks-per-node 4 --time 04:00:00 --data /scratch/train.lmdb
      python -m pario jobscript train --script train.py --set LAUNCHER=mpiexec --set "ARGUMENTS=--epochs 90"
    """
    from pario.commands import jobscript as room

    if name is not None and name not in room.names():
        raise click.BadParameter(f"{name!r} is none of {', '.join(room.names())}", param_hint="NAME")
    values = {}
    for one in others:
        knob, given, value = one.partition("=")
        if not given:
            raise click.BadParameter(f"{one!r} is not KNOB=VALUE", param_hint="--set")
        values[knob] = value
    values |= {knob: value for knob, value in (("DATA", data), ("SCRIPT", script)) if value is not None}
    lines = {option.replace("_", "-"): value for option, value in sbatch.items() if value is not None}
    return room.jobscript(name, lines, values, output, force)
