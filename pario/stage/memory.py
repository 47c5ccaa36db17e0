"""A tier in memory of this node that belongs to pario: filled by one process, read by all that it hands the files to.

    data     a memfd as large as the data file, at whose own offsets the chunks lie; sparse
    states   a memfd with a head of a few words, and one word per chunk: its generation, odd while the chunk is there

Both are sealed: nobody can shrink them, so no reader is killed by SIGBUS. Chunks can be given back, and then read as
zeros; so a reader looks at the chunk's generation before and after it copies, and uses nothing that was copied while
the generation changed. A chunk's bytes are written before its generation becomes odd, and given back after it has
become even again. Readers map the data privately: what a user's function writes into a record stays in its process.

Whoever waits for a chunk sleeps on a futex in the head.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from pario.comm import futex
from pario.errors import OptionError, ParioError
from pario.kernels.fence import full_fence
from pario.stage.base import AnyTier, Counts
from pario.stage.grid import Grid

__all__ = ["MemoryTier"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HEAD_BYTES = 64
#: no memory is set aside for pages that nobody writes; mmap.MAP_NORESERVE exists from Python 3.11 on
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
#: words of the head, i32: changes with every chunk that arrives, and when the next one changes; chunks are on their way
_NEWS, _FILLING = 0, 1


class MemoryTier(AnyTier):
    """`MemoryTier.made` makes one, `MemoryTier(grid, files)` maps one that another process has made and fills.

    files : descriptors of data and states, which this tier owns from now on, if this does not raise

    Raises ParioError if they are not what `made` makes: without the seals, whoever made them could kill this process.

    files : descriptors for other processes of this user on this node, which make a MemoryTier of them
    fills : this process made it, and alone puts chunks
    budget : bytes that its chunks may take, if this process fills it
    held_bytes : of the chunks that are here or on their way, in the process that fills it
    view : u8[file_bytes]: the file's bytes, where their chunks are held. Whoever uses it asks `generations` before and
        after. Writing to it changes nothing for others
    """

    name = "memory"

    def __init__(self, grid: Grid, files: tuple[int, int], *, budget: int = 0) -> None:
        self.grid = grid.checked()
        self.counts = Counts()
        self.fills = budget > 0
        self.budget = budget
        self.files = files
        self.held_bytes = 0
        self._lock = threading.Lock()  # guards the one above and the one below, and the chunks' words
        self._busy: set[int] = set()
        self._open = True
        sizes = _sizes(grid)
        for fd, nbytes in zip(files, sizes, strict=True):
            try:
                sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:  # no memfd
                sealed = False
            if not sealed or os.fstat(fd).st_size != nbytes:
                raise ParioError(f"descriptor {fd} is no sealed memory of {nbytes:,} bytes")
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if self.fills else 0)
        self._map = mmap.mmap(files[0], sizes[0], prot=rights)
        words = mmap.mmap(files[1], sizes[1], prot=rights)
        # Not a read-only one: for arrays that cannot be written Numba would compile every kernel once more.
        view = mmap.mmap(files[0], sizes[0], flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = np.frombuffer(view, dtype=np.uint8, count=grid.file_bytes)
        self._head = np.frombuffer(words, dtype=np.int32, count=_HEAD_BYTES // 4)
        self._states = np.frombuffer(words, dtype=np.int64, offset=_HEAD_BYTES)

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
            for name, nbytes in zip(("pario-data", "pario-states"), _sizes(grid), strict=True):
                files.append(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
                os.ftruncate(files[-1], nbytes)
                fcntl.fcntl(files[-1], fcntl.F_ADD_SEALS, _SEALS)
            return cls(grid, (files[0], files[1]), budget=budget)
        except BaseException:
            for fd in files:
                os.close(fd)
            raise

    @classmethod
    def attached(cls, grid: Grid, paths: tuple[str, str]) -> MemoryTier:
        """The tier of another process, by the names that `paths` gives there. Raises OSError, ParioError."""
        files: list[int] = []
        try:
            for path in paths:
                files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            return cls(grid, (files[0], files[1]))
        except BaseException:
            for fd in files:
                os.close(fd)
            raise

    @property
    def paths(self) -> tuple[str, str]:
        """Names of the files for other processes of this user on this node, for `attached`."""
        data, states = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self.files)
        return data, states

    # -- what is here --------------------------------------------------------------------------------------------------

    def held(self) -> np.ndarray:
        return self._states % 2 == 1

    def has(self, chunk: int) -> bool:
        return self._open and bool(self._states[chunk] & 1)

    @property
    def is_full(self) -> bool:
        return not self._open or self.held_bytes + self.grid.chunk_bytes > self.budget

    def generations(self, chunks: np.ndarray) -> np.ndarray | None:
        """i64[n], of these chunks (i64[n]); None if one of them is not here. The same before and after some work with
        `view`: it saw the file's bytes."""
        full_fence()
        found: np.ndarray = self._states[chunks]
        full_fence()
        return found if (found & 1).all() else None

    def wait(self, chunks: np.ndarray, check: Callable[[], None], every_s: float) -> bool:
        """Wait until these chunks (i64[n]) are here. False: one of them is not, and nothing fills the tier.

        check : called every `every_s` seconds; may raise
        """
        head = self._head
        while True:
            news, filling = int(head[_NEWS]), int(head[_FILLING])
            full_fence()
            if (self._states[chunks] & 1).all():
                return True
            if not filling:
                return False
            check()
            futex.wait(head.ctypes.data + 4 * _NEWS, news, every_s)

    def wake(self) -> None:
        """Make all that wait call their `check`."""
        futex.wake_all(self._head.ctypes.data + 4 * _NEWS)

    # -- by the process that fills it ----------------------------------------------------------------------------------

    def announce(self, filling: bool) -> None:
        """Whether chunks are on their way, so that waiting for them has a point."""
        if self.fills:
            self._head[_FILLING] = filling
            self._tell()

    def give_back(self, chunk: int) -> None:
        """Give the chunk's memory back to the system. By the process that fills the tier."""
        if self._open and self.fills:
            self._drop(chunk)

    def _drop(self, chunk: int) -> None:
        offset, nbytes = self.grid.span(chunk)
        with self._lock:
            if self.fills and self._states[chunk] & 1:
                self._states[chunk] += 1
                full_fence()
                self._empty(offset, nbytes)
                self.held_bytes -= nbytes

    def shrink(self, nbytes: int) -> int:
        """Give at least so many bytes back to the system, or all, and take no others for them; returns how many. By the
        process that fills the tier."""
        before = self.held_bytes
        with self._lock:
            self.budget = max(0, before - nbytes)
        for chunk in np.flatnonzero(self.held())[::-1].tolist():
            if self.held_bytes <= before - nbytes:
                break
            self.give_back(chunk)
        return before - self.held_bytes

    def _tell(self) -> None:
        full_fence()
        self._head[_NEWS] = (int(self._head[_NEWS]) + 1) & 0x7FFFFFFF
        futex.wake_all(self._head.ctypes.data + 4 * _NEWS)

    # -- the contract --------------------------------------------------------------------------------------------------

    def put(self, chunk: int, data: np.ndarray) -> bool:
        offset, nbytes = self.grid.span(chunk)
        if data.dtype != np.uint8 or data.shape != (nbytes,):
            raise ValueError(f"chunk {chunk} has {nbytes} bytes, got {data.shape} of {data.dtype}")
        with self._lock:
            if not self._open or not self.fills or chunk in self._busy:
                return False
            if self._states[chunk] & 1:
                return True
            if self.held_bytes + nbytes > self.budget:
                self.counts.refused += 1
                return False
            self._busy.add(chunk)
            self.held_bytes += nbytes
        # (O_DIRECT reads of 1 MiB into memory that is used over and over, then this: 1.6 to 2.1 GB/s on two cores. The
        # reads straight into new pages of the mapping: 1.1 to 2.0, for the kernel clears each page first. Into huge pages
        # that MADV_COLLAPSE made: 0.5 to 3.3, with nothing gained later.)
        kept = False
        try:
            kept = self._write(data, offset)
        finally:
            with self._lock:
                self._busy.discard(chunk)
                kept = kept and self._open  # it may have been closed meanwhile
                if kept:
                    full_fence()
                    self._states[chunk] += 1
                    self.counts.puts += 1
                    self.counts.put_bytes += nbytes
                    self._tell()
                else:
                    self.held_bytes -= nbytes
                    self._empty(offset, nbytes)
        return kept

    def _write(self, data: np.ndarray, offset: int) -> bool:
        view = memoryview(np.ascontiguousarray(data))
        try:
            while view:
                done = os.pwrite(self.files[0], view, offset)
                view, offset = view[done:], offset + done
        except OSError:  # no memory, or a limit on the size of files
            self.counts.errors += 1
            return False
        return True

    def _empty(self, offset: int, nbytes: int) -> None:
        """Give these pages back to the system."""
        self._map.madvise(mmap.MADV_REMOVE, offset, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def read(self, offset: int, out: np.ndarray) -> bool:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.grid.file_bytes:
            raise IndexError(f"bytes {offset} to {end} of a file of {self.grid.file_bytes}")
        if not self._open:
            return False
        chunks = np.arange(offset // self.grid.chunk_bytes, -(-end // self.grid.chunk_bytes))
        before = self.generations(chunks)
        if before is None:
            return False
        out[:] = self.view[offset:end]
        after = self.generations(chunks)
        if after is None or not np.array_equal(before, after):
            return False
        self.counts.reads += 1
        self.counts.read_bytes += len(out)
        return True

    def close(self) -> None:
        """Idempotent. The process that fills the tier takes the memory along: others find its chunks absent."""
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self.announce(False)
            for chunk in np.flatnonzero(self.held()).tolist():  # garbage may refer to the mappings for a while
                self._drop(chunk)
            for fd in self.files:
                os.close(fd)


def _sizes(grid: Grid) -> tuple[int, int]:
    """Bytes of data, in whole pages, and of states."""
    return -(-grid.file_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, _HEAD_BYTES + 8 * grid.chunks
