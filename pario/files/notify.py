"""The kernel's side of a view: seccomp user notification, through ctypes.

    a program                      the kernel                      the supervisor
    openat(..., "/data/a", ...) -> the filter says USER_NOTIF  ->  receive(): the call's number and arguments
       sleeps                                                      reads the path out of the program's memory
       gets a descriptor        <- installs it, wakes it       <-  hand(): a descriptor of its own

`install` runs in the child that becomes the program, `Listener` in the supervisor. A filter is inherited by all
descendants, survives exec, and cannot be taken off. When the supervisor's descriptor is closed, because it died, say,
the kernel answers ENOSYS to each call that waits for it and to each later one: nothing can hang.

Numbers and structures: linux/seccomp.h, linux/filter.h, seccomp_unotify(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Iterable

from pario.errors import ParioError
from pario.files.numbers import ARCHITECTURE, NUMBERS, OTHER_WAY, SECOND_ARGUMENTS, machine

_MODE_FILTER, _ACTION_AVAILABLE, _NOTIFICATION_SIZES = 1, 2, 3
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_ALLOW, _NOTIFY, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_RECEIVE, _SEND, _VALID, _ADD, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103, 0x40082104
_CONTINUE, _ADD_AND_SEND, _SAME_CPU = 1, 2, 1
_NO_NEW_PRIVILEGES, _SUBREAPER = 38, 36

#: struct seccomp_notif: id, pid, flags, {nr, arch, instruction pointer, args[6]}
_NOTIFICATION = struct.Struct("QIIiIQ6Q")
_ANSWER = struct.Struct("Qqii")  # struct seccomp_notif_resp: id, val, error, flags
_ADDED = struct.Struct("QIIII")  # struct seccomp_notif_addfd: id, flags, srcfd, newfd, newfd_flags
_EMPTY = bytes(_NOTIFICATION.size)
_CLOEXEC = os.O_CLOEXEC

_PAGE = 4096
#: Bytes read at first; most paths are shorter.
_FIRST_READ = 256
_LONGEST_PATH = 4096

libc = ctypes.CDLL(None, use_errno=True)
_syscall = libc.syscall
_syscall.restype = ctypes.c_long
_blocking_ioctl = libc.ioctl
#: The GIL is not given up in calls that do not wait: another thread that has received a call would take it, find that
#: this one is not done, and give it back, for the price of a whole call.
_quick = ctypes.PyDLL(None, use_errno=True)
_ioctl, _read_memory, _write_memory = _quick.ioctl, _quick.process_vm_readv, _quick.process_vm_writev
_read_memory.restype = _write_memory.restype = ctypes.c_ssize_t
_quick.lseek.restype, _quick.lseek.argtypes = ctypes.c_long, (ctypes.c_int, ctypes.c_long, ctypes.c_int)


class Gone(Exception):
    """The call that was being answered does not wait any more: its thread was killed or interrupted."""


def failed(number: int | None = None) -> OSError:
    """The error of this errno, by default of the last call."""
    number = ctypes.get_errno() if number is None else number
    return OSError(number, os.strerror(number))


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Polled(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("wanted", ctypes.c_short), ("found", ctypes.c_short))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def raw_call(number: int, *arguments: int) -> int:
    """A system call by its number; raises OSError."""
    done = int(_syscall(ctypes.c_long(number), *(ctypes.c_long(each) for each in arguments)))
    if done < 0:
        raise failed()
    return done


def quick(name: str, *arguments: int | bytes) -> int:
    """A function of the C library on what is in memory: the interpreter lets no other thread run. Its arguments are
    int, char* or void*. Raises OSError."""
    done = int(getattr(_quick, name)(*arguments))
    if done < 0:
        raise failed()
    return done


def check_kernel() -> None:
    """Raises ParioError where the kernel cannot notify a supervisor of system calls."""
    numbers = machine()
    action = ctypes.c_uint32(_NOTIFY)
    sizes = (ctypes.c_uint16 * 3)()
    try:
        raw_call(numbers.seccomp, _ACTION_AVAILABLE, 0, ctypes.addressof(action))
        raw_call(numbers.seccomp, _NOTIFICATION_SIZES, 0, ctypes.addressof(sizes))
    except OSError as e:
        raise ParioError(
            f"this kernel ({os.uname().release}), or a container's policy, offers no seccomp user notification: "
            f"{e.strerror}",
            hint=OTHER_WAY,
        ) from None
    if sizes[0] != _NOTIFICATION.size or sizes[1] != _ANSWER.size:
        found = f"{sizes[0]} and {sizes[1]} bytes"
        raise ParioError(f"this kernel's notifications have {found}, not 80 and 24", hint=OTHER_WAY)


def filter_program(calls: Iterable[int]) -> bytes:
    """The filter, in classic BPF: calls of another architecture and all calls but these go on as without it.

    Stats of a descriptor (AT_EMPTY_PATH) go on, too. io_uring would open paths without a system call, so there is none.
    """
    numbers = machine()
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    at_empty_path, negative = 0x1000, 0x80000000

    def argument(k: int) -> int:  # where the lower half of an argument stands in struct seccomp_data
        return 16 + 8 * k

    body: list[tuple[int, int, int, int]] = [(load, 0, 0, 4), (equal, 1, 0, numbers.audit), (give, 0, 0, _ALLOW)]
    body += [(load, 0, 0, 0)]
    if ARCHITECTURE == "x86_64":  # the x32 calls: numbers with a bit more
        body += [(at_least, 0, 1, 0x40000000), (give, 0, 0, _ALLOW)]
    body += [(equal, 0, 1, numbers.io_uring_setup), (give, 0, 0, _ERRNO | errno.ENOSYS)]
    by_flags = {NUMBERS["newfstatat"]: 3, NUMBERS["statx"]: 2}
    for number, flags in by_flags.items():
        body += [
            (equal, 0, 6, number),
            (load, 0, 0, argument(flags)),
            (any_bit, 0, 3, at_empty_path),
            (load, 0, 0, argument(0)),
            (at_least, 1, 0, negative),
            (give, 0, 0, _ALLOW),
            (give, 0, 0, _NOTIFY),
        ]
    by_request = {NUMBERS[name]: requests for name, requests in SECOND_ARGUMENTS.items()}
    for number, requests in by_request.items():
        most = len(requests)
        body += [(equal, 0, most + 3, number), (load, 0, 0, argument(1))]
        body += [(equal, most - k, 0, request) for k, request in enumerate(requests)]
        body += [(give, 0, 0, _ALLOW), (give, 0, 0, _NOTIFY)]
    for number in sorted(set(calls) - {*by_flags, *by_request}):
        body += [(equal, 0, 1, number), (give, 0, 0, _NOTIFY)]
    body.append((give, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *each) for each in body)


def install(program: bytes) -> int:
    """Put the filter on this thread and all that it starts; returns the descriptor of its notifications.

    The process and its descendants give up gaining privileges (no_new_privs): setuid programs run without theirs.
    Raises OSError: EBUSY where a filter with notifications is on already.
    """
    numbers = machine()
    code = ctypes.create_string_buffer(program, len(program))
    described = _Program(len(program) // 8, ctypes.addressof(code))
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    for flags in (_NEW_LISTENER | _WAIT_KILLABLE, _NEW_LISTENER):
        try:
            return raw_call(numbers.seccomp, _MODE_FILTER, flags, ctypes.addressof(described))
        except OSError as e:
            if e.errno != errno.EINVAL or flags == _NEW_LISTENER:  # Linux < 5.19 does not know the flag
                raise
    raise AssertionError


def set_subreaper() -> None:
    """Orphans among this process's descendants become its children."""
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)


