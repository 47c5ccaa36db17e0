"""Reads through the page cache."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cached_property

import numpy as np

from pario.fetch.file import FileFetcher
from pario.kernels.reads import cached_share, read_spans_now


class PosixFetcher(FileFetcher):
    """pread through the page cache. The kernel's read-ahead is off, so that only planned bytes are read."""

    def __init__(self, path: str, via: str | None = None) -> None:
        super().__init__(path, via)
        self._tell(os.POSIX_FADV_RANDOM)

    def read_now(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        if not self._tells:  # memory, most likely: nothing there is worth another thread
            self.read(reads, out, starts)
            return np.ones(len(reads), bool)
        offsets, sizes, starts = self._checked(reads, out, starts)
        there = np.zeros(len(reads), bool)
        read_spans_now(self._read_fd, offsets, sizes, out.ctypes.data, starts, there)
        return there

    @cached_property
    def _tells(self) -> bool:
        """Whether reads that do not wait are possible."""
        with suppress(AttributeError, OSError):
            with suppress(BlockingIOError):
                os.preadv(self._fd, [bytearray(1)], 0, os.RWF_NOWAIT)
            return True
        return False

    def cached_share(self, offset: int, nbytes: int) -> float | None:
        self._check_open()
        share = cached_share(self._read_fd, offset, nbytes)
        return None if share < 0 else float(share)
