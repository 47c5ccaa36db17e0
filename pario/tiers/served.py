"""The memory tier of a node's service, as another process of the node sees it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import numpy as np

from pario.errors import ParioError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import identity_of
from pario.format.meta import Snapshot
from pario.tiers.asking import CHUNK_BYTES, ask_service, here
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.states import ChunkStates

_log = logging.getLogger("pario")


class _States(ChunkStates):
    """The service's word that chunks are on their way is nothing to wait for: it may have died since."""

    def wait(self, chunks: np.ndarray, check: Callable[[], None]) -> bool:
        check()
        return self.generation(chunks, chunks) >= 0


class ServedTier(MemoryTier):
    """Memory that the service fills. This process reads it, and asks the service for chunks; see `ask_by`."""

    name = "service"
    asks = True
    _states_kind = _States
    _ask: Callable[[int], bool] | None = None

    def ask_by(self, ask: Callable[[int], bool], budget: int) -> None:
        """From now on this is asked: ask(chunk), which returns True if the service has the chunk then.

        budget : bytes that the service has for this dataset
        """
        self._ask, self.budget = ask, budget

    @property
    def is_full(self) -> bool:
        """The service knows."""
        return not self._open

    def ask(self, chunk: int) -> bool:
        return self._ask is not None and self._ask(chunk)


class ServedCopy:
    """What the service of this node has of a data file in memory (docs/tiers.md): bytes come from there as far as it
    has them, and it brings the whole file from now on. A copy of one state of the file, which nobody changes. Any
    thread.

    lease : a descriptor that is closed in the end; as long as it is open, the service keeps the copy
    """

    def __init__(self, tier: ServedTier, lease: int) -> None:
        self.tier, self._lease = tier, lease

    def read(self, offset: int, out: memoryview) -> bool:
        """Fill `out` with the bytes of the file from here on. False: not all of them are here."""
        return self.tier.read(offset, np.frombuffer(out, np.uint8))

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self._lease)


def served_copy(
    folder: str, file: PosixFetcher, snapshot: Snapshot, is_current: Callable[[], bool]
) -> ServedCopy | None:
    """The copy of the service in `folder`; None where it cannot serve this state of the file, which a warning says.

    is_current : whether `snapshot` is the newest state
    """
    grid = Grid(snapshot.file_bytes, CHUNK_BYTES)
    lease = -1
    try:
        identity = identity_of(file, [snapshot])
        if not is_current():  # the identity may be that of a newer state
            return None
        told, lease = ask_service(here(folder), os.path.abspath(file.path), identity, grid, fill=True)
        if told is not None and told.path is not None:
            return ServedCopy(ServedTier.attached(grid, told.path), lease)
    except (OSError, ParioError) as e:
        _log.warning("the memory of the node's service cannot be used for %s: %s", file.path, e)
    if lease >= 0:
        os.close(lease)
    return None
