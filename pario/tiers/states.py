"""Which chunks of a memory tier are there, in memory that its writer and its readers share.

    head    64 bytes of i32 words, see below
    states  i64 per chunk: its generation, odd while the chunk is there; of the even ones those are no multiple of 4
            that it has while its bytes go
    coming  u8 per chunk: 1 while a thread that copies from a file of this node is at it (kernels/fill.py)

A chunk's bytes are written before its generation becomes odd, and given back after it has become even again. Anyone who
copies from the tier compares generations before and after. Anyone who waits for a chunk sleeps on a futex in the head.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np

from pario.comm import futex
from pario.kernels.fence import full_fence, generation_of
from pario.kernels.fill import CHUNK_US, STOPPED

_HEAD_BYTES = 64
#: Seconds between two looks of a rank that waits for a chunk whether the others still live.
_LOOK_S = 0.2
_NOTHING = np.empty(0, np.int64)
#: words of the head
_NEWS = 0  # changes with every chunk that arrives, and when the next word changes
_FILLING = 1  # chunks are on their way
_GIVEN = 2  # how often chunks were given back
_USED = 4  # how many chunks hold records, if a fill from a file of this node has begun; two more words: kernels/fill.py


class ChunkStates:
    """Maps the states in an open file: `ChunkStates.nbytes(chunks)` bytes from `offset`, a multiple of the page size.

    writes : this process may call the methods of the writer, one thread at a time; the others any thread may call

    address : of the chunks' states in memory, i64 each
    words : (states, coming, head) as arrays, for kernels
    """

    def __init__(self, fd: int, offset: int, chunks: int, *, writes: bool) -> None:
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
        words = mmap.mmap(fd, self.nbytes(chunks), prot=rights, offset=offset)
        self._head = np.frombuffer(words, dtype=np.int32, count=_HEAD_BYTES // 4)
        self._states = np.frombuffer(words, dtype=np.int64, offset=_HEAD_BYTES, count=chunks)
        self._coming = np.frombuffer(words, dtype=np.uint8, offset=_HEAD_BYTES + 8 * chunks, count=chunks)
        self.words = self._states, self._coming, self._head
        self._address = self._head.ctypes.data + 4 * _NEWS
        self.address = int(self._states.ctypes.data)

    @staticmethod
    def nbytes(chunks: int) -> int:
        return _HEAD_BYTES + 9 * chunks

    # -- of readers ----------------------------------------------------------------------------------------------------

    def held(self) -> np.ndarray:
        """bool[chunks]: which ones are there."""
        return self._states & 1 == 1

    def has(self, chunk: int) -> bool:
        return bool(self._states[chunk] & 1)

    def generation(self, first: np.ndarray, last: np.ndarray) -> int:
        """Of the chunks first[i] to last[i] (i64[n] each), all i together; -1 if one is not there. The same before and
        after some work with the tier's memory: it saw the file's bytes. (A chunk's only grows, and so does their sum.)
        """
        return generation_of(self._states, first, last, _NOTHING)  # type: ignore[no-any-return]

    def generation_of_each(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """i64[n]: the same for each i alone."""
        found = np.empty(len(first), np.int64)
        generation_of(self._states, first, last, found)
        return found

    @property
    def given(self) -> int:
        """How often chunks were given back; grows after they are no longer there, and before their bytes go."""
        return int(self._head[_GIVEN])

    def wait(self, chunks: np.ndarray, check: Callable[[], None]) -> bool:
        """Wait until these chunks (i64[n]) are there. False: one of them is not, and none is on its way.

        check : called now and then; may raise
        """
        while True:
            news, filling = int(self._head[_NEWS]), int(self._head[_FILLING])
            full_fence()
            if (self._states[chunks] & 1).all():
                return True
            if not filling:
                return False
            check()
            futex.wait(self._address, news, _LOOK_S)

    def wait_coming(
        self, chunks: np.ndarray, check: Callable[[], None], limit_s: float, *, absent: bool = False
    ) -> bool:
        """Wait until none of these chunks (i64[n]) is just being copied, at most about `limit_s` seconds. Returns
        whether that is so.

        check : called now and then; may raise
        absent : wait for those, too, whose copy has not begun
        """
        end = time.monotonic() + limit_s
        while True:
            news = int(self._head[_NEWS])
            full_fence()
            coming = ~self._states[chunks] & 1
            if not (coming if absent else coming & self._coming[chunks]).any():
                return True
            if time.monotonic() > end:
                return False
            check()
            futex.wait(self._address, news, min(limit_s, _LOOK_S))

    def wake(self) -> None:
        """Make all that wait call their `check`."""
        futex.wake_all(self._address)

    def left(self) -> int:
        """Chunks that a fill on this node has still to bring."""
        used = int(self._head[_USED])  # 0 between fills, when each batch asks: counting 500,000 chunks takes 0.6 ms
        return max(0, used - int(np.count_nonzero(self._states & 1))) if used else 0

    def left_s(self) -> float:
        """Seconds that it needs for them if the ranks leave it its cores; 0: it has not copied any."""
        return self.left() * int(self._head[CHUNK_US]) * 1e-6

    def coming_s(self) -> float:
        """The same for those that are just being copied."""
        return np.count_nonzero(self._coming) * int(self._head[CHUNK_US]) * 1e-6

    # -- of the writer -------------------------------------------------------------------------------------------------

    def announce(self, filling: bool) -> None:
        """Whether chunks are on their way, so that waiting for them has a point."""
        self._head[_FILLING] = filling
        if not filling:
            self._head[_USED] = 0
        self._tell()

    def expect(self, chunks: int) -> None:
        """A fill begins, after which this many chunks will be there."""
        if chunks:  # an ended one may say so when the next one has begun
            self._head[[CHUNK_US, STOPPED]] = 0
        self._head[_USED] = chunks

    def stop(self) -> None:
        """Memory is being given back: the fill under way ends."""
        self._head[STOPPED] = 1

    def add(self, chunk: int) -> None:
        """The chunk's bytes are written."""
        full_fence()
        self._states[chunk] += 1
        self._tell()

    def drop(self, chunk: int | np.ndarray) -> None:
        """The chunk's bytes are about to go; or those of several, each named once."""
        self._states[chunk] += 1
        full_fence()
        self._head[_GIVEN] = (int(self._head[_GIVEN]) + 1) & 0x7FFFFFFF
        full_fence()

    def dropped(self, chunk: int | np.ndarray) -> None:
        """They are gone. Until then no thread that copies from a file begins with the chunk."""
        full_fence()
        self._states[chunk] += 2

    def _tell(self) -> None:
        full_fence()
        self._head[_NEWS] = (int(self._head[_NEWS]) + 1) & 0x7FFFFFFF
        futex.wake_all(self._address)
