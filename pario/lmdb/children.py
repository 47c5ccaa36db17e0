"""What processes that multiprocessing starts (spawn, forkserver: a DataLoader's workers among them) are told first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["tell_children", "told_by_parent"]

#: An attribute of multiprocessing's class of processes: a child has that class before it can import pario.
_ATTRIBUTE = "_told_by_pario"

_told: dict[str, Callable[[], Any]] = {}


class _Told:
    """Unpickled in a child, it leaves there what the child is told. That needs the standard library only: the child
    unpickles it before it knows where its parent found other modules."""

    def __reduce__(self) -> Any:
        from multiprocessing.process import BaseProcess

        return setattr, (BaseProcess, _ATTRIBUTE, {name: thing() for name, thing in _told.items()})


def tell_children(name: str, thing: Callable[[], Any]) -> None:
    """From now on they are told what `thing` returns when they start: objects of Python's own, except where
    every child is to import pario first of all. A name's earlier thing is replaced."""
    from multiprocessing import spawn

    _told[name] = thing
    prepare = spawn.get_preparation_data
    if getattr(prepare, "tells_of_pario", False):
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "pario": _Told()}

    get_preparation_data.tells_of_pario = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data


def told_by_parent(name: str) -> Any:
    """What the process that started this one told it when it did; None if nothing."""
    process = sys.modules.get("multiprocessing.process")
    return None if process is None else getattr(process.BaseProcess, _ATTRIBUTE, {}).get(name)
