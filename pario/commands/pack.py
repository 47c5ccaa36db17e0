"""`data pack | unpack`: compressed datasets, and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from pario.commands import arguments
from pario.commands.screen import counted, decimal_bytes, screen, seconds

if TYPE_CHECKING:
    from pario.packing.pack import Summary, Talk

_folder = click.option("--folder", "in_folder", is_flag=True, help="Make DST a folder with data.mdb.")


@click.command()
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("dst")
@click.option(
    "--codec", default="zstd:3", show_default=True, metavar="NAME[:LEVEL]", help='"auto": what `choose` finds best.'
)
@arguments.aim
@click.option(
    "--dictionary", default="auto", show_default=True, metavar="auto|no|SIZE", help="Dictionary of small records: 32k."
)
@click.option(
    "--block", default="auto", show_default=True, metavar="auto|no|SIZE", help="Blocks of small records: 4k."
)
@click.option("--db", "dbs", multiple=True, metavar="NAME", help="Pack only this named database; repeatable.")
@arguments.choice(
    "--links",
    known=("follow", "keep"),
    help="Pack what symbolic links that lead out of a folder lead to, or keep the links.",
)
@arguments.choice(
    "--keys", known=("path", "hash"), help="Keep paths that are too long for a key beside the records (hash)."
)
@click.option("--no-prefix", is_flag=True, help="Take the keys of several SRC as they are.")
@_folder
@click.option("--force", is_flag=True, help="Replace DST, when the new one is complete.")
@click.option("--no-verify", is_flag=True, help="Do not read DST back and compare it with SRC.")
@arguments.as_json
def pack(sources: tuple[str, ...], dst: str, no_prefix: bool, no_verify: bool, **options: Any) -> int:
    """Make a compressed dataset.

    SRC is an LMDB, a folder, or a tar, compressed or not. DST is an LMDB with the same keys; keys of a folder or a tar
    are the paths in it. pario reads it as it reads any LMDB, and `unpack` gives SRC back. With several SRC, keys begin
    with the name of theirs. A run that was killed goes on when it is started again. Collective under mpiexec.

    \b
    Examples:
      python -m pario data pack train.lmdb packed.lmdb
      python -m pario data pack images/ images.lmdb --codec zstd:19
      mpiexec -n 16 python -m pario data pack train.tar train.lmdb
    """
    from pario.comm.world import get_world
    from pario.packing.pack import PackOptions
    from pario.packing.pack import pack as run

    started = time.perf_counter()
    world = get_world()
    made = run(world, sources, dst, PackOptions(prefix=not no_prefix, verify=not no_verify, **options), _talk())
    ratio = f", {made.raw_bytes / made.stored_bytes:.2f} times smaller" if made.raw_bytes > made.stored_bytes else ""
    _say(made, "packed" + ("" if no_verify else " and verified"), world.size, started)
    screen.say(f"{decimal_bytes(made.raw_bytes)} of values, {decimal_bytes(made.stored_bytes)} in the file{ratio}")
    world.close()
    return 0


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("dst")
@_folder
@click.option("--force", is_flag=True, help="Replace DST, an LMDB or a tar, when the new one is complete.")
@click.option(
    "--no-verify", is_flag=True, help="Do not read back a DST that is an LMDB. (Values have checksums in any case.)"
)
@arguments.as_json
def unpack(source: str, dst: str, in_folder: bool, force: bool, no_verify: bool) -> int:
    """Give back what a dataset was packed from: the LMDB, the folder or the tar.

    \b
    Example:
      python -m pario data unpack images.lmdb images/
    """
    from pario.comm.world import get_world
    from pario.packing.unpack import unpack as run

    started = time.perf_counter()
    world = get_world()
    made = run(world, source, dst, _talk(), in_folder=in_folder, force=force, verify=not no_verify)
    _say(made, "unpacked", world.size, started)
    world.close()
    return 0


def _say(made: Summary, done: str, ranks: int, started: float) -> None:
    screen.tell(vars(made), seconds=time.perf_counter() - started)
    took = seconds(time.perf_counter() - started)
    screen.say(f"{made.file}: {counted(made.records, 'record')} {done} in {took} on {counted(ranks, 'rank')}")


def _talk() -> Talk:
    from pario.packing.pack import Talk

    def progress(what: str, nbytes: int) -> Any:
        bar = screen.bar(nbytes, what, "B")

        def moved(done: int) -> None:
            bar.update(done)
            if bar.n >= nbytes:
                screen.end_bar()

        return moved

    return Talk(screen.note, progress)
