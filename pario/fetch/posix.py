"""Reads through the page cache: libc's pread, called from a nogil kernel."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property

import numpy as np
from numba import carray, types

from pario.errors import ClosedError, FileError
from pario.fetch.base import read_error
from pario.kernels.jit import kernel
from pario.machine import read_ahead_bytes

__all__ = ["PosixFetcher"]

# Resolved by the linker inside the process. A ctypes function pointer would do the same, but Numba cannot cache code
# that holds an address of this run.
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_preadv = types.ExternalFunction("preadv", types.intp(types.intc, types.uintp, types.intc, types.int64))
_readahead = types.ExternalFunction("readahead", types.intp(types.intc, types.int64, types.uintp))
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
def read_split(fd, begins, nbytes, lead, head, row, edges, tail, out, vector, trash):  # type: ignore[no-untyped-def]
    """Of value i, `nbytes[i]` bytes behind the `lead` bytes from `begins[i]` on, all but its first `head` bytes and
    what is behind `row` more go to `out`, one after the other; what stands before and behind to `edges[i]`. `row` < 0:
    all of each value. Values that follow each other in the file, with no more between them than `trash` has room for,
    are one read. `vector` u64[k, 2]: the places and sizes of its parts, 4 for a value.

    Returns (-1, 0, 0, reads, their bytes), or of the part that failed (where it begins in the file, errno, the bytes
    that came, reads, its bytes). errno -1: more than `tail` bytes stand behind some value, or none of it; -2: no room.
    """
    # Signed, as all else: a sum of both kinds would be a float.
    place, edge, waste = np.int64(out.ctypes.data), np.int64(edges.ctypes.data), np.int64(trash.ctypes.data)
    scratch = vector.ctypes.data
    pitch, n, i, reads, total, room = edges.shape[1], len(begins), 0, 0, 0, len(out)
    if head + lead + tail > pitch or len(edges) < n or len(vector) < 4:
        return 0, -2, 0, reads, total
    for k in range(n):
        size = nbytes[k] - head if row < 0 else row
        if size < 0 or not 0 <= nbytes[k] - head - size <= tail:
            return 0, -1, 0, reads, total
        room -= size
    if room < 0:
        return 0, -2, 0, reads, total
    while i < n:
        begin, wanted, parts, gap = begins[i], 0, 0, 0
        while True:
            size = nbytes[i] - head if row < 0 else row
            rest = nbytes[i] - head - size
            vector[parts, 0], vector[parts, 1] = edge, lead + head
            vector[parts + 1, 0], vector[parts + 1, 1] = place, size
            vector[parts + 2, 0], vector[parts + 2, 1] = edge + lead + head, rest
            parts += 3
            wanted += lead + nbytes[i]
            place += size
            edge += pitch
            i += 1
            gap = begins[i] - (begin + wanted) if i < n else -1
            if gap < 0 or gap > len(trash) or parts + 4 > len(vector):
                break
            vector[parts, 0], vector[parts, 1] = waste, gap
            parts += 1
            wanted += gap
        reads += 1
        total += wanted
        if _preadv(types.intc(fd), types.uintp(scratch), types.intc(parts), types.int64(begin)) == wanted:
            continue
        # Interrupted, short or refused: part by part, which also tells where.
        for part in range(parts):
            size = np.int64(vector[part, 1])
            errno, got = read_whole(fd, begin, size, np.int64(vector[part, 0]))
            if got < size:
                return begin, errno, got, reads, size
            begin += size
    return -1, 0, 0, reads, total


@kernel
def advise_spans(fd, offsets, sizes, gap, piece):  # type: ignore[no-untyped-def]
    """Let the kernel bring spans into its page cache; those that follow each other within `gap` bytes as one, and no
    more than `piece` bytes per call, since the kernel cuts off what is longer than it likes."""
    i, n = 0, len(offsets)
    while i < n:
        first, stop = offsets[i], offsets[i] + sizes[i]
        i += 1
        while i < n and first <= offsets[i] <= stop + gap:
            stop = max(stop, offsets[i] + sizes[i])
            i += 1
        while first < stop:
            size = min(piece, stop - first)
            _readahead(types.intc(fd), types.int64(first), types.uintp(size))
            first += size


#: IOV_MAX: parts of one preadv.
_MOST_PARTS = 1024
#: For one call of readahead(2), at least: kernels bring no more at once than they read ahead by themselves.
_ADVICE_BYTES = 128 << 10


class PosixFetcher:
    """pread through the page cache, with the kernel's read-ahead switched off: what is read is what was planned; but
    for `let_read_ahead` and `advise`.

    via : another name of the file, opened in place of `path`, which may lead elsewhere by now
    """

    align = 1

    def __init__(self, path: str, via: str | None = None) -> None:
        self.path = path
        self._fd = _open(via or path, os.O_RDONLY)
        self._status = os.fstat(self._fd)
        self.nbytes = self._status.st_size
        self._read_fd = self._fd
        self.reads_ahead = False
        self._let_read_ahead(False)

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
        self,
        begins: np.ndarray,
        nbytes: np.ndarray,
        lead: int,
        head: int,
        row: int,
        edges: np.ndarray,
        tail: int,
        out: np.ndarray,
        gap: int,
    ) -> tuple[int, int] | None:
        """Values whose middle goes straight to where it is wanted: (how many reads that took, their bytes), or None if
        some value has not that form; then nothing is said about what was read.

        Value i has `nbytes[i]` bytes, behind the `lead` bytes from `begins[i]` of the file on. `row` bytes of it, from
        byte `head` on, go to `out`, one value after the other; all from there on where `row` is negative. What stands
        before and behind, in one piece, is edges[i]. It is of another form if it has fewer bytes, or more than `tail`
        behind them. Values that follow each other with a gap of at most `gap` bytes are one read.

        begins, nbytes : i64[n], contiguous; edges : u8[n or more, at least lead + head + tail]; out : u8[k], contiguous
        Raises ReadError.
        """
        self._check_open()
        vector = np.empty((min(_MOST_PARTS, 4 * len(begins) + 4), 2), np.uint64)
        trash = np.empty(gap, np.uint8)
        failed, errno, got, reads, wanted = read_split(
            self._read_fd, begins, nbytes, lead, head, row, edges, tail, out, vector, trash
        )
        if failed < 0:
            return int(reads), int(wanted)
        if errno == -2:
            raise IndexError(f"{len(begins)} values do not fit into {out.nbytes} bytes and edges {edges.shape}")
        if errno != -1:
            raise read_error(self.path, int(failed) + int(got), int(wanted), int(got), int(errno))
        return None

    @cached_property
    def read_ahead_bytes(self) -> int:
        """How far the kernel reads ahead in this file when it is read in order; 0 where it lies on no block device of
        this node, and page cache and kernel are not known to be the better way to read."""
        return read_ahead_bytes(self._status.st_dev) or 0

    def let_read_ahead(self, on: bool) -> None:
        """Switch the kernel's read-ahead, for a while in which all of this file is read in order."""
        if on != self.reads_ahead:
            self._check_open()
            self._let_read_ahead(on)

    def _let_read_ahead(self, on: bool) -> None:
        self.reads_ahead = on
        advise = getattr(os, "posix_fadvise", None)
        if advise is not None:
            with contextlib.suppress(OSError):  # some file systems refuse advice; it is only advice
                advise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL if on else os.POSIX_FADV_RANDOM)

    def advise(self, offsets: np.ndarray, nbytes: np.ndarray, gap: int) -> None:
        """These bytes will be read soon: the page cache shall have them. Waits for nothing but room in the device's
        queue; reports no errors, which the reads will.

        offsets, nbytes : i64[n], contiguous; neighbours with a gap of at most `gap` bytes are one request
        """
        self._check_open()
        advise_spans(self._read_fd, offsets, nbytes, gap, max(self.read_ahead_bytes, _ADVICE_BYTES))

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