class Receiver:
    """Receives calls. For one thread; there may be several."""

    def __init__(self, fd: int) -> None:
        self._fd = ctypes.c_int(fd)
        self._notification = bytearray(_NOTIFICATION.size)
        self._kept = ctypes.c_char.from_buffer(self._notification)
        self._receive = (ctypes.c_ulong(_RECEIVE), ctypes.byref(self._kept))
        self._polled = _Polled(fd, select.POLLIN, 0)
        self._poll = (ctypes.byref(self._polled), ctypes.c_ulong(1), ctypes.c_int(0))

    def others_wait(self) -> bool:
        """Whether there are calls that nobody has received."""
        return bool(_quick.poll(*self._poll) > 0 and self._polled.found & select.POLLIN)

    def receive(self) -> tuple[int, ...] | None:
        """The next call: id, thread, flags, number, architecture, instruction pointer, six arguments. None for one that
        was gone before it came here, and when no program is left. Waits; a signal to the supervisor ends the wait."""
        self._notification[:] = _EMPTY
        if _blocking_ioctl(self._fd, *self._receive) < 0:
            number = ctypes.get_errno()
            if number in (errno.ENOENT, errno.EINTR):
                return None
            raise failed(number)
        return _NOTIFICATION.unpack(self._notification)


class Listener:
    """Answers calls. For one thread at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._fd = ctypes.c_int(fd)
        self._answer = bytearray(_ANSWER.size)
        self._added = bytearray(_ADDED.size)
        self._valid = ctypes.c_uint64()
        here = ctypes.c_char.from_buffer
        self._kept = [here(each) for each in (self._answer, self._added)]
        self._send = (ctypes.c_ulong(_SEND), ctypes.byref(self._kept[0]))
        self._add = (ctypes.c_ulong(_ADD), ctypes.byref(self._kept[1]))
        self._ask = (ctypes.c_ulong(_VALID), ctypes.byref(self._valid))
        self._at_once = True
        # Linux >= 6.6: the supervisor wakes on the caller's processor, which sleeps anyway. Older ones refuse.
        _ioctl(self._fd, ctypes.c_ulong(_SET_FLAGS), ctypes.c_ulong(_SAME_CPU))

    def can_hand(self) -> bool:
        """Whether the kernel can put descriptors into programs (Linux >= 5.9)."""
        try:
            self._install(0, self.fd, 0, 0)
        except Gone:  # it has looked for a call of this id
            return True
        except OSError:
            return False
        return True

    def go_on(self, call: int) -> None:
        """The kernel does the call as if there were no view."""
        _ANSWER.pack_into(self._answer, 0, call, 0, 0, _CONTINUE)
        _ioctl(self._fd, *self._send)

    def give(self, call: int, value: int) -> None:
        """The call returns `value`."""
        _ANSWER.pack_into(self._answer, 0, call, value, 0, 0)
        _ioctl(self._fd, *self._send)

    def refuse(self, call: int, number: int) -> None:
        """The call fails with this errno."""
        _ANSWER.pack_into(self._answer, 0, call, 0, -number, 0)
        _ioctl(self._fd, *self._send)

    def hand(self, call: int, fd: int, flags: int) -> None:
        """The call returns a descriptor of its own for the file behind `fd`. flags : O_CLOEXEC counts.

        Raises Gone, OSError (EMFILE: the program's own limit).
        """
        if self._at_once:
            try:
                self._install(call, fd, flags, _ADD_AND_SEND)
                return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._at_once = False  # Linux < 5.14
        self.give(call, self._install(call, fd, flags, 0))

    def add(self, call: int, fd: int) -> int:
        """Put a descriptor for the file behind `fd` into the program, which goes on sleeping; returns its number there.
        Raises Gone, OSError."""
        return self._install(call, fd, _CLOEXEC, 0)

    def _install(self, call: int, fd: int, flags: int, how: int) -> int:
        _ADDED.pack_into(self._added, 0, call, how, fd, 0, flags & _CLOEXEC)
        while (done := _ioctl(self._fd, *self._add)) < 0:
            number = ctypes.get_errno()
            if number == errno.ENOENT:
                raise Gone
            if number != errno.EINTR:
                raise failed(number)
        return int(done)

    def check(self, call: int) -> None:
        """Raises Gone unless the call still waits: what was read from its thread's memory was its own."""
        self._valid.value = call
        if _ioctl(self._fd, *self._ask) < 0:
            raise Gone

    def close(self) -> None:
        os.close(self.fd)


class Memory:
    """Reads and writes the memory of programs, through a buffer of its own. For one thread."""

    def __init__(self) -> None:
        self._buffer = bytearray(2 * _LONGEST_PATH)
        self._room = bytearray(64 << 10)
        self._kept = [ctypes.c_char.from_buffer(each) for each in (self._buffer, self._room)]
        self._text, self._data = (ctypes.addressof(each) for each in self._kept)
        self._here, self._there = Iovec(), Iovec()
        self._one, self._none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        self._iovecs = (ctypes.byref(self._here), self._one, ctypes.byref(self._there), self._one, self._none)

    @property
    def most(self) -> int:
        """Bytes that `write` takes at most."""
        return len(self._room)

    def path(self, thread: int, address: int) -> bytes | None:
        """The text at an address, without its final zero; None where it cannot be read or is longer than a path."""
        here, there, buffer = self._here, self._there, self._buffer
        have = 0
        while have < _LONGEST_PATH:
            begin = address + have
            here.base, there.base = self._text + have, begin
            # Never across a page: what lies behind the text may not be mapped.
            here.length = there.length = min(_PAGE - begin % _PAGE, _LONGEST_PATH if have else _FIRST_READ)
            got = _read_memory(ctypes.c_int(thread), *self._iovecs)
            if got <= 0:
                return None
            end = buffer.find(0, have, have + got)
            if end >= 0:
                return bytes(buffer[:end])
            have += got
        return None

    def read(self, thread: int, address: int, nbytes: int) -> bytes:
        """Raises OSError."""
        self._here.base, self._there.base = self._text, address
        self._here.length = self._there.length = nbytes
        if _read_memory(ctypes.c_int(thread), *self._iovecs) != nbytes:
            raise failed(errno.EFAULT)
        return bytes(self._buffer[:nbytes])

    def write(self, thread: int, address: int, data: bytes) -> None:
        """At most `most` bytes. Raises OSError."""
        self._room[: len(data)] = data
        self._here.base, self._there.base = self._data, address
        self._here.length = self._there.length = len(data)
        if data and _write_memory(ctypes.c_int(thread), *self._iovecs) != len(data):
            raise failed(errno.EFAULT)


# -- its own answers about a descriptor, as the bytes that a program expects in its memory -----------------------------

_AT_EMPTY_PATH = 0x1000
_buffer = ctypes.create_string_buffer(256)
_at, _empty = ctypes.addressof(_buffer), ctypes.create_string_buffer(1)
_nothing = ctypes.addressof(_empty)
#: bytes of struct stat; where st_nlink, st_size and st_blocks stand in it, and how st_nlink is packed
_STAT = (144, 16, 48, 64, "Q") if ARCHITECTURE == "x86_64" else (128, 20, 48, 64, "I")
_STATX = (256, 16, 40, 48, "I")
_BLOCK, _PAGE_BLOCKS = 4096, 8  # a page of memory, and how many blocks of 512 bytes it is
_STATFS_BYTES = 120


def stat_bytes(fd: int, links: int) -> bytes:
    """struct stat. links : tell what a memfd will have when it is filled: blocks; and
    names, since it has none"""
    raw_call(NUMBERS["newfstatat"], fd, _nothing, _at, _AT_EMPTY_PATH)
    return _told(_STAT, links)


def statx_bytes(fd: int, mask: int, links: int) -> bytes:
    """struct statx."""
    raw_call(NUMBERS["statx"], fd, _nothing, _AT_EMPTY_PATH, mask, _at)
    return _told(_STATX, links)


def _told(layout: tuple[int, int, int, int, str], names: int) -> bytes:
    nbytes, links, size, blocks, code = layout
    if names:
        struct.pack_into(code, _buffer, links, names)
        pages = -(-struct.unpack_from("Q", _buffer, size)[0] // _BLOCK)
        struct.pack_into("Q", _buffer, blocks, _PAGE_BLOCKS * pages)
    return _buffer.raw[:nbytes]


def statfs_bytes(fd: int) -> bytes:
    """struct statfs."""
    raw_call(machine().fstatfs, fd, _at)
    return _buffer.raw[:_STATFS_BYTES]
