"""A data file as chunks, which are placed and fetched whole, and blocks, which are verified one by one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pario.errors import OptionError

#: A record of 3 KB costs the reading and hashing of this many bytes, and a chunk this many checksums of 8 bytes in the
#: map and in each reader's memory. (64 KiB: 3 KB records in random order out of a disk tier took 1.2 times as
#: long, 197 KB ones as long.)
BLOCK_BYTES = 16 << 10


class Grid(NamedTuple):
    """file_bytes : size of the data file; chunk_bytes : of all chunks but the last one, a multiple of BLOCK_BYTES"""

    file_bytes: int
    chunk_bytes: int

    def checked(self) -> Grid:
        """This grid. Raises OptionError."""
        if self.chunk_bytes < BLOCK_BYTES or self.chunk_bytes % BLOCK_BYTES:
            raise OptionError(f"chunks must be multiples of {BLOCK_BYTES:,} bytes, got {self.chunk_bytes:,}")
        if self.file_bytes < 1:
            raise OptionError(f"there are no chunks in a file of {self.file_bytes:,} bytes")
        return self

    @property
    def chunks(self) -> int:
        return -(-self.file_bytes // self.chunk_bytes)

    @property
    def blocks(self) -> int:
        return -(-self.file_bytes // BLOCK_BYTES)

    def span(self, chunk: int) -> tuple[int, int]:
        """(offset, bytes) of a chunk. Raises IndexError."""
        if not 0 <= chunk < self.chunks:
            raise IndexError(f"no chunk {chunk} of {self.chunks}")
        offset = chunk * self.chunk_bytes
        return offset, min(self.chunk_bytes, self.file_bytes - offset)

    def blocks_of(self, chunk: int) -> tuple[int, int]:
        """(first, end) of a chunk's blocks."""
        offset, nbytes = self.span(chunk)
        return offset // BLOCK_BYTES, -(-(offset + nbytes) // BLOCK_BYTES)

    def ends_of(self, offsets: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and the last chunk that each of these extents touches, i64[n] each. One of no bytes may lie at the
        very end of the file."""
        first, last = offsets.copy(), np.maximum(nbytes, 1)
        last += offsets - 1
        bits = self.chunk_bytes.bit_length() - 1
        # Most sizes are powers of two, and a division takes several times as long.
        divide, by = (np.right_shift, bits) if self.chunk_bytes == 1 << bits else (np.floor_divide, self.chunk_bytes)
        for ends in first, last:
            divide(ends, by, out=ends)
            np.minimum(ends, self.chunks - 1, out=ends)
        return first, last

    def chunks_at(self, offsets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """The chunks that these extents touch, i64[k], ascending."""
        first, last = self.ends_of(offsets, nbytes)
        counts = last - first + 1
        # For each extent its chunks, one after another.
        touched = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        if len(touched) < self.chunks:
            return np.unique(touched)
        held = np.zeros(self.chunks, bool)
        held[touched] = True
        return np.flatnonzero(held)
