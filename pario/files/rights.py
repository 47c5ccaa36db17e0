"""Whose call it is. The supervisor makes a call itself, or shows a way out of a root, only where its caller could do
the same without it: the thread has the supervisor's rights, and its paths begin in the same root.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from pario.files.notify import failed, statx_bytes
from pario.files.view import Call, View
from pario.machine import closing_fd

#: umask; users; groups; capabilities; filters of system calls: of a thread, which may differ from its process's others
_STATUS = re.compile(
    rb"\nUmask:\t(\d+)\n.*?(\nUid:.*?\nGid:.*?\n)FDSize:.*?(\nGroups:.*?\n).*?(\nCapEff:.*?\n)"
    rb"(?:.*?\nSeccomp_filters:\t(\d+)\n)?",
    re.DOTALL,
)
_INODE_AND_MOUNT = 0x1100  # STATX_INO, STATX_MNT_ID


def _rights(thread: int, more_filters: int = 0) -> tuple[int, list[object]]:
    """Umask and rights. Raises OSError for a thread that is gone, or that this process may not look at."""
    own = Path(f"/proc/{thread}")
    umask, *rights, filters = _STATUS.findall((own / "status").read_bytes())[0]
    with suppress(OSError):  # no security module that gives labels
        rights.append((own / "attr/current").read_bytes())
    # In a user namespace of its own, capabilities mean less. Linux < 5.12 counts no filters.
    return int(umask, 8), [*rights, os.readlink(own / "ns/user"), filters and int(filters) + more_filters]


def _root(thread: int) -> bytes:
    """Where absolute paths begin. A mount has one number, which no other mount namespace has."""
    with closing_fd(os.open(f"/proc/{thread}/root", os.O_PATH | os.O_CLOEXEC)) as fd:
        told = statx_bytes(fd, _INODE_AND_MOUNT, 0)
    return told[32:40] + told[136:152]


@cache
def _ours() -> tuple[list[object], bytes]:
    """Rights and root of a program that has given up nothing: under one filter more than this process."""
    return _rights(os.getpid(), 1)[1], _root(os.getpid())


@contextmanager
def lent(view: View, call: Call) -> Iterator[bool]:
    """Whether this process may act in the caller's place, with its umask as long as that takes. Raises Gone."""
    rights, root = _ours()
    may, before = False, os.umask(0o077)
    try:
        with suppress(OSError):
            umask, theirs = _rights(call[1])
            may = theirs == rights and _root(call[1]) == root and not view.confined
            os.umask(umask)
        view.listener.check(call[0])  # it was this thread, and it waits: only itself can change its rights
        yield may
    finally:
        os.umask(before)


def check_folder(view: View, call: Call) -> None:
    """Raises OSError for a caller that a folder's descriptor would help out of its root or mount namespace."""
    rights, root = _ours()
    with suppress(OSError):
        if _root(call[1]) == root or _rights(call[1])[1] == rights:
            return
    raise refused(view, call, "opens a folder of the view")


def refused(view: View, call: Call, what: str) -> OSError:
    """The error of a call that this process will not make for its caller, once with a line that says why."""
    why = f"thread {call[1]} {what}, and has other rights, another root or other mounts than the view"
    why += ", or may be confined (Landlock)" if view.confined else ""
    view.report(PermissionError(f"{why}: it must name what it wants from outside the view"), errno.EACCES)
    return failed(errno.EACCES)
