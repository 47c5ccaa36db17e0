"""Reading: libc's pread, preadv and readahead, called without the interpreter."""

from __future__ import annotations

import numpy as np
from numba import carray, types

from pario.kernels.jit import inner, kernel
from pario.kernels.runs import next_run, together
from pario.kernels.sums import SCRATCH, sum_pieces

__all__ = ["advise_ranges", "read_ranges", "read_spans", "read_split"]

# Resolved by the linker inside the process. A ctypes function pointer would do the same, but Numba cannot cache code
# that holds an address of this run.
_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_preadv = types.ExternalFunction("preadv", types.intp(types.intc, types.uintp, types.intc, types.int64))
_readahead = types.ExternalFunction("readahead", types.intp(types.intc, types.int64, types.uintp))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.intc)())

_EINTR = 4
#: Values that are compared with their checksums are read so many bytes at a time: they stay in the second cache.
_CHECKED_BYTES = 256 << 10


@inner
def _read_whole(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
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
def read_spans(fd, offsets, sizes, address, starts, file_bytes):  # type: ignore[no-untyped-def]
    """Read span i to `address + starts[i]`. Returns (-1, 0, 0), or the failing span with errno and the bytes it got.

    A span may end beyond the file (a last block widened for O_DIRECT): only bytes inside the file are required.
    """
    for i in range(len(offsets)):
        errno, got = _read_whole(fd, offsets[i], sizes[i], address + starts[i])
        if got < min(sizes[i], file_bytes - offsets[i]):
            return i, errno, got
    return -1, 0, 0


@kernel
def read_ranges(fd, begins, nbytes, gap, out, starts):  # type: ignore[no-untyped-def]
    """Read ranges one after the other into `out`, those of one run (`next_run`) by one call.

    begins, nbytes i64[n]. Fills starts i64[n], places in `out`. Returns (-1, 0, 0, 0, reads, bytes read), or of the
    read that failed (where it begins in the file, its bytes, errno, the bytes that came), or errno -1 with -1 in front:
    `out` is too short.
    """
    at, reads, total, i, n, address = 0, 0, 0, 0, len(begins), out.ctypes.data
    while i < n:
        j, first, stop = next_run(begins, nbytes, i, gap)
        if stop - first > len(out) - at:
            return -1, 0, -1, 0, reads, total
        errno, got = _read_whole(fd, first, stop - first, address + at)
        if got < stop - first:
            return first, stop - first, errno, got, reads, total
        for k in range(i, j):
            starts[k] = at + begins[k] - first
        at += stop - first
        total += stop - first
        reads += 1
        i = j
    return -1, 0, 0, 0, reads, total


@kernel
def read_split(fd, begins, nbytes, form, gap, edges, out, vector, trash, ids, sums, wrong):  # type: ignore[no-untyped-def]
    """Of value i, `nbytes[i]` bytes behind the `lead` bytes from `begins[i]` on, all but its first `head` bytes and
    what is behind `row` more go to `out`, one after the other; what stands before and behind to `edges[i]`. `row` < 0:
    all of each value. Values that follow each other in the file are one read where `together` says so.

    form: (lead, head, row, tail); vector u64[k, 2]: the places and sizes of a read's parts, 4 for a value;
    trash: as long as a gap may be; ids: i64[n], or none: then nothing is compared with sums u64[m], by record id;
    wrong: bool[n], becomes True where a value has another checksum.
    Returns (-1, 0, 0, reads, their bytes), or of the part that failed (where it begins in the file, errno, the bytes
    that came, reads, its bytes). errno -1: more than `tail` bytes stand behind some value, or none of it; -2: no room.
    """
    lead, head, row, tail = form
    # Signed, as all else: a sum of both kinds would be a float.
    at, edge, waste = np.int64(out.ctypes.data), np.int64(edges.ctypes.data), np.int64(trash.ctypes.data)
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
    checks = len(ids) == n
    lanes, memory, flat = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8), edges.reshape(-1)
    row_at = np.int64(0)
    while i < n:
        begin, wanted, parts, first = begins[i], 0, 0, i
        while True:
            size = nbytes[i] - head if row < 0 else row
            rest = nbytes[i] - head - size
            vector[parts, 0], vector[parts, 1] = edge, lead + head
            vector[parts + 1, 0], vector[parts + 1, 1] = at, size
            vector[parts + 2, 0], vector[parts + 2, 1] = edge + lead + head, rest
            parts += 3
            wanted += lead + nbytes[i]
            at += size
            edge += pitch
            i += 1
            stop = begin + wanted
            if i == n or begins[i] < stop or not together(stop, begins[i], gap) or parts + 4 > len(vector):
                break
            if checks and wanted >= _CHECKED_BYTES:
                break
            vector[parts, 0], vector[parts, 1] = waste, begins[i] - stop
            parts += 1
            wanted += begins[i] - stop
        reads += 1
        total += wanted
        if _preadv(types.intc(fd), types.uintp(scratch), types.intc(parts), types.int64(begin)) != wanted:
            # Interrupted, short or refused: part by part, which also tells where.
            for part in range(parts):
                size = np.int64(vector[part, 1])
                errno, got = _read_whole(fd, begin, size, np.int64(vector[part, 0]))
                if got < size:
                    return begin, errno, got, reads, size
                begin += size
        if checks:  # while they are in the processor's cache
            for k in range(first, i):
                size = nbytes[k] - head if row < 0 else row
                tail = nbytes[k] - head - size
                found = sum_pieces(flat, k * pitch + lead, head, out, row_at, size, tail, lanes, memory)
                wrong[k] = not 0 <= ids[k] < len(sums) or found != sums[ids[k]]
                row_at += size
    return -1, 0, 0, reads, total


@kernel
def advise_ranges(fd, begins, nbytes, gap, piece):  # type: ignore[no-untyped-def]
    """Let the kernel bring ranges into its page cache, those of one run (`next_run`) as one, and no more than `piece`
    bytes per call, since the kernel cuts off what is longer than it likes."""
    i, n = 0, len(begins)
    while i < n:
        i, first, stop = next_run(begins, nbytes, i, gap)
        while first < stop:
            size = min(piece, stop - first)
            _readahead(types.intc(fd), types.int64(first), types.uintp(size))
            first += size
