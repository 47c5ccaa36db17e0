"""`view`: runs a program that sees an LMDB's records as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pario.commands.run_service import script_tiers, use_own_service
from pario.errors import OptionError
from pario.files.launch import Plan, run_under_view
from pario.files.outputs import Outputs
from pario.files.tree import Tree
from pario.files.view import Limits
from pario.options import Tier

__all__ = ["view"]


def view(words: Sequence[str], extensions: bool, held: str, output: str | None = None, local: str | None = None) -> int:
    """Returns the program's exit status. words : LMDB=FOLDER of each dataset, then the program and its arguments.
    Raises OptionError."""
    shown, command = _divided(words)
    roots = [(folder, _opener(path, extensions)) for path, folder in shown]
    tiers = script_tiers()
    if tiers:
        use_own_service(tiers)
    outputs = Outputs(output, local) if output else None
    return run_under_view(Plan(roots, command, Limits(held_bytes=_size(held)), outputs))


def _opener(path: str, extensions: bool) -> Callable[[], Tree]:
    return lambda: Tree({"": path}, extensions=extensions)


def _divided(words: Sequence[str]) -> tuple[list[tuple[str, str]], Sequence[str]]:
    """([(LMDB, folder)], the program and its arguments)"""
    shown: list[tuple[str, str]] = []
    for word in words:
        path, _, folder = word.rpartition("=")
        if not path or not folder.startswith("/"):
            break
        shown.append((path, folder))
    usage = "python -m pario view train.lmdb=/data -- COMMAND"
    if not shown:
        raise OptionError(f"{words[0]!r} is not LMDB=FOLDER with an absolute FOLDER", hint=f"Write: {usage}")
    if len(shown) == len(words):
        raise OptionError("there is no program to run", hint=f"Write: {usage}")
    return shown, words[len(shown) :]


def _size(held: str) -> int:
    found = Tier("memory", held).quota_bytes
    if found is None:
        raise OptionError(f"--held {held!r} is not a size", hint='Write "1GiB", for example.')
    return found
