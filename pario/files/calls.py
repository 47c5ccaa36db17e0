"""What each system call answers for a path in a view. One small function per call.

A function takes the view, the call and the spot, and answers with `view.listener`, or raises OSError, whose errno the
program gets. A view is read-only: calls that would change it fail with EROFS, as on a file system mounted read-only.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from functools import partial

from pario.files.moving import change_folder
from pario.files.notify import failed, quick, raw_call, stat_bytes, statfs_bytes, statx_bytes
from pario.files.rights import check_folder
from pario.files.spots import Spot
from pario.files.view import AT_FDCWD, Call, View
from pario.machine import closing_fd

Handler = Callable[[View, Call, Spot], None]

_ID, _THREAD, _ARGUMENTS = 0, 1, 6
_WRITES = os.O_WRONLY | os.O_RDWR
_O_TMPFILE = 0o20000000  # with O_DIRECTORY
_PIDFD_GETFD, _PIDFD_THREAD = 438, os.O_EXCL
_OPEN_HOW = struct.Struct("QQQ")
_RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH, _RESOLVE_IN_ROOT = 0x04, 0x08, 0x10


def signed(argument: int) -> int:
    """An int among the arguments: 32 bits with a sign."""
    return (argument & 0xFFFFFFFF) - ((argument & 0x80000000) << 1)


def _argument(call: Call, k: int) -> int:
    return call[_ARGUMENTS + k]


# -- opening ---------------------------------------------------------------------------------------------------------


def _open(view: View, call: Call, spot: Spot, flags: int) -> None:
    try:
        node = view.find(spot)
    except FileNotFoundError:
        raise failed(errno.EROFS if flags & os.O_CREAT and _has_parent(view, spot) else errno.ENOENT) from None
    if flags & os.O_CREAT and flags & os.O_EXCL:
        raise failed(errno.EEXIST)
    writes = flags & (_WRITES | os.O_TRUNC) and not flags & os.O_PATH
    if node.kind == "folder":
        if flags & _O_TMPFILE:
            raise failed(errno.EROFS)
        if writes or flags & os.O_CREAT:
            raise failed(errno.EISDIR)
        check_folder(view, call)
        fd = view.folder(spot, node)
    elif flags & os.O_DIRECTORY:
        raise failed(errno.ENOTDIR)
    elif node.kind == "link":
        raise failed(errno.ELOOP)
    elif writes:
        raise failed(errno.EROFS)
    else:
        fd = view.open(spot, node, flags)
    try:
        view.listener.hand(call[_ID], fd, flags)
    finally:
        quick("close", fd)


def _has_parent(view: View, spot: Spot) -> bool:
    try:
        return bool(spot.path) and view.find(Spot(spot.root, os.path.dirname(spot.path))).kind == "folder"
    except OSError:
        return False


def _open_by(view: View, call: Call, spot: Spot, *, flags_at: int) -> None:
    _open(view, call, spot, _argument(call, flags_at))


def _open_how(view: View, call: Call, spot: Spot) -> None:
    if _argument(call, 3) < _OPEN_HOW.size:
        raise failed(errno.EINVAL)
    flags, _, resolve = _OPEN_HOW.unpack(view.memory.read(call[_THREAD], _argument(call, 2), _OPEN_HOW.size))
    if resolve & (_RESOLVE_BENEATH | _RESOLVE_IN_ROOT):
        # The kernel's rules apply to a folder; only what begins in the view and stays below it is served.
        path = view.memory.path(call[_THREAD], _argument(call, 1)) or b"/"
        base = view.link(call[_THREAD], signed(_argument(call, 0)))
        if path.startswith(b"/") or b".." in path.split(b"/") or base is None or view.skeleton.spot(base) is None:
            raise failed(errno.EXDEV)
    elif not resolve & _RESOLVE_NO_SYMLINKS:
        spot = view.followed(spot, not flags & os.O_NOFOLLOW)
    _open(view, call, spot, flags)


def _create(view: View, call: Call, spot: Spot) -> None:
    _open(view, call, spot, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)


# -- asking ----------------------------------------------------------------------------------------------------------


def tell(view: View, call: Call, address: int, data: bytes, result: int = 0) -> None:
    """Write into the program's memory, and let the call return `result`."""
    view.listener.check(call[_ID])
    view.memory.write(call[_THREAD], address, data)
    view.listener.give(call[_ID], result)


