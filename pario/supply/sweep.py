"""Brings a cold file of this node's disk into the page cache, from its beginning to its end, while an epoch in random
order begins.

    first rank of the node, a thread   readahead(2), window after window --> page cache
    all ranks of the node              read their records as ever: out of the page cache, as soon as they are there

The sweep delivers nothing, so that no batch depends on it. Where it is worth its time says plan/sweep.py. Nothing is
measured or swept for a loop that hardly waits: it would gain nothing, and its own reads would take longer. (DLIO, 7,680
records of 147 KB, two ranks, steps of 39 ms, cold disk: utilisation 97.2 %, first batch 0.04 s; with the sweep from the
beginning on 95.4 % and 0.40 s; medians of five runs in turn.)
"""

from __future__ import annotations

import logging
import math
import threading
import time

import numpy as np

from pario import machine
from pario.errors import ParioError
from pario.fetch.base import Fetcher
from pario.plan.stream import Work
from pario.plan.sweep import Choice, Figures, choose, no_room
from pario.supply.base import Context
from pario.text import decimal_bytes
from pario.threads import start_thread

__all__ = ["KNOB", "Sweep"]

_log = logging.getLogger("pario")

#: its name among the published knobs; the value: bytes that are read so
KNOB = "sweep_bytes"
#: The loop waits if that takes this part of its time. The first batch does not count: everybody waits for that.
_WAITS = 0.25
#: The records whose places in the page cache are asked for, and those that are read at random.
_SAMPLE = 64
#: The long reads that are measured: so many of so many bytes.
_LONG, _LONG_BYTES = 8, 1 << 20
#: A file of which the page cache lacks less is not cold. (choose.py calls it cached above 0.98.)
_COLD = 0.02
#: Bytes of a part of a window: where several files are joined, each begins at a multiple of them.
_PART = 64 << 10
#: Of a window that was asked for, this part must be there a moment later, or the kernel takes no advice here.
_OBEYED = 0.5


