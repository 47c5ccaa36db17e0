"""`files view | mount`: records as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import click

from pario.commands.screen import screen
from pario.errors import OptionError
from pario.text import read_size


@click.command()
@click.argument("sources", metavar="LMDB[=NAME]...", nargs=-1, required=True)
@click.argument("folder", type=click.Path())
@click.option("--extensions", is_flag=True, help="Let names end as their data's format has it: .jpg, .npy, ...")
@click.option("--others", is_flag=True, help="Let other users read, too (allow_other).")
def mount(sources: tuple[str, ...], folder: str, extensions: bool, others: bool) -> int:
    """Show records as files in a folder, by FUSE, until Ctrl-C or SIGTERM.

    The key of a record is its path; a slash in it makes a folder. Of several LMDBs each is a folder, NAME, or else
    the last part of its path. Nothing can be written. FOLDER must be empty.

    \b
    Examples:
      python -m pario files mount train.lmdb /mnt/train
      python -m pario files mount train.lmdb=train val.lmdb=val /mnt/data &
    """
    from pario.commands.run_service import join_service
    from pario.files import fuse
    from pario.files.tree import Tree

    fuse.check(folder)
    join_service()
    with Tree(_read_sources(sources), extensions=extensions) as tree:
        fuse.mount(tree, folder, others=others, ready=lambda: screen.say(f"{', '.join(sources)} mounted at {folder}"))
    return 0


def _read_sources(words: tuple[str, ...]) -> dict[str, str]:
    """Folder -> LMDB, of "LMDB=NAME" or "LMDB"; "" is the root, of a single one without a name. Raises OptionError."""
    found: dict[str, str] = {}
    for word in words:
        path, equals, name = word.rpartition("=")
        if not equals or os.path.exists(word):
            path = word
            name = "" if len(words) == 1 else os.path.basename(os.path.abspath(word))
        elif not name:
            raise OptionError(f"{word!r} has no name behind the =")
        elif not os.path.exists(path) and os.path.exists(word.partition("=")[2]):  # as it was in 0.1: NAME=LMDB
            name, _, path = word.partition("=")
            screen.note(f"note: write {path}={name}; {word} goes with the next release")
        if name in found:
            raise OptionError(f"two LMDBs would be the folder {name}", hint="Name them: LMDB=NAME.")
        found[name] = path
    return found


@click.command()
@click.option("--extensions", is_flag=True, help="Let names end as their data's format has it: .jpg, .npy, ...")
@click.option("--held", default="1GiB", show_default=True, metavar="SIZE", help="Memory for files opened last.")
@click.option("--output", metavar="DIR", help="Keep what is written below DIR on this node, and merge it at the end.")
@click.option("--local", metavar="DIR", help="Where outputs stay until then. Default: the folder for temporary files.")
@click.argument("words", metavar="LMDB=FOLDER... -- COMMAND...", nargs=-1, required=True)
def view(words: tuple[str, ...], extensions: bool, held: str, output: str | None, local: str | None) -> int:
    """Run a program that sees an LMDB's records as files.

    COMMAND and all that it starts find the records below FOLDER, read-only: shells, mpiexec and static programs, too.
    FOLDER is absolute, and does not exist yet or is empty; its parent exists. Needs neither root nor FUSE: the kernel
    asks pario about every system call with a path (docs/files.md says what that costs).

    \b
    Examples:
      python -m pario files view train.lmdb=/data -- ls -l /data
      python -m pario files view train.lmdb=/train val.lmdb=/val -- mpiexec -n 4 python train.py
    """
    from pario.commands.run_service import join_service
    from pario.files.launch import Plan, run_under_view
    from pario.files.outputs import Outputs
    from pario.files.tree import Tree
    from pario.files.view import Limits

    shown, command = _divided(words)
    roots = [(folder, partial(Tree, {"": path}, extensions=extensions)) for path, folder in shown]
    held_bytes = read_size(held)
    if not held_bytes:
        raise OptionError(f"--held {held!r} is not a size", hint='Write "1GiB", for example.')
    limits = Limits(held_bytes=int(held_bytes))
    if local and not output:
        raise OptionError("--local says where outputs stay, and there are none", hint="Name their folder: --output DIR")
    join_service()
    outputs = Outputs(output, local) if output else None
    return run_under_view(Plan(roots, command, limits, outputs))


def _divided(words: Sequence[str]) -> tuple[list[tuple[str, str]], Sequence[str]]:
    """([(LMDB, folder)], the program and its arguments)"""
    shown: list[tuple[str, str]] = []
    for word in words:
        path, _, folder = word.rpartition("=")
        if not path or not folder.startswith("/"):
            break
        shown.append((path, folder))
    usage = "python -m pario files view train.lmdb=/data -- COMMAND"
    if not shown:
        raise OptionError(f"{words[0]!r} is not LMDB=FOLDER with an absolute FOLDER", hint=f"Write: {usage}")
    if len(shown) == len(words):
        raise OptionError("there is no program to run", hint=f"Write: {usage}")
    return shown, words[len(shown) :]
