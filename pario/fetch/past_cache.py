"""Whether a file on a disk of this node is read past the page cache, where nobody has said.

Copying through the page cache costs processor time, which a process that reads alone feels in its first epoch. Later
epochs come out of memory instead, which gains what the disk is slower than memory. So the page cache is left out only
where the disk is fast. (1 rank, seconds of the first epoch and of the second, through the page cache -> past it, next
to other work: 197 KB records in key order 1.9, 0.6 -> 0.6, 0.6; "block" 2.9, 0.6 -> 0.7, 0.6; "global" 1.4, 0.6 -> 0.8,
0.8; 3 KB in key order 2.4, 1.1 -> 1.5, 1.2; "block" 4.5, 2.4 -> 3.4, 1.4.)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from pario.errors import ParioError
from pario.fetch.base import Fetcher
from pario.fetch.direct import DirectFetcher
from pario.fetch.pool import ReadPool
from pario.records import EXTENT

__all__ = ["past_cache"]

_log = logging.getLogger("pario")

#: What is read to find out: so many times so many reads of so many bytes. Of smaller files that would be too much.
_TRIES, _READS, _BYTES = 4, 2, 1 << 20
_LEAST_BYTES = 64 * _TRIES * _READS * _BYTES
#: The page cache is of use if it holds this part of a sample of so many bytes, evenly over the file.
_CACHED, _SAMPLE = 0.5, 64
#: A disk is fast if it takes at most so many times as long as a copy by one thread. (Here 1.3 to 4.6 times, more where
#: nothing else runs, since what is copied then lies in the processor's cache. At 0.5 GB/s, as much as SATA carries, it
#: would be 17 times and more. With 4 every fourth Loader on an idle machine went through the page cache.)
_FAST = 8.0


def past_cache(store: Fetcher) -> Fetcher | None:
    """Another fetcher of the same file, which bypasses the page cache; None if `store` is better. Reads a few MiB of a
    file that the page cache does not hold."""
    if len(store.files) > 1 or store.rows is None or not store.read_ahead_bytes or store.nbytes < _LEAST_BYTES:
        return None
    offsets = np.linspace(0, store.nbytes - 1, _SAMPLE).astype(np.int64)
    share = store.cached_share(offsets, _CACHED)
    if share is None or share >= _CACHED:
        return None
    (file,) = store.files
    try:
        direct = DirectFetcher(store.path, f"/proc/self/fd/{file.fileno()}")
    except (OSError, ParioError):
        return None
    try:
        fast = _is_fast(direct)
    except (OSError, ParioError):  # the way through the page cache tells whoever needs these bytes
        fast = False
    if not fast:
        direct.close()
        return None
    _log.info("%s is read past the page cache, whose copies cost more here than its disk", store.path)
    return direct


def _is_fast(disk: DirectFetcher) -> bool:
    """Raises OSError, ParioError."""
    memory = np.zeros(_TRIES * _READS * _BYTES + disk.align, np.uint8)
    memory = memory[-memory.ctypes.data % disk.align :][: _TRIES * _READS * _BYTES]
    reads, starts = np.zeros(_READS, EXTENT), np.arange(_READS) * _BYTES
    reads["nbytes"] = disk.align
    pool = ReadPool(disk, _READS)
    try:
        pool.read(reads, memory, starts)  # its threads start, and the kernels are loaded
        by_disk = []
        for k, out in enumerate(np.split(memory, _TRIES), 1):
            first = k * disk.nbytes // (_TRIES + 1)
            reads["offset"], reads["nbytes"] = first - first % disk.align + starts, _BYTES
            by_disk.append(_seconds(partial(pool.read, reads, out, starts)))
    finally:
        pool.close()
    copies = os.memfd_create("pario-copy", os.MFD_CLOEXEC)
    try:
        os.pwrite(copies, memory, 0)
        by_copy = [_seconds(partial(os.preadv, copies, [memory], 0)) for _ in range(_TRIES)]
    finally:
        os.close(copies)
    return min(by_disk) * _TRIES <= _FAST * min(by_copy)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
