"""The contents of files that programs open, in memory, with a bound.

A file is a memfd: the kernel's own memory file. `stat` of a name makes it, empty but with the file's size and time, so
that a program finds the same inode when it opens the file later (cp compares them). `open` fills and seals it; nobody
can change it any more. Each open gets a descriptor with an offset of its own.

Half of the time that a new file takes is the kernel's, for fresh pages. Two ways around it were tried and left out.
Files made ahead by a thread gained nothing on an idle machine, where waking another processor takes as long. Writing
another record into a file that nobody has open any more (F_SEAL_FUTURE_WRITE, and a lease that shows it) would take a
fifth, but pages that sendfile or splice have put into a pipe are still the file's: their reader would get other bytes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable

__all__ = ["Held", "HeldFiles"]

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_NOEXEC = 8  # MFD_NOEXEC_SEAL, since Linux 6.3
_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
#: Flags of open(2) that a descriptor keeps. Not O_PATH, because the kernel hands no such descriptor over.
_KEPT_FLAGS = os.O_NONBLOCK | os.O_NOATIME
#: Bytes that a memfd takes in the kernel besides its contents, about.
_OWN_BYTES = 4096
#: Larger files are read straight into their memory.
_SCRATCH_BYTES = 4 << 20


def _memfd(name: str) -> int:
    try:
        return os.memfd_create(name, _MEMFD | _NOEXEC)
    except OSError:
        return os.memfd_create(name, _MEMFD)


class Held:
    """One file. fd : its memfd; filled : the contents are there, and sealed."""

    __slots__ = ("_mtime", "fd", "filled", "size")

    def __init__(self, size: int, mtime: float) -> None:
        self.fd = _memfd("pario")
        self.size = size
        self._mtime = mtime
        self.filled = False
        try:
            os.ftruncate(self.fd, size)
            os.fchmod(self.fd, 0o444)
            os.utime(self.fd, (mtime, mtime))
        except BaseException:
            os.close(self.fd)
            raise

    def fill(self, read_into: Callable[[memoryview], None], scratch: bytearray) -> None:
        """Raises what `read_into` raises, OSError. scratch : memory that small files pass through."""
        if self.size > len(scratch):
            os.posix_fallocate(self.fd, 0, self.size)  # an error here, instead of a signal when memory ends
            with mmap.mmap(self.fd, self.size) as mapped, memoryview(mapped) as view:
                read_into(view)
        elif self.size:
            with memoryview(scratch)[: self.size] as view:
                read_into(view)
                # New pages of a mapping cost a fault each: writing them takes half the time.
                if os.pwrite(self.fd, view, 0) != self.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.size:
            os.utime(self.fd, (self._mtime, self._mtime))
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.filled = True

    def open(self, flags: int) -> int:
        """A descriptor for reading, with an offset of its own."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | flags & _KEPT_FLAGS)


class HeldFiles:
    """Files that were asked for last. Programs keep what they have open, whatever is given up here.

    most_bytes, most_files : bounds of what is kept
    """

    def __init__(self, most_bytes: int, most_files: int) -> None:
        self._most_bytes, self._most_files = most_bytes, most_files
        self._files: OrderedDict[Hashable, Held] = OrderedDict()
        self._scratch = bytearray(_SCRATCH_BYTES)
        self.nbytes = 0

    def get(self, key: Hashable, size: int, mtime: float) -> Held:
        """The file of this key, as it is or new and empty. Raises OSError."""
        held = self._files.get(key)
        if held is not None:
            self._files.move_to_end(key)
            return held
        self._make_room(_OWN_BYTES, 1)
        held = self._files[key] = Held(size, mtime)
        self.nbytes += _OWN_BYTES
        return held

    def filled(self, key: Hashable, size: int, mtime: float, read_into: Callable[[memoryview], None]) -> Held:
        """The file of this key with its contents. Raises what `read_into` raises, OSError."""
        held = self.get(key, size, mtime)
        if not held.filled:
            try:
                held.fill(read_into, self._scratch)
            except BaseException:
                self._drop(key)
                raise
            self.nbytes += size
            self._make_room(0, 0, keep=key)
        return held

    def _make_room(self, nbytes: int, files: int, keep: Hashable = None) -> None:
        while self._files and (
            self.nbytes + nbytes > self._most_bytes or len(self._files) + files > self._most_files
        ):
            oldest = next(iter(self._files))
            if oldest == keep:
                return
            self._drop(oldest)

    def _drop(self, key: Hashable) -> None:
        held = self._files.pop(key)
        self.nbytes -= _OWN_BYTES + (held.size if held.filled else 0)
        os.close(held.fd)

    def close(self) -> None:
        for key in list(self._files):
            self._drop(key)
