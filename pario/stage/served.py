"""The memory tier of a node's service, as another process of the node sees it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pario.stage.memory import MemoryTier
from pario.stage.states import ChunkStates

__all__ = ["ServedTier"]


class _States(ChunkStates):
    """The service's word that chunks are on their way is nothing to wait for: it may have died since."""

    def wait(self, chunks: np.ndarray, check: Callable[[], None], every_s: float) -> bool:
        check()
        return self.generations(chunks) is not None


class ServedTier(MemoryTier):
    """Memory that the service fills. This process reads it, and asks the service for chunks; see `ask_by`."""

    name = "service"
    asks = True
    _states_kind = _States
    _ask: Callable[[int], bool] | None = None

    def ask_by(self, ask: Callable[[int], bool], budget: int) -> None:
        """From now on `fill` calls ask(chunk), which returns True if the service has the chunk then.

        budget : bytes that the service has for this dataset
        """
        self._ask, self.budget = ask, budget

    @property
    def is_full(self) -> bool:
        """The service knows."""
        return not self._open

    def fill(self, chunk: int, read: Callable[[np.ndarray], None]) -> bool:
        return self._ask is not None and self._ask(chunk)
