"""A fetcher whose requests are traced: which file, which bytes, from when to when (stats/trace.py).

It stands at the store, below tiers and token buckets: what it sees is what the kernel is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from pario import machine
from pario.fetch.base import Compare, Fetcher, Form, OpenFile, RowReader
from pario.stats.trace import ADVISE, OPEN, PREAD, PROBE, ROWS, STAT, OpenedFile, Recorder

__all__ = ["TracedFetcher", "open_traced", "traced"]


def open_traced(make: Callable[[], Fetcher], recorder: Recorder | None) -> Fetcher:
    """The fetcher of one file that `make` opens, traced; as it is without a recorder. Raises what `make` raises."""
    if recorder is None:
        return make()
    begin = time.perf_counter()
    fetcher = TracedFetcher(make(), recorder)
    recorder.request(OPEN, begin, 0, 0, fetcher.number)
    return fetcher


def traced(fetcher: Fetcher | None, recorder: Recorder | None) -> Fetcher | None:
    """An open fetcher of one file, traced from now on."""
    return fetcher if fetcher is None or recorder is None else TracedFetcher(fetcher, recorder)


class TracedFetcher(Fetcher):
    """Reads of one file. store : is closed with this; number : of the file, for events"""

    def __init__(self, store: Fetcher, recorder: Recorder) -> None:
        self._store, self._recorder = store, recorder
        self.path, self.nbytes, self.align, self.staged = store.path, store.nbytes, store.align, store.staged
        (file,) = store.files
        status = file.status()
        system = machine.file_system_of(store.path, status.st_dev)
        self.number = recorder.file(
            OpenedFile(
                os.path.abspath(store.path),
                system.type,
                system.kind,
                system.shared,
                machine.is_rotating(status.st_dev),
                max(512, status.st_blksize),
            )
        )
        self._files = (_TracedFile(file, recorder, self.number),)
        rows = store.rows
        self.rows = None if rows is None else _TracedRows(rows, recorder, self.number)

    @property
    def files(self) -> tuple[OpenFile, ...]:
        return self._files

    @property
    def read_ahead_bytes(self) -> int:  # type: ignore[override]
        return self._store.read_ahead_bytes

    @property
    def long_bytes(self) -> int:  # type: ignore[override]
        return self._store.long_bytes

    def pread(self, offset: int, nbytes: int) -> bytes:
        begin = time.perf_counter()
        data = self._store.pread(offset, nbytes)
        self._recorder.request(PREAD, begin, 1, len(data), self.number)
        return data

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        begin = time.perf_counter()
        self._store.read(reads, out, starts)
        self._recorder.reads(begin, reads, self.number)

    def announce(self, operations: int) -> None:
        self._store.announce(operations)

    def advise(self, begins: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        begin = time.perf_counter()
        self._store.advise(begins, nbytes, gap)
        self._recorder.request(ADVISE, begin, len(begins), int(nbytes.sum()), self.number)

    def cached_share(self, offsets: np.ndarray, enough: float = 0.0) -> float | None:
        begin = time.perf_counter()
        share = self._store.cached_share(offsets, enough)
        # It may have ended before, with fewer looks.
        self._recorder.request(PROBE, begin, len(offsets) if (share or 0.0) >= enough else 0, 0, self.number)
        return share

    def close(self) -> None:
        self._store.close()


class _TracedFile(OpenFile):
    def __init__(self, file: OpenFile, recorder: Recorder, number: int) -> None:
        self._file, self._recorder, self._number = file, recorder, number
        self.path = file.path

    def fileno(self) -> int:
        return self._file.fileno()

    def status(self) -> os.stat_result:
        return self._file.status()

    def is_replaced(self) -> bool:
        begin = time.perf_counter()
        found = self._file.is_replaced()
        self._recorder.request(STAT, begin, 0, 0, self._number)
        return found


class _TracedRows(RowReader):
    """Rows from the page cache, whose single requests only the kernels know."""

    def __init__(self, rows: RowReader, recorder: Recorder, number: int) -> None:
        self._rows, self._recorder, self._number = rows, recorder, number

    def read_ranges(
        self, begins: np.ndarray, nbytes: np.ndarray, gap: int, out: np.ndarray
    ) -> tuple[np.ndarray, int, int] | None:
        begin = time.perf_counter()
        done = self._rows.read_ranges(begins, nbytes, gap, out)
        if done is not None:
            self._recorder.request(ROWS, begin, done[1], done[2], self._number)
        return done

    def read_split(
        self,
        begins: np.ndarray,
        nbytes: np.ndarray,
        form: Form,
        gap: int,
        edges: np.ndarray,
        out: np.ndarray,
        compare: Compare | None = None,
    ) -> tuple[int, int] | None:
        begin = time.perf_counter()
        done = self._rows.read_split(begins, nbytes, form, gap, edges, out, compare)
        if done is not None:
            self._recorder.request(ROWS, begin, *done, self._number)
        return done
