"""The commands, their arguments and help texts, for click. The modules beside this one do the work.

Those are imported when a command runs, so that `--help` and a wrong option load neither Numba nor MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import pario
from pario.commands import app_checkpoint, app_choose, app_control, app_pack
from pario.options import FETCHERS, RECIPES

__all__ = ["group"]

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_path = click.argument("path")
_db = click.option("--db", metavar="NAME", help="Named database. Default: the main one.")
_decoder = click.option(
    "--decoder",
    metavar="NAME",
    help="Decoder: datum, image, json, zlib+json, ase, ... (docs/decoders.md), module:function or file.py:function.",
)

_select = click.option(
    "--select", metavar="WHICH", help='Records START:STOP, or keys that begin so; "all": meta records, too.'
)


@click.group(context_settings=_SETTINGS, invoke_without_command=True)
@click.version_option(pario.__version__, prog_name="pario")
@click.pass_context
def group(context: click.Context) -> None:
    """pario reads an LMDB dataset for all ranks of an MPI job.

    New here? Try:  python -m pario demo

    PATH is an LMDB: its folder, or the data file itself. pario never writes to it; `index` writes a small file beside
    it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@group.command()
@click.option("-n", "--ranks", default=2, show_default=True, type=click.IntRange(1, 64), help="MPI ranks to start.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the LMDBs here. Default: a temporary directory.")
def demo(ranks: int, folder: Path | None) -> int:
    """Train a small network on two ranks, in seconds.

    Writes scikit-learn's handwritten digits to an LMDB, starts two MPI ranks with mpiexec, trains a network that reads
    the LMDB through pario, and prints its accuracy. Needs no data, no accelerator and no network.

    \b
    Example:
      python -m pario demo
    """
    from pario.commands.demo import demo as run

    return run(ranks, folder)


@group.command()
@_path
@_db
@_decoder
def info(path: str, db: str | None, decoder: str | None) -> int:
    """Show what a file contains.

    Prints the LMDB format, the databases with their entries and pages, the record sizes, whether the records lie in the
    file in key order, whether an index is saved, and what the first, a middle and the last record look like.

    \b
    Example:
      python -m pario info train.lmdb
    """
    from pario.commands.info import info as run

    return run(path, db, decoder)


@group.command()
@_path
@click.option("-n", "count", default=5, show_default=True, type=click.IntRange(1), help="Number of first records.")
@_db
@_decoder
@_select
def head(path: str, count: int, db: str | None, decoder: str | None, select: str | None) -> int:
    """Show the first records, one from the middle and the last, and what they seem to be.

    Values are inspected, never executed: a pickle is recognised, not loaded. "~" marks an id that is an estimate.
    --decoder shows what a decoder makes of them instead. --select shows those of a part of the dataset; it builds and
    saves the index, as a Loader does.

    \b
    Examples:
      python -m pario head -n 3 train.lmdb
      python -m pario head train.lmdb --select label- --decoder text
    """
    from pario.commands.head import head as run

    return run(path, count, db, decoder, select)