class Sweep:
    """Of the first epoch that reads a cold file; on the first rank of a node. One thread calls the public methods."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._fetcher: Fetcher = context.reader.file.pool.fetcher
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._work: Work | None = None  # until it is decided
        self._batches = 0
        self._before = 0.0, 0.0  # seconds of waiting and of the caller, until the first batch was handed out

    def begin(self, work: Work) -> None:
        """A loop begins. Whether a sweep helps it is decided when it is seen to wait."""
        if self._is_possible(work):
            self._work = work
            self._decided(0, "the loop does not wait for bytes")

    def look(self, position: int) -> None:
        """The loop has come to this position of its epoch: measure, decide and read, in a thread, if it waits."""
        work, stats = self._work, self._context.stats
        if work is None:
            return
        self._batches += 1
        now = stats.waiting, stats.consumer  # until the batch before this one was handed out
        if self._batches == 2:
            self._before = now
        waited, away = (now[0] - self._before[0], now[1] - self._before[1])
        if self._batches > 3 and waited > _WAITS * (waited + away):
            self._work = None
            try:
                self._thread = start_thread("pario-sweep", self._run, work, position)
            except ParioError as e:
                self._decided(0, f"it did not begin: {e}")

    def _run(self, work: Work, position: int) -> None:
        """The thread."""
        path, nbytes = self._context.reader.path, self._fetcher.nbytes
        try:
            choice = self._choose(work, position)
            if choice is None or self._stop.is_set():
                return
            self._decided(nbytes if choice.sweep else 0, choice.reason)
            if choice.sweep:
                _log.info("%s is read whole, %s: %s", path, decimal_bytes(nbytes), choice.reason)
                self._read()
        except ParioError as e:  # of the store: whoever needs these bytes meets it again; or the file was closed
            self._decided(0, f"it did not begin: {e}")

    def _decided(self, nbytes: int, reason: str) -> None:
        self._context.reader.file.knobs.decided(KNOB, nbytes, reason)

    def _is_possible(self, work: Work) -> bool:
        """False: the file is not on a disk of this node, or not cold, or it is not read at random."""
        context, fetcher = self._context, self._fetcher
        if context.stream.shuffle != "global" or not fetcher.read_ahead_bytes or not context.reader.index.is_complete:
            return False
        return self._left(work.start) > 2 * _SAMPLE and self._are_cold(self._places(work, work.start))

    def _left(self, position: int) -> int:
        """Records that this node still needs from this position of the epoch on."""
        seats = self._context.seats
        return (self._context.stream.n - position) * seats.here // seats.count

    def _places(self, work: Work, position: int) -> np.ndarray:
        """Of the records at this position of the epoch: in a permutation, as random a sample as any."""
        numbers = work.order.ids(position, min(position + _SAMPLE, self._context.stream.n))
        return self._context.reader.index.places(self._context.ids_of(numbers, work.order))

    def _are_cold(self, places: np.ndarray) -> bool:
        """False also if the system does not say. Asking makes the kernel begin to read them."""
        share = self._fetcher.cached_share(np.ascontiguousarray(places["offset"]))
        return share is not None and 1 - share >= _COLD

    def _choose(self, work: Work, position: int) -> Choice | None:
        """None: nothing to decide any more."""
        context, fetcher, left = self._context, self._fetcher, self._left(position)
        if left <= 2 * _SAMPLE:  # not worth a measurement
            return None
        # The epoch's last records are the last that anybody has asked for.
        end = context.stream.n
        if not self._are_cold(self._places(work, end - 2 * _SAMPLE)):
            return None
        places = self._places(work, end - _SAMPLE)
        options, world = context.options, context.world
        room = machine.memory(swap=False)[1] - world.node_size * options.held_bytes - options.slots * options.slot_bytes
        return no_room(fetcher.nbytes, room) or choose(
            Figures(fetcher.nbytes, left * context.width, *self._measure(places))
        )

    def _measure(self, places: np.ndarray) -> tuple[float, float]:
        """(seconds of a record at random, seconds of a byte of a long read). Raises ReadError.

        All ranges are asked for before the first is waited for: this is the best that reading at random can come to.
        (Through a pool of 8 threads the sample took 94 us per record of 3 KB and 485 us per record of 150 KB, while
        epochs took 20 and 120 us, beside other work: the sweep seemed too good, and made those of 150 KB slower.)
        So short a sample still makes reading at random look slower than it is.
        """
        fetcher = self._fetcher
        long_bytes = min(_LONG_BYTES, max(1, fetcher.nbytes // _LONG))
        first = np.linspace(0, fetcher.nbytes - long_bytes, _LONG).astype(np.int64)
        single = _seconds(fetcher, np.ascontiguousarray(places["offset"]), np.ascontiguousarray(places["nbytes"]))
        long = _seconds(fetcher, first, np.full(_LONG, long_bytes))
        return single / len(places), long / (_LONG * long_bytes)

    def _read(self) -> None:
        """The thread: one window is on its way while the one before it is waited for."""
        fetcher, window = self._fetcher, max(self._context.options.slot_bytes, self._fetcher.read_ahead_bytes)
        before = 0
        try:
            for begin in range(0, fetcher.nbytes, window):
                if self._stop.is_set():
                    return
                end = min(fetcher.nbytes, begin + window)
                parts = np.arange(begin, end, _PART)  # no part lies in two files
                fetcher.advise(parts, np.minimum(_PART, end - parts), 0)
                if before:
                    fetcher.pread(before - 1, 1)  # comes when the window is there
                if begin == window and not self._obeyed(before):
                    return
                before = end
        except ParioError as e:  # the file was closed, or the ranks that read it meet the same
            _log.debug("the sweep over %s ends: %s", fetcher.path, e)

    def _obeyed(self, nbytes: int) -> bool:
        share = self._fetcher.cached_share(np.linspace(0, nbytes - 1, _SAMPLE).astype(np.int64), _OBEYED)
        if share is None or share >= _OBEYED:
            return True
        self._decided(0, "the kernel reads nothing ahead on demand here")
        return False

    def end(self, limit_s: float = math.inf) -> bool:
        """Read no more; returns whether the thread has ended within `limit_s` seconds. Idempotent; any thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(min(limit_s, threading.TIMEOUT_MAX))
        return self._thread is None or not self._thread.is_alive()


def _seconds(fetcher: Fetcher, begins: np.ndarray, nbytes: np.ndarray) -> float:
    """Until the kernel has brought all of these bytes."""
    begin = time.perf_counter()
    fetcher.advise(begins, nbytes, 0)
    for last in (begins + np.maximum(nbytes, 1) - 1).tolist():
        fetcher.pread(last, 1)
    return time.perf_counter() - begin
