"""What others of this node hold of a data file: the copy of a service (docs/tiers.md), and what was announced in this
process or in the one that started it (ahead.py). Pages and values then come out of their memory, as far as they have
them. And what the control plane lets this process read of the store.

Processes that multiprocessing starts (spawn, forkserver: a DataLoader's workers among them) are told of it first.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pario.lmdb.store import Store
    from pario.lmdb.told import ToldMemory
    from pario.plane.agent import Agent

_log = logging.getLogger("pario")

#: Identity of a file's state -> the ToldMemory with what is announced of it. A forked process inherits it.
announced: dict[bytes, Any] = {}


#: Each store looks once at least: the process that started this one may have told of something.
_news = 1


def announce(identity: bytes, memory: ToldMemory) -> None:
    global _news
    announced[identity] = memory
    _news += 1


def limits() -> Agent | None:
    """Those of the control plane, if there is one. They stay until the process ends: one that opens a file for each
    read would begin anew each time."""
    if not os.environ.get("PARIO_CONTROL"):
        return None
    from pario.plane.joining import store_agent  # few processes have a control plane

    with store_agent() as agent:
        if agent is not None:
            agent.hold()
    return agent


def use_announced(store: Store) -> None:
    """Let `store` read what is announced of its state of the file, if anything is. Costs nothing without news."""
    if store.heard == _news:
        return
    store.heard = _news
    paths: dict[bytes, tuple[str, str]] = _told_by_parent("announced") or {}
    if store.copy is not None or not (paths or announced):
        return
    from pario.errors import ParioError
    from pario.fetch.snapshot import identity_of
    from pario.lmdb.told import ToldMemory

    try:
        identity = identity_of(store.file, [store.snapshot])
        if identity in paths and identity not in announced:
            announced[identity] = ToldMemory.attached(paths.pop(identity))
        if identity in announced and store.is_newest():
            store.read_announced(announced[identity])
    except (OSError, ParioError) as e:  # anyone who announced has ended
        _log.debug("%s: what is announced cannot be used: %s", store.file.path, e)


def use_service(store: Store) -> None:
    """Let `store` read from the copy of the service that PARIO_SERVICE names, which brings the whole file from now on.
    Without one a warning says why, and everything is read from the file."""
    folder = os.environ.get("PARIO_SERVICE")
    if folder:
        # Not before it is wanted: the drop-in begins faster than this module is imported.
        from pario.tiers.served import served_copy

        found = served_copy(folder, store.file, store.snapshot, store.is_newest)
        if found is not None:
            store.read_copy(found)
    elif folder is None and os.environ.get("PARIO_TIERS"):
        _tell_how()


@cache
def _tell_how() -> None:
    _log.info(
        "PARIO_TIERS is set, but lmdb.open reads copies of a service only: start the script by `python -m pario run`, "
        "or a service by `python -m pario tiers serve` (docs/tiers.md)"
    )


def peers_of_service(store: Store) -> Any:
    """Whom to ask for chunks of the copy that `store` reads, a `Peers`, which the caller closes; None without one."""
    folder, tier = os.environ.get("PARIO_SERVICE"), store.copy
    if not folder or tier is None:
        return None
    from pario.fetch.snapshot import identity_of
    from pario.tiers.asking import ask_service, here, peers_told

    identity = identity_of(store.file, [store.snapshot])
    told, lease = ask_service(here(folder), os.path.abspath(store.file.path), identity, tier.grid)
    if lease >= 0:
        os.close(lease)  # the store has one
    return None if told is None else peers_told(told, identity, tier.grid)


# -- what processes that multiprocessing starts are told first ---------------------------------------------------------

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


def _told_by_parent(name: str) -> Any:
    """What the process that started this one told it when it did; None if nothing."""
    process = sys.modules.get("multiprocessing.process")
    return None if process is None else getattr(process.BaseProcess, _ATTRIBUTE, {}).get(name)