@group.command()
@_path
@_db
def index(path: str, db: str | None) -> int:
    """Build the index ahead of a job.

    The index says where each record lies. pario builds it from the LMDB's inner pages, without reading the records, and
    saves it beside the dataset, or in your cache directory if that place is not writable. The Loader builds a missing
    index by itself; for a dataset of terabytes you may prefer to build it once, on many ranks.

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
def checksum(path: str, db: str | None) -> int:
    """Save a checksum of every record's value.

    Reads all records, which the ranks divide, and saves the checksums beside the dataset, or in your cache directory if
    that place is not writable. `verify` and Loader(verify=True) then find any value that has changed since.

    \b
    Examples:
      python -m pario checksum train.lmdb
      mpiexec -n 8 python -m pario checksum train.lmdb
    """
    from pario.commands.checksum import checksum as run

    return run(path, db)


@group.command()
@_path
@_db
@click.option("--to", "folder", required=True, metavar="FOLDER", help="On a disk of the node.")
@click.option("--quota", default="auto", show_default=True, metavar="SIZE", help='As in "400 GiB".')
@click.option("--force", is_flag=True, help="FOLDER may be on a network file system.")
def stage(path: str, db: str | None, folder: str, quota: str, force: bool) -> int:
    """Copy the records' part of the file to a disk of every node.

    Jobs that name the folder in PARIO_TIERS, or as a pario.Tier, then read the copy. What is there already is not read
    again, so that an interrupted run goes on where it was.

    \b
    Examples:
      python -m pario stage train.lmdb --to /local/nvme
      srun --ntasks-per-node=1 python -m pario stage train.lmdb --to /local/nvme --quota 400GiB
    """
    from pario.commands.stage import stage as run

    return run(path, db, folder, quota, force)


@group.command()
@click.option(
    "--at", "folder", envvar="PARIO_SERVICE", metavar="FOLDER", help="On the node.  [default: $PARIO_SERVICE]"
)
@click.option("--tiers", metavar="TIERS", help='As in "memory:auto,/local/nvme:400GiB".  [default: $PARIO_TIERS]')
@click.option("--copies", default="auto", show_default=True, metavar="N", help="Of each chunk, on different nodes.")
def serve(folder: str | None, tiers: str | None, copies: str) -> int:
    """Keep copies of datasets for all your jobs on these nodes, until it is interrupted.

    Start one process per node. Jobs whose PARIO_SERVICE names FOLDER then share the copies, in memory and on disks,
    with each other and across the nodes: the shared store is read once for all of them.

    \b
    Examples:
      export PARIO_SERVICE=/tmp
      python -m pario serve --tiers memory:auto &
      srun --ntasks-per-node=1 --overlap python -m pario serve --tiers memory:auto,/local/nvme:400GiB &
    """
    from pario.commands.serve import serve as run

    return run(folder, tiers, copies)


for _one in (app_checkpoint.checkpoint, app_control.control, app_choose.choose, app_pack.pack, app_pack.unpack):
    group.add_command(_one)


@group.group()
def cache() -> None:
    """Look after the copies that tiers keep on disks.

    FOLDER is a tier's folder, as in PARIO_TIERS. On several nodes start one process per node.

    \b
    Examples:
      python -m pario cache list /local/nvme
      srun --ntasks-per-node=1 python -m pario cache clean /local/nvme --older-than 7
    """


_folders = click.argument("folders", metavar="FOLDER...", nargs=-1, required=True)


@cache.command("list")
@_folders
def list_(folders: tuple[str, ...]) -> int:
    """Which datasets, how much of them, and when a job used them last."""
    from pario.commands.cache import list_copies as run

    return run(folders)


@cache.command("verify")
@_folders
def verify_copies(folders: tuple[str, ...]) -> int:
    """Read all copies and compare their checksums. The exit status is 1 if there is damage.

    Damaged chunks are dropped: the next job fetches them again.
    """
    from pario.commands.cache import verify_copies as run

    return run(folders)


@cache.command()
@_folders
@click.option("--older-than", "days", default=0.0, metavar="DAYS", type=click.FloatRange(min=0), help="Since last use.")
def clean(folders: tuple[str, ...], days: float) -> int:
    """Remove the copies that no job uses now."""
    from pario.commands.cache import clean_copies as run

    return run(folders, days)


@group.command()
@_path
@_db
def verify(path: str, db: str | None) -> int:
    """Read the whole file and look for damage.

    Checks that all pages in use have valid headers and bounds, that no page is used twice or both used and free, that
    keys are in order, that the number of records is right, that every byte can be read, that the index matches, and
    that every value still has the checksum that `checksum` saved, if it did. Prints each fault with its file, page,
    offset and record. The exit status is 1 if there is any.

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


