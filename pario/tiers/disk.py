"""A tier on a disk of the node: a sparse copy of the data file, and a map that says which of its chunks are there.

    FOLDER/pario-UID/DATASET/data    the chunks, at their own offsets
                             map     which chunks are there, and the sums of their blocks (map.py)
                             lock    one byte per chunk is locked by the process that puts it, and one more, shared,
                                     by all that use the copy
                             path    of the data file, for anyone who lists copies

* The map decides what is there; holes in the sparse file are not asked for. A chunk's bytes are written first, then the
  sums of its blocks, then its byte in the map: a process that dies in between leaves no chunk.
* Nothing is synced. After a loss of power the map may be newer than the data; the sums find that, as they find every
  other damage, since each block is verified on every read.
* Space is allocated before it is written, with the quota locked: processes that put at the same time stay within it
  together, and a full disk is noticed before half a chunk is written.
* A disk may stop answering, for minutes or for good. What the page cache has is read at once. Everything else is done
  by threads that can be left behind, with memory of their own (patience.py).
* Nothing is evicted and nothing is unlinked here: what this job does not need, another one may be reading. `pario tiers
  clean` removes copies that nobody uses (copies.py).
* Everything lies in a directory of this user's that nobody else can write (kernels/private.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import numpy as np

from pario.buffers import Buffers
from pario.errors import OptionError
from pario.kernels.pack import copy_ranges
from pario.kernels.private import PrivateDirectory
from pario.machine import write_all
from pario.tiers.base import AnyTier, Counts
from pario.tiers.disk_files import Claims, DiskFiles, Room, locked, root_of
from pario.tiers.disk_reads import BATCH_BYTES, NOW, Batch, Found, batches_of, read_batch, read_now
from pario.tiers.grid import BLOCK_BYTES, Grid
from pario.tiers.map import ChunkMap, block_sums
from pario.tiers.patience import Patience, StalledError, Step

_log = logging.getLogger("pario")

T = TypeVar("T")

#: After this many failed system calls in a row a tier is left alone for this many seconds; so is one without room.
_MOST_ERRORS, _REST_S = 3, 30.0
#: A disk that has not answered for this many seconds is left alone until it does, and for _REST_S at least. (Busy ones
#: answer within one or two.)
_STALL_S = 4.0
#: How long to wait for another process that brings a chunk, and how often to look. (A store answers in milliseconds.)
_BRING_S, _LOOK_S = 8.0, 0.002


class DiskTier(AnyTier):
    """Opens, or makes, the copy of one data file below a folder.

    folder : on a disk of this node
    identity : bytes[32], digest of what tells this state of the data file from all others
    quota : bytes that all datasets of this user may take below `folder`
    floor : fraction of the disk's bytes and inodes that must stay free
    path : of the data file, for the list of copies

    Raises OptionError if the quota does not hold one chunk, OSError (UnsafeError) if the folder cannot be used or
    trusted.
    """

    def __init__(
        self, folder: str, identity: bytes, grid: Grid, quota: int, *, floor: float = 0.05, path: str = ""
    ) -> None:
        self.name = folder
        self.grid = grid.checked()
        self.counts = Counts()
        if len(identity) != 32:
            raise OptionError(f"an identity has 32 bytes, got {len(identity)}")
        if quota < grid.chunk_bytes:
            raise OptionError(
                f"a quota of {quota:,} bytes does not hold one chunk of {grid.chunk_bytes:,}",
                hint="Give the tier more, or leave it out",
            )
        root = root_of(folder)
        self._folder = PrivateDirectory(os.path.join(root, identity.hex()))
        self._room = Room(root, quota, floor)
        self._claims = Claims()
        self._patience = Patience("pario-disk", _STALL_S)
        self._buffers = Buffers(BATCH_BYTES)
        self._files: DiskFiles | None = self._patience.call(lambda _: self._opened(identity, path))
        self._reads_now = bool(NOW)
        self._failed, self._rests_until = 0, 0.0
        self._refused, self._full_until = 0, 0.0
        self._dropped: set[int] = set()  # damaged chunks: their room is taken already

    def _opened(self, identity: bytes, path: str) -> DiskFiles:
        """Raises OSError."""
        files, grid = DiskFiles(self._folder, PrivateDirectory(self._room.root)), self.grid
        with locked(files.map):  # two processes may make it at the same time
            needs = ChunkMap.nbytes(grid) if not os.fstat(files.map).st_size else 0
            if needs and not self._room.has(files.map, needs):
                free = max(self._room.free(files.map), 0)
                raise OSError(errno.ENOSPC, f"quota and disk leave {free:,} bytes, {needs:,} are wanted", self.name)
            files.chunks = ChunkMap(files.map, identity, grid)
            if files.chunks.is_new:  # whatever lies there is unknown
                os.ftruncate(files.data, 0)
                self._folder.write("path", os.fsencode(path))
        return files

    @property
    def is_full(self) -> bool:
        now = time.monotonic()
        return self._files is None or self._rests() or now < self._full_until

    def held(self) -> np.ndarray:
        held = self._asked(lambda files: files.chunks.held())
        return np.zeros(self.grid.chunks, dtype=bool) if held is None else held

    def has(self, chunk: int) -> bool:
        files = self._files
        if files is None or self._rests():
            return False
        try:
            return self._now(lambda: files.chunks.has(chunk, NOW))
        except BlockingIOError:
            pass
        except OSError as e:
            self._fails(e)
            return False
        return self._asked(lambda files: files.chunks.has(chunk)) or False

    def put(self, chunk: int, data: np.ndarray) -> bool:
        offset, nbytes = self.grid.span(chunk)
        if data.dtype != np.uint8 or data.shape != (nbytes,):
            raise ValueError(f"chunk {chunk} has {nbytes} bytes, got {data.shape} of {data.dtype}")
        files = self._files
        refuses = self._refused >= _MOST_ERRORS and time.monotonic() < self._full_until
        if files is None or self._rests() or refuses:
            return False
        data = data.copy()  # the caller's memory may have other contents when a call that was left behind writes it
        try:
            return self._patience.call(lambda _: self._put(files, chunk, offset, data))
        except StalledError as e:
            self._fails(e)
        except OSError:  # reading may go on: a disk may have become read-only
            self.counts.errors += 1
            self._refused += 1
            if self._refused >= _MOST_ERRORS:
                self._full_until = time.monotonic() + _REST_S
        return False

    def _put(self, files: DiskFiles, chunk: int, offset: int, data: np.ndarray) -> bool:
        """Raises OSError. If its caller has left it behind, others may put the chunk at the same time: with the same
        bytes."""
        with self._claims.claimed(files, chunk) as mine:
            if not mine or files.chunks.has(chunk):
                return mine
            if chunk not in self._dropped and not self._room.allocated(files, offset, len(data), self.grid.file_bytes):
                self.counts.refused += 1
                self._full_until = time.monotonic() + _REST_S
                return False
            write_all(files.data, data, offset)
            files.chunks.add(chunk, block_sums(data))
            self._dropped.discard(chunk)
        self._refused = 0
        self.counts.puts += 1
        self.counts.put_bytes += len(data)
        return True

    def read(self, offset: int, out: np.ndarray) -> bool:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.grid.file_bytes:
            raise IndexError(f"bytes {offset} to {end} of a file of {self.grid.file_bytes}")
        right = self._read_all(np.array([offset]), np.array([len(out)]), out, np.zeros(1, np.int64))
        return bool(right[0])

    def read_many(self, extents: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        offsets, nbytes = np.ascontiguousarray(extents["offset"]), np.ascontiguousarray(extents["nbytes"])
        return self._read_all(offsets, nbytes, out, np.ascontiguousarray(starts))

    def _read_all(self, offsets: np.ndarray, nbytes: np.ndarray, out: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """bool[n]: which of these are here, and right; they were read."""
        files, right = self._files, np.zeros(len(offsets), bool)
        if files is None:
            return right
        for batch in batches_of(offsets, nbytes, self._present(files, offsets, nbytes)):
            if self._rests():
                break
            memory = self._buffers.take(batch.nbytes)
            found = self._found(files, batch, memory)
            if found is None:
                continue
            sizes, to = nbytes[batch.members], starts[batch.members]
            here = found.has(batch.starts, sizes)
            # By anyone who needs them: a thread that was left behind must not write there.
            copy_ranges(memory, batch.starts, sizes, out, to, here)
            self._buffers.give(memory)
            right[batch.members] = here
        right |= nbytes == 0
        self.counts.reads += int(right.sum())
        self.counts.read_bytes += int(nbytes[right].sum())
        return right

    def _present(self, files: DiskFiles, offsets: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Those of these extents that lie in chunks that are here, i64[k]; none of no bytes."""
        first, last = offsets // self.grid.chunk_bytes, (offsets + nbytes - 1) // self.grid.chunk_bytes
        here = files.chunks.known(first) & files.chunks.known(last) & (last - first <= 1) & (nbytes > 0)
        for k in np.flatnonzero(~here & (nbytes > 0)).tolist():
            here[k] = all(self.has(chunk) for chunk in range(int(first[k]), int(last[k]) + 1))
        return np.flatnonzero(here)

    def _found(self, files: DiskFiles, batch: Batch, memory: np.ndarray) -> Found | None:
        """What came of a batch; None if nothing did."""
        try:
            return self._now(lambda: read_now(files, self.grid, batch, memory))
        except BlockingIOError:
            pass
        except OSError as e:
            self._fails(e)
            return None
        try:
            found = self._patience.call(partial(self._read_batch, files, batch, memory))
        except OSError as e:
            self._fails(e)
            return None
        for error in found.errors:
            self._fails(error)
        if found.right.any():
            self._failed = 0
        return found

    def _read_batch(self, files: DiskFiles, batch: Batch, memory: np.ndarray, step: Step) -> Found:
        found = read_batch(files, self.grid, batch, memory, step)
        blocks = self.grid.chunk_bytes // BLOCK_BYTES
        for chunk in np.unique(found.wrong // blocks).tolist():
            self.counts.damaged += 1
            self._dropped.add(chunk)
            files.chunks.drop(chunk)
        return found

    def _now(self, work: Callable[[], T]) -> T:
        """What work() returns, which reads with NOW; BlockingIOError if that is not to be had at once."""
        if self._reads_now:
            try:
                return work()
            except OSError as e:
                if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                    raise
                self._reads_now = False
        raise BlockingIOError

    def room(self) -> int:
        def most(files: DiskFiles) -> int:
            more = self._room.free(files.data) // self.grid.chunk_bytes
            return min(self.grid.chunks, int(files.chunks.held().sum()) + max(0, more))

        return self._asked(most) or 0

    def close(self) -> None:
        files, self._files = [self._files], None
        # What other threads have under way keeps the files open until it is done. Closing may have to wait, too.
        if files[0] is not None:
            with contextlib.suppress(OSError):
                self._patience.call(lambda _: files.clear())
        self._patience.close()

    # -- who puts, and what fails --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def bringing(self, chunk: int) -> Iterator[None]:
        files, end = self._files, time.monotonic() + _BRING_S
        if files is None or files.chunks.knows(chunk) or self._rests():
            yield
            return
        while not (mine := self._claims.claim(files, chunk, lasting=True)) and not self.has(chunk):
            if time.monotonic() > end or self._rests():  # anyone who brings it may be waiting for this disk
                break
            time.sleep(_LOOK_S)
        try:
            yield
        finally:
            if mine:
                self._claims.let_go(files, chunk)

    def _asked(self, work: Callable[[DiskFiles], T]) -> T | None:
        """What work(files) returns, by a thread that can be left behind; None if the disk fails, or rests."""
        files = self._files
        try:
            if files is not None and not self._rests():
                return self._patience.call(lambda _: work(files))
        except OSError as e:
            self._fails(e)
        return None

    def _fails(self, error: OSError) -> None:
        self.counts.errors += 1
        before, self._failed = self._failed, self._failed + 1
        if isinstance(error, StalledError):
            self._failed = _MOST_ERRORS
            if before < _MOST_ERRORS:
                _log.warning("tier %s does not answer (%s): it is not used until it does", self.name, error)
        if self._failed >= _MOST_ERRORS:
            self._rests_until = time.monotonic() + _REST_S

    def _rests(self) -> bool:
        return self._patience.has_left_calls or (self._failed >= _MOST_ERRORS and time.monotonic() < self._rests_until)
