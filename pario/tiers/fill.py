"""Brings chunks into the tiers, in the background and in the order of their first use."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from pario.errors import ClosedError
from pario.fetch.pool import ReadPool
from pario.stats.rank import RankStats
from pario.tiers.base import AnyTier
from pario.tiers.staged import StagedFetcher

#: told of an error
Told = Callable[[BaseException], object]


class Filler:
    """What the threads of a pool bring while nobody waits for other reads. Meanwhile the tier says that waiting for a
    chunk has a point.

    pool : of the rank that fills the tier
    order : the chunks, as they are needed
    stats : counts the time of these reads
    failed(error) : called once, by a thread, if a chunk cannot be read; no more are brought then
    """

    def __init__(
        self, pool: ReadPool, staged: StagedFetcher, tier: AnyTier, order: Iterator[int], stats: RankStats, failed: Told
    ) -> None:
        self._staged, self._tier = staged, tier
        self._order, self._failed, self._stats = order, failed, stats
        self._turn = threading.Condition()  # guards the iterator and those below
        self._under_way = 0
        self._stopped = self._is_last = False
        self.error: BaseException | None = None
        tier.announce(True)
        try:
            pool.work_behind(self)
        except BaseException:
            tier.announce(False)
            raise

    def next(self) -> int | None:
        with self._turn:
            while not (self._stopped or self._is_last or self._tier.is_full):
                try:
                    chunk = next(self._order, None)
                except BaseException as e:  # of the index
                    self._fail(e)
                    break
                if chunk is None:
                    break
                self._under_way += 1
                if not self._staged.is_others(chunk):
                    return chunk
                self._staged.askers.run(partial(self._ask, chunk))
            self._is_last = True
            self._end()
            return None

    def _ask(self, chunk: int) -> None:
        if self._stopped:
            self._brought(None)
        else:
            self._staged.bring(chunk, self._brought)

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
        first = self.error is None and not (self._stopped and isinstance(error, ClosedError))
        self._stopped = True
        if first:
            self.error = error
            self._failed(error)

    @property
    def is_over(self) -> bool:
        """No thread brings chunks any more."""
        return (self._is_last or self._stopped) and not self._under_way

    def cancel(self, limit_s: float = math.inf) -> bool:
        """Bring no more; returns whether the threads ended within `limit_s` seconds. Idempotent."""
        self._stopped = True  # without the lock: the garbage collector may call this in a thread that holds it
        if not limit_s:
            return not self._under_way
        with self._turn:
            self._end()
            return self._turn.wait_for(lambda: not self._under_way, min(limit_s, threading.TIMEOUT_MAX))
