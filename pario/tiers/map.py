"""The map of a tier on disk: which chunks of a data file are there, and the sums that their blocks must have.

    head       4 KiB: magic, identity of the dataset, bytes of the file, of a chunk, of a block, xxh3 of these
    sums       u64 per block
    states     one byte per chunk: 1 = all its bytes and sums are written

It is read and written explicitly, not mapped: a device that fails under a mapping kills the process. What a process has
seen it keeps in memory; only a chunk that it does not know yet costs a look at the file, where another process may have
noted it meanwhile.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import NamedTuple

import numpy as np
import xxhash

from pario.machine import write_all
from pario.tiers.grid import BLOCK_BYTES, Grid

_MAGIC = b"pario chunk map1"
_HEAD = struct.Struct("<16s32sQQQ")
_HEAD_BYTES = 4096


class ChunkMap:
    """The map in an open file, made anew unless it is that of this dataset and grid. Any thread; all methods but
    `knows` may raise OSError.

    The caller holds a lock on the file during the construction, and one on the chunk during `add`.

    is_new : it was made anew
    """

    def __init__(self, fd: int, identity: bytes, grid: Grid) -> None:
        self._fd = fd
        self._grid = grid
        self._states_at = _HEAD_BYTES + 8 * grid.blocks
        self._sums = np.zeros(grid.blocks, dtype=np.uint64)
        self._known = np.zeros(grid.chunks, dtype=bool)
        self._lock = threading.Lock()
        size = self.nbytes(grid)
        head = _HEAD.pack(_MAGIC, identity, grid.file_bytes, grid.chunk_bytes, BLOCK_BYTES)
        head += xxhash.xxh3_64_digest(head)
        self.is_new = os.fstat(fd).st_size != size or os.pread(fd, len(head), 0) != head
        if self.is_new:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size)  # what is noted later must not fail for want of room
            os.pwrite(fd, head, 0)

    @staticmethod
    def nbytes(grid: Grid) -> int:
        """Of the file."""
        return _HEAD_BYTES + 8 * grid.blocks + grid.chunks

    def knows(self, chunk: int) -> bool:
        """Whether this process has seen that the chunk is there. No system call."""
        return bool(self._known[chunk])

    def known(self, chunks: np.ndarray) -> np.ndarray:
        """`knows` of each of these chunks, bool[n]; False outside the file."""
        return self._known[np.minimum(chunks, len(self._known) - 1)] & (chunks < len(self._known)) & (chunks >= 0)

    def has(self, chunk: int, flags: int = 0) -> bool:
        """Whether the chunk is there.

        flags : for reading, as of preadv
        """
        if not self._known[chunk] and self._pread(1, self._states_at + chunk, flags) == b"\1":
            first, end = self._grid.blocks_of(chunk)
            sums = self._pread(8 * (end - first), _HEAD_BYTES + 8 * first, flags)
            if len(sums) == 8 * (end - first):
                with self._lock:
                    self._sums[first:end] = np.frombuffer(sums, dtype=np.uint64)
                    self._known[chunk] = True
        return bool(self._known[chunk])

    def _pread(self, nbytes: int, offset: int, flags: int) -> bytearray:
        memory = bytearray(nbytes)
        del memory[os.preadv(self._fd, [memory], offset, flags) :]
        return memory

    def held(self) -> np.ndarray:
        """bool[chunks]: all that are there."""
        states = np.frombuffer(self._pread(self._grid.chunks, self._states_at, 0), dtype=np.uint8)
        held = self._known.copy()
        held[: len(states)] |= states == 1
        return held

    def sums(self, blocks: np.ndarray) -> np.ndarray:
        """The sums of these blocks (i64[n]) of chunks that are known, u64[n]."""
        found: np.ndarray = self._sums[blocks]
        return found

    def add(self, chunk: int, sums: np.ndarray) -> None:
        """The chunk's bytes are written: note its sums, then the chunk."""
        first, _ = self._grid.blocks_of(chunk)
        write_all(self._fd, sums.tobytes(), _HEAD_BYTES + 8 * first)
        with self._lock:
            self._sums[first : first + len(sums)] = sums
        write_all(self._fd, b"\1", self._states_at + chunk)
        self._known[chunk] = True

    def drop(self, chunk: int) -> None:
        """The chunk is not what was put: it counts as absent, for all processes that have not seen it yet."""
        self._known[chunk] = False
        write_all(self._fd, b"\0", self._states_at + chunk)


class Head(NamedTuple):
    """What a map says by itself. held : bool[chunks]: which chunks are there"""

    identity: bytes
    grid: Grid
    held: np.ndarray


def read_head(contents: bytes) -> Head | None:
    """Of the contents of a map; None if it is none."""
    head, total = contents[: _HEAD.size], contents[_HEAD.size : _HEAD.size + 8]
    if len(head) < _HEAD.size or xxhash.xxh3_64_digest(head) != total:
        return None
    magic, identity, file_bytes, chunk_bytes, block_bytes = _HEAD.unpack(head)
    grid = Grid(file_bytes, chunk_bytes)
    if magic != _MAGIC or block_bytes != BLOCK_BYTES or len(contents) != ChunkMap.nbytes(grid):
        return None
    return Head(identity, grid, np.frombuffer(contents, np.uint8)[_HEAD_BYTES + 8 * grid.blocks :] == 1)


def block_sums(data: np.ndarray) -> np.ndarray:
    """xxh3 of each block, u64[n]."""
    view = memoryview(data)
    sums = [xxhash.xxh3_64_intdigest(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    return np.array(sums, dtype=np.uint64)
