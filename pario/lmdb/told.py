"""What an announcing process has brought for all processes of its node: memory that several of them share. Who makes it
puts values (ahead.py), who has it may read them (prepared.py).

    data     a memfd in which each value stands at a place of its own; what was read is given back to the system
    table    a memfd of i64 words that says which value stands where

        head   HEAD words
        slots  SLOT words each; a page number may stand in one of the PROBES slots from `slot_of` on
        late   the pages of the last LATE reads; -1 where the table had the page. A value that was read before its slot
               was made need not be read again

Both belong to no folder: the system frees them with the last process that has them open. A slot's first word counts its
uses in steps of 4; its lowest two bits say what it is used for. A reader of a value compares it before and after:
the bytes are right if it is the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import partial

import numpy as np

from pario.errors import ParioError
from pario.kernels.fence import full_fence
from pario.machine import is_sealed, sealed_memory, with_files, write_all

#: Words of the head: reads of any page or value so far; those of announced ones that had not come; for how many
#: microseconds one that is coming is waited for.
ASKED, MISSED, PATIENCE = 0, 1, 2
HEAD = 8

#: Words of a slot: see above; the page where the value begins; its bytes, with the header of its page; where it stands
#: in the memory; how often it was read, or given up, since it was announced.
USE, PAGE, NBYTES, AT, TAKEN = range(5)
SLOT = 8

#: What a slot is used for: a value that was announced, one that is being read, one that is here. (0: nothing)
TOLD, COMING, HERE = 1, 2, 3

#: A power of two. (1 MiB; untouched slots cost nothing.)
SLOTS = 1 << 14
PROBES = 16

#: Read number n (of ASKED) stands at word LATE_AT + n % LATE.
LATE_AT, LATE = HEAD + SLOT * SLOTS, 1 << 13
WORDS = LATE_AT + LATE

#: Values are put one behind the other, and the places of old ones are not used again before this many bytes were put.
_ROUND_BYTES = 1 << 46
_TABLE_BYTES = 8 * WORDS
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
        first = slot_of(page)
        for k in range(PROBES):
            slot = HEAD + SLOT * ((first + k) & (SLOTS - 1))
            if not self.words[slot + USE] & 3:
                self.words[slot + PAGE], self.words[slot + NBYTES] = page, 0
                self.words[slot + TAKEN] = 0
                self.use(slot, TOLD)
                return slot
        return 0

    def use(self, slot: int, state: int) -> None:
        """What the slot is used for from now on; 0: nothing."""
        full_fence()
        self.words[slot + USE] = (self.words[slot + USE] | 3) + 1 + state
        full_fence()

    def taken(self, slot: int) -> int:
        """How often the value was read, or given up, since `add`."""
        return self.words[slot + TAKEN]

    def put(self, slot: int, value: np.ndarray) -> bool:
        """Put a value (u8[n]) for all to read. False: the system has no memory for it."""
        room = _whole_pages(len(value))
        if self._next + room > _ROUND_BYTES:
            self._next = 0
        at = self._next
        self._next += room
        try:
            write_all(self.data, value, at)
        except OSError:
            self._free(at, room)
            return False
        self.words[slot + AT], self.words[slot + NBYTES] = at, len(value)
        self.use(slot, HERE)
        return True

    def drop(self, slot: int, state: int) -> None:
        """Give the value's memory back; the slot is used for `state`."""
        here = self.words[slot + USE] & 3 == HERE
        self.use(slot, state)
        if here:
            self._free(self.words[slot + AT], _whole_pages(self.words[slot + NBYTES]))

    def end(self) -> None:
        """Nobody finds anything here any more, and the memory is given back, unless this is a forked process."""
        if self.is_ours:
            for slot in range(HEAD, LATE_AT, SLOT):
                if self.words[slot + USE] & 3:
                    self.use(slot, 0)
            self._free(0, _ROUND_BYTES)

    def _free(self, at: int, nbytes: int) -> None:
        _fallocate(self.data, _KEEP_SIZE | _PUNCH_HOLE, at, nbytes)


_FILES = (("pario-told", _ROUND_BYTES), ("pario-told-table", _TABLE_BYTES))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def slot_of(page: int) -> int:
    """The first slot for this page. No step overflows 64 bits."""
    return (page * 40503 + (page >> 14)) & (SLOTS - 1)
