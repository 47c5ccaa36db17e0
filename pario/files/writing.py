"""What system calls answer for a path below the folder of the outputs: one writer, once, and then only readers."""

from __future__ import annotations

import errno
import os

from pario.files.beyond import OPENS, beyond, umask_of
from pario.files.outputs import Outputs
from pario.files.view import Call, View

__all__ = ["ends", "renames", "writes"]

_ARGUMENTS = 6
_NEW = ("mkdir", "mkdirat")
_NEVER = ("mknod", "mknodat", "symlink", "symlinkat", "link", "linkat", "chroot", "execve", "execveat")
_CHANGES = {
    *("rmdir", "unlink", "unlinkat", "chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "utimensat"),
    *("utime", "utimes", "futimesat"),
}
_O_TMPFILE = 0o20000000


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _process(thread: int) -> tuple[int, int]:
    """The process of a thread: its number, and when it began, since numbers come again."""
    with open(f"/proc/{thread}/status", "rb") as file:
        number = next(int(line[5:]) for line in file if line.startswith(b"Tgid:"))
    with open(f"/proc/{number}/stat", "rb") as file:
        return number, int(file.read().rpartition(b")")[2].split()[19])


def writes(view: View, outputs: Outputs, call: Call, name: str, path: str) -> None:
    """Answer a call with one path. path : below the folder. Raises OSError."""
    outputs.look(_process(call[1]))
    here = outputs.here(path)
    if name in OPENS:
        flags_at, _ = OPENS[name]
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC if flags_at is None else call[_ARGUMENTS + flags_at]
        if _asks_to_write(outputs, path, flags):
            _create(view, outputs, call, name, path)
            return
    elif name == "openat2":
        raise _error(errno.ENOSYS)  # programs fall back to openat
    elif name in _NEVER:
        raise _error(errno.EPERM)
    elif name == "truncate" or (name in _CHANGES and (outputs.closed or not os.path.lexists(here))):
        raise _error(errno.EROFS if outputs.exists(path) else errno.ENOENT)
    elif name in _NEW:
        if outputs.exists(path):
            raise _error(errno.EEXIST)
        outputs.make_parents(path)
        beyond(view, call, os.fsencode(here))
        return
    beyond(view, call, os.fsencode(here if os.path.lexists(here) else outputs.there(path)))


def _asks_to_write(outputs: Outputs, path: str, flags: int) -> bool:
    if flags & _O_TMPFILE and flags & os.O_DIRECTORY and flags & (os.O_WRONLY | os.O_RDWR):
        raise _error(errno.EOPNOTSUPP)
    exists = outputs.exists(path)
    if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
        return bool(flags & os.O_CREAT) and not exists
    if exists and outputs.is_folder(path):
        raise _error(errno.EISDIR)
    if exists:
        raise outputs.refuse(path) if flags & os.O_CREAT else _error(errno.EROFS)
    if not flags & os.O_CREAT:
        raise _error(errno.ENOENT)
    return True


def _create(view: View, outputs: Outputs, call: Call, name: str, path: str) -> None:
    if outputs.closed:
        raise _error(errno.EROFS)
    outputs.make_parents(path)
    flags_at, mode_at = OPENS[name]
    arguments = call[_ARGUMENTS:]
    flags = os.O_WRONLY if flags_at is None else arguments[flags_at]
    view.listener.check(call[0])
    with umask_of(call[1]):
        fd = os.open(
            outputs.here(path),
            flags & ~os.O_PATH | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            arguments[mode_at] & 0o7777,
        )
    try:
        outputs.begin(path, _process(call[1]))
        view.listener.hand(call[0], fd, flags)
    except BaseException:  # the program has no descriptor: it may try again
        outputs.forget(path)
        raise
    finally:
        os.close(fd)


def renames(view: View, outputs: Outputs, call: Call, name: str, old: str, new: str) -> None:
    """Answer rename within the folder. Raises OSError; EEXIST where the new name is taken."""
    outputs.look(_process(call[1]))
    if "link" in name:
        raise _error(errno.EPERM)
    if not os.path.lexists(outputs.here(old)):
        raise _error(errno.EROFS if outputs.exists(old) else errno.ENOENT)
    if outputs.closed:
        raise _error(errno.EROFS)
    if outputs.exists(new):
        raise outputs.refuse(new)
    outputs.make_parents(new)
    outputs.rename(old, new)
    view.listener.give(call[0], 0)


def ends(view: View, outputs: Outputs, call: Call) -> None:
    """A process ends by itself."""
    outputs.ends(_process(call[1]))
    view.listener.go_on(call[0])
