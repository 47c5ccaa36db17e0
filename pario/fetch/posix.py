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
_preadv = types.ExternalFunction("preadv", types.intp(types.intc, types.uintp, types.intc, types.int64))
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


@kernel
def read_whole(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
    """Read `nbytes` bytes from `offset` on to `address`. Returns (errno, bytes got); all of them, if errno is 0 and
    the file does not end before."""
    got = 0
    while got < nbytes:
        n = _pread(types.intc(fd), types.uintp(address + got), types.uintp(nbytes - got), types.int64(offset + got))
        if n > 0:
            got += n
        elif n == 0:
            return 0, got
        else:
            errno = carray(_errno_location(), 1)[0]
            if errno != _EINTR:
                return errno, got
    return 0, got


@kernel
def read_records(fd, offsets, nbytes, lead, gap, out, starts):  # type: ignore[no-untyped-def]
    """Read records one after the other into `out`, those that follow each other within `gap` bytes in one read.

    offsets, nbytes i64[n]; Fills starts i64[n], places in `out`. Returns (-1, 0, 0, 0, reads, bytes read), or of the
    read that failed (where it begins in the file, its bytes, errno, the bytes that came).
    """
    place, reads, total, i, n, address = 0, 0, 0, 0, len(offsets), out.ctypes.data
    while i < n:
        first, stop = max(0, offsets[i] - lead), offsets[i] + nbytes[i]
        j = i + 1
        # On either side: small values lie in descending order in their page.
        while j < n and offsets[j] - lead <= stop + gap and offsets[j] + nbytes[j] >= first - gap:
            first, stop = min(first, max(0, offsets[j] - lead)), max(stop, offsets[j] + nbytes[j])
            j += 1
        errno, got = read_whole(fd, first, stop - first, address + place)
        if got < stop - first:
            return first, stop - first, errno, got, reads, total
        for k in range(i, j):
            starts[k] = place + offsets[k] - first
        place += stop - first
        total += stop - first
        reads += 1
        i = j
    return -1, 0, 0, 0, reads, total


@kernel
def read_split(fd, offsets, head, row_nbytes, tails, edges, pitch, out, vector, vector_address):  # type: ignore[no-untyped-def]
    """Range i of the file, `head` + `row_nbytes` + `tails[i]` bytes from `offsets[i]` on: its middle goes to row
    i at `out`, head and tail one after the other to `edges` + i * `pitch`. `edges`, `out`: addresses; `vector`
    u64[6] at `vector_address`: scratch. Returns (-1, 0, 0), or the failing range with errno and the bytes that came.
    """
    for i in range(len(offsets)):
        edge, row = edges + i * pitch, out + i * row_nbytes
        wanted = head + row_nbytes + tails[i]
        vector[0], vector[1] = edge, head
        vector[2], vector[3] = row, row_nbytes
        vector[4], vector[5] = edge + head, tails[i]
        n = _preadv(types.intc(fd), types.uintp(vector_address), types.intc(3), types.int64(offsets[i]))
        if n == wanted:
            continue
        # Interrupted, short or refused: part by part, which also tells where.
        done = 0
        for part in range(3):
            size = np.int64(vector[2 * part + 1])
            errno, got = read_whole(fd, offsets[i] + done, size, np.int64(vector[2 * part]))
            done += got
            if got < size:
                return i, errno, done
    return -1, 0, 0


class PosixFetcher:
    """pread through the page cache, with the kernel's read-ahead switched off: what is read is what was planned.

    via : another name of the file, opened in place of `path`, which may lead elsewhere by now
    """

    align = 1

    def __init__(self, path: str, via: str | None = None) -> None:
        self.path = path
        self._fd = _open(via or path, os.O_RDONLY)
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

    def read_records(
        self, offsets: np.ndarray, nbytes: np.ndarray, lead: int, gap: int, out: np.ndarray
    ) -> tuple[np.ndarray, int, int]:
        """Records in any order into `out`, with `lead` bytes before each, read in this order: (starts i64[n] in `out`,
        reads, bytes read). Neighbours with a gap of at most `gap` bytes are one read.

        offsets, nbytes : i64[n], contiguous; out : u8[nbytes.sum() + n * (lead + gap)] or more
        Raises ReadError.
        """
        self._check_open()
        starts = np.empty(len(offsets), np.int64)
        if int(nbytes.sum()) + len(offsets) * (lead + gap) > out.nbytes:
            raise IndexError(f"{len(offsets)} records do not fit into a buffer of {out.nbytes}")
        first, wanted, errno, got, reads, total = read_records(
            self._read_fd, offsets, nbytes, lead, gap, out, starts
        )
        if first >= 0:
            raise read_error(self.path, int(first) + int(got), int(wanted), int(got), int(errno))
        return starts, int(reads), int(total)

    def read_split(
        self, offsets: np.ndarray, head: int, tails: np.ndarray, edges: np.ndarray, out: np.ndarray
    ) -> None:
        """Ranges of the file whose middle goes straight to where it is wanted, each in one read.

        Range i has `head` + `out.shape[1]` + `tails[i]` bytes from `offsets[i]` on: its middle becomes out[i], what is
        before and behind it stands one after the other in edges[i].

        offsets, tails : i64[n], contiguous; edges : u8[n, at least head + most of tails]; out : u8[n, row], contiguous
        Raises ReadError.
        """
        self._check_open()
        n, pitch = edges.shape
        if not len(offsets) == n == len(out) or head + int(tails.max(initial=0)) > pitch:
            raise IndexError(f"{len(offsets)} ranges do not fit into {n} edges of {pitch} bytes and {len(out)} rows")
        row, vector = out.shape[1], np.empty(6, np.uint64)
        failed, errno, got = read_split(
            self._read_fd, offsets, head, row, tails, edges.ctypes.data, pitch, out.ctypes.data, vector,
            vector.ctypes.data,
        )  # fmt: skip
        if failed >= 0:
            wanted = head + row + int(tails[failed])
            raise read_error(self.path, int(offsets[failed]) + int(got), wanted, int(got), int(errno))

    def cached_share(self, offsets: np.ndarray, enough: float = 0.0) -> float | None:
        """At how many of these places of the file its page is in this node's page cache (0..1); None where the system
        cannot say. Stops where the share cannot reach `enough` any more.

        A read with RWF_NOWAIT returns only bytes that are there. It waits for nothing, but may let the kernel fetch the
        page that it missed.
        """
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
