"""`mount`: records as files in a folder."""

from __future__ import annotations

import os

from pario.commands.run_service import script_tiers, use_own_service
from pario.commands.screen import screen
from pario.errors import OptionError
from pario.files.fuse import check, mount
from pario.files.tree import Tree

__all__ = ["read_sources", "run_mount"]


def run_mount(sources: tuple[str, ...], folder: str, extensions: bool, others: bool) -> int:
    """Serves until a signal or an unmount."""
    check(folder)
    tiers = script_tiers()
    if tiers:
        use_own_service(tiers)
    with Tree(read_sources(sources), extensions=extensions) as tree:
        mount(tree, folder, others=others, ready=lambda: screen.say(f"{', '.join(sources)} mounted at {folder}"))
    return 0


def read_sources(words: tuple[str, ...]) -> dict[str, str]:
    """Folder -> LMDB, of "NAME=LMDB" or "LMDB"; "" is the root, of a single one without a name. Raises OptionError."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or os.path.exists(word):
            path = word
            name = "" if len(words) == 1 else os.path.basename(os.path.abspath(word))
        elif not name:
            raise OptionError(f"{word!r} has no name before the =")
        if name in found:
            raise OptionError(f"two LMDBs would be the folder {name}", hint="Name them: NAME=LMDB.")
        found[name] = path
    return found
