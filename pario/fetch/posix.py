"""Reads through the page cache: libc's pread, called from a nogil kernel."""

from __future__ import annotations

import contextlib
import os

import numpy as np
from numba import carray, types

from pario.errors import ClosedError, FileError
from pario.fetch.base import read_error
from pario.kernels.jit import kernel

__all__ = ["PosixFetcher"]

# Resolved by the linker inside the process. A ctypes function pointer would do the same, but Numba cannot cache code
# that holds an address of this run.
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.intc)())

_EINTR = 4


@kernel
def read_spans(fd, offsets, sizes, address, starts, file_bytes):  # type: ignore[no-untyped-def]
    """Read span i to `address + starts[i]`. Returns (-1, 0, 0), or the failing span with errno and the bytes it got.

    A span may end beyond the file (a last block widened for O_DIRECT): only bytes inside the file are required.
    """
    for i in range(len(offsets)):
        wanted = min(sizes[i], file_bytes - offsets[i])
        got = 0
        while got < wanted:
            n = _pread(
                types.intc(fd),
                types.uintp(address + starts[i] + got),
                types.uintp(sizes[i] - got),
                types.int64(offsets[i] + got),
            )
            if n > 0:
                got += n
            elif n == 0:
                return i, 0, got
            else:
                errno = carray(_errno_location(), 1)[0]
                if errno != _EINTR:
                    return i, errno, got
    return -1, 0, 0


class PosixFetcher:
    """pread through the page cache, with the kernel's read-ahead switched off: what is read is what was planned."""

    align = 1

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = _open(path, os.O_RDONLY)
        self._status = os.fstat(self._fd)
        self.nbytes = self._status.st_size
        self._read_fd = self._fd
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            with contextlib.suppress(OSError):  # some file systems refuse advice; it is only advice
                advise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def fileno(self) -> int:
        """The open file, for advice and for reads of one's own."""
        self._check_open()
        return self._fd

    def pread(self, offset: int, nbytes: int) -> bytes:
        self._check_open()
        data = b""
        while len(data) < nbytes:  # a store may bring less than was asked for
            try:
                part = os.pread(self._fd, nbytes - len(data), offset + len(data))
            except OSError as e:
                raise read_error(self.path, offset, nbytes, 0, e.errno or 0) from e
            if not part:
                break
            data += part
        return data

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self._check_open()
        offsets = np.ascontiguousarray(reads["offset"])
        sizes = np.ascontiguousarray(reads["nbytes"])
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        if len(offsets) and (int(starts.min()) < 0 or int((starts + sizes).max()) > out.nbytes):
            raise IndexError(f"reads end at byte {int((starts + sizes).max())} of a buffer of {out.nbytes}")
        failed, errno, got = read_spans(self._read_fd, offsets, sizes, out.ctypes.data, starts, self.nbytes)
        if failed >= 0:
            raise read_error(self.path, int(offsets[failed]) + int(got), int(sizes[failed]), int(got), int(errno))

    def __del__(self) -> None:
        # The last thread that reads is gone.
        if getattr(self, "_fd", -1) >= 0:
            self.close()

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

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ClosedError("the file is already closed", path=self.path)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as e:
        raise FileError(f"cannot open: {e.strerror}", path=path, hint="Check owner and mode of the file.") from e
