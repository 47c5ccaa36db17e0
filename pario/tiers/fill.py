"""Brings chunks into the tiers, in the background and in the order of their first use."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from pario.errors import ClosedError
from pario.fetch.pool import ReadPool
from pario.stats.rank import RankStats
from pario.threads import Condition
from pario.tiers.base import AnyTier
from pario.tiers.staged import ASKERS, StagedFetcher

#: told of an error
Tell = Callable[[BaseException], object]


class Filler:
    """What the threads of a pool bring while nobody waits for other reads, and what others are asked for meanwhile. The
    tier says that waiting for a chunk has a point.

    pool : of the rank that fills the tier
    order : the chunks, as they are needed. Threads that read and those that ask take theirs out of it, each sort in
        this order, and neither waits for the other
    stats : counts the time of these reads
    failed(error) : called once, by a thread, if a chunk cannot be read; no more are brought then
    """

    def __init__(
        self, pool: ReadPool, staged: StagedFetcher, tier: AnyTier, order: Iterator[int], stats: RankStats, failed: Tell
    ) -> None:
        self._staged, self._tier = staged, tier
        self._order, self._failed, self._stats = order, failed, stats
        self._turn = Condition()  # guards the order and those below
        self._mine, self._others = deque[int](), deque[int]()  # taken out of it for threads of the other sort
        self._under_way = 0
        self._stopped = self._is_last = False
        self.error: BaseException | None = None
        tier.announce(True)
        try:
            if not staged.asks:
                pool.work_behind(self)
            for _ in range(ASKERS if staged.asks or staged.peers is not None else 0):
                staged.askers.put(self._ask)
        except BaseException:
            tier.announce(False)
            raise

    def next(self) -> int | None:
        return self._take(self._mine)

    def _take(self, wanted: deque[int]) -> int | None:
        with self._turn:
            while not (wanted or self._stopped or self._is_last or self._tier.is_full):
                try:
                    chunk = next(self._order, None)
                except BaseException as e:  # of the index
                    self._fail(e)
                    break
                if chunk is None:
                    break
                (self._others if self._staged.is_others(chunk) else self._mine).append(chunk)
            if wanted and not self._stopped:
                self._under_way += 1
                return wanted.popleft()
            self._is_last = True
            self._end()
            return None

    def _ask(self) -> None:
        while (chunk := self._take(self._others)) is not None:
            self.bring(chunk)

    def bring(self, what: int) -> int:
        begin = self._stats.begin_reads()
        nbytes = self._staged.bring(what, self._brought)
        self._stats.end_reads(time.perf_counter() - begin)
        return nbytes

    def _brought(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        with self._turn:
            self._under_way -= 1
            self._end()

    def _end(self) -> None:
        """Nobody is at a chunk, and nobody will be."""
        if self.is_over:
            self._tier.announce(False)
            self._turn.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            first = self.error is None and not (self._stopped and isinstance(error, ClosedError))
            self._stopped = True
            self.error = error if first else self.error
        if first:
            self._failed(error)

    @property
    def is_over(self) -> bool:
        """No thread brings chunks any more."""
        return not self._under_way and (self._stopped or (self._is_last and not self._mine and not self._others))

    def cancel(self, limit_s: float = math.inf) -> bool:
        """Bring no more; returns whether the threads ended within `limit_s` seconds. Idempotent."""
        self._stopped = True  # without the lock: the garbage collector may call this in a thread that holds it
        if not limit_s:
            return not self._under_way
        with self._turn:
            self._end()
            return self._turn.wait_for(lambda: not self._under_way, min(limit_s, threading.TIMEOUT_MAX))
