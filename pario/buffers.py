"""Memory for batch arrays, reused only when nobody refers to it any more."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod

import numpy as np

from pario.errors import HeldBatchesError

_ALIGN = 64  # bytes: cache lines, and the widest vector loads

#: A large page, in bytes.
_LARGE = 2 << 20


def large_pages(nbytes: int) -> np.ndarray:
    """u8[>= nbytes], uninitialised, which begins and ends with a large page where the system has them: a disk fills
    such memory in few requests. (O_DIRECT reads of 1 to 16 MiB of a local file, one thread: 3.4 to 4.0 GB/s into large
    pages, 1.2 to 1.7 into small ones.)"""
    whole = -(-max(nbytes, 1) // _LARGE) * _LARGE
    memory = np.empty(_LARGE + whole, np.uint8)  # from twice _LARGE on, numpy asks the system for them
    return memory[-memory.ctypes.data % _LARGE :][:whole]


class Buffers:
    """Memory for reads, which is given back when its contents are no longer needed. Any thread.

    least : bytes of each piece
    """

    #: kept for later reads
    _MOST = 8

    def __init__(self, least: int) -> None:
        self._least = least
        self._free: deque[np.ndarray] = deque(maxlen=self._MOST)

    def take(self, nbytes: int) -> np.ndarray:
        """u8[k], k >= nbytes, that begins at a page. New memory costs more than what is read into it."""
        with suppress(IndexError):
            memory = self._free.pop()
            if len(memory) >= nbytes:
                return memory
        return large_pages(max(nbytes, self._least))

    def give(self, memory: np.ndarray) -> None:
        self._free.append(memory)


#: What `take` is asked for: name -> (shape, dtype).
Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


class BatchBuffers:
    """Blocks of memory for the arrays of a batch.

    The arrays are views of one array, which they keep alive and nobody else: its end tells that the user's last
    reference is gone. (A method of a deque hears of it, no `__del__` of ours: Ctrl-C would be lost in that. Reference
    counts tell the same in CPython 3.10, but later versions count local variables differently.)

    held_bytes : limit of all blocks together, in use or waiting for reuse. `take` raises HeldBatchesError if the blocks
        that the user refers to would exceed it alone.
    allocate : makes a block: allocate(n) -> u8[n], uninitialised. Memory of another kind: assign a function of your own
        before the first batch
    lead : bytes, see `Decoder.lead`
    """

    def __init__(self, held_bytes: int, lead: int = 0) -> None:
        self.held_bytes, self._lead = held_bytes, lead
        self.allocate: Callable[[int], np.ndarray] = lambda nbytes: np.empty(nbytes, np.uint8)
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}  # by the id of what tells of its end
        self._returned: deque[weakref.ref[np.ndarray]] = deque()  # by the thread that drops the last reference
        self._free: list[np.ndarray] = []
        self._allocated = 0
        self._lock = threading.Lock()
        self._layout: tuple[Shapes, dict[str, int], int] = {}, {}, 0

    @property
    def allocated_bytes(self) -> int:
        """Memory of all blocks, in use or not."""
        return self._allocated

    def take(self, shapes: Shapes) -> dict[str, np.ndarray]:
        """Arrays of these shapes and dtypes, uninitialised, in one block. Those of objects lie apart, uncounted."""
        before, places, total = self._layout
        if shapes != before:  # most batches are like the last one
            places, total = {}, 0
            for name, (shape, dtype) in shapes.items():
                if not dtype.hasobject:
                    places[name] = total + self._lead
                    total += -(-(dtype.itemsize * prod(shape) + self._lead) // _ALIGN) * _ALIGN
            self._layout = dict(shapes), places, total
        block = self._block(total)
        root = np.frombuffer(memoryview(block), np.uint8)
        end = weakref.ref(root, self._returned.append)
        self._lent[id(end)] = end, block
        return {  # in the decoder's order, which `x, y = batch` has
            name: np.ndarray(*each, root, places[name]) if name in places else np.empty(*each)
            for name, each in shapes.items()
        }

    def _block(self, nbytes: int) -> np.ndarray:
        with self._lock:
            while self._returned:
                self._free.append(self._lent.pop(id(self._returned.popleft()))[1])
            best, most = -1, 4 * nbytes + 4096
            for i, block in enumerate(self._free):
                # Of those of one size the one that came back last: a core's cache may still hold it.
                if nbytes <= block.nbytes <= most:
                    best, most = i, block.nbytes
            if best >= 0:
                return self._free.pop(best)
            # One eighth more than requested, so that batches of variable size fit each other's blocks.
            size = (nbytes + nbytes // 8 + _ALIGN + 4095) // 4096 * 4096
            while self._free and self._allocated + size > self.held_bytes:
                self._allocated -= self._free.pop().nbytes
            if self._allocated + size > self.held_bytes and self._allocated > 0:
                raise HeldBatchesError(
                    f"batches of {self._allocated:,} bytes are still referred to, and another {size:,} bytes "
                    f"would pass the limit of {self.held_bytes:,}",
                    hint="Keep copies (`array.copy()`) of what you need instead of whole batches, or raise "
                    "Options(held_bytes=...).",
                )
            block = self.allocate(size + _ALIGN)
            self._allocated += size
            return block[-block.ctypes.data % _ALIGN :][:size]
