"""The commands `pack` and `unpack`, their arguments and help texts, for click (app.py). pack.py does the work."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["pack", "unpack"]

_folder = click.option("--folder", "in_folder", is_flag=True, help="DST is a folder with data.mdb, as SRC may be.")


@click.command()
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("dst")
@click.option(
    "--codec", default="zstd:3", show_default=True, metavar="NAME[:LEVEL]", help='Or "auto": as `choose` finds best.'
)
@click.option("--dictionary", default="auto", show_default=True, metavar="auto|no|SIZE", help="For small records: 32k.")
@click.option("--no-prefix", is_flag=True, help="Of several SRC, take the keys as they are.")
@_folder
@click.option("--force", is_flag=True, help="Replace DST, when the new one is complete.")
@click.option("--no-verify", is_flag=True, help="Do not read DST back and compare it with SRC.")
def pack(sources: tuple[str, ...], dst: str, no_prefix: bool, no_verify: bool, **options: Any) -> int:
    """Make a compressed dataset.

    SRC is an LMDB, a folder, or a tar, compressed or not. DST is an LMDB with the same keys; keys of a folder or a tar
    are the paths in it. pario reads it as it reads any LMDB, and `unpack` gives SRC back. With several SRC, keys begin
    with the name of theirs. A run that was killed goes on when it is started again. Collective under mpiexec.

    \b
    Examples:
      python -m pario pack train.lmdb packed.lmdb
      python -m pario pack images/ images.lmdb --codec zstd:19
      mpiexec -n 16 python -m pario pack train.tar train.lmdb
    """
    from pario.commands.pack import run_pack
    from pario.packing.pack import PackOptions

    return run_pack(sources, dst, PackOptions(prefix=not no_prefix, verify=not no_verify, **options))


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("dst")
@_folder
@click.option("--force", is_flag=True, help="Replace DST, an LMDB or a tar, when the new one is complete.")
@click.option(
    "--no-verify", is_flag=True, help="Of an LMDB: do not read DST back. (Values have checksums in any case.)"
)
def unpack(source: str, dst: str, in_folder: bool, force: bool, no_verify: bool) -> int:
    """Give back what a dataset was packed from: the LMDB, the folder or the tar.

    \b
    Example:
      python -m pario unpack images.lmdb images/
    """
    from pario.commands.pack import run_unpack

    return run_unpack(source, dst, in_folder, force, not no_verify)
