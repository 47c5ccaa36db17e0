"""Reading: libc's pread and preadv2, called without the interpreter."""

from __future__ import annotations

import os

import numpy as np
from numba import carray, types

from pario.kernels.jit import inner, kernel

# Resolved by the linker inside the process. A ctypes function pointer would do the same, but Numba cannot cache code
# that holds an address of this run.
pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
preadv2 = types.ExternalFunction("preadv2", types.intp(types.intc, types.uintp, types.intc, types.int64, types.intc))
errno_location = types.ExternalFunction("__errno_location", types.CPointer(types.intc)())

_long = types.int64
#: syscall(2) with six arguments: one signature for all kernels, because LLVM knows a name by one.
system_call = types.ExternalFunction("syscall", _long(_long, _long, _long, _long, _long, _long, _long))

_EINTR, _EAGAIN, _EINVAL, _ENOSYS, _EOPNOTSUPP = 4, 11, 22, 38, 95
#: Number of the system call cachestat, the same on every architecture.
_CACHESTAT = 451
_PAGE = os.sysconf("SC_PAGESIZE")
#: Read only what need not be waited for.
_NOWAIT = 8


@inner
def read_whole(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
    """Read `nbytes` bytes from `offset` on to `address`. Returns (errno, bytes got); all of them, if errno is 0 and
    the file does not end before."""
    got = 0
    while got < nbytes:
        n = pread(types.intc(fd), types.uintp(address + got), types.uintp(nbytes - got), types.int64(offset + got))
        if n > 0:
            got += n
        elif n == 0:
            return 0, got
        else:
            errno = carray(errno_location(), 1)[0]
            if errno != _EINTR:
                return errno, got
    return 0, got


@inner
def _cached_pages(fd, offset, nbytes, words):  # type: ignore[no-untyped-def]
    """(pages of these bytes, how many of them the page cache has; -1 if the kernel does not say).

    Linux 6.5 and later; some do not say it of others' files. words : u64[7], struct cachestat_range, struct cachestat
    """
    at, none = _long(words.ctypes.data), _long(0)
    words[0], words[1] = offset, nbytes
    pages = (offset + nbytes - 1) // _PAGE - offset // _PAGE + 1
    known = system_call(_long(_CACHESTAT), _long(fd), at, at + 16, none, none, none) == 0
    return pages, (_long(words[2]) if known else _long(-1))


@inner
def _try(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
    """Read what need not be waited for; returns how many bytes, or -1."""
    words = np.empty(2, np.uint64)  # a struct iovec
    words[0], words[1] = address, nbytes
    got = preadv2(types.intc(fd), types.uintp(words.ctypes.data), types.intc(1), _long(offset), types.intc(_NOWAIT))
    return got + 0 * len(words)  # Numba frees an array after its last use


@inner
def cached_whole(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
    """1: the page cache has all of these bytes; 0: it has not; -1: the file system cannot tell. A read that does not
    wait starts read-ahead where a page is missing, so the kernel is asked without one. address : where a byte may go"""
    pages, cached = _cached_pages(fd, offset, nbytes, np.empty(7, np.uint64))
    if cached >= 0:
        return np.int64(cached >= pages)
    got = _try(fd, offset, min(nbytes, 1), address)  # the first page tells, and is all that is fetched
    unknown = got < 0 and carray(errno_location(), 1)[0] in (_EOPNOTSUPP, _ENOSYS, _EINVAL)
    return np.int64(-1 if unknown else got == min(nbytes, 1))


@kernel
def cached_share(fd, offset, nbytes):  # type: ignore[no-untyped-def]
    """The part of these bytes' pages that the page cache has; -1.0 if the file system cannot tell."""
    byte = np.empty(1, np.uint8)
    pages, cached = _cached_pages(fd, offset, nbytes, np.empty(7, np.uint64))
    if cached >= 0:
        return cached / pages
    there = 0
    for page in range(offset // _PAGE, offset // _PAGE + pages, 16):  # each look may fetch what it misses
        got = _try(fd, page * _PAGE, 1, byte.ctypes.data)
        if got < 0 and carray(errno_location(), 1)[0] != _EAGAIN:
            return -1.0
        there += got > 0
    return there / -(-pages // 16)


@inner
def read_now(fd, offset, nbytes, address):  # type: ignore[no-untyped-def]
    """Read `nbytes` bytes, if the page cache has all of them; returns whether it has."""
    return cached_whole(fd, offset, nbytes, address) > 0 and _try(fd, offset, nbytes, address) == nbytes


@kernel
def read_spans(fd, offsets, sizes, address, starts, file_bytes):  # type: ignore[no-untyped-def]
    """Read span i to `address + starts[i]`. Returns (-1, 0, 0), or the failing span with errno and the bytes it got.

    A span may end beyond the file (a last block widened for O_DIRECT): only bytes inside the file are required.
    """
    for i in range(len(offsets)):
        errno, got = read_whole(fd, offsets[i], sizes[i], address + starts[i])
        if got < min(sizes[i], file_bytes - offsets[i]):
            return i, errno, got
    return -1, 0, 0


@kernel
def read_spans_now(fd, offsets, sizes, address, starts, there):  # type: ignore[no-untyped-def]
    """Read those spans to `address + starts[i]` that the page cache holds; bool[n] `there` says which these are."""
    for i in range(len(offsets)):
        there[i] = read_now(fd, offsets[i], sizes[i], address + starts[i])
