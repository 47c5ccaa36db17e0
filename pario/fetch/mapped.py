"""Reads through a memory mapping (mmap), as LMDB itself does: for studies, and the only file of pario that maps one.

The kernel reads a page when it is touched, and reads ahead as it does for LMDB. A mapping cannot report errors. Each
read first checks the file's size, so a file that was truncated earlier raises `ReadError`, as with the other fetchers.
If the file is truncated during the copy, or the store fails then, the process ends with SIGBUS, like every program that
uses LMDB.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np

from pario.errors import FileError
from pario.fetch.base import read_error
from pario.fetch.file import FileFetcher
from pario.kernels.pack import copy_ranges


class MappedFetcher(FileFetcher):
    """Copies out of a mapping of the whole file, without the GIL. Metadata comes by pread."""

    def __init__(self, path: str, via: str | None = None) -> None:
        super().__init__(path, via)
        self._map: mmap.mmap | None = None  # with the kernel's default read-ahead
        try:
            self._map = mmap.mmap(self._fd, self.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            self._bytes = np.frombuffer(self._map, np.uint8)
        except (OSError, ValueError) as e:
            super().close()
            raise FileError(f"cannot map it into memory: {e}", path=path, hint="A recipe without mmap reads it.") from e

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        offsets, sizes, starts = self._checked(reads, out, starts)
        if not len(offsets):
            return
        sizes = np.minimum(sizes, self.nbytes - offsets)
        there = min(os.fstat(self._fd).st_size, self.nbytes)
        short = np.flatnonzero((offsets < 0) | (sizes < 0) | (sizes > there - offsets))
        if len(short):
            offset, wanted = int(offsets[short[0]]), int(sizes[short[0]])
            raise read_error(self.path, offset, wanted, max(0, there - offset), 0)
        copy_ranges(self._bytes, offsets, sizes, out, starts, np.ones(len(offsets), bool))

    def close(self) -> None:
        mapping, self._map = self._map, None
        self._bytes = np.empty(0, np.uint8)
        if mapping is not None:
            with suppress(BufferError):  # a thread still copies from it; it is unmapped with the last view
                mapping.close()
        super().close()
