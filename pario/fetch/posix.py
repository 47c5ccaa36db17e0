"""Reads through the page cache."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property

import numpy as np

from pario.fetch.base import Compare, Form, RowReader, read_error
from pario.fetch.file import FileFetcher
from pario.kernels import reads as kernels
from pario.kernels.runs import LONGEST_GAP
from pario.machine import read_ahead_bytes

__all__ = ["PosixFetcher"]

#: IOV_MAX: parts of one preadv.
_MOST_PARTS = 1024
#: Values that are compared with nothing.
_NOTHING = Compare(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.bool_))
#: The least bytes per call of readahead(2); kernels prefetch at most their own read-ahead per call.
_ADVICE_BYTES = 128 << 10


class PosixFetcher(FileFetcher, RowReader):
    """pread through the page cache. The kernel's read-ahead is off, so that only planned bytes are read, besides what
    `advise` asks for."""

    def __init__(self, path: str, via: str | None = None) -> None:
        super().__init__(path, via)
        self._tell("POSIX_FADV_RANDOM")

    @cached_property
    def read_ahead_bytes(self) -> int:  # type: ignore[override]
        return read_ahead_bytes(self._status.st_dev) or 0

    def advise(self, begins: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        self._check_open()
        kernels.advise_ranges(self._read_fd, begins, nbytes, gap, max(self.read_ahead_bytes, _ADVICE_BYTES))

    def cached_share(self, offsets: np.ndarray, enough: float = 0.0) -> float | None:
        # A read with RWF_NOWAIT returns only bytes that are there. It waits for nothing, but may let the kernel fetch
        # the page that it missed.
        flag = getattr(os, "RWF_NOWAIT", None)
        if flag is None or not len(offsets):
            return None
        self._check_open()
        byte = bytearray(1)
        there, left = 0, len(offsets)
        try:
            for offset in offsets.tolist():
                with contextlib.suppress(BlockingIOError):
                    there += os.preadv(self._fd, [byte], offset, flag) > 0
                left -= 1
                if there + left < enough * len(offsets):
                    break
        except OSError:  # a file system without RWF_NOWAIT
            return None
        return there / len(offsets)

    # -- rows ----------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> RowReader:  # type: ignore[override]
        return self

    def read_ranges(
        self, begins: np.ndarray, nbytes: np.ndarray, gap: int, out: np.ndarray
    ) -> tuple[np.ndarray, int, int] | None:
        self._check_open()
        starts = np.empty(len(begins), np.int64)
        first, wanted, errno, got, reads, total = kernels.read_ranges(self._read_fd, begins, nbytes, gap, out, starts)
        if first >= 0:
            raise read_error(self.path, int(first) + int(got), int(wanted), int(got), int(errno))
        return None if errno else (starts, int(reads), int(total))

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
        self._check_open()
        vector = np.empty((min(_MOST_PARTS, 4 * len(begins) + 4), 2), np.uint64)
        trash = np.empty(min(gap, LONGEST_GAP), np.uint8)
        failed, errno, got, reads, wanted = kernels.read_split(
            self._read_fd, begins, nbytes, tuple(form), gap, edges, out, vector, trash, *(compare or _NOTHING)
        )
        if failed < 0:
            return int(reads), int(wanted)
        if errno == -2:
            raise IndexError(f"{len(begins)} values do not fit into {out.nbytes} bytes and edges {edges.shape}")
        if errno != -1:
            raise read_error(self.path, int(failed) + int(got), int(wanted), int(got), int(errno))
        return None
