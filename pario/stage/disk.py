"""A tier on a disk of the node: a sparse copy of the data file, and a map that says which of its chunks are there.

    FOLDER/pario-UID/DATASET/data    the chunks, at their own offsets
                             map     which chunks are there, and the sums of their blocks (map.py)
                             lock    one byte per chunk is locked by whoever puts it, and one more, shared, by whoever
                                     uses the copy
                             path    of the data file, for whoever lists copies

* The map decides what is there; holes in the sparse file are not asked for. A chunk's bytes are written first, then the
  sums of its blocks, then its byte in the map: a process that dies in between leaves no chunk.
* Nothing is synced. After a loss of power the map may be newer than the data; the sums find that, as they find every
  other damage, since each block is verified on every read.
* Space is allocated before it is written, with the quota locked: processes that put at the same time stay within it
  together, and a full disk is noticed before half a chunk is written.
* Nothing is evicted and nothing is unlinked here: what this job does not need, another one may be reading. `pario cache
  clean` removes copies that nobody uses (copies.py).
* Everything lies in a directory of this user's that nobody else can write (kernels/private.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np

from pario.errors import OptionError
from pario.kernels.private import PrivateDirectory
from pario.stage.base import AnyTier, Counts
from pario.stage.grid import BLOCK_BYTES, Grid
from pario.stage.map import ChunkMap, block_sums

__all__ = ["FILES", "DiskTier", "is_used", "lock_use", "root_of"]

#: of a copy, in the order in which they may be removed
FILES = ("data", "map", "path", "lock")

#: After so many failed system calls in a row a tier is left alone for so many seconds; so is one without room.
_MOST_ERRORS, _REST_S = 3, 30.0
#: How long to wait for another process that brings a chunk, and how often to look. (A store answers in milliseconds.)
_BRING_S, _LOOK_S = 8.0, 0.002
#: How long to wait for another process that holds a lock.
_LOCK_S = 5.0
#: the byte of the lock file that says who uses the copy
_USE = 1 << 62


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
        self._quota, self._floor = quota, floor
        self._root = root_of(folder)
        self._folder = PrivateDirectory(os.path.join(self._root, identity.hex()))
        self._files: _Files | None = _Files(self._folder, PrivateDirectory(self._root))
        with _locked(self._files.map):  # two processes may make it at the same time
            needs = ChunkMap.nbytes(grid) if not os.fstat(self._files.map).st_size else 0
            if needs and (self._used() + needs > quota or not self._above_floor(self._files.map, needs)):
                raise OSError(errno.ENOSPC, f"there is no room for the map of its chunks ({needs:,} bytes)", folder)
            self._map = ChunkMap(self._files.map, identity, grid)
            if self._map.is_new:  # whatever lies there is unknown
                os.ftruncate(self._files.data, 0)
                self._folder.write("path", os.fsencode(path))
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # chunks that threads of this process are putting
        self._mine: set[int] = set()  # those of them that `bringing` has claimed
        self._failed, self._rests_until = 0, 0.0
        self._refused, self._full_until = 0, 0.0
        self._dropped: set[int] = set()  # damaged chunks: their room is taken already

    @property
    def is_full(self) -> bool:
        now = time.monotonic()
        return self._files is None or self._rests() or now < self._full_until

    def held(self) -> np.ndarray:
        files = self._files
        try:
            if files is not None and not self._rests():
                return self._map.held()
        except OSError:
            self._fails()
        return np.zeros(self.grid.chunks, dtype=bool)

    def has(self, chunk: int) -> bool:
        try:
            return self._files is not None and not self._rests() and self._map.has(chunk)
        except OSError:
            self._fails()
            return False

    def put(self, chunk: int, data: np.ndarray) -> bool:
        offset, nbytes = self.grid.span(chunk)
        if data.dtype != np.uint8 or data.shape != (nbytes,):
            raise ValueError(f"chunk {chunk} has {nbytes} bytes, got {data.shape} of {data.dtype}")
        files = self._files
        if files is None or self._rests() or self._takes_nothing():
            return False
        try:
            with self._claimed(files, chunk) as mine:
                if not mine or self._map.has(chunk):
                    return mine
                if chunk not in self._dropped and not self._allocated(files, offset, nbytes):
                    self.counts.refused += 1
                    self._full_until = time.monotonic() + _REST_S
                    return False
                data = np.ascontiguousarray(data)
                _write(files.data, data, offset)
                self._map.add(chunk, block_sums(data))
                self._dropped.discard(chunk)
        except OSError:  # reading may go on: a disk may have become read-only
            self.counts.errors += 1
            self._refused += 1
            if self._refused >= _MOST_ERRORS:
                self._full_until = time.monotonic() + _REST_S
            return False
        self._refused = 0
        self.counts.puts += 1
        self.counts.put_bytes += nbytes
        return True

    def read(self, offset: int, out: np.ndarray) -> bool:
        end = offset + len(out)
        if not 0 <= offset <= end <= self.grid.file_bytes:
            raise IndexError(f"bytes {offset} to {end} of a file of {self.grid.file_bytes}")
        files = self._files
        if files is None or self._rests():
            return False
        try:
            right = self._read(files, offset, end, out)
        except OSError:
            self._fails()
            return False
        if right:  # else nothing was read: the chunk is not here
            self._failed = 0
            self.counts.reads += 1
            self.counts.read_bytes += len(out)
        return right

    def _read(self, files: _Files, offset: int, end: int, out: np.ndarray) -> bool:
        """All blocks that hold these bytes, verified. Raises OSError."""
        chunk_bytes = self.grid.chunk_bytes
        if not all(self._map.has(chunk) for chunk in range(offset // chunk_bytes, -(-end // chunk_bytes))):
            return False
        first, last = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        begin, until = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.grid.file_bytes)
        whole = (begin, until) == (offset, end) and out.flags.c_contiguous
        blocks = out if whole else np.empty(until - begin, dtype=np.uint8)
        got = _read(files.data, blocks, begin)
        wrong = self._map.sums(first, last).copy()
        found = block_sums(blocks[:got])
        wrong[: len(found)] ^= found
        wrong[got // BLOCK_BYTES :] |= got < len(blocks)  # whatever their sums: a map may be wrong, too
        if wrong.any():
            for chunk in {(first + int(block)) * BLOCK_BYTES // chunk_bytes for block in np.flatnonzero(wrong)}:
                self.counts.damaged += 1
                self._dropped.add(chunk)
                self._map.drop(chunk)
            return False
        if not whole:
            out[:] = blocks[offset - begin : end - begin]
        return True

    def room(self) -> int:
        files = self._files
        if files is None:
            return 0
        try:
            disk = os.fstatvfs(files.data)
            free = int(disk.f_bavail * disk.f_frsize - self._floor * disk.f_blocks * disk.f_frsize)
            more = min(self._quota - self._used(), free) // self.grid.chunk_bytes
        except OSError:
            self._fails()
            return 0
        return min(self.grid.chunks, int(self.held().sum()) + max(0, more))

    def close(self) -> None:
        self._files = None  # what other threads have under way keeps the files open until it is done

    # -- room ----------------------------------------------------------------------------------------------------------

    def _allocated(self, files: _Files, offset: int, nbytes: int) -> bool:
        """Take room for a chunk. False if quota or disk have none. Raises OSError."""
        fd = files.data
        with self._lock, _locked(files.quota):
            if self._used() + nbytes > self._quota or not self._above_floor(fd, nbytes):
                return False
            if os.fstat(fd).st_size < self.grid.file_bytes:
                os.ftruncate(fd, self.grid.file_bytes)
            try:
                os.posix_fallocate(fd, offset, nbytes)
            except OSError as e:
                if e.errno in _FULL:
                    return False
                raise
        return True

    def _used(self) -> int:
        """Bytes of all datasets of this user below the folder."""
        used = 0
        with os.scandir(self._root) as entries:
            for entry in entries:
                for name in ("data", "map"):
                    with contextlib.suppress(OSError):
                        status = os.stat(os.path.join(entry.path, name), follow_symlinks=False)
                        used += 512 * status.st_blocks
        return used

    def _above_floor(self, fd: int, nbytes: int) -> bool:
        disk = os.fstatvfs(fd)
        room = disk.f_bavail * disk.f_frsize - nbytes >= self._floor * disk.f_blocks * disk.f_frsize
        return room and (disk.f_files == 0 or disk.f_favail >= self._floor * disk.f_files)

    # -- who puts, and what fails --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def bringing(self, chunk: int) -> Iterator[None]:
        files, end = self._files, time.monotonic() + _BRING_S
        if files is None or self._map.knows(chunk):
            yield
            return
        while not (mine := self._claim(files, chunk)) and time.monotonic() < end and not self.has(chunk):
            time.sleep(_LOOK_S)
        with self._lock:
            self._mine.update([chunk] if mine else [])
        try:
            yield
        finally:
            if mine:
                with self._lock:
                    self._mine.discard(chunk)
                self._let_go(files, chunk)

    @contextlib.contextmanager
    def _claimed(self, files: _Files, chunk: int) -> Iterator[bool]:
        """True if nobody else, in this process or another one, puts this chunk meanwhile."""
        with self._lock:
            already = chunk in self._mine
        mine = already or self._claim(files, chunk)
        try:
            yield mine
        finally:
            if mine and not already:
                self._let_go(files, chunk)

    def _claim(self, files: _Files, chunk: int) -> bool:
        with self._lock:
            if chunk in self._busy:
                return False
            self._busy.add(chunk)
        try:
            # Of an open file description: it ends with the process, and closing another descriptor does not end it.
            fcntl.fcntl(files.lock, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, chunk))
        except OSError:
            with self._lock:
                self._busy.discard(chunk)
            return False
        return True

    def _let_go(self, files: _Files, chunk: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(files.lock, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, chunk))
        with self._lock:
            self._busy.discard(chunk)

    def _fails(self) -> None:
        self.counts.errors += 1
        self._failed += 1
        if self._failed >= _MOST_ERRORS:
            self._rests_until = time.monotonic() + _REST_S

    def _takes_nothing(self) -> bool:
        return self._refused >= _MOST_ERRORS and time.monotonic() < self._full_until

    def _rests(self) -> bool:
        return self._failed >= _MOST_ERRORS and time.monotonic() < self._rests_until


class _Files:
    """The open files of a tier; they are closed with the last reference to them."""

    def __init__(self, folder: PrivateDirectory, root: PrivateDirectory) -> None:
        self._open: list[int] = []
        self._open.append(_used_lock(folder))
        for directory, name in ((folder, "map"), (folder, "data"), (root, "quota")):
            self._open.append(directory.open_file(name))
        self.lock, self.map, self.data, self.quota = self._open

    def __del__(self) -> None:
        for fd in self._open:
            os.close(fd)


def root_of(folder: str) -> str:
    """Where this user's copies lie below a tier's folder."""
    return os.path.join(os.path.abspath(folder), f"pario-{os.geteuid()}")


def lock_use(lock: int, *, alone: bool, byte: int = _USE) -> bool:
    """Note in an open lock file that this process uses what it stands for, as others may, or that nobody else does.
    False: others do, or one does alone. It ends when the descriptor is closed.

    byte : of the file; by default the one that stands for a copy
    """
    try:
        fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK if alone else fcntl.F_RDLCK, byte))
    except BlockingIOError:
        return False
    return True


def is_used(lock: int, *, byte: int) -> bool:
    """Whether another open file, of this process or another one, holds `lock_use` of this byte. Raises OSError."""
    found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, byte))
    return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)


def _used_lock(folder: PrivateDirectory) -> int:
    """The open lock file of a copy that this process uses from now on. Raises OSError."""
    now = os.path.join(folder.path, "lock")
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # whoever removed the copy meanwhile removed this file, too
            lock = folder.open_file("lock")
            try:
                if lock_use(lock, alone=False) and os.path.samestat(os.fstat(lock), os.stat(now)):
                    os.utime(lock)
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        time.sleep(0.01)
    raise OSError(errno.EBUSY, "the copy is being removed", folder.path)


#: Looks at a copy that is being removed, which takes a moment.
_TRIES = 20

#: The disk, or the user's share of it, is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _range(kind: int, chunk: int) -> bytes:
    """struct flock for the byte of a chunk."""
    return struct.pack("@hhqqi4x", kind, os.SEEK_SET, chunk, 1, 0)


@contextlib.contextmanager
def _locked(fd: int) -> Iterator[None]:
    """Whoever holds this lock does so for some system calls. Raises OSError after a while: it may have been stopped."""
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _write(fd: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _read(fd: int, out: np.ndarray, offset: int) -> int:
    """Bytes read: all, or fewer at the end of the file."""
    view, got = memoryview(out), 0
    while got < len(out):
        done = os.preadv(fd, [view[got:]], offset + got)
        if done == 0:
            break
        got += done
    return got
