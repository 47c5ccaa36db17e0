"""The contents of files that programs open, in memory, with a bound.

A file is a memfd: the kernel's own memory file. `stat` of a name makes it, empty but with the file's size and time, so
that a program finds the same inode when it opens the file later (cp compares them). `open` fills and seals it; nobody
can change it any more. Each open gets a descriptor with an offset of its own. Its name is the path that programs know
it by: they see it in /proc/PID/fd and /proc/PID/maps.

Where the storage can, the kernel copies a record into it by itself (sendfile): 43 us for 128 KiB in the page cache,
against 63 us by way of our memory, and 7.4 ms for 8 MiB, against 9.2 ms, or 14.2 ms through a mapping of the memfd.

Half of the time that a new file takes is the kernel's, for fresh pages. Two ways around it were tried and left out.
Files made ahead by a thread gained nothing on an idle machine, where waking another processor takes as long. Writing
another record into a file that nobody has open any more (F_SEAL_FUTURE_WRITE, and a lease that shows it) would take a
fifth, but pages that sendfile or splice have put into a pipe are still the file's: their reader would get other bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from pario.files.crew import Crew
from pario.files.notify import quick
from pario.machine import memory

if TYPE_CHECKING:
    from pario.files.tree import Node, Tree

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SET_FLAGS, _IMMUTABLE = 0x40086602, struct.pack("l", 0x10)  # FS_IOC_SETFLAGS, FS_IMMUTABLE_FL
_NOEXEC, _EXEC = 8, 16  # MFD_NOEXEC_SEAL, without which a mode may say that a file can run, and MFD_EXEC: Linux 6.3
_TIMES = struct.Struct("4q")  # struct timespec[2]
_MEMFD = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
#: Flags of open(2) that a descriptor keeps. Not O_PATH, because the kernel hands no such descriptor over.
_KEPT_FLAGS = os.O_NONBLOCK | os.O_NOATIME
#: Bytes that a memfd takes in the kernel besides its contents, about.
_OWN_BYTES = 4096
#: Larger files that the kernel cannot copy are read straight into their memory.
_SCRATCH_BYTES = 4 << 20
#: While a larger file is copied, another thread answers calls.
_LARGE_BYTES, _SMALL_BYTES = 1 << 20, 2048
#: Files that are sent only if their first and their last page are in memory: then there is nothing to wait for.
_FEW_PAGES_BYTES = 8 << 10
#: How often the memory that is left is looked at; and that much, and a part of all, stays free for programs.
_LOOK_BYTES, _LEFT_SHARE = 64 << 20, 32
#: Of a memfd's name.
_LONGEST_NAME = 249
#: What a memfd is called whose path is longer.
_NO_NAME = b"pario"


class Wanted(NamedTuple):
    """A file. name : the path that programs know it by; mode : permissions"""

    key: Hashable
    name: bytes
    size: int
    mtime_ns: int
    mode: int = 0o444


def _memfd(name: bytes, mode: int) -> int:
    name = name if len(name) <= _LONGEST_NAME else _NO_NAME
    for more in (_EXEC if mode & 0o111 else _NOEXEC, 0):
        try:
            return quick("memfd_create", name, _MEMFD | more)
        except OSError as e:
            if e.errno != errno.EINVAL and more != _EXEC:  # which a system may forbid
                raise
    return quick("memfd_create", name, _MEMFD | _NOEXEC)


class Held:
    """One file. fd : its memfd; filled : the contents are there, sealed; busy : a thread fills it, and will set this"""

    __slots__ = ("_mtime_ns", "busy", "fd", "filled", "size")

    def __init__(self, wanted: Wanted) -> None:
        self.fd = _memfd(wanted.name, wanted.mode)
        self.size = wanted.size
        self._mtime_ns = wanted.mtime_ns
        self.filled = False
        self.busy: threading.Event | None = None
        try:
            with contextlib.suppress(PermissionError):  # a file that must not be able to run
                for mode in sorted({wanted.mode & ~0o111, wanted.mode}):
                    quick("fchmod", self.fd, mode)
        except BaseException:
            os.close(self.fd)
            raise

    def stand_for_it(self) -> None:
        """Have the size and the time of the file, without its contents."""
        os.ftruncate(self.fd, self.size)
        self._tell_time()

    def _tell_time(self) -> None:
        quick("futimens", self.fd, _TIMES.pack(*2 * divmod(self._mtime_ns, 10**9)))

    def read(self, tree: Tree, node: Node, scratch: bytearray) -> None:
        """Raises OSError, ParioError. scratch : memory that small files pass through."""
        if self.size > len(scratch):
            os.posix_fallocate(self.fd, 0, self.size)  # an error here, instead of a signal when memory ends
            with mmap.mmap(self.fd, self.size) as mapped, memoryview(mapped) as view:
                tree.read_into(node, view)
        else:
            with memoryview(scratch)[: self.size] as view:
                tree.read_into(node, view)
                # New pages of a mapping cost a fault each: writing them takes half the time.
                if os.pwrite(self.fd, view, 0) != self.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def seal(self) -> None:
        """The contents are there. Raises OSError."""
        self._tell_time()
        quick("fcntl", self.fd, fcntl.F_ADD_SEALS, _SEALS)
        with contextlib.suppress(OSError):  # needs CAP_LINUX_IMMUTABLE: root could change what others have open
            quick("ioctl", self.fd, _SET_FLAGS, _IMMUTABLE)
        if quick("lseek", self.fd, 0, os.SEEK_END) != self.size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.filled = True


class HeldFiles:
    """Files that were asked for last. Programs keep what they have open, whatever is given up here.

    most_bytes, most_files : bounds of what is kept
    crew : anyone who calls has its lock, which is given up as long as a file is filled
    """

    def __init__(self, most_bytes: int, most_files: int, crew: Crew) -> None:
        self._most_bytes, self._most_files = most_bytes, most_files
        self._files: OrderedDict[Hashable, Held] = OrderedDict()
        self._scratches: list[bytearray] = []
        self._crew = crew
        self._unseen = 0
        #: reopening a memfd by its number there is half the price of by its whole path
        self._numbers = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.nbytes = 0

    def get(self, wanted: Wanted) -> Held:
        """The file, as it is or new and empty. Raises OSError."""
        held = self._known(wanted.key)
        if held is None:
            held = self._new(wanted)
            held.stand_for_it()
        return held

    def open(self, wanted: Wanted, tree: Tree, node: Node, flags: int) -> int:
        """A descriptor of the file with its contents, for reading, with an offset of its own. Raises what the source
        raises, OSError."""
        held = self._known(wanted.key)
        if held is None:
            held = self._new(wanted)
        if not held.filled:
            self._fill(wanted.key, held, tree, node)
        return quick("openat", self._numbers, b"%d" % held.fd, os.O_RDONLY | os.O_CLOEXEC | flags & _KEPT_FLAGS)

    def _known(self, key: Hashable) -> Held | None:
        """None: there is no such file. Waits for a thread that fills it."""
        while (held := self._files.get(key)) is not None:
            busy = held.busy
            if busy is None:
                self._files.move_to_end(key)
                return held
            with self._crew.given_up(another=True):
                busy.wait()
        return None

    def _new(self, wanted: Wanted) -> Held:
        self._make_room(_OWN_BYTES, 1)
        held = self._files[wanted.key] = Held(wanted)
        self.nbytes += _OWN_BYTES
        return held

    def _fill(self, key: Hashable, held: Held, tree: Tree, node: Node) -> None:
        try:
            self._find_memory(held.size, key)
        except BaseException:
            self._drop(key)
            raise
        held.busy = busy = threading.Event()
        try:
            if held.size:
                # Who waits for the lock would take it, for the price of a copy of so few pages.
                small = held.size <= _FEW_PAGES_BYTES
                with contextlib.nullcontext() if small else self._crew.given_up(another=held.size > _LARGE_BYTES):
                    sent = tree.send(node, held.fd)
                if not sent:
                    self._read(held, tree, node)
            held.seal()
            self.nbytes += held.size
            self._make_room(0, 0, keep=key)
        except BaseException:
            self._drop(key)
            raise
        finally:
            held.busy = None
            busy.set()

    def _read(self, held: Held, tree: Tree, node: Node) -> None:
        scratch = self._scratches.pop() if self._scratches else bytearray(_SCRATCH_BYTES)
        try:
            # A storage may take its time, or hang. Small records lie in pages that were read to find them.
            with self._crew.given_up(another=held.size >= _SMALL_BYTES):
                held.read(tree, node, scratch)
        finally:
            self._scratches.append(scratch)

    def _find_memory(self, nbytes: int, keep: Hashable) -> None:
        """Raises OSError (ENOMEM): what programs have open fills the memory of this machine or control group, and the
        kernel would kill one of them, or the supervisor, instead."""
        self._unseen += nbytes
        if self._unseen < _LOOK_BYTES:
            return
        self._unseen = 0
        for give_up in (True, False):
            total, free = memory()
            if free >= nbytes + _LOOK_BYTES + total // _LEFT_SHARE or not total:
                return
            if give_up:
                for key in [key for key, held in self._files.items() if held.busy is None and key != keep]:
                    self._drop(key)
        raise OSError(
            errno.ENOMEM,
            f"what programs have open leaves {free:,} bytes of memory, and a file of {nbytes:,} is to be opened",
        )

    def _make_room(self, nbytes: int, files: int, keep: Hashable = None) -> None:
        while self.nbytes + nbytes > self._most_bytes or len(self._files) + files > self._most_files:
            oldest = next((key for key, held in self._files.items() if held.busy is None and key != keep), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, key: Hashable) -> None:
        held = self._files.pop(key)
        self.nbytes -= _OWN_BYTES + (held.size if held.filled else 0)
        # Freeing the pages of a large one takes its time.
        if held.size > _LARGE_BYTES:
            os.close(held.fd)
        else:
            quick("close", held.fd)

    def close(self) -> None:
        for key in list(self._files):
            self._drop(key)
        os.close(self._numbers)
