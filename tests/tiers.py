"""One data file for the tests of the tiers: its chunks, its bytes, and what a tier says of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue

import numpy as np

from pario.kernels.large import LARGE_BYTES
from pario.tiers.base import AnyTier
from pario.tiers.grid import BLOCK_BYTES, Grid
from pario.tiers.staged import StagedFetcher

CHUNKS = 5
GRID = Grid((CHUNKS - 1) * 8 * BLOCK_BYTES + 1234, 8 * BLOCK_BYTES)
DATA = np.random.default_rng(0).integers(1, 256, GRID.file_bytes, dtype=np.uint8)  # no zeros, which holes hold


def chunk_of(chunk: int, data: np.ndarray = DATA, grid: Grid = GRID) -> np.ndarray:
    offset, nbytes = grid.span(chunk)
    return data[offset : offset + nbytes]


def read(tier: AnyTier, offset: int, nbytes: int) -> bytes | None:
    out = np.full(nbytes, 0xAA, dtype=np.uint8)
    return out.tobytes() if tier.read(offset, out) else None


def has_large_pages() -> bool:
    """Whether this system makes them when it is asked: not before Linux 6.1, nor where its setting is "deny"."""
    nbytes = 2 * LARGE_BYTES
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    room = mmap.mmap(-1, 2 * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(room))
    begin += -begin % LARGE_BYTES
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap(ctypes.c_void_p(begin), ctypes.c_size_t(LARGE_BYTES), 3, mmap.MAP_SHARED | 0x10, fd, ctypes.c_long(0))
    os.pwrite(fd, b"x", 0)
    os.close(fd)
    return libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(LARGE_BYTES), 25) == 0


def brought(fetcher: StagedFetcher, chunk: int) -> None:
    """Bring a chunk, and wait until it is here."""
    arrivals: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    fetcher.bring(chunk, arrivals.put)
    assert arrivals.get(timeout=30) is None
