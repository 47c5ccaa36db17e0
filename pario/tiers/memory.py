"""A tier in memory of this node that belongs to pario: filled by one process, read by all that it hands the files to.

    data     as large as the data file, at whose own offsets the chunks lie; sparse
    states   which chunks are there (states.py)

Both lie in one memfd, which is sealed: nobody can shrink it, so no reader is killed by SIGBUS. Chunks can be given
back, and then read as zeros; so a reader looks at the chunk's generation before and after it copies, and uses nothing
that was copied while the generation changed. Processes map the data twice: read-only, and privately for kernels that
expect writable memory.

A tier with room for the whole file lies in large pages if the system has them: records of 150 KB are copied out of
them 1.2 to 1.4 times as fast, and a disk writes into them directly. (In a tier with less room two chunks may take one
large page each, which is more than its budget.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pario.errors import OptionError, ParioError
from pario.kernels.fence import full_fence
from pario.kernels.large import LARGE, LARGE_BYTES, SMALL, UNKNOWN, WAIT, enlarge
from pario.kernels.pack import copy_ranges
from pario.machine import is_sealed, sealed_memory, write_all
from pario.tiers.base import AnyTier, Counts
from pario.tiers.fill_end import FillEnd
from pario.tiers.grid import Grid
from pario.tiers.states import ChunkStates
from pario.wire.frames import Part

#: No memory is set aside for pages that nobody writes: else a file larger than memory could not be mapped. Python's
#: mmap has the name from 3.13 on only.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x40 if platform.machine().startswith("ppc") else 0x4000)
_MAP_FIXED, _REMOVE = 0x10, 9
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = *(ctypes.c_size_t,) * 2, *(ctypes.c_int,) * 3, ctypes.c_int64
_libc.madvise.argtypes = ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int

T = TypeVar("T", bound="MemoryTier")


class MemoryTier(AnyTier):
    """`MemoryTier.made` makes one, `MemoryTier(grid, fd)` maps one that another process has made and fills.

    fd : of data and states, which this tier owns from now on, if this does not raise; and which other processes of this
        user on this node may map

    Raises ParioError if it is not what `made` makes: without the seals, its maker could kill this process.

    fills : this process made it, and alone puts chunks
    budget : bytes that its chunks may take now, if this process fills it; wanted : while there is enough memory
    held_bytes : of the chunks that are here or on their way, in the process that fills it; promised : how many of
        them a fill may still write
    admit(chunks) : asked before the tier takes more; for how many of them there is memory now
    states : of the chunks; fill_end : when they will all be there, as this process sees it
    view : u8[file_bytes], read-only: the file's bytes, where their chunks are held. Anyone who uses it asks `states`
        before and after
    kernel_view : the same for pario's own kernels, which would be compiled once more for arrays that cannot be written.
        Nobody writes to it: that would change the record for this process in all later epochs
    pages : the same, for those who fill it; large : of `kernels.large.enlarge`, none if all pages are to be small
    """

    name, near = "memory", True
    _states_kind: type[ChunkStates] = ChunkStates

    def __init__(self, grid: Grid, fd: int, *, budget: int = 0) -> None:
        self.grid = grid.checked()
        self.counts = Counts()
        self.fills = budget > 0
        self._pid = os.getpid()
        self.budget = self.wanted = budget
        self.fd = fd
        self.held_bytes = self.promised = 0
        self.admit: Callable[[int], int] = lambda chunks: chunks
        # Guards the one above and the one below, and writing to the states. The garbage collector may call `close`
        # while this thread holds it.
        self._lock = threading.RLock()
        self._busy: set[int] = set()
        self._seen: tuple[int, object, np.ndarray] = -1, None, np.empty(0, np.uint8)
        self._open = False
        self._file_closed = False
        nbytes, whole = _sizes(grid)
        if not is_sealed(fd, whole):
            raise ParioError(f"descriptor {fd} is no sealed memory of {whole:,} bytes")
        self.states = self._states_kind(fd, nbytes, grid.chunks, writes=self.fills)
        self.fill_end = FillEnd(self.states)
        self.view = _mapped(fd, nbytes)[: grid.file_bytes]
        self.kernel_view = _mapped(fd, nbytes, writes=True, private=True)[: grid.file_bytes]
        self.pages, self.large = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        if self.fills:
            self.pages = _mapped(fd, nbytes, writes=True)
            # Chunks are smaller where those beside this node's are of no use to it.
            if budget >= grid.file_bytes >= LARGE_BYTES and 2 * grid.chunk_bytes >= LARGE_BYTES:
                large = np.zeros(nbytes // LARGE_BYTES, np.int64)
                self.large = large if enlarge(self.pages, large, 0, 1) else self.large
        self._open = True

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
        return cls._over(sealed_memory("pario-data", _sizes(grid)[1]), grid, budget)

    @classmethod
    def attached(cls: type[T], grid: Grid, path: str) -> T:
        """The tier of another process, by the name that `path` gives there. Raises OSError, ParioError."""
        return cls._over(os.open(path, os.O_RDONLY | os.O_CLOEXEC), grid, 0)

    @classmethod
    def _over(cls: type[T], fd: int, grid: Grid, budget: int) -> T:
        try:
            return cls(grid, fd, budget=budget)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        """The file's name for other processes of this user on this node, for `attached`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def seen(self, given: int, index: object, n: int) -> np.ndarray:
        """u8[...], a bit for each of the n records of an index: those that this process has checked while
        `states.given` was this. (Checks of 256 records of 3 KB, at random: 70 of 370 us.)"""
        before, of, bits = self._seen
        if before != given or of is not index:
            bits = np.zeros(-(-n // 8), np.uint8)
            self._seen = given, index, bits
        return bits

    def held(self) -> np.ndarray:
        return self.states.held()

    def has(self, chunk: int) -> bool:
        return self._open and self.states.has(chunk)

    @property
    def is_full(self) -> bool:
        return not self._open or self.held_bytes + self.grid.chunk_bytes > self.budget

    def put(self, chunk: int, data: np.ndarray) -> bool:
        offset, nbytes = self.grid.span(chunk)
        if data.dtype != np.uint8 or data.shape != (nbytes,):
            raise ValueError(f"chunk {chunk} has {nbytes} bytes, got {data.shape} of {data.dtype}")
        # Anyone who is asked may let this tier shrink, and takes its own lock first.
        admitted = self.is_full or self.states.has(chunk) or self.admit(1)
        with self._lock:
            if chunk in self._busy:
                return False
            self._busy.add(chunk)  # first of all: from here on the file stays open
            here, room = self.states.has(chunk), admitted and self.held_bytes + nbytes <= self.budget
            if not self._open or not self.fills or here or not room:
                self._busy.discard(chunk)
                self._close_file()
                self.counts.refused += self._open and self.fills and not here
                return self._open and self.fills and here
            self.held_bytes += nbytes
        kept = self._write(np.ascontiguousarray(data), offset)
        with self._lock:
            self._busy.discard(chunk)
            kept = kept and self._open  # it may have been closed meanwhile
            if kept:
                self.counts.puts += 1
                self.counts.put_bytes += nbytes
                self.states.add(chunk)
            else:
                self.held_bytes = max(0, self.held_bytes - nbytes)
                self._empty(offset, nbytes)
                self._close_file()
        return kept

    def _write(self, data: np.ndarray, offset: int) -> bool:
        enlarge(self.pages, self.large, offset, len(data))
        try:
            write_all(self.fd, data, offset)
        except OSError:  # no memory, or a limit on the size of files
            self.counts.errors += 1
            return False
        return True

    def read(self, offset: int, out: np.ndarray) -> bool:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.grid.file_bytes:
            raise IndexError(f"bytes {offset} to {end} of a file of {self.grid.file_bytes}")
        part = self.lend(offset, len(out))
        if part is None or part.still is None:
            return False
        out[:] = part.view
        return part.still()

    def read_many(self, extents: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        if not self._open:
            return np.zeros(len(extents), bool)
        offsets, nbytes = np.ascontiguousarray(extents["offset"]), np.ascontiguousarray(extents["nbytes"])
        chunks = offsets // self.grid.chunk_bytes
        before = self.states.generation_of_each(chunks, chunks)
        here: np.ndarray = before >= 0
        copy_ranges(self.kernel_view, offsets, nbytes, out, starts, here)
        here &= self.states.generation_of_each(chunks, chunks) == before
        self.counts.reads += int(here.sum())
        self.counts.read_bytes += int(nbytes[here].sum())
        return here

    def lend(self, offset: int, nbytes: int) -> Part | None:
        chunks = np.arange(offset // self.grid.chunk_bytes, -(-(offset + nbytes) // self.grid.chunk_bytes))
        before = self.states.generation(chunks, chunks) if self._open else -1
        if before < 0:
            return None
        self.counts.reads += 1
        self.counts.read_bytes += nbytes
        view = self.view[offset : offset + nbytes]
        return Part(view, self.fd, offset, lambda: self.states.generation(chunks, chunks) == before)

    def room(self) -> int:
        return min(self.grid.chunks, self.budget // self.grid.chunk_bytes)

    # -- by the process that fills it ----------------------------------------------------------------------------------

    def give_back(self, chunks: int | np.ndarray) -> None:
        """Give the memory of these chunks (i64[n], each once) back to the system."""
        with self._lock:
            gone = np.sort(np.atleast_1d(chunks))  # each epoch begins here, mostly with none
            gone = gone[self.held()[gone]]
            if not (len(gone) and self._open and self.fills):
                return
            self.states.drop(gone)
            for run in np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1):
                offset, end = self.grid.span(run[0])[0], sum(self.grid.span(run[-1]))
                self.held_bytes -= end - offset
                self._empty(offset, end - offset)
            self.states.dropped(gone)

    def shrink(self, nbytes: int) -> int:
        """Give at least this many bytes back to the system, or all, and take no others for them; returns how many."""
        before, chunk_bytes = self.held_bytes, self.grid.chunk_bytes
        with self._lock:
            self.budget = max(0, before - nbytes)
            if nbytes > 0:
                self.states.stop()
            self.large[self.large == UNKNOWN] = SMALL
            while self.held_bytes > before - nbytes and len(held := np.flatnonzero(self.held())):
                self.give_back(held[::-1][: -(-(self.held_bytes + nbytes - before) // chunk_bytes)])
            pages = np.flatnonzero(self.large == LARGE)
            self.large[pages] = WAIT
            full_fence()  # who claims a chunk from here on waits
            used = self.held() | (self.states.words[1] != 0)
            used[list(self._busy)] = True
            for page in pages.tolist():  # go, too, if nothing was written to them
                at = page * LARGE_BYTES
                has_any = used[at // chunk_bytes : -(-(at + LARGE_BYTES) // chunk_bytes)].any()
                if not has_any:
                    self._empty(at, LARGE_BYTES)
                self.large[page] = LARGE if has_any else SMALL
        return before - self.held_bytes

    def grow(self, nbytes: int) -> None:
        """Others need no more of the memory that was given back: take this many bytes again, when chunks come."""
        with self._lock:
            self.budget = min(self.wanted, max(self.budget, self.held_bytes + nbytes))

    def reserve(self, chunks: int) -> int:
        """Count up to this many more chunks as held, which somebody is about to write; returns how many have room."""
        nbytes = self.grid.chunk_bytes
        chunks = min(chunks, (self.budget - self.held_bytes) // nbytes)
        chunks = self.admit(chunks) if chunks > 0 else 0
        with self._lock:
            chunks = max(0, min(chunks, (self.budget - self.held_bytes) // nbytes)) if self._open else 0
            self.held_bytes += chunks * nbytes
            self.promised += chunks
        return chunks

    def settle(self, reserved: int, written: int, nbytes: int) -> None:
        """Of this many chunks that were reserved, this many were written, `nbytes` in all."""
        with self._lock:
            self.held_bytes = max(0, self.held_bytes - reserved * self.grid.chunk_bytes + nbytes)
            self.promised -= reserved
            self.counts.puts += written
            self.counts.put_bytes += nbytes

    def announce(self, filling: bool) -> None:
        with self._lock:
            if self._open and self.fills:
                self.states.announce(filling)

    def close(self) -> None:
        """Idempotent. The process that fills the tier takes the memory along: others find its chunks absent."""
        with self._lock:
            if not self._open:
                return
            if self.fills and self._pid == os.getpid():  # a forked process has no say
                self.states.announce(False)
                self.states.drop(np.flatnonzero(self.held()))
                self.held_bytes = 0
                # Garbage may refer to the mappings for a while. A decoder that was overtaken by `give_back` may have
                # made new pages, too: so everything goes.
                self._empty(0, self.grid.file_bytes)
            self._open = False
            self._close_file()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def _close_file(self) -> None:
        """As soon as nobody writes: the system may give its number to another file at once."""
        if not self._open and not self._busy and not self._file_closed:
            self._file_closed = True
            os.close(self.fd)

    def _empty(self, offset: int, nbytes: int) -> None:
        end = offset + nbytes if offset + nbytes < self.grid.file_bytes else len(self.pages)
        begin = self.pages.__array_interface__["data"][0]  # `ctypes` imports a module: not when the interpreter ends
        _checked(_libc.madvise(begin + offset, end - offset, _REMOVE))


def _sizes(grid: Grid) -> tuple[int, int]:
    """Bytes of data, in whole pages, and of data and states together."""
    page = LARGE_BYTES if grid.file_bytes >= LARGE_BYTES else mmap.PAGESIZE
    nbytes = -(-grid.file_bytes // page) * page
    return nbytes, nbytes + ChunkStates.nbytes(grid.chunks)


def _mapped(fd: int, nbytes: int, *, writes: bool = False, private: bool = False) -> np.ndarray:
    """u8[nbytes] of `sealed_memory`, whose first byte is the first of a large page. Raises OSError.

    private : what this process writes is seen by nobody else
    """
    rights, own = mmap.PROT_READ | mmap.PROT_WRITE * writes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    # The kernel aligns mappings only where it makes large pages by itself: so this one takes the place of an empty one,
    # which is as long as both live.
    room = np.frombuffer(mmap.mmap(-1, nbytes + LARGE_BYTES, flags=own, prot=rights), np.uint8)
    memory = room[-room.ctypes.data % LARGE_BYTES :][:nbytes]
    kind = _MAP_FIXED | (mmap.MAP_PRIVATE | _NO_RESERVE if private else mmap.MAP_SHARED)
    _checked(_libc.mmap(memory.ctypes.data, nbytes, rights, kind, fd, 0))
    return memory


def _checked(result: int) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
