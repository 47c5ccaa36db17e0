"""Whether a rank that reads by itself what is absent had better wait for the end of the fill."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pario.tiers.states import ChunkStates

#: The longest wait, in seconds: what a start takes anyway.
_LONGEST_S = 0.25


class FillEnd:
    """The end of the fill of a node's memory, foretold by one rank from what it has seen arrive.

    A rank that reads from a disk what the fill reads, too, makes the fill take longer: 1.4 times as long for 310 MB in
    "global" order on two ranks (215 ms until the end of the epoch where they wait, 320 where they read).

    record_s : seconds of each record that this rank reads by itself, kept up to date by the caller
    """

    record_s = 0.0

    def __init__(self, states: ChunkStates) -> None:
        self._states, self._seen_at, self._left = states, 0.0, 0

    def wait(self, chunks: np.ndarray, records: int, check: Callable[[], None]) -> None:
        """Wait for these chunks (i64[n]) if the fill ends soon, and before this rank has read `records` by itself.

        check : called now and then; may raise
        """
        left, now = self._states.left(), time.monotonic()
        if not self._left:
            self._seen_at, self._left = now, left
        brought = self._left - left
        if left and brought > 0:
            needs = left * (now - self._seen_at) / brought
            soon = needs < min(self.record_s * records, _LONGEST_S)
            if soon and not self._states.wait_coming(chunks, check, 2 * needs, absent=True):
                self._left = -1  # it is not as foretold: never again
