"""`view`: runs a program that sees an LMDB's records as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

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
    limits = Limits(held_bytes=_size(held))
    if local and not output:
        raise OptionError("--local says where outputs stay, and there are none", hint="Name their folder: --output DIR")
    tiers = script_tiers()
    if tiers:
        use_own_service(tiers)
    outputs = Outputs(output, local) if output else None
    return run_under_view(Plan(roots, command, limits, outputs))


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
    with suppress(OptionError):  # which speaks of tiers
        found = Tier("memory", held).quota_bytes
        if found is not None:
            return found
    raise OptionError(f"--held {held!r} is not a size", hint='Write "1GiB", for example.')
