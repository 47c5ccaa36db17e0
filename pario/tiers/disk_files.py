"""The files of a copy on a disk of the node (disk.py), the locks on them, and the room that they may take.

FOLDER/pario-UID/DATASET/lock    one byte per chunk is locked by anyone who puts it, and one more, shared, by anyone who
                                 uses the copy
FOLDER/pario-UID/quota           locked while space is allocated
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Iterator

from pario.kernels.private import PrivateDirectory
from pario.tiers.map import ChunkMap

#: of a copy, in the order in which they may be removed
FILES = ("data", "map", "path", "lock")

#: How long to wait for another process that holds a lock. (Less than a disk may take to answer: disk.py.)
_LOCK_S = 3.0

#: The disk, or the user's share of it, is full.
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFiles:
    """The open files of a tier; they are closed with the last reference to them."""

    chunks: ChunkMap

    def __init__(self, folder: PrivateDirectory, root: PrivateDirectory) -> None:
        self._open: list[int] = []
        self._open.append(used_lock(folder))
        for directory, name in ((folder, "map"), (folder, "data"), (root, "quota")):
            self._open.append(directory.open_file(name))
        self.lock, self.map, self.data, self.quota = self._open
        #: the data past the page cache; -1 where the file system cannot
        self.direct = -1
        with contextlib.suppress(OSError, AttributeError):
            self.direct = os.open(f"/proc/self/fd/{self.data}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            self._open.append(self.direct)
        with contextlib.suppress(OSError, AttributeError):  # reads are as long as they are to be
            os.posix_fadvise(self.data, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        for fd in self._open:
            os.close(fd)


class Claims:
    """Who puts which chunk, of the threads of this process and of all processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._busy: set[int] = set()  # chunks that are claimed
        self._lasting: set[int] = set()  # those of them that threads put without another claim

    @contextlib.contextmanager
    def claimed(self, files: DiskFiles, chunk: int) -> Iterator[bool]:
        """True if nobody else puts this chunk meanwhile."""
        with self._lock:
            already = chunk in self._lasting
        mine = already or self.claim(files, chunk)
        try:
            yield mine
        finally:
            if mine and not already:
                self.let_go(files, chunk)

    def claim(self, files: DiskFiles, chunk: int, *, lasting: bool = False) -> bool:
        """Until `let_go`; False if somebody else has it.

        lasting : for any thread of this process that puts it
        """
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
        with self._lock:
            self._lasting.update([chunk] if lasting else [])
        return True

    def let_go(self, files: DiskFiles, chunk: int) -> None:
        with self._lock:
            self._lasting.discard(chunk)
        with contextlib.suppress(OSError):
            fcntl.fcntl(files.lock, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, chunk))
        with self._lock:
            self._busy.discard(chunk)


class Room:
    """What this user's copies below a folder may take. All methods make system calls, and raise OSError.

    root : of this user's copies there
    quota : bytes that all of them may take
    floor : fraction of the disk's bytes and inodes that must stay free, of what users other than root may take
    """

    def __init__(self, root: str, quota: int, floor: float) -> None:
        self.root = root
        self._quota, self._floor = quota, floor
        self._lock = threading.Lock()

    def has(self, fd: int, nbytes: int) -> bool:
        """Whether there is room for this many bytes more.

        fd : of a file on the disk
        """
        disk = os.fstatvfs(fd)
        inodes = disk.f_files == 0 or disk.f_favail >= self._floor * disk.f_files
        return inodes and self.free(fd) >= nbytes

    def free(self, fd: int) -> int:
        """Bytes; fewer than none if others have taken more than they should."""
        disk = os.fstatvfs(fd)
        # as df counts: without what the file system keeps for root, 60 % of one of our machines
        free = disk.f_bavail - math.ceil(self._floor * (disk.f_blocks - disk.f_bfree + disk.f_bavail))
        return min(self._quota - self._used(), free * disk.f_frsize)

    def allocated(self, files: DiskFiles, offset: int, nbytes: int, file_bytes: int) -> bool:
        """Take room for a chunk. False if quota or disk have none."""
        fd = files.data
        with self._lock, locked(files.quota):
            if not self.has(fd, nbytes):
                return False
            status = os.fstat(fd)
            if not status.st_nlink:  # neither this user's other jobs nor the quota would ever see it
                raise OSError(errno.ESTALE, "the copy was removed", self.root)
            if status.st_size < file_bytes:
                os.ftruncate(fd, file_bytes)
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
        with os.scandir(self.root) as entries:
            for entry in entries:
                for name in ("data", "map"):
                    with contextlib.suppress(OSError):
                        status = os.stat(os.path.join(entry.path, name), follow_symlinks=False)
                        used += 512 * status.st_blocks
        return used


def root_of(folder: str) -> str:
    """Where this user's copies lie below a tier's folder."""
    return os.path.join(os.path.abspath(folder), f"pario-{os.geteuid()}")


#: the byte of the lock file that says who uses the copy
USE = 1 << 62


def lock_use(lock: int, *, alone: bool, byte: int = USE, wait: bool = False) -> bool:
    """Note in an open lock file that this process uses what it stands for, as others may, or that nobody else does.
    False: others do, or one does alone. It ends when the descriptor is closed.

    byte : of the file; by default the one that stands for a copy
    wait : until no other process stands against it
    """
    how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(lock, how, _range(fcntl.F_WRLCK if alone else fcntl.F_RDLCK, byte))
    except BlockingIOError:
        return False
    return True


def is_used(lock: int, *, byte: int) -> bool:
    """Whether another open file, of this process or another one, holds `lock_use` of this byte. Raises OSError."""
    found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, byte))
    return bool(struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK)


def used_lock(folder: PrivateDirectory, name: str = "lock") -> int:
    """The open lock file of a copy, or of what else lies in the folder, that this process uses from now on; anyone who
    removes that removes the lock file last, having locked it alone. Raises OSError."""
    now = os.path.join(folder.path, name)
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # anyone who removed the copy meanwhile removed this file, too
            lock = folder.open_file(name)
            try:
                if lock_use(lock, alone=False) and os.path.samestat(os.fstat(lock), os.stat(now)):
                    os.utime(lock)
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        time.sleep(0.01)
    raise OSError(errno.EBUSY, "it is being removed", folder.path)


#: Looks at a copy that is being removed, which takes a moment.
_TRIES = 20


def _range(kind: int, chunk: int) -> bytes:
    """struct flock for the byte of a chunk."""
    return struct.pack("@hhqqi4x", kind, os.SEEK_SET, chunk, 1, 0)


@contextlib.contextmanager
def locked(fd: int) -> Iterator[None]:
    """This lock is held for some system calls at a time. Raises OSError after a while: it may have been stopped."""
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
