"""Memory for announced values that several processes share: who makes it puts values, who has it may read them.

    data     a memfd in which each value stands at a place of its own; what was read is given back to the system
    table    a memfd that says which value stands where (kernels/told.py)

Both belong to no folder: the system frees them with the last process that has them open.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial

import numpy as np

from pario.comm.memory import is_sealed, sealed_memory, with_files
from pario.errors import ParioError
from pario.kernels import told
from pario.kernels.fence import full_fence

#: Values are put one behind the other, and the places of old ones are not used again before this many bytes were put.
_ROUND_BYTES = 1 << 46
_TABLE_BYTES = 8 * told.WORDS
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

_fallocate = ctypes.CDLL(None, use_errno=True)["fallocate"]
_fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64


class ToldMemory:
    """`ToldMemory.made()` makes one, `ToldMemory.attached(paths)` opens that of another process of this user and node.

    words : i64[...] of the table; address : where it stands in this process; data : descriptor of the data

    The methods from `add` on are for one thread at a time of the process that made it. Raises OSError, ParioError.
    """

    def __init__(self, files: tuple[int, int]) -> None:
        self._pid = os.getpid()
        if not is_sealed(files[1], _TABLE_BYTES):
            raise ParioError("no table of announced values: its size may change")
        table = mmap.mmap(files[1], _TABLE_BYTES)
        self.words = memoryview(table).cast("q")
        self.address = int(np.frombuffer(table, np.int64).ctypes.data)
        self._next = 0
        self.data, self._table = files  # last: anyone who has not got this object closes them himself

    @classmethod
    def made(cls) -> ToldMemory:
        return with_files(cls, (partial(sealed_memory, *each) for each in _FILES))

    @classmethod
    def attached(cls, paths: tuple[str, str]) -> ToldMemory:
        return with_files(cls, (partial(os.open, path, os.O_RDWR | os.O_CLOEXEC) for path in paths))

    @property
    def paths(self) -> tuple[str, str]:
        """Names of the files for other processes of this user on this node, for `attached`."""
        return f"/proc/{os.getpid()}/fd/{self.data}", f"/proc/{os.getpid()}/fd/{self._table}"

    def __del__(self) -> None:
        for name in ("data", "_table"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    @property
    def is_ours(self) -> bool:
        """False in a forked child of the process that opened it."""
        return self._pid == os.getpid()

    # -- of the process that made it -----------------------------------------------------------------------------------

    def add(self, page: int) -> int:
        """The slot of a value that begins at this page, which is announced now; 0: there is none."""
        first = told.slot_of(page)
        for k in range(told.PROBES):
            slot = told.HEAD + told.SLOT * ((first + k) & (told.SLOTS - 1))
            if not self.words[slot + told.USE] & 3:
                self.words[slot + told.PAGE], self.words[slot + told.NBYTES] = page, 0
                self.words[slot + told.TAKEN] = 0
                self.use(slot, told.TOLD)
                return slot
        return 0

    def use(self, slot: int, state: int) -> None:
        """What the slot is used for from now on; 0: nothing."""
        full_fence()
        self.words[slot + told.USE] = (self.words[slot + told.USE] | 3) + 1 + state
        full_fence()

    def taken(self, slot: int) -> int:
        """How often the value was read, or given up, since `add`."""
        return self.words[slot + told.TAKEN]

    def put(self, slot: int, value: np.ndarray) -> bool:
        """Put a value (u8[n]) for all to read. False: the system has no memory for it."""
        room = _whole_pages(len(value))
        if self._next + room > _ROUND_BYTES:
            self._next = 0
        at, done = self._next, 0
        self._next += room
        try:
            while done < len(value):
                done += os.pwrite(self.data, value[done:], at + done)
        except OSError:
            self._free(at, room)
            return False
        self.words[slot + told.AT], self.words[slot + told.NBYTES] = at, len(value)
        self.use(slot, told.HERE)
        return True

    def drop(self, slot: int, state: int) -> None:
        """Give the value's memory back; the slot is used for `state`."""
        here = self.words[slot + told.USE] & 3 == told.HERE
        self.use(slot, state)
        if here:
            self._free(self.words[slot + told.AT], _whole_pages(self.words[slot + told.NBYTES]))

    def end(self) -> None:
        """Nobody finds anything here any more, and the memory is given back, unless this is a forked process."""
        if self.is_ours:
            for slot in range(told.HEAD, told.LATE_AT, told.SLOT):
                if self.words[slot + told.USE] & 3:
                    self.use(slot, 0)
            self._free(0, _ROUND_BYTES)

    def _free(self, at: int, nbytes: int) -> None:
        _fallocate(self.data, _KEEP_SIZE | _PUNCH_HOLE, at, nbytes)


_FILES = (("pario-told", _ROUND_BYTES), ("pario-told-table", _TABLE_BYTES))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
