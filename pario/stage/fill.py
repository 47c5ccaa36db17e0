"""Brings chunks into the memory tier, in the background and in the order of their first use."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from pario.control.depth import Depth
from pario.control.knobs import Knob
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
    inflight : reads in flight, a fixed number, or a knob that follows what the reads of the store take
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
        inflight: int | Knob,
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
        self._knob = Knob("inflight", inflight, inflight, inflight) if isinstance(inflight, int) else inflight
        self._depth = Depth(self._knob, day=time.time() - time.perf_counter())
        self._lock = threading.Lock()  # guards the iterator, the depth but its knob, the two above, the three below
        self._active = 0  # threads that bring, or will when they have started
        self._stopped = False
        self.error: BaseException | None = None
        self._workers = Workers("pario-stage", self._knob.value)
        memory.announce(True)
        try:
            self._let_more_come()
        except BaseException:
            memory.announce(False)
            raise

    def _let_more_come(self) -> None:
        """Until as many bring as the knob says. Raises ParioError if not even one can."""
        self._workers.resize(self._knob.value)
        with self._lock:
            more = max(0, self._knob.value - self._active)
            self._active += more
        came = False
        try:
            came = self._workers.put(*[self._run] * more)
        finally:
            if not came:
                with self._lock:
                    self._active -= more

    def _run(self) -> None:
        try:
            while (chunk := self._next()) is not None:
                if self._bring(chunk):
                    self._let_more_come()
        except BaseException as e:
            self._fail(e)
        with self._lock:
            self._active -= 1
            if not self._active:
                self._memory.say_whole(self._used)
                self._memory.announce(False)

    def _bring(self, chunk: int) -> bool:
        """Returns whether the depth has changed."""
        stored = turned = False
        begin = time.perf_counter()
        with self._lock:
            if not self._under_way:
                self._busy_since = begin
            self._under_way += 1
            self._depth.begin(begin, self._under_way)
        try:
            stored = self._staged.bring(chunk)
        finally:
            now = time.perf_counter()
            with self._lock:
                self._under_way -= 1
                self._stats.read += now - self._busy_since
                self._stats.reading += now - begin
                self._busy_since = now
                if stored:  # what other tiers, nodes and processes bring says nothing about the store
                    turned = self._depth.end(begin, now, 1, self._memory.grid.chunk_bytes)
        return turned

    def _next(self) -> int | None:
        with self._lock:
            if self._stopped or self._memory.is_full or self._active > self._knob.value:
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