class _Bench(click.Command):
    """`bench PATH`, and under the same name `bench study`."""

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
@_decoder
@click.option(
    "--recipe",
    default="auto",
    show_default=True,
    type=click.Choice(list(RECIPES)),
    help="How to read: as pario does, or a step of LMDBIO, or plain py-lmdb (docs/recipes.md).",
)
@click.option("--size", type=click.IntRange(1), help="image: scale to so many pixels, as unequal images do not stack.")
@click.option("-e", "--epochs", default=1, show_default=True, type=click.IntRange(1), help="Passes over the data.")
@click.option(
    "--fetch",
    default="auto",
    show_default=True,
    type=click.Choice(FETCHERS),
    help="posix: through the page cache; direct: past it (O_DIRECT).",
)
@_select
@click.option("--step-ms", default=0.0, type=click.FloatRange(0), help="Sleep per batch, for a training step.")
@click.option("--cold", is_flag=True, help="Ask the kernel to drop the file from the page cache first.")
@click.option("--inflight", type=int, help="Reads in flight per reading rank; without, as measured.")
@click.option("--readers-per-node", type=int, help="Number of reading ranks per node.")
@click.option("--report", is_flag=True, help="Print what each rank did, and the slow part.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def bench(
    path: str,
    db: str | None,
    fetch: str,
    inflight: int | None,
    readers_per_node: int | None,
    report: bool,
    as_json: bool,
    **workload: Any,
) -> int:
    """Measure how fast a dataset is read, and why.

    Reads epochs as a training job would. Use the batch size, shuffle and decoder of your job, and start it as you start
    your job. A large "share" means that the ranks waited for the storage; a large "turn" means that the storage waited
    for the ranks. --report prints a line per rank, and a sentence that names the slow part.

    "study" in place of a PATH compares all ways of reading (`bench study --help`); write ./study for a dataset of that
    name.

    \b
    Examples:
      python -m pario bench train.lmdb --decoder datum
      mpiexec -n 4 python -m pario bench train.lmdb --shuffle block --batch-size 256 --epochs 2 --report
      python -m pario bench study
    """
    from pario.bench.dataset import Workload
    from pario.commands.bench import bench as run
    from pario.commands.dataset import selected
    from pario.commands.decoder import find_decoder
    from pario.options import Options

    decoder, size = workload["decoder"], workload.pop("size")
    workload["decoder"] = find_decoder(decoder, **({"size": size} if size else {})) if decoder else None
    workload["shuffle"] = workload["shuffle"] != "none" and workload["shuffle"]
    workload["select"] = selected(workload["select"])
    given: dict[str, Any] = {"inflight": inflight, "readers_per_node": readers_per_node}
    options = Options(fetch=fetch, **{name: value for name, value in given.items() if value is not None})
    return run(path, Workload(**workload, options=options), db=db, report=report, as_json=as_json)


@group.command()
@click.argument("path", required=False)
@_db
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON instead of text.")
def doctor(path: str | None, db: str | None, as_json: bool) -> int:
    """Check this machine for what pario needs.

    Checks the launcher and the MPI library, the nodes and ranks as pario sees them, cores, memory, shared memory and
    the folder of compiled kernels; with PATH also the dataset, its file system and its index. Reads no records and
    writes nothing to the dataset. The exit status is 1 if something is wrong.

    \b
    Examples:
      python -m pario doctor
      mpiexec -n 4 python -m pario doctor train.lmdb
    """
    from pario.commands.doctor import doctor as run

    return run(path, db, as_json)


@group.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(1), help="Start this many MPI ranks with mpiexec.")
@click.option("-m", "module", is_flag=True, help="TARGET is a module, as for python -m.")
@click.option("--oversubscribe", is_flag=True, help="With -n: allow more than 16 ranks per core of this machine.")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None, module: bool, oversubscribe: bool, target: str, arguments: tuple[str, ...]
) -> int | Callable[[], int]:
    """Run a script unchanged, with pario reading its LMDBs.

    In the script, `lmdb.open(..., readonly=True)` opens with pario: without a memory map, and faster on cold random
    reads. Environments opened for writing go to the real lmdb. The workers of a PyTorch DataLoader are covered, too.
    With PARIO_TIERS set, all of them share a copy of the file in the node's memory (docs/tiers.md).

    \b
    Examples:
      python -m pario run train.py --epochs 3
      python -m pario run -n 4 train.py
      python -m pario run -m my_package.train
    """
    from pario.commands import run as script

    if ranks is not None:
        return script.launch(ranks, module, target, arguments, oversubscribe=oversubscribe)
    # Called after click has returned, since click would change some of the script's exceptions.
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
@click.option("--array", metavar="RANGE", help="For job_array, for example 0-19%4.")
@click.option("--signal", metavar="B:USR1@SECONDS", help="For train_requeue: how long before the limit to save.")
@click.option("--data", metavar="PATH", help="The LMDB.")
@click.option("--script", metavar="FILE", help="Your training script. Default: a copy of one of pario's examples.")
@click.option("--set", "others", metavar="KNOB=VALUE", multiple=True, help="Any other knob of the template.")
@click.option("-o", "--output", metavar="FILE", help="Output file. Default: NAME.slurm; - for standard output.")
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
    """Write a filled-in Slurm job script.

    Without NAME, list the templates.

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
