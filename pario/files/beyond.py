"""Paths that begin in a folder of a view, or go through one, and lead out of it; among them those below the folder of
the outputs, where each file has one writer, once, and then only readers.

The kernel would go astray in the skeleton, or find nothing at the prefix. For a thread that has its rights and its
root (rights.py) the supervisor makes the call itself, with the path made absolute and with the program's umask.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator

from pario.files.calls import say_link, tell
from pario.files.moving import change_folder
from pario.files.notify import failed, raw_call, stat_bytes, statfs_bytes, statx_bytes
from pario.files.numbers import CALLS, NUMBERS
from pario.files.outputs import Outputs
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
#: what changes a path below the folder of the outputs: makes it, is never allowed, or needs it to be there
_NEW = ("mkdir", "mkdirat")
_NEVER = ("mknod", "mknodat", "symlink", "symlinkat", "link", "linkat", "chroot", "execve", "execveat")
_CHANGES = {
    *("rmdir", "unlink", "unlinkat", "chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "utimensat"),
    *("utime", "utimes", "futimesat"),
}
_O_TMPFILE = 0o20000000


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
    asked, mode = _opening(call, name)
    # O_PATH: the kernel hands no such descriptor over. O_NOCTTY: the terminal would be the supervisor's. O_NONBLOCK:
    # others would wait with one that opens a FIFO without a partner; it gets ENXIO instead, or reads nothing.
    flags = asked & ~os.O_PATH | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    view.listener.check(call[0])
    with closing_fd(os.open(path, flags, mode)) as fd:
        os.set_blocking(fd, not asked & os.O_NONBLOCK)
        view.listener.hand(call[0], fd, asked)


def _opening(call: Call, name: str) -> tuple[int, int]:
    """Flags and mode that it asks for."""
    flags_at, mode_at = OPENS[name]
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC if flags_at is None else call[_ARGUMENTS + flags_at]
    return flags, call[_ARGUMENTS + mode_at] & 0o7777


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


def _process(thread: int) -> tuple[int, int]:
    """The process of a thread: its number, and when it began, since numbers come again."""
    with open(f"/proc/{thread}/status", "rb") as file:
        number = next(int(line[5:]) for line in file if line.startswith(b"Tgid:"))
    with open(f"/proc/{number}/stat", "rb") as file:
        return number, int(file.read().rpartition(b")")[2].split()[19])


@contextlib.contextmanager
def writing(view: View, outputs: Outputs, call: Call) -> Iterator[None]:
    """Around `writes` and `renames`. Raises OSError for a caller in whose place the supervisor may not act."""
    with lent(view, call) as may:
        if not may:
            raise refused(view, call, f"asks for outputs in {outputs.folder!r}")
        outputs.look(_process(call[1]))
        yield


def writes(view: View, outputs: Outputs, call: Call, name: str, path: str) -> None:
    """Answer a call with one path. path : below the folder. Raises OSError."""
    here = outputs.here(path)
    if name in OPENS:
        if _asks_to_write(outputs, path, _opening(call, name)[0]):
            _create(view, outputs, call, name, path)
            return
    elif name == "openat2":
        raise failed(errno.ENOSYS)  # programs fall back to openat
    elif name in _NEVER:
        raise failed(errno.EPERM)
    elif name == "truncate" or (name in _CHANGES and (outputs.closed or not os.path.lexists(here))):
        raise failed(errno.EROFS if outputs.exists(path) else errno.ENOENT)
    elif name in _NEW:
        if outputs.exists(path):
            raise failed(errno.EEXIST)
        outputs.make_parents(path)
        _make_it(view, call, os.fsencode(here))
        return
    _make_it(view, call, os.fsencode(here if os.path.lexists(here) else outputs.there(path)))


def _asks_to_write(outputs: Outputs, path: str, flags: int) -> bool:
    if flags & _O_TMPFILE and flags & os.O_DIRECTORY and flags & (os.O_WRONLY | os.O_RDWR):
        raise failed(errno.EOPNOTSUPP)
    exists = outputs.exists(path)
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
        return bool(flags & os.O_CREAT) and not exists
    if exists and outputs.is_folder(path):
        raise failed(errno.EISDIR)
    if exists:
        raise outputs.refuse(path) if flags & os.O_CREAT else failed(errno.EROFS)
    if not flags & os.O_CREAT:
        raise failed(errno.ENOENT)
    return True


def _create(view: View, outputs: Outputs, call: Call, name: str, path: str) -> None:
    if outputs.closed:
        raise failed(errno.EROFS)
    outputs.make_parents(path)
    flags, mode = _opening(call, name)
    view.listener.check(call[0])
    flags = flags & ~os.O_PATH | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing_fd(os.open(outputs.here(path), flags, mode)) as fd:
        try:
            outputs.begin(path, _process(call[1]))
            view.listener.hand(call[0], fd, flags)
        except BaseException:  # the program has no descriptor: it may try again
            outputs.forget(path)
            raise


def renames(view: View, outputs: Outputs, call: Call, name: str, old: str, new: str) -> None:
    """Answer rename within the folder. Raises OSError; EEXIST where the new name is taken."""
    if "link" in name:
        raise failed(errno.EPERM)
    if not os.path.lexists(outputs.here(old)):
        raise failed(errno.EROFS if outputs.exists(old) else errno.ENOENT)
    if outputs.closed:
        raise failed(errno.EROFS)
    if outputs.exists(new):
        raise outputs.refuse(new)
    outputs.make_parents(new)
    outputs.rename(old, new)
    view.listener.give(call[0], 0)


def ends(view: View, outputs: Outputs, call: Call) -> None:
    """A process ends by itself."""
    outputs.look(_process(call[1]), ends=True)
    view.listener.go_on(call[0])
