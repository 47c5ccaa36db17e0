"""Read time against request size: one process reads a file from its beginning, by pread and by copying from a mapping,
with the kernel's read-ahead and without. The file is cold before each pass.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.cache import drop_file

__all__ = ["WAYS", "measure_requests"]

#: way -> (through a mapping, with read-ahead)
WAYS = {
    "pread": (False, True),
    "mmap": (True, True),
    "pread, no read-ahead": (False, False),
    "mmap, no read-ahead": (True, False),
}


def measure_requests(
    path: str, sizes: Sequence[int], nbytes: int, rounds: int, tick: Callable[[], None] = lambda: None
) -> Iterator[dict[str, Any]]:
    """One row per size and way: {"way", "size", "bytes", "seconds": [one per round]}; the ways run in turns.

    sizes : bytes per request
    nbytes : bytes to read per pass, at most the file's
    """
    nbytes = min(nbytes, os.path.getsize(path))
    for size in sizes:
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way, (mapped, ahead) in WAYS.items():
                drop_file(path)
                took[way].append((_by_map if mapped else _by_pread)(path, size, nbytes, ahead))
            tick()
        for way, seconds in took.items():
            yield {"way": way, "size": size, "bytes": nbytes // size * size, "seconds": seconds}


def _by_pread(path: str, size: int, nbytes: int, ahead: bool) -> float:
    block = [bytearray(size)]
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL if ahead else os.POSIX_FADV_RANDOM)
        begin = time.perf_counter()
        for offset in range(0, nbytes - size + 1, size):
            os.preadv(fd, block, offset)
        return time.perf_counter() - begin
    finally:
        os.close(fd)


def _by_map(path: str, size: int, nbytes: int, ahead: bool) -> float:
    block = memoryview(bytearray(size))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as whole:
        if not ahead:
            whole.madvise(mmap.MADV_RANDOM)
        with memoryview(whole) as view:
            begin = time.perf_counter()
            for offset in range(0, nbytes - size + 1, size):
                block[:] = view[offset : offset + size]
            return time.perf_counter() - begin
