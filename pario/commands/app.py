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
from pario.commands.control import plane
from pario.commands.copies import clean, list_, serve, stage, verify_copies
from pario.commands.demo import demo
from pario.commands.files import mount, view
from pario.commands.jobscript import jobscript
from pario.commands.pack import pack, unpack
from pario.commands.run import advise, run, trace
from pario.commands.screen import screen
from pario.commands.sidecars import checksum, index

#: old name -> its words now; old names go with the release after this one
_OLD = {
    **{name: f"data {name}" for name in ("info", "head", "verify", "index", "checksum", "pack", "unpack", "choose")},
    **{name: f"tiers {name}" for name in ("stage", "serve")},
    **{name: f"files {name}" for name in ("view", "mount")},
    "cache": "tiers",
}


class _Names(click.Group):
    """Knows the old names, too."""

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, rest = args[0], args[1:]
        now = _OLD.get(name, name)
        if name == "control":
            now, rest = ("plane status", rest[1:]) if rest[:1] == ["status"] else ("plane serve", rest)
        elif name == "bench" and (first := next((word for word in rest if not word.startswith("-")), None)):
            if first in ("threads", "overlap", "checkpoint"):
                moved = f"python -m benchmarks.micro {first}"
                raise click.UsageError(f"`pario bench {first}` has left the package: in a clone, run `{moved}`")
            now = name if first in bench.commands else "bench run"
        if now != name and not context.resilient_parsing:
            old = f"{name} status" if now == "plane status" else name
            screen.note(f"note: `pario {old}` is `pario {now}` now; the old name goes with the next release")
        return super().resolve_command(context, [*now.split(), *rest])


@click.group(
    cls=_Names,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(pario.__version__, prog_name="pario")
@click.pass_context
def group(context: click.Context) -> None:
    """pario reads an LMDB dataset for all ranks of an MPI job.

    New here? Try:  python -m pario demo

    A PATH is an LMDB: its folder, or the data file itself. pario never writes to it; `data index` writes a small file
    beside it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@group.group()
def data() -> None:
    """Look at datasets, check them, prepare and pack them."""


@group.group()
def tiers() -> None:
    """Keep copies of datasets on the nodes: ahead of jobs, between them, and for several at once.

    FOLDER is a tier's folder, as in PARIO_TIERS. On several nodes start one process per node.

    \b
    Examples:
      python -m pario tiers list /local/nvme
      srun --ntasks-per-node=1 python -m pario tiers clean /local/nvme --older-than 7
    """


@group.group()
def files() -> None:
    """Show records as files, to programs that know files alone."""


for _room, _commands in (
    (group, (data, run, trace, advise, tiers, bench, checkpoint, plane, files, demo, jobscript)),
    (data, (index, checksum, pack, unpack)),
    (tiers, (list_, verify_copies, clean, stage, serve)),
    (files, (view, mount)),
):
    for _one in _commands:
        _room.add_command(_one)


@data.command()
@arguments.path
@arguments.db
@arguments.decoder
@arguments.as_json
def info(path: str, db: str | None, decoder: str | None) -> int:
    """Show what a file contains.

    Prints the LMDB format, the databases with their entries and pages, the record sizes, whether the records lie in the
    file in key order, whether an index is saved, and what the first, a middle and the last record look like.

    \b
    Example:
      python -m pario data info train.lmdb
    """
    from pario.commands.info import info as run

    return run(path, db, decoder)


@data.command()
@arguments.path
@click.option("-n", "count", default=5, show_default=True, type=click.IntRange(1), help="Number of first records.")
@arguments.db
@arguments.decoder
@arguments.select
@arguments.as_json
def head(path: str, count: int, db: str | None, decoder: str | None, select: str | None) -> int:
    """Show the first records, one from the middle and the last, and what they seem to be.

    Values are inspected, never executed: a pickle is recognised, not loaded. "~" marks an id that is an estimate.
    --decoder shows what a decoder makes of them instead. --select shows those of a part of the dataset; it builds and
    saves the index, as a Loader does.

    \b
    Examples:
      python -m pario data head -n 3 train.lmdb
      python -m pario data head train.lmdb --select label- --decoder text
    """
    from pario.commands.info import head as run

    return run(path, count, db, decoder, select)


@data.command()
@arguments.path
@arguments.db
@arguments.as_json
def verify(path: str, db: str | None) -> int:
    """Read the whole file and look for damage.

    Checks that all pages in use have valid headers and bounds, that no page is used twice or both used and free, that
    keys are in order, that the number of records is right, that every byte can be read, that the index matches, and
    that every value still has the checksum that `data checksum` saved, if it did. Prints each fault with its file,
    page, offset and record. The exit status is 1 if there is any.

    \b
    Examples:
      python -m pario data verify train.lmdb
      mpiexec -n 8 python -m pario data verify train.lmdb
    """
    from pario.commands.verify import verify as run

    return run(path, db)


@data.command()
@arguments.path
@click.option("--step-ms", metavar="MS", type=click.FloatRange(min=0, min_open=True),
              help="Time of a training step with its data in memory, in milliseconds. Required.")
@click.option("-b", "--batch-size", metavar="N", type=click.IntRange(min=1),
              help="Records per node and step. Required.")
@click.option("--iteration", type=click.FloatRange(min=0), hidden=True)  # the old names
@click.option("--batch", type=click.IntRange(min=1), hidden=True)
@click.option("--sync", is_flag=True, help="The script reads and computes in turns, instead of reading ahead.")
@click.option("--threads", metavar="N", type=click.IntRange(min=1), help="Number of decoding threads.  [default: all]")
@arguments.db
@arguments.aim
@click.option("--samples", metavar="N", type=click.IntRange(min=2), default=2000, show_default=True,
              help="Number of records to sample.")
@click.option("--seconds", metavar="S", type=click.FloatRange(min=0.01), default=0.5, show_default=True,
              help="Time to measure each candidate, in seconds.")
@click.option("--margin", metavar="SHARE", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
              help="Share of the time for decoding that stays free for what the equations leave out.")
@arguments.as_json
def choose(
    path: str,
    step_ms: float | None,
    batch_size: int | None,
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
      python -m pario data choose train.lmdb --step-ms 650 --batch-size 512
      python -m pario data choose train.lmdb --step-ms 650 --batch-size 512 --sync
    """
    from pario.codec.select import Application
    from pario.commands.choose import run_choose

    old_batch, old_step_s = measuring.pop("batch"), measuring.pop("iteration")
    size, step_s = batch_size or old_batch, step_ms / 1000 if step_ms else old_step_s
    if not size or not step_s:
        raise click.UsageError(f"Missing option '{'--step-ms' if size else '--batch-size'}'.")
    # Bytes and threads are not known before the samples are read.
    application = Application(size, 0.0, step_s, threads or 1, sync)
    return run_choose(path, application, db=db, threads=threads, speed=aim == "speed", **measuring)


@group.command()
@click.argument("path", required=False, type=click.Path())
@arguments.db
@arguments.as_json
def doctor(path: str | None, db: str | None) -> int:
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

    return run(path, db)


@group.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print what lets a shell complete the words after `pario`.

    \b
    Examples:
      eval "$(pario completion bash)"        (in ~/.bashrc; zsh likewise)
      pario completion fish > ~/.config/fish/completions/pario.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(group, {}, "pario", "_PARIO_COMPLETE").source())
    return 0


arguments.with_common(group)
