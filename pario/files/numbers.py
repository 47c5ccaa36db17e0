"""The system calls that a view answers: their numbers, and where in their arguments a path stands.

Every call that takes the path of a file is here, because a filter sees numbers and addresses, and cannot read the path
behind an address; not those of an administrator (mount, swapon, quotactl, ...) and the addresses of sockets. Calls on
descriptors are here if they change what others see. The rest, read, lseek, mmap, fstat, ..., stay the kernel's own.
"""

from __future__ import annotations

import platform
import sys
from typing import NamedTuple

from pario.errors import ParioError

OTHER_WAY = "Use `pario files mount` (FUSE), pario:// with fsspec, or `pario data unpack` instead (docs/files.md)."

_DIRECT = -1  # no folder descriptor: a relative path begins in the working directory


class Entry(NamedTuple):
    """
    x86_64, generic : numbers of the call; None where the machine does not have it. Newer processors (aarch64, riscv64)
        share the generic ones
    paths : (position of the folder's descriptor or -1, position of the path) of each path among the arguments
    """

    x86_64: int | None
    generic: int | None
    paths: tuple[tuple[int, int], ...] = ()


_FIRST = ((_DIRECT, 0),)
_SECOND = ((_DIRECT, 1),)
_AT = ((0, 1),)
_BOTH = ((_DIRECT, 0), (_DIRECT, 1))
_BOTH_AT = ((0, 1), (2, 3))

CALLS = {
    "open": Entry(2, None, _FIRST),
    "openat": Entry(257, 56, _AT),
    "openat2": Entry(437, 437, _AT),
    "creat": Entry(85, None, _FIRST),
    "stat": Entry(4, None, _FIRST),
    "lstat": Entry(6, None, _FIRST),
    "newfstatat": Entry(262, 79, _AT),
    "statx": Entry(332, 291, _AT),
    "access": Entry(21, None, _FIRST),
    "faccessat": Entry(269, 48, _AT),
    "faccessat2": Entry(439, 439, _AT),
    "readlink": Entry(89, None, _FIRST),
    "readlinkat": Entry(267, 78, _AT),
    "statfs": Entry(137, 43, _FIRST),
    "chdir": Entry(80, 49, _FIRST),
    "chroot": Entry(161, 51, _FIRST),
    "execve": Entry(59, 221, _FIRST),
    "execveat": Entry(322, 281, _AT),
    "getdents": Entry(78, None),
    "getdents64": Entry(217, 61),
    "getcwd": Entry(79, 17),
    "fchmod": Entry(91, 52),
    "fchown": Entry(93, 55),
    "fsetxattr": Entry(190, 7),
    "fremovexattr": Entry(199, 16),
    "landlock_restrict_self": Entry(446, 446),
    "ioctl": Entry(16, 29),
    "fcntl": Entry(72, 25),
    "mkdir": Entry(83, None, _FIRST),
    "mkdirat": Entry(258, 34, _AT),
    "mknod": Entry(133, None, _FIRST),
    "mknodat": Entry(259, 33, _AT),
    "symlink": Entry(88, None, _SECOND),
    "symlinkat": Entry(266, 36, ((1, 2),)),
    "rmdir": Entry(84, None, _FIRST),
    "unlink": Entry(87, None, _FIRST),
    "unlinkat": Entry(263, 35, _AT),
    "truncate": Entry(76, 45, _FIRST),
    "chmod": Entry(90, None, _FIRST),
    "fchmodat": Entry(268, 53, _AT),
    "fchmodat2": Entry(452, 452, _AT),
    "chown": Entry(92, None, _FIRST),
    "lchown": Entry(94, None, _FIRST),
    "fchownat": Entry(260, 54, _AT),
    "utime": Entry(132, None, _FIRST),
    "utimes": Entry(235, None, _FIRST),
    "futimesat": Entry(261, None, _AT),
    "utimensat": Entry(280, 88, _AT),
    "rename": Entry(82, None, _BOTH),
    "renameat": Entry(264, 38, _BOTH_AT),
    "renameat2": Entry(316, 276, _BOTH_AT),
    "link": Entry(86, None, _BOTH),
    "linkat": Entry(265, 37, _BOTH_AT),
    "setxattr": Entry(188, 5, _FIRST),
    "lsetxattr": Entry(189, 6, _FIRST),
    "removexattr": Entry(197, 14, _FIRST),
    "lremovexattr": Entry(198, 15, _FIRST),
    "getxattr": Entry(191, 8, _FIRST),
    "lgetxattr": Entry(192, 9, _FIRST),
    "listxattr": Entry(194, 11, _FIRST),
    "llistxattr": Entry(195, 12, _FIRST),
    "setxattrat": Entry(463, 463, _AT),
    "getxattrat": Entry(464, 464, _AT),
    "listxattrat": Entry(465, 465, _AT),
    "removexattrat": Entry(466, 466, _AT),
    "file_getattr": Entry(468, 468, _AT),
    "file_setattr": Entry(469, 469, _AT),
    "inotify_add_watch": Entry(254, 27, _SECOND),
    "name_to_handle_at": Entry(303, 264, _AT),
}

#: calls that are answered for these requests only: FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR; F_SETLEASE, which makes all
#: others wait who open the file, F_SET_RW_HINT, F_SETDELEG
SECOND_ARGUMENTS = {"ioctl": (0x40086602, 0x401C5820), "fcntl": (1024, 1036, 1040)}


class Machine(NamedTuple):
    """
    audit : the kernel's name of the architecture, AUDIT_ARCH_*
    seccomp, io_uring_setup, fchdir, close, fstatfs, exit_group : numbers of calls
    trap_bytes : length of the instruction that enters the kernel
    """

    audit: int
    seccomp: int
    io_uring_setup: int
    fchdir: int
    close: int
    fstatfs: int
    exit_group: int
    trap_bytes: int


_MACHINES = {
    "x86_64": Machine(0xC000003E, 317, 425, 81, 3, 138, 231, 2),
    "aarch64": Machine(0xC00000B7, 277, 425, 50, 57, 44, 94, 4),
}

ARCHITECTURE = platform.machine()
_generic = ARCHITECTURE != "x86_64"
#: name -> number here
NUMBERS: dict[str, int] = {
    name: number
    for name, entry in CALLS.items()
    if (number := entry.generic if _generic else entry.x86_64) is not None
}


def machine() -> Machine:
    """This processor's numbers. Raises ParioError where pario knows none."""
    known = _MACHINES.get(ARCHITECTURE) if sys.platform.startswith("linux") and sys.byteorder == "little" else None
    if known is None:
        where = f"{sys.platform} on {ARCHITECTURE}"
        raise ParioError(f"pario's view knows Linux on x86_64 and aarch64, not {where}", hint=OTHER_WAY)
    return known
