"""The command line of pario, for click: all commands, and the arguments and help texts of the longer ones.

What a command needs is imported when it runs, so that `--help` and a wrong option load neither Numba nor MPI.
"""

from __future__ import annotations

from typing import Any

import click

import pario
from pario.commands import arguments
from pario.commands.bench import bench
from pario.commands.checkpoint import checkpoint
from pario.commands.control import control
from pario.commands.copies import cache, serve, stage
from pario.commands.demo import demo
from pario.commands.files import mount, view
from pario.commands.jobscript import jobscript
from pario.commands.pack import pack, unpack
from pario.commands.run import advise, run, trace
from pario.commands.sidecars import checksum, index

__all__ = ["group"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, invoke_without_command=True
)
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


for _one in (
    *(demo, index, checksum, stage, serve, cache, bench, run, jobscript),
    *(control, pack, unpack, trace, advise, mount, view, checkpoint),
):
    group.add_command(_one)


@group.command()
@arguments.path
@arguments.db
@arguments.decoder
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
@arguments.path
@click.option("-n", "count", default=5, show_default=True, type=click.IntRange(1), help="Number of first records.")
@arguments.db
@arguments.decoder
@arguments.select
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
    from pario.commands.info import head as run

    return run(path, count, db, decoder, select)


@group.command()
@arguments.path
@arguments.db
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


@group.command()
@click.argument("path")
@click.option("--iteration", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True), required=True,
              help="Of one training iteration with data in memory.")
@click.option("--batch", metavar="RECORDS", type=click.IntRange(min=1), required=True, help="Per node and iteration.")
@click.option("--sync", is_flag=True, help="The script reads and computes in turns, instead of reading ahead.")
@click.option("--threads", metavar="N", type=click.IntRange(min=1), help="That decode.  [default: cores]")
@click.option("--db", metavar="NAME", help="A named database.")
@click.option("--for", "aim", type=click.Choice(["capacity", "speed"]), default="capacity", show_default=True,
              help="Of the codecs that keep up: the highest ratio, or the least time.")
@click.option("--samples", metavar="N", type=click.IntRange(min=2), default=2000, show_default=True, help="Records.")
@click.option("--seconds", metavar="S", type=click.FloatRange(min=0.01), default=0.5, show_default=True,
              help="Per candidate and measurement.")
@click.option("--margin", metavar="SHARE", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
              help="Of the allowance, that stays free for what the equations leave out.")
def choose(
    path: str,
    iteration: float,
    batch: int,
    sync: bool,
    threads: int | None,
    db: str | None,
    aim: str,
    **measuring: Any,
) -> int:  # fmt: skip
    """Find the codec that a training job can afford.

    Samples records of the LMDB at PATH, packs them with every codec, has a Loader read them on this machine, and reads
    the store past the page cache if it can. Of the codecs that keep up with the iterations, the one with the highest
    ratio is chosen.

    \b
    Examples:
      python -m pario choose train.lmdb --iteration 0.65 --batch 512
      python -m pario choose train.lmdb --iteration 0.65 --batch 512 --sync
    """
    from pario.codec.select import Application
    from pario.commands.choose import run_choose

    # Bytes and threads are not known before the samples are read.
    application = Application(batch, 0.0, iteration, threads or 1, sync)
    return run_choose(path, application, db=db, threads=threads, speed=aim == "speed", **measuring)


@group.command()
@click.argument("path", required=False)
@arguments.db
@arguments.as_json
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
