"""Measures, drops and fills one file's pages in the page cache, so that a run is cold or warm for certain."""

from __future__ import annotations

import ctypes
import os
import time

from pario.machine import closing_fd

__all__ = ["Unavailable", "cached_bytes", "drop_file", "warm_file"]


class Unavailable(RuntimeError):
    """This machine or user cannot do this; the message says what is missing."""


class _CachestatRange(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class _Cachestat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")]


_SYS_CACHESTAT = 451  # the same number on every architecture; Linux >= 6.5


def cached_bytes(path: str) -> int | None:
    """Bytes of the file in the page cache; None if the kernel has no cachestat (Linux >= 6.5).

    The older way is RWF_NOWAIT reads, but they start read-ahead and so change what they measure.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        span, found = _CachestatRange(0, 0), _Cachestat()  # length 0: to the end of the file
        number = ctypes.c_long(_SYS_CACHESTAT)
        if libc.syscall(number, ctypes.c_uint(file.fileno()), ctypes.byref(span), ctypes.byref(found), 0) != 0:
            return None
    return int(found.cache) * os.sysconf("SC_PAGESIZE")


def drop_file(path: str, allow: float = 0.001) -> None:
    """Drop one file's pages from the page cache, and no others.

    allow : fraction of the file that may stay before this is an error (mapped pages cannot be dropped).
    """
    with closing_fd(os.open(path, os.O_RDONLY)) as fd:
        os.fsync(fd)
        size = os.fstat(fd).st_size
        for _ in range(5):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            left = cached_bytes(path)
            if left is None or left <= allow * size:
                return
            time.sleep(0.1)  # recently read pages stay in per-CPU lists for a moment
    raise Unavailable(f"{left} of {size} bytes of {path} stay in the page cache: does another process map it?")


def warm_file(path: str) -> None:
    """Read the whole file into the page cache, and check that it stays there."""
    buffer = bytearray(8 << 20)
    size = os.path.getsize(path)
    for _ in range(3):  # other programs may evict pages again
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        held = cached_bytes(path)
        if held is None or held >= 0.999 * size:
            return
    raise Unavailable(f"only {held} of {size} bytes of {path} stay in the page cache: too little memory to be warm")