def _about(view: View, spot: Spot, tell: Callable[[int, int], bytes]) -> bytes:
    node = view.find(spot)
    if node.kind == "file":
        return tell(view.file(spot, node).fd, node.links)
    with closing_fd(view.folder(spot, node, os.O_PATH)) as fd:
        return tell(fd, 0)


def _stat(view: View, call: Call, spot: Spot, *, at: int) -> None:
    tell(view, call, _argument(call, at), _about(view, spot, stat_bytes))


def _statx(view: View, call: Call, spot: Spot) -> None:
    mask = _argument(call, 3) & 0xFFFFFFFF
    tell(view, call, _argument(call, 4), _about(view, spot, lambda fd, links: statx_bytes(fd, mask, links)))


def _statfs(view: View, call: Call, spot: Spot) -> None:
    tell(view, call, _argument(call, 1), _about(view, spot, lambda fd, _: statfs_bytes(fd)))


def _access(view: View, call: Call, spot: Spot, *, mode_at: int) -> None:
    node, mode = view.find(spot), _argument(call, mode_at)
    if mode & os.W_OK:
        raise failed(errno.EROFS)
    if mode & os.X_OK and node.kind == "file":  # as where a file system is mounted without the right to run files
        raise failed(errno.EACCES)
    view.listener.give(call[_ID], 0)


def _refused(number: int) -> Handler:
    """What is there refuses it by this error; what is not says so."""

    def refuse(view: View, call: Call, spot: Spot) -> None:
        view.find(spot)
        raise failed(number)

    return refuse


def say_link(view: View, call: Call, name: str, text: bytes) -> None:
    """Answer readlink. Raises OSError, EINVAL for no room among them."""
    at = 1 if name == "readlink" else 2
    room = _argument(call, at + 1) & 0xFFFFFFFF
    if not 0 < room < 1 << 31:
        raise failed(errno.EINVAL)
    tell(view, call, _argument(call, at), text[:room], len(text[:room]))


def _read_link(view: View, call: Call, spot: Spot, *, name: str) -> None:
    node = view.find(spot)
    if node.kind != "link":
        raise failed(errno.EINVAL)
    say_link(view, call, name, node.target)


def _no_attributes(view: View, call: Call, spot: Spot) -> None:
    view.find(spot)
    view.listener.give(call[_ID], 0)


# -- folders ---------------------------------------------------------------------------------------------------------


def _change_folder(view: View, call: Call, spot: Spot) -> None:
    node = view.find(spot)
    if node.kind != "folder":
        raise failed(errno.ENOTDIR)
    check_folder(view, call)
    with closing_fd(view.folder(spot, node)) as fd:
        change_folder(view.listener, call, fd)


def _working_folder(view: View, call: Call) -> None:
    base = view.link(call[_THREAD], AT_FDCWD)
    here = view.standing(base) if base else None
    if here is None:
        view.listener.go_on(call[_ID])
        return
    text = view.prefixes.full(here) + b"\0"
    if len(text) > _argument(call, 1):
        raise failed(errno.ERANGE)
    tell(view, call, _argument(call, 0), text, len(text))


def _list(view: View, call: Call, *, old: bool) -> None:
    number = signed(_argument(call, 0))
    base = view.link(call[_THREAD], number)
    spot = view.skeleton.spot(base) if base else None
    if spot is None:
        view.listener.go_on(call[_ID])
        return
    with closing_fd(_copy_of(call[_THREAD], number)) as fd:
        # The position is the descriptor's own offset, so that the kernel shares it among copies and rewinds it.
        position = os.lseek(fd, 0, os.SEEK_CUR)
        data, end = view.entries.answer(spot, position, min(_argument(call, 2), view.memory.most), old)
        view.listener.check(call[_ID])
        view.memory.write(call[_THREAD], _argument(call, 1), data)
        os.lseek(fd, end, os.SEEK_SET)
        view.listener.give(call[_ID], len(data))


def _copy_of(thread: int, number: int) -> int:
    """A descriptor of ours for what a program's descriptor means. Raises OSError."""
    try:
        pidfd = os.pidfd_open(thread, _PIDFD_THREAD)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        with open(f"/proc/{thread}/status", "rb") as file:  # Linux < 6.9 has them of processes only
            pidfd = os.pidfd_open(next(int(line[5:]) for line in file if line.startswith(b"Tgid:")))
    with closing_fd(pidfd):
        return raw_call(_PIDFD_GETFD, pidfd, number, 0)


