"""Reads of a copy on a disk (disk.py): runs of whole blocks, each of which is verified.

What the page cache has is copied out of it. The rest bypasses it where the file system can: copying through it costs
more than a fast disk takes, and a copy that is read once per epoch would drive everything else out of memory.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.comm.memory import PAGE
from pario.stage.disk_files import DiskFiles
from pario.stage.grid import BLOCK_BYTES, Grid
from pario.stage.map import block_sums
from pario.stage.patience import Step

__all__ = ["NOW", "Batch", "Buffers", "Found", "batches_of", "read_batch"]

#: For a read of what the page cache has, and no more; 0 if this Python does not know it.
NOW: int = getattr(os, "RWF_NOWAIT", 0)

#: About so many bytes are read by one call of a thread that can be left behind.
_BATCH_BYTES = 4 << 20


class Batch(NamedTuple):
    """Runs of neighbouring blocks, one after another in memory, and the extents in them.

    begins, sizes : i64[r], of the runs, in bytes of the file; multiples of BLOCK_BYTES
    members : i64[k], numbers of the extents
    starts : i64[k], where these begin in memory
    nbytes : of the memory
    """

    begins: np.ndarray
    sizes: np.ndarray
    members: np.ndarray
    starts: np.ndarray
    nbytes: int


class Found(NamedTuple):
    """right : bool[blocks of the batch], in memory; wrong : i64[n], blocks of the file with other sums; errors : of
    system calls"""

    right: np.ndarray
    wrong: np.ndarray
    errors: list[OSError]

    def has(self, starts: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """bool[k]: which of these bytes of the memory are right."""
        missing = np.concatenate([[0], np.cumsum(~self.right)])
        found: np.ndarray = missing[-(-(starts + nbytes) // BLOCK_BYTES)] == missing[starts // BLOCK_BYTES]
        return found


def batches_of(offsets: np.ndarray, nbytes: np.ndarray, members: np.ndarray) -> list[Batch]:
    """The blocks of those extents (offsets, nbytes : i64[n], none empty) that `members` (i64[k]) names.

    A block that several extents touch is read once, if they are in one batch; neighbouring blocks by one call.
    """
    members = members[np.argsort(offsets[members], kind="stable")]
    first = offsets[members] // BLOCK_BYTES
    ends = np.maximum.accumulate(-(-(offsets[members] + nbytes[members]) // BLOCK_BYTES))  # of all extents so far
    news = ends - np.maximum(first, np.concatenate([[0], ends[:-1]]))  # blocks that nobody before has touched
    batch = (np.cumsum(np.maximum(news, 0)) - 1) // (_BATCH_BYTES // BLOCK_BYTES)
    cuts = [*np.flatnonzero(np.diff(batch, prepend=-1)).tolist(), len(members)]
    return [_batch(offsets, first, ends, members, a, b) for a, b in pairwise(cuts)]


def _batch(offsets: np.ndarray, first: np.ndarray, ends: np.ndarray, members: np.ndarray, a: int, b: int) -> Batch:
    """Of members[a:b]."""
    first, ends, members = first[a:b], ends[a:b], members[a:b]
    new = np.concatenate([[True], first[1:] > ends[:-1]])
    heads = np.flatnonzero(new)
    begins = first[heads] * BLOCK_BYTES
    sizes = ends[np.append(heads[1:], len(ends)) - 1] * BLOCK_BYTES - begins
    run = np.cumsum(new) - 1
    starts = offsets[members] - begins[run] + (np.cumsum(sizes) - sizes)[run]
    return Batch(begins, sizes, members, starts, int(sizes.sum()))


class Buffers:
    """Memory for reads that may be left behind: what they write to is not given back. Any thread."""

    #: kept for later reads
    _MOST = 8

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque(maxlen=self._MOST)

    def take(self, nbytes: int) -> np.ndarray:
        """u8[k], k >= nbytes, that begins at a page. New memory costs more than what is read into it."""
        try:
            memory = self._free.pop()
            if len(memory) >= nbytes:
                return memory
        except IndexError:
            pass
        nbytes = max(nbytes, _BATCH_BYTES)
        memory = np.empty(nbytes + PAGE, np.uint8)
        begin = -memory.ctypes.data % PAGE
        return memory[begin : begin + nbytes]

    def give(self, memory: np.ndarray) -> None:
        self._free.append(memory)


def read_batch(
    files: DiskFiles, grid: Grid, batch: Batch, memory: np.ndarray, flags: int = 0, step: Step | None = None
) -> Found:
    """Read the runs into `memory`, and verify their blocks.

    flags : NOW: raises BlockingIOError if they are not to be had at once, and OSError for other failures. 0: a run that
        fails is missing
    step : called after each run
    """
    if flags:  # Whoever asks for all of what is not there lets the kernel fetch all of it.
        os.preadv(files.data, [bytearray(1)], int(batch.begins[0]), flags)
    right, wrong, errors, at = [], [], [], 0
    for begin, size in zip(batch.begins.tolist(), batch.sizes.tolist(), strict=True):
        first, count = begin // BLOCK_BYTES, size // BLOCK_BYTES
        out = memory[at : at + size]
        size = min(size, grid.file_bytes - begin)
        try:
            got = _read(files, out[: -(-size // PAGE) * PAGE], size, begin, flags)
        except OSError as e:
            if flags:
                raise
            errors.append(e.with_traceback(None))  # which would keep the files open
            right.append(np.zeros(count, bool))
        else:
            whole = got if got == size else got // BLOCK_BYTES * BLOCK_BYTES
            same = np.zeros(count, bool)  # whatever their sums, blocks that did not come are wrong: so may be the map
            found = block_sums(out[:whole])
            same[: len(found)] = files.chunks.sums(first, first + len(found)) == found
            if flags and not same.all():  # to be noted in the map, by a thread that can be left behind
                raise BlockingIOError
            right.append(same)
            wrong.append(first + np.flatnonzero(~same))
        at += count * BLOCK_BYTES
        if step is not None:
            step()
    return Found(np.concatenate(right), np.concatenate([np.empty(0, np.int64), *wrong]), errors)


def _read(files: DiskFiles, out: np.ndarray, nbytes: int, offset: int, flags: int) -> int:
    """Bytes read: `nbytes`, or fewer at the end of the file. Raises OSError.

    out : u8[k], whole pages
    """
    view, got = memoryview(out), 0
    while got < nbytes:
        past = files.direct >= 0 and not flags and got % PAGE == 0
        try:
            done = os.preadv(files.direct if past else files.data, [view[got:]], offset + got, flags)
        except OSError as e:
            if not past or e.errno != errno.EINVAL:
                raise
            files.direct = -1  # the file system took the flag, but takes no reads
            continue
        if done == 0:
            break
        got += done
    return min(got, nbytes)
