"""The common part of all file fetchers: an open file, read by pread."""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np

from pario.errors import ClosedError, FileError
from pario.fetch.base import OneFile, read_error
from pario.kernels.reads import read_spans
from pario.machine import absolute


class FileFetcher(OneFile):
    """An open file. It closes at the latest with the last reference: a thread that still reads keeps it open.

    via : another name of the file, opened instead of `path`, which may lead elsewhere by now
    """

    def __init__(self, path: str, via: str | None = None) -> None:
        self.path = absolute(path)  # a script may go to another folder
        self._fd = self._read_fd = _open(via or path)
        self._status = os.fstat(self._fd)
        self.nbytes = self._status.st_size

    def fileno(self) -> int:
        self._check_open()
        return self._fd

    def pread(self, offset: int, nbytes: int) -> bytes:
        self._check_open()
        data = b""
        while len(data) < nbytes:  # a store may return less than requested
            try:
                part = os.pread(self._fd, nbytes - len(data), offset + len(data))
            except OSError as e:
                raise read_error(self.path, offset, nbytes, 0, e.errno or 0) from e
            if not part:
                break
            data += part
        return data

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        offsets, sizes, starts = self._checked(reads, out, starts)
        failed, errno, got = read_spans(self._read_fd, offsets, sizes, out.ctypes.data, starts, self.nbytes)
        if failed >= 0:
            raise read_error(self.path, int(offsets[failed]) + int(got), int(sizes[failed]), int(got), int(errno))

    def status(self) -> os.stat_result:
        return self._status

    def is_replaced(self) -> bool:
        self._check_open()
        try:
            now = os.stat(self.path)
        except OSError:
            return True
        return not os.path.samestat(now, self._status)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = self._read_fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def _tell(self, advice: int) -> None:
        """How the whole file will be read: an advice of posix_fadvise."""
        with suppress(OSError):  # some file systems refuse advice; it is only advice
            os.posix_fadvise(self._fd, 0, 0, advice)

    def _checked(
        self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(offsets, sizes, starts) of `read`, contiguous and inside of `out`."""
        self._check_open()
        offsets = np.ascontiguousarray(reads["offset"])
        sizes = np.ascontiguousarray(reads["nbytes"])
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        if len(offsets) and (int(starts.min()) < 0 or int((starts + sizes).max()) > out.nbytes):
            raise IndexError(f"reads end at byte {int((starts + sizes).max())} of a buffer of {out.nbytes}")
        return offsets, sizes, starts

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ClosedError("the file is already closed", path=self.path)


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise FileError(f"cannot open: {e.strerror}", path=path, hint="Check owner and mode of the file.") from e
