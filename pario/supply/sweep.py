"""Brings a cold file of this node's disk into the page cache, from its beginning to its end, while an epoch in random
order begins.

    first rank of the node, a thread   readahead(2), window after window --> page cache
    all ranks of the node              read their records as ever: out of the page cache, as soon as they are there

The sweep delivers nothing, so that no batch depends on it. Where it is worth its time says plan/sweep.py.
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
from pario.plan.sweep import Choice, Figures, choose
from pario.supply.base import Context
from pario.text import decimal_bytes
from pario.threads import start_thread

__all__ = ["KNOB", "Sweep"]

_log = logging.getLogger("pario")

#: its name among the published knobs; the value: bytes that are read so
KNOB = "sweep_bytes"
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
    """Of the first epoch that reads a cold file; on the first rank of a node. One thread calls the methods."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._fetcher: Fetcher = context.reader.file.pool.fetcher
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, work: Work) -> None:
        """Measure, decide, publish the decision, and start reading if that is it."""
        path, nbytes = self._context.reader.path, self._fetcher.nbytes
        try:
            choice = self._choose(work)
            if choice is None:
                return
            self._decided(nbytes if choice.sweep else 0, choice.reason)
            if choice.sweep:
                _log.info("%s is read whole, %s: %s", path, decimal_bytes(nbytes), choice.reason)
                self._thread = start_thread("pario-sweep", self._read)
        except ParioError as e:  # of the store: whoever needs these bytes meets it again
            self._decided(0, f"it did not begin: {e}")

    def _decided(self, nbytes: int, reason: str) -> None:
        self._context.reader.file.knobs.decided(KNOB, nbytes, reason)

    def _choose(self, work: Work) -> Choice | None:
        """None: nothing to decide. The file is not on a disk of this node, or not cold, or it is not read at random."""
        context, fetcher = self._context, self._fetcher
        index, options, world = context.reader.index, context.options, context.world
        if context.stream.shuffle != "global" or not index.is_complete or not fetcher.read_ahead_bytes:
            return None
        left = (context.stream.n - work.start) * context.seats.here // context.seats.count
        if left <= _SAMPLE:  # not worth a measurement
            return None
        # The first numbers of a permutation are as random a sample as any; they are read next.
        numbers = work.order.ids(work.start, min(work.start + _SAMPLE, context.stream.n))
        places = index.places(context.ids_of(numbers, work.order))
        share = fetcher.cached_share(np.ascontiguousarray(places["offset"]))
        if share is None or 1 - share < _COLD:
            return None
        room = machine.memory(swap=False)[1] - world.node_size * options.held_bytes - options.slots * options.slot_bytes
        found = Figures(fetcher.nbytes, left * context.width, 0.0, 0.0, room)
        if fetcher.nbytes <= room:
            record_s, byte_s = self._measure(places)
            found = found._replace(record_s=record_s, byte_s=byte_s)
        return choose(found)

    def _measure(self, places: np.ndarray) -> tuple[float, float]:
        """(seconds of a record at random, seconds of a byte of a long read). Raises ReadError.

        All ranges are asked for before the first is waited for: this is the best that reading at random can come to.
        (Through a pool of 8 threads the sample took 94 us per record of 3 KB and 485 us per record of 150 KB, while
        epochs took 20 and 120 us, beside other work: the sweep seemed too good, and made those of 150 KB slower.)
        So short a sample still makes reading at random look twice as slow as it is, or more: where both ways take
        about as long, the sweep may lose some hundredths of a second.
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
