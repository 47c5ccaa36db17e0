"""The commands that show records as files, their arguments and help texts, for click (app.py)."""

from __future__ import annotations

import click

__all__ = ["mount"]


@click.command()
@click.argument("sources", metavar="[NAME=]LMDB...", nargs=-1, required=True)
@click.argument("folder")
@click.option("--extensions", is_flag=True, help="Names get the extension of their data, .jpg for example.")
@click.option("--others", is_flag=True, help="Other users may read, too (allow_other).")
def mount(sources: tuple[str, ...], folder: str, extensions: bool, others: bool) -> int:
    """Show records as files in a folder, by FUSE, until Ctrl-C or SIGTERM.

    The key of a record is its path; a slash in it makes a folder. Of several LMDBs each is a folder, NAME, or else
    the last part of its path. Nothing can be written. FOLDER must be empty.

    \b
    Examples:
      python -m pario mount train.lmdb /mnt/train
      python -m pario mount train=train.lmdb val=val.lmdb /mnt/data &
    """
    from pario.commands.mount import run_mount

    return run_mount(sources, folder, extensions, others)