# -- what a view refuses -----------------------------------------------------------------------------------------------


def _make(view: View, call: Call, spot: Spot) -> None:
    try:
        view.find(spot)
    except FileNotFoundError:
        raise failed(errno.EROFS if _has_parent(view, spot) else errno.ENOENT) from None
    raise failed(errno.EEXIST)


_change = _refused(errno.EROFS)


def change_opened(view: View, call: Call) -> None:
    """Mode, owner, times, attributes and leases by a descriptor: it is that of all who have the file open."""
    real = view.link(call[_THREAD], signed(_argument(call, 0)))
    if real is not None and view.is_record(real):
        raise failed(errno.EROFS)
    view.listener.go_on(call[_ID])


def _confine(view: View, call: Call) -> None:
    view.confined = True
    view.listener.go_on(call[_ID])


ON_PATHS: dict[str, Handler] = {
    "open": partial(_open_by, flags_at=1),
    "openat": partial(_open_by, flags_at=2),
    "openat2": _open_how,
    "creat": _create,
    "stat": partial(_stat, at=1),
    "lstat": partial(_stat, at=1),
    "newfstatat": partial(_stat, at=2),
    "statx": _statx,
    "access": partial(_access, mode_at=1),
    "faccessat": partial(_access, mode_at=2),
    "faccessat2": partial(_access, mode_at=2),
    **{name: partial(_read_link, name=name) for name in ("readlink", "readlinkat")},
    "statfs": _statfs,
    "chdir": _change_folder,
    "chroot": _refused(errno.EPERM),
    "execve": _refused(errno.EACCES),
    "execveat": _refused(errno.EACCES),
    **dict.fromkeys(("mkdir", "mkdirat", "mknod", "mknodat", "symlink", "symlinkat"), _make),
    **dict.fromkeys(("rmdir", "unlink", "unlinkat", "truncate"), _change),
    **dict.fromkeys(("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat"), _change),
    **dict.fromkeys(("utime", "utimes", "futimesat", "utimensat"), _change),
    **dict.fromkeys(("setxattr", "lsetxattr", "removexattr", "lremovexattr", "setxattrat", "removexattrat"), _change),
    **dict.fromkeys(("getxattr", "lgetxattr", "getxattrat", "name_to_handle_at"), _refused(errno.EOPNOTSUPP)),
    **dict.fromkeys(("listxattr", "llistxattr", "listxattrat"), _no_attributes),
    "inotify_add_watch": _refused(errno.EACCES),
    "file_getattr": _refused(errno.EOPNOTSUPP),
    "file_setattr": _change,
}
#: calls that follow a link at the end of their path, and which argument may tell them not to
FOLLOW: dict[str, int | None] = {
    **dict.fromkeys(("stat", "access", "faccessat", "statfs", "chdir", "execve", "getxattr", "listxattr", "creat")),
    **{"open": 1, "openat": 2, "newfstatat": 3, "statx": 2, "faccessat2": 3, "execveat": 4, "inotify_add_watch": None},
}
#: calls that change what a link leads to, and which argument may tell them to take the link itself
CHANGES: dict[str, int | None] = {
    **dict.fromkeys(("truncate", "chmod", "fchmodat", "chown", "utime", "utimes", "futimesat")),
    **dict.fromkeys(("setxattr", "removexattr")),
    **{"fchmodat2": 3, "fchownat": 4, "utimensat": 3, "setxattrat": 2, "removexattrat": 2, "file_setattr": 4},
}
#: calls without a path, on descriptors that may be a view's
ON_DESCRIPTORS: dict[str, Callable[[View, Call], None]] = {
    "getcwd": _working_folder,
    "landlock_restrict_self": _confine,
    "getdents": partial(_list, old=True),
    "getdents64": partial(_list, old=False),
    **dict.fromkeys(("fchmod", "fchown", "fsetxattr", "fremovexattr", "ioctl", "fcntl"), change_opened),
}
#: serve.py answers these
TWO_PATHS = ("rename", "renameat", "renameat2", "link", "linkat")
