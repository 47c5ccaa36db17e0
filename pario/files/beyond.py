"""Paths that begin in a folder of a view, or go through one, and lead out of it.

The kernel would go astray in the skeleton, or find nothing at the prefix. The supervisor, which runs as
the same user, makes the call itself, with the path made absolute and with the program's umask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator

from pario.files.kernel_stat import stat_bytes, statfs_bytes, statx_bytes
from pario.files.moving import change_folder
from pario.files.notify import raw_call
from pario.files.numbers import CALLS, NUMBERS
from pario.files.view import AT_FDCWD, Call, View

__all__ = ["OPENS", "beyond", "say_link", "umask_of"]

_ARGUMENTS = 6
_NOFOLLOW, _REMOVE_FOLDER = 0x100, 0x200
_TIMES_BYTES = 32
#: calls whose other arguments are numbers
_PLAIN = {
    *("mkdir", "mkdirat", "mknod", "mknodat", "rmdir", "unlink", "unlinkat", "truncate", "chmod", "fchmodat"),
    *("fchmodat2", "chown", "lchown", "fchownat", "access", "faccessat", "faccessat2", "rename", "renameat"),
    *("renameat2", "link", "linkat"),
}
_NAMES = {number: name for name, number in NUMBERS.items()}
OPENS = {"open": (1, 2), "openat": (2, 3), "creat": (None, 1)}  # where flags and mode stand
_STATS = {"stat": (1, None), "lstat": (1, None), "newfstatat": (2, 3)}  # where the structure goes, and flags


def beyond(view: View, call: Call, *paths: bytes) -> None:
    """Make the call with these absolute paths, and answer. Raises OSError: EXDEV for calls that pario does not make,
    EOPNOTSUPP for extended attributes."""
    name = _NAMES[call[3]]
    listener, arguments = view.listener, call[_ARGUMENTS:]
    if name in OPENS:
        _open(view, call, name, paths[0])
    elif name in _STATS:
        where, flags = _STATS[name]
        follow = not arguments[flags] & _NOFOLLOW if flags is not None else name == "stat"
        with _looked_up(paths[0], follow) as fd:
            _tell(view, call, arguments[where], stat_bytes(fd, False))
    elif name == "statx":
        with _looked_up(paths[0], not arguments[2] & _NOFOLLOW) as fd:
            _tell(view, call, arguments[4], statx_bytes(fd, arguments[3] & 0xFFFFFFFF, False))
    elif name == "statfs":
        with _looked_up(paths[0], True) as fd:
            _tell(view, call, arguments[1], statfs_bytes(fd))
    elif name in ("readlink", "readlinkat"):
        say_link(view, call, name, os.readlink(paths[0]))
    elif name == "chdir":
        fd = os.open(paths[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            change_folder(listener, call, fd)
        finally:
            os.close(fd)
    elif name == "utimensat":
        times = view.memory.read(call[1], arguments[2], _TIMES_BYTES) if arguments[2] else None
        given = ctypes.create_string_buffer(times) if times else None
        _make(view, call, name, paths, {2: ctypes.addressof(given) if given else 0})
    elif name in _PLAIN:
        _make(view, call, name, paths, {})
    else:
        number = errno.EOPNOTSUPP if "xattr" in name else errno.EXDEV
        raise OSError(number, os.strerror(number))


def say_link(view: View, call: Call, name: str, text: bytes) -> None:
    """Answer readlink. Raises OSError, EINVAL for no room among them."""
    at = _ARGUMENTS + (1 if name == "readlink" else 2)
    room = call[at + 1] & 0xFFFFFFFF
    if not 0 < room < 1 << 31:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    _write(view, call, call[at], text[:room])
    view.listener.give(call[0], len(text[:room]))


def _open(view: View, call: Call, name: str, path: bytes) -> None:
    flags_at, mode_at = OPENS[name]
    arguments = call[_ARGUMENTS:]
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC if flags_at is None else arguments[flags_at]
    # O_PATH: the kernel hands no such descriptor over. O_NOCTTY: the terminal would be the supervisor's. O_NONBLOCK:
    # others would wait with one that opens a FIFO without a partner; it gets ENXIO instead, or reads nothing.
    flags = flags & ~os.O_PATH | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    view.listener.check(call[0])
    with umask_of(call[1]):
        fd = os.open(path, flags, arguments[mode_at] & 0o7777)
    try:
        os.set_blocking(fd, not (flags_at is not None and arguments[flags_at] & os.O_NONBLOCK))
        view.listener.hand(call[0], fd, arguments[flags_at] if flags_at is not None else 0)
    finally:
        os.close(fd)


def _make(view: View, call: Call, name: str, paths: tuple[bytes, ...], others: dict[int, int]) -> None:
    arguments = list(call[_ARGUMENTS:])
    kept = [ctypes.create_string_buffer(path) for path in paths]
    for (folder_at, path_at), text in zip(CALLS[name].paths, kept, strict=True):
        arguments[path_at] = ctypes.addressof(text)
        if folder_at >= 0:
            arguments[folder_at] = AT_FDCWD
    for k, value in others.items():
        arguments[k] = value
    with umask_of(call[1]):
        view.listener.check(call[0])
        done = raw_call(NUMBERS[name], *(each - (1 << 64) if each >> 63 else each for each in arguments))
    view.listener.give(call[0], done)


@contextlib.contextmanager
def _looked_up(path: bytes, follow: bool) -> Iterator[int]:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def umask_of(thread: int) -> Iterator[None]:
    with open(f"/proc/{thread}/status", "rb") as file:
        mask = next(int(line[6:], 8) for line in file if line.startswith(b"Umask:"))
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _tell(view: View, call: Call, address: int, data: bytes) -> None:
    _write(view, call, address, data)
    view.listener.give(call[0], 0)


def _write(view: View, call: Call, address: int, data: bytes) -> None:
    view.listener.check(call[0])
    view.memory.write(call[1], address, data)
