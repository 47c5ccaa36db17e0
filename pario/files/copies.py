"""What the service of this node has of a data file in memory (docs/tiers.md): bytes come from there as far as it has
them, and it brings the whole file from now on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from pario.errors import ParioError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.meta import Snapshot

__all__ = ["ServedCopy", "served_copy"]

_log = logging.getLogger("pario")


class ServedCopy:
    """A copy of one state of a data file, which nobody changes. Any thread.

    lease : a descriptor that is closed in the end; as long as it is open, the service keeps the copy
    """

    def __init__(self, tier: Any, lease: int) -> None:
        self._tier, self._lease = tier, lease

    def read(self, offset: int, out: memoryview) -> bool:
        """Fill `out` with the bytes of the file from here on. False: not all of them are here."""
        import numpy as np

        return bool(self._tier.read(offset, np.frombuffer(out, np.uint8)))

    def lend(self, offset: int, nbytes: int) -> tuple[int, int, Callable[[], bool]] | None:
        """(a descriptor of a file that holds these bytes, where they begin in it, whether it holds them still), or None
        if not all of them are here."""
        part = self._tier.lend(offset, nbytes)
        return None if part is None else (part.fd, part.offset, part.still)

    def __del__(self) -> None:
        os.close(self._lease)


def served_copy(file: PosixFetcher, snapshot: Snapshot) -> ServedCopy | None:
    """None without PARIO_SERVICE, and where its service cannot serve this state of the file, which a warning says."""
    folder = os.environ.get("PARIO_SERVICE")
    if not folder:
        return None
    # Not before it is wanted: a view begins faster than these modules are imported.
    from pario.stage.asking import CHUNK_BYTES, ask_service, here, identity_of
    from pario.stage.grid import Grid
    from pario.stage.served import ServedTier

    grid = Grid(snapshot.file_bytes, CHUNK_BYTES)
    lease = -1
    try:
        identity = identity_of(file, snapshot)
        if read_snapshot(file).txnid != snapshot.txnid:  # the identity may be that of a newer state
            return None
        told, lease = ask_service(here(folder), os.path.abspath(file.path), identity, grid, fill=True)
        if told is not None and told.paths is not None:
            return ServedCopy(ServedTier.attached(grid, told.paths), lease)
    except (OSError, ParioError) as e:
        _log.warning("the memory of the node's service cannot be used for %s: %s", file.path, e)
    if lease >= 0:
        os.close(lease)
    return None
