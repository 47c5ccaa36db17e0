"""A fetcher whose requests are traced: which file, which bytes, from when to when (stats/trace.py).

It stands at the store, below tiers and token buckets: what it sees is what the kernel is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from pario import machine
from pario.fetch.base import Guarded, OneFile
from pario.stats.trace import OPEN, PREAD, PROBE, STAT, OpenedFile, Recorder


def open_traced(make: Callable[[], OneFile], recorder: Recorder | None) -> OneFile:
    """The fetcher of one file that `make` opens, traced; as it is without a recorder. Raises what `make` raises."""
    if recorder is None:
        return make()
    begin = time.perf_counter()
    fetcher = TracedFetcher(make(), recorder)
    recorder.request(OPEN, begin, 0, 0, fetcher.number)
    return fetcher


class TracedFetcher(Guarded):
    """Reads of one file. number : of the file, for events"""

    def __init__(self, store: OneFile, recorder: Recorder) -> None:
        super().__init__(store)
        self._recorder = recorder
        status = store.status()
        system = machine.file_system_of(store.path, status.st_dev)
        rotating = machine.is_rotating(status.st_dev)
        path = os.path.abspath(store.path)
        self.number = recorder.file(OpenedFile(path, system.type, system.kind, system.shared, rotating))

    def pread(self, offset: int, nbytes: int) -> bytes:
        begin = time.perf_counter()
        data = self._store.pread(offset, nbytes)
        self._recorder.request(PREAD, begin, 1, len(data), self.number)
        return data

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        begin = time.perf_counter()
        self._store.read(reads, out, starts)
        self._recorder.reads(begin, reads, self.number)

    def read_now(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        begin = time.perf_counter()
        there = self._store.read_now(reads, out, starts)
        if there.any():
            self._recorder.reads(begin, reads[there], self.number)
        return there

    def cached_share(self, offset: int, nbytes: int) -> float | None:
        begin = time.perf_counter()
        share = self._store.cached_share(offset, nbytes)
        self._recorder.request(PROBE, begin, 1, 0, self.number)
        return share

    def is_replaced(self) -> bool:
        begin = time.perf_counter()
        found = self._store.is_replaced()
        self._recorder.request(STAT, begin, 0, 0, self.number)
        return found
