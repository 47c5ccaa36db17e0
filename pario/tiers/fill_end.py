"""Whether a rank that reads by itself what is absent had better wait for the end of the fill."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from pario.tiers.states import ChunkStates

#: Seconds of waiting that nobody minds: what a start takes anyway.
_START_S = 0.25
#: What a rank waits at least for a chunk that is being copied before it reads the bytes itself, in seconds. (The first
#: three epochs of 4 ranks on 2 nodes, all cached: 204, 19, 15 ms with 3 KB records in "global" order, and 257, 125, 182
#: with 150 KB. Without the wait for what the page cache has: 155, 114, 182, and 100, 188, 195, because the fill took
#: only the time that cores were idle.) Twice what the copies under way need, up to _START_S, if that is more: what it
#: read meanwhile would be read twice. (165 MB in key order on two nodes from one disk of 200 MB/s: 182
#: MB are read in 0.82 s; with 20 ms for each wait 190 MB in 0.83 to 0.92 s.)
_COMING_S = 0.02


class FillEnd:
    """The end of the fill of a node's memory, foretold from what its copies have cost.

    A rank that reads from a disk what the fill reads, too, makes the fill take longer: 1.4 times as long for 310 MB in
    "global" order on two ranks (215 ms until the end of the epoch where they wait, 320 where they read). And one that
    reads out of the page cache takes the cores that the fill needs. How many epochs will gain from it nobody knows. So
    it waits as soon as the script has waited for batches as long as the fill still needs: it then waits at most twice
    as long as it had to, whatever comes. (R. M. Karp, On-line algorithms versus off-line algorithms, 1992: the rental
    of skis.) A script that computes while records are read does not wait for batches, nor for the fill. All wait as
    long as a start takes anyway, if the fill ends within that: 41,000 records of 3 KB from a cold disk in "global"
    order take 79 ms, and 99 where the first batches are read meanwhile.

    record_s : seconds of each record that this rank reads by itself, kept up to date by the caller
    """

    record_s = 0.0

    def __init__(self, states: ChunkStates) -> None:
        self._states, self._last = states, 0

    def left(self, waited_s: float) -> int:
        """As `ChunkStates.left`. Each batch asks, before it waits.

        waited_s : seconds that the script has waited for batches until now
        """
        left = self._states.left()
        if left > self._last:  # a fill begins, or chunks were given back
            self._waited_s, self._holds, self._first = waited_s, True, True
        self._last = left
        return left

    def wait(self, chunks: np.ndarray, records: int, waited_s: float, check: Callable[[], None]) -> None:
        """Wait for those of these chunks (i64[n]) that are just being copied, and for all if the fill ends soon.

        records : what this rank would still read by itself in this epoch
        waited_s : as in `left`
        check : called now and then; may raise
        """
        # Nothing foretells the end before a chunk is there.
        coming_s = min(max(_COMING_S, 2 * self._states.coming_s()), _START_S)
        self._states.wait_coming(chunks, check, coming_s, absent=self._first and not self._states.left_s())
        self._first = False
        # What it costs this rank to read by itself is unknown before it does: as long as the fill, for whole epochs.
        limit = max(min(self.record_s * records or _START_S, _START_S), waited_s - self._waited_s)
        end = time.monotonic() + 2 * limit
        while self._holds and 0 < (needs := self._states.left_s()) < limit:
            left, longest = self._states.left(), end - time.monotonic()
            if self._states.wait_coming(chunks, check, min(2 * needs, longest), absent=True):
                break
            # What the first chunks cost may foretell too little. (Without another look a rank read the rest by itself:
            # 20 of 100 ms.)
            self._holds = self._states.left() < left and 2 * needs < longest
