"""The copy that a service keeps of a data file on this node (docs/tiers.md): pages and values then come out of its
memory, as far as it has them."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pario.lmdb.store import Store

__all__ = ["peers_of_service", "use_service"]

_log = logging.getLogger("pario")


def use_service(store: Store) -> None:
    """Let `store` read from the copy of the service that PARIO_SERVICE names, which brings the whole file from now on.
    Without one a warning says why, and everything is read from the file."""
    folder = os.environ.get("PARIO_SERVICE")
    if folder:
        found = _copy(store, folder)
        if found is not None:
            store.read_copy(*found)
    elif folder is None and os.environ.get("PARIO_TIERS"):
        _tell_how()


@cache
def _tell_how() -> None:
    _log.info(
        "PARIO_TIERS is set, but lmdb.open reads copies of a service only: start the script by `python -m pario run`, "
        "or a service by `python -m pario serve` (docs/tiers.md)"
    )


def _copy(store: Store, folder: str) -> tuple[Any, int] | None:
    """(the memory tier, the descriptor of the lease)"""
    # Not before it is wanted: the drop-in begins faster than these modules are imported.
    from pario.errors import ParioError
    from pario.stage.asking import CHUNK_BYTES, ask_service, here, identity_of
    from pario.stage.grid import Grid
    from pario.stage.served import ServedTier

    grid = Grid(store.snapshot.file_bytes, CHUNK_BYTES)
    lease = -1
    try:
        identity = identity_of(store.file, store.snapshot)
        if not store.is_newest():  # the identity is that of a newer state
            return None
        path = os.path.abspath(store.file.path)
        told, lease = ask_service(here(folder), path, identity, grid, fill=True)
        if told is not None and told.paths is not None:
            return ServedTier.attached(grid, told.paths), lease
    except (OSError, ParioError) as e:
        _log.warning("the memory of the node's service cannot be used for %s: %s", store.file.path, e)
    if lease >= 0:
        os.close(lease)
    return None


def peers_of_service(store: Store) -> Any:
    """Whom to ask for chunks of the copy that `store` reads, a `Peers`, which the caller closes; None without one."""
    folder, tier = os.environ.get("PARIO_SERVICE"), store.copy
    if not folder or tier is None:
        return None
    from pario.stage.asking import ask_service, here, identity_of, peers_told

    identity = identity_of(store.file, store.snapshot)
    told, lease = ask_service(here(folder), os.path.abspath(store.file.path), identity, tier.grid)
    if lease >= 0:
        os.close(lease)  # the store has one
    return None if told is None else peers_told(told, identity, tier.grid)
