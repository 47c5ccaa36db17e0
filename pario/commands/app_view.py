"""The command `view`, its arguments and help text, for click (app.py). view.py does the work."""

from __future__ import annotations

import click

__all__ = ["view"]


@click.command()
@click.option("--extensions", is_flag=True, help="File names end as their data's format has it: .jpg, .npy, ...")
@click.option("--held", default="1GiB", show_default=True, metavar="SIZE", help="Memory for files opened last.")
@click.option("--output", metavar="DIR", help="What is written below DIR stays on this node and is merged at the end.")
@click.option("--local", metavar="DIR", help="Where it stays until then. Default: the folder for temporary files.")
@click.argument("words", metavar="LMDB=FOLDER... -- COMMAND...", nargs=-1, required=True)
def view(words: tuple[str, ...], extensions: bool, held: str, output: str | None, local: str | None) -> int:
    """Run a program that sees an LMDB's records as files.

    COMMAND and all that it starts find the records below FOLDER, read-only: shells, mpiexec and static programs, too.
    FOLDER is absolute, and does not exist yet or is empty; its parent exists. Needs neither root nor FUSE: the kernel
    asks pario about every system call with a path (docs/files.md says what that costs).

    \b
    Examples:
      python -m pario view train.lmdb=/data -- ls -l /data
      python -m pario view train.lmdb=/train val.lmdb=/val -- mpiexec -n 4 python train.py
    """
    from pario.commands.view import view as run

    return run(words, extensions, held, output, local)
