"""`cache`: the copies that tiers keep on the disks of the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pario.comm.base import AnyWorld, together
from pario.comm.launcher import node_name
from pario.comm.world import get_world
from pario.commands.screen import counted, decimal_bytes, screen, table
from pario.stage.copies import Copy, copies_below, remove, verify

__all__ = ["clean_copies", "list_copies", "verify_copies"]

T = TypeVar("T")


def list_copies(folders: Sequence[str]) -> int:
    """Collective over all ranks; the first one of each node looks."""
    rows = [("node", "folder", "data file", "copied", "on disk", "used", "copy")]
    for node, copies in _on_every_node(folders, lambda copy: copy):
        rows += [
            (node, copy.folder, copy.path or "?", _part(copy), decimal_bytes(copy.disk_bytes), _when(copy), _name(copy))
            for copy in copies
        ]
    screen.say(table(rows, words=True) if len(rows) > 1 else "no copies")
    return 0


def verify_copies(folders: Sequence[str]) -> int:
    """Returns 1 if there is damage. Collective over all ranks; the first one of each node reads."""
    damaged = 0
    for node, found in _on_every_node(folders, lambda copy: (copy, *verify(copy))):
        for copy, right, wrong in found:
            damaged += wrong
            words = f"{counted(wrong, 'chunk')} damaged, which jobs fetch again" if wrong else "no damage"
            screen.say(f"{node}: {_name(copy)} of {copy.path or '?'}: {counted(right + wrong, 'chunk')}, {words}")
    screen.say(f"{damaged} damaged")
    return 1 if damaged else 0


def clean_copies(folders: Sequence[str], days: float) -> int:
    """Removes what no job uses and none has used for so many days. Collective over all ranks; the first one of each
    node removes."""
    freed = 0

    def clean(copy: Copy) -> tuple[Copy, bool]:
        return copy, copy.days >= days and remove(copy)

    for node, found in _on_every_node(folders, clean):
        for copy, gone in found:
            freed += copy.disk_bytes if gone else 0
            kept = "in use" if copy.in_use else f"used {_when(copy)}"
            screen.say(f"{node}: {_name(copy)} of {copy.path or '?'} {'removed' if gone else f'kept: {kept}'}")
    screen.say(f"{decimal_bytes(freed)} freed")
    return 0


def _on_every_node(folders: Sequence[str], what: Callable[[Copy], T]) -> list[tuple[str, list[T]]]:
    """(name of the node, what `what` says of each copy), on all ranks. Raises OSError, ParioError."""
    world: AnyWorld = get_world(None)
    with world:
        mine: tuple[str, list[T]] | None = None
        with together(world, "looking after copies"):
            if world.is_leader:
                mine = node_name(), [what(copy) for folder in folders for copy in copies_below(folder)]
        return [each for each in world.allgather(mine) if each is not None]


def _part(copy: Copy) -> str:
    return f"{copy.held_bytes / copy.grid.file_bytes:.0%} of {decimal_bytes(copy.grid.file_bytes)}"


def _when(copy: Copy) -> str:
    return "now" if copy.in_use else f"{copy.days:.1f} days ago"


def _name(copy: Copy) -> str:
    return copy.identity[:12]
