"""A tier in memory of this node that belongs to pario: filled by one process, read by all that it hands the files to.

    data     a memfd as large as the data file, at whose own offsets the chunks lie; sparse
    states   a memfd with one word per chunk: its generation, odd while the chunk is there

Both are sealed: nobody can shrink them, so no reader is killed by SIGBUS. Chunks can be given back, and then read as
zeros; so a reader looks at the chunk's generation before and after it copies, and uses nothing that was copied while
the generation changed. A chunk's bytes are written before its generation becomes odd, and given back after it has
become even again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from pario.errors import OptionError, ParioError
from pario.kernels.fence import full_fence
from pario.stage.base import Counts, Tier
from pario.stage.grid import Grid

__all__ = ["MemoryTier"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryTier(Tier):
    """`MemoryTier.made` makes one, `MemoryTier(grid, files)` maps one that another process has made and fills.

    files : descriptors of data and states, which this tier owns from now on

    Raises ParioError if they are not what `made` makes: without the seals, whoever made them could kill this process.
    """

    def __init__(self, grid: Grid, files: tuple[int, int]) -> None:
        self.grid = grid.checked()
        self.counts = Counts()
        self._budget = 0
        self._files = files
        self._lock = threading.Lock()
        for fd, nbytes in zip(files, (grid.file_bytes, 8 * grid.chunks), strict=True):
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:  # no memfd
                sealed = False
            if not sealed or os.fstat(fd).st_size != nbytes:
                raise ParioError(f"descriptor {fd} is no sealed memory of {nbytes:,} bytes")
        self._map = mmap.mmap(files[0], grid.file_bytes)
        self._data: np.ndarray | None = np.frombuffer(self._map, dtype=np.uint8)
        self._states = np.frombuffer(mmap.mmap(files[1], 8 * grid.chunks), dtype=np.int64)

    @classmethod
    def made(cls, grid: Grid, budget: int) -> MemoryTier:
        """An empty tier, which this process fills.

        budget : bytes that its chunks may take. Raises OptionError if no chunk fits, OSError.
        """
        if budget < grid.checked().chunk_bytes:
            raise OptionError(
                f"a budget of {budget:,} bytes does not hold one chunk of {grid.chunk_bytes:,}",
                hint="Give the memory tier more, or leave it out",
            )
        files: list[int] = []
        try:
            for name, nbytes in (("pario-data", grid.file_bytes), ("pario-states", 8 * grid.chunks)):
                files.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.ftruncate(files[-1], nbytes)
                fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, _SEALS)
            tier = cls(grid, (files[0], files[1]))
        except BaseException:
            for fd in files:
                os.close(fd)
            raise
        tier._budget = budget
        return tier

    @property
    def files(self) -> tuple[int, int]:
        """Descriptors to hand to other processes of this user on this node, which make a MemoryTier of them."""
        return self._files

    def held(self) -> np.ndarray:
        return self._states % 2 == 1

    @property
    def held_bytes(self) -> int:
        """Bytes of the chunks that are here."""
        held = self.held()
        last = self.grid.span(self.grid.chunks - 1)[1]
        return int(held.sum()) * self.grid.chunk_bytes - bool(held[-1]) * (self.grid.chunk_bytes - last)

    def put(self, chunk: int, data: np.ndarray) -> bool:
        offset, nbytes = self.grid.span(chunk)
        if data.dtype != np.uint8 or data.shape != (nbytes,):
            raise ValueError(f"chunk {chunk} has {nbytes} bytes, got {data.shape} of {data.dtype}")
        with self._lock:
            if self._data is None:
                return False
            if self._states[chunk] % 2:
                return True
            if self.held_bytes + nbytes > self._budget:
                self.counts.refused += 1
                return False
            self._data[offset : offset + nbytes] = data
            full_fence()
            self._states[chunk] += 1
        self.counts.puts += 1
        self.counts.put_bytes += nbytes
        return True

    def read(self, offset: int, out: np.ndarray) -> bool:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.grid.file_bytes:
            raise IndexError(f"bytes {offset} to {end} of a file of {self.grid.file_bytes}")
        data = self._data
        if data is None:
            return False
        first, last = offset // self.grid.chunk_bytes, -(-end // self.grid.chunk_bytes)
        before = self._states[first:last].copy()
        if not (before % 2).all():
            return False
        full_fence()
        out[:] = data[offset:end]
        full_fence()
        if not np.array_equal(before, self._states[first:last]):
            return False
        self.counts.reads += 1
        self.counts.read_bytes += len(out)
        return True

    def give_back(self, chunk: int) -> None:
        """Give the chunk's memory back to the system. By the process that fills the tier."""
        offset, nbytes = self.grid.span(chunk)
        with self._lock:
            if self._data is None or not self._states[chunk] % 2:
                return
            self._states[chunk] += 1
            full_fence()
            self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def close(self) -> None:
        """Idempotent. The memory is freed when the last process has closed it; views of it keep it, too."""
        with self._lock:
            if self._data is not None:
                self._data = None
                for fd in self._files:
                    os.close(fd)
