"""Brings chunks into the memory tier, in the background and in the order of their first use."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from pario.errors import ClosedError
from pario.stage.memory import MemoryTier
from pario.stage.staged import StagedFetcher
from pario.stats.rank import RankStats
from pario.threads import Workers

__all__ = ["Filler"]


class Filler:
    """Threads that bring chunks. While they do, the tier says that waiting for a chunk has a point.

    chunks : the chunks in the order in which they are needed
    used : i64[n], all chunks that hold records
    threads : reads in flight
    stats : counts the time of these reads
    failed(error) : called once, by a thread, if a chunk cannot be read; no more are brought then
    """

    def __init__(
        self,
        staged: StagedFetcher,
        memory: MemoryTier,
        chunks: Iterator[int],
        used: np.ndarray,
        *,
        threads: int,
        stats: RankStats,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._staged = staged
        self._memory = memory
        self._chunks = chunks
        self._used = used
        self._failed = failed
        self._stats = stats
        self._under_way = 0
        self._busy_since = 0.0
        self._lock = threading.Lock()  # guards the iterator, the two above and the three below
        self._active = threads
        self._stopped = False
        self.error: BaseException | None = None
        self._workers = Workers("pario-stage", threads)
        memory.announce(True)
        try:
            self._workers.put(*[self._run] * threads)
        except BaseException:
            memory.announce(False)
            raise

    def _run(self) -> None:
        try:
            while (chunk := self._next()) is not None:
                self._bring(chunk)
        except BaseException as e:
            self._fail(e)
        with self._lock:
            self._active -= 1
            if not self._active:
                self._memory.say_whole(self._used)
                self._memory.announce(False)

    def _bring(self, chunk: int) -> None:
        begin = time.perf_counter()
        with self._lock:
            if not self._under_way:
                self._busy_since = begin
            self._under_way += 1
        try:
            self._staged.bring(chunk)
        finally:
            now = time.perf_counter()
            with self._lock:
                self._under_way -= 1
                self._stats.read += now - self._busy_since
                self._stats.reading += now - begin
                self._busy_since = now

    def _next(self) -> int | None:
        with self._lock:
            if self._stopped or self._memory.is_full:
                return None
            return next(self._chunks, None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            first = self.error is None and not (self._stopped and isinstance(error, ClosedError))
            self._stopped = True
            if first:
                self.error = error
        if first:
            self._failed(error)

    @property
    def is_over(self) -> bool:
        """No thread brings chunks any more."""
        return not self._active

    def stop(self, limit_s: float = math.inf) -> bool:
        """Bring no more; returns whether the threads ended within `limit_s` seconds. Idempotent."""
        self._stopped = True  # without the lock: the garbage collector may call this in a thread that holds it
        return self._workers.end(limit_s)
