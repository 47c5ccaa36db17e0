"""What others of this node hold of a data file, the copy of a service (docs/tiers.md): pages and values then come out
of its memory, as far as it has them. And what the control plane lets this process read of the store.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pario.lmdb.store import Store
    from pario.plane.agent import Agent

_log = logging.getLogger("pario")

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
