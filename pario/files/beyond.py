"""Paths that begin in a folder of a view, or go through one, and lead out of it.

The kernel would go astray in the skeleton, or find nothing at the prefix. For a thread that has its rights and its
root (rights.py) the supervisor makes the call itself, with the path made absolute and with the program's umask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from pario.files.calls import say_link, tell
from pario.files.moving import change_folder
from pario.files.notify import failed, raw_call, stat_bytes, statfs_bytes, statx_bytes
from pario.files.numbers import CALLS, NUMBERS
from pario.files.rights import lent, refused
from pario.files.view import AT_FDCWD, Call, View, of_thread
from pario.machine import closing_fd

_ARGUMENTS = 6
_NOFOLLOW = 0x100
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

def beyond(view: View, call: Call, named: bool, *paths: bytes) -> None:
    """Answer a call with these absolute paths. named : see Escaped, of all of them. Raises OSError: EACCES for a caller
    with other rights, EXDEV for calls that pario does not make, EOPNOTSUPP for extended attributes."""
    with lent(view, call) as may:
        if may:
            _make_it(view, call, *(of_thread(call[1], path) for path in paths))
        elif named:
            view.listener.go_on(call[0])
        else:
            raise refused(view, call, f"asks for {os.fsdecode(paths[0])!r} by a path out of a folder of the view")


def _make_it(view: View, call: Call, *paths: bytes) -> None:
    name = _NAMES[call[3]]
    listener, arguments = view.listener, call[_ARGUMENTS:]
    if name in OPENS:
        _open(view, call, name, paths[0])
    elif name in _STATS:
        where, flags = _STATS[name]
        follow = not arguments[flags] & _NOFOLLOW if flags is not None else name == "stat"
        with _looked_up(paths[0], follow) as fd:
            tell(view, call, arguments[where], stat_bytes(fd, 0))
    elif name == "statx":
        with _looked_up(paths[0], not arguments[2] & _NOFOLLOW) as fd:
            tell(view, call, arguments[4], statx_bytes(fd, arguments[3] & 0xFFFFFFFF, 0))
    elif name == "statfs":
        with _looked_up(paths[0], True) as fd:
            tell(view, call, arguments[1], statfs_bytes(fd))
    elif name in ("readlink", "readlinkat"):
        say_link(view, call, name, os.readlink(paths[0]))
    elif name == "chdir":
        with closing_fd(os.open(paths[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            change_folder(listener, call, fd)
    elif name == "utimensat":
        times = view.memory.read(call[1], arguments[2], _TIMES_BYTES) if arguments[2] else None
        given = ctypes.create_string_buffer(times) if times else None
        _make(view, call, name, paths, {2: ctypes.addressof(given) if given else 0})
    elif name in _PLAIN:
        _make(view, call, name, paths, {})
    else:
        number = errno.EOPNOTSUPP if "xattr" in name else errno.EXDEV
        raise failed(number)


def _open(view: View, call: Call, name: str, path: bytes) -> None:
    flags_at, mode_at = OPENS[name]
    arguments = call[_ARGUMENTS:]
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC if flags_at is None else arguments[flags_at]
    # O_PATH: the kernel hands no such descriptor over. O_NOCTTY: the terminal would be the supervisor's. O_NONBLOCK:
    # others would wait with one that opens a FIFO without a partner; it gets ENXIO instead, or reads nothing.
    flags = flags & ~os.O_PATH | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    view.listener.check(call[0])
    with closing_fd(os.open(path, flags, arguments[mode_at] & 0o7777)) as fd:
        os.set_blocking(fd, not (flags_at is not None and arguments[flags_at] & os.O_NONBLOCK))
        view.listener.hand(call[0], fd, arguments[flags_at] if flags_at is not None else 0)


def _make(view: View, call: Call, name: str, paths: tuple[bytes, ...], others: dict[int, int]) -> None:
    arguments = list(call[_ARGUMENTS:])
    kept = [ctypes.create_string_buffer(path) for path in paths]
    for (folder_at, path_at), text in zip(CALLS[name].paths, kept, strict=True):
        arguments[path_at] = ctypes.addressof(text)
        if folder_at >= 0:
            arguments[folder_at] = AT_FDCWD
    for k, value in others.items():
        arguments[k] = value
    view.listener.check(call[0])
    done = raw_call(NUMBERS[name], *(each - (1 << 64) if each >> 63 else each for each in arguments))
    view.listener.give(call[0], done)


def _looked_up(path: bytes, follow: bool) -> contextlib.AbstractContextManager[int]:
    return closing_fd(os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)))
