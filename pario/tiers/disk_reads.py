"""Reads of a copy on a disk (disk.py): runs of whole blocks, each of which is verified.

What the page cache has is copied out of it. Otherwise long runs bypass it, where the file system can: copying through
it costs more than a fast disk takes, and a copy that is read once per epoch would drive everything else out of memory.
"""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pario.comm.memory import PAGE
from pario.kernels.reads import read_spans
from pario.tiers.disk_files import DiskFiles
from pario.tiers.grid import BLOCK_BYTES, Grid
from pario.tiers.map import block_sums
from pario.tiers.patience import Step

#: For a read of what the page cache has, and no more; 0 if this Python does not know it.
NOW: int = getattr(os, "RWF_NOWAIT", 0)

#: About this many bytes are read by one call of a thread that can be left behind.
BATCH_BYTES = 4 << 20
#: Runs that are longer bypass the page cache. Of shorter ones many are in one block, in random order: where memory has
#: room for the copy, each block is then read once. (3 KB records in "global" order past it: 38 s, through it 18 s.)
_LONG_BYTES = 64 << 10
#: This many runs at most are read before anyone who waits hears that the disk answers.
_RUNS = 32


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
    batch = (np.cumsum(np.maximum(news, 0)) - 1) // (BATCH_BYTES // BLOCK_BYTES)
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


def read_now(files: DiskFiles, grid: Grid, batch: Batch, memory: np.ndarray) -> Found:
    """Read the runs into `memory` out of the page cache, and verify their blocks. Raises BlockingIOError if they are
    not to be had at once or not right, and OSError for other failures."""
    # Anyone who asks for all of what is not there lets the kernel fetch all of it.
    os.preadv(files.data, [bytearray(1)], int(batch.begins[0]), NOW)
    at = 0
    for begin, size in zip(batch.begins.tolist(), batch.sizes.tolist(), strict=True):
        view = memoryview(memory[at : at + min(size, grid.file_bytes - begin)])
        while view:
            done = os.preadv(files.data, [view], begin, NOW)
            if not done:
                raise BlockingIOError
            view, begin = view[done:], begin + done
        at += size
    found = _verified(files, grid, batch, memory, np.ones(batch.nbytes // BLOCK_BYTES, bool))
    if len(found.wrong):  # to be noted in the map, by a thread that can be left behind
        raise BlockingIOError
    return found


def read_batch(files: DiskFiles, grid: Grid, batch: Batch, memory: np.ndarray, step: Step) -> Found:
    """Read the runs into `memory` from the disk, and verify their blocks. A run that fails is missing.

    step : called now and then, if something has come
    """
    sizes = np.minimum(batch.sizes, -(-(grid.file_bytes - batch.begins) // PAGE) * PAGE)
    starts = np.cumsum(batch.sizes) - batch.sizes
    came, failed = np.ones(batch.nbytes // BLOCK_BYTES, bool), np.zeros(batch.nbytes // BLOCK_BYTES, bool)
    errors: list[OSError] = []
    past = files.direct >= 0 and batch.nbytes >= _LONG_BYTES * len(sizes)
    fd, i = files.direct if past else files.data, 0
    while i < len(sizes):
        j = min(len(sizes), i + _RUNS)
        part = batch.begins[i:j], sizes[i:j], memory.ctypes.data, starts[i:j], grid.file_bytes
        k, number, got = read_spans(fd, *part)
        if k < 0:
            i = j
        elif number == errno.EINVAL and not got and fd != files.data:  # it took the flag, but takes no reads
            fd, files.direct = files.data, -1
        else:
            i += int(k) + 1
            blocks = slice((starts[i - 1] + got) // BLOCK_BYTES, (starts[i - 1] + batch.sizes[i - 1]) // BLOCK_BYTES)
            came[blocks] = False
            if number and not (number == errno.EINVAL and got):  # past the cache, a short read is the file's end
                errors.append(OSError(int(number), os.strerror(int(number))))
                failed[blocks] = True
        step()
    return _verified(files, grid, batch, memory, came, failed)._replace(errors=errors)


def _verified(
    files: DiskFiles, grid: Grid, batch: Batch, memory: np.ndarray, came: np.ndarray, failed: np.ndarray | None = None
) -> Found:
    """came, failed : bool[blocks of the batch]: that were read, and where a system call failed"""
    counts = batch.sizes // BLOCK_BYTES
    before = np.cumsum(counts) - counts
    blocks = np.repeat(batch.begins // BLOCK_BYTES - before, counts) + np.arange(len(came))
    missing = max(0, (int(blocks[-1]) + 1) * BLOCK_BYTES - grid.file_bytes)  # of the last block of the file
    # Whatever their sums, blocks that did not come are wrong: so may be the map.
    right = came & (files.chunks.sums(blocks) == block_sums(memory[: batch.nbytes - missing]))
    return Found(right, blocks[~right if failed is None else ~right & ~failed], [])
