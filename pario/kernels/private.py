"""A directory into which nobody but this user can put files, and files in it that nobody else has written.

Compiled kernels are pickles, and to unpickle is to execute. Their directory lies, by default, where everybody may write
(/tmp), so that other users can make its name first, as a directory or a link, and change what a path leads to between
a look and its use. Hence:

* Every use walks down from "/" by descriptors, and looks at each component with the descriptor that it goes on from.
  What was checked is what is used, and nothing is remembered until the next use.
* Each component belongs to root or to this user. Others may write into it only if it is sticky (in such a directory
  nobody renames or removes what is somebody else's), and never into the last one, which is this user's own.
* Links of root and of this user are followed (/tmp itself is one on some systems), but none in a directory where
  others may write.
* A file is used only if its descriptor says that it is a regular file of this user's, that nobody else may write, and
  that has no second name outside: what an earlier, wider mode of the directory let in does no harm.
* A FUSE mount of another user's tells what that user likes about owners: its files are not used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections import deque
from collections.abc import Iterator
from functools import cache

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_COMPONENT = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
#: As many as the kernel follows.
_MOST_LINKS = 40


class UnsafeError(OSError):
    """The directory, or what lies there, cannot be trusted. The text says which component and why."""


class PrivateDirectory:
    """The directory at `path`, made (mode 0700) when something is first written. Raises UnsafeError and OSError."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)

    def problem(self) -> str:
        """Why nothing can be kept here; "" if all is well."""
        try:
            with self._open(make=True) as folder:
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                    return f"{self.path} is not writable"
        except UnsafeError as e:
            return str(e)
        except OSError as e:
            return f"{self.path} cannot be made: {e.strerror}"
        return ""

    def read(self, name: str) -> bytes:
        """The contents of a file."""
        with self._open(make=False) as folder:
            # Without O_NONBLOCK, opening somebody's pipe would wait for ever.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as file:
            self._check_file(fd, name)
            return file.read()

    def write(self, name: str, contents: bytes) -> None:
        """Make or replace a file; readers see the old contents or the new."""
        half = f".{name}.{secrets.token_hex(8)}"
        with self._open(make=True) as folder:
            fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    file.write(contents)
                os.rename(half, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(half, dir_fd=folder)
                raise

    def open_file(self, name: str, *, make: bool = True) -> int:
        """Descriptor of a file, open for reading and writing; made if need be, and if `make`."""
        with self._open(make=make) as folder:
            flags = os.O_RDWR | os.O_CREAT * make | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            self._check_file(fd, name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def remove(self, name: str) -> None:
        """Remove a file of this user's."""
        with self._open(make=False) as folder:
            os.unlink(name, dir_fd=folder)

    def _check_file(self, fd: int, name: str) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            why = "is no regular file"
        elif status.st_uid != os.geteuid():
            why = f"belongs to user {status.st_uid}"
        elif status.st_mode & _OTHERS_WRITE:
            why = "may be written by others"
        elif status.st_nlink > 1:
            why = "has a second name"
        else:
            return
        raise UnsafeError(f"{os.path.join(self.path, name)} {why}")

    @contextlib.contextmanager
    def _open(self, *, make: bool) -> Iterator[int]:
        """A descriptor of the directory (O_PATH)."""
        folder = _walk(self.path, make=make)
        try:
            yield folder
        finally:
            os.close(folder)


def _walk(path: str, *, make: bool) -> int:
    """A descriptor of the directory `path`, every component checked; missing ones are made if `make`."""
    left, links = deque(_names(path)), 0
    here, at = -1, ""
    status: os.stat_result | None = None
    try:
        while left:
            name = left.popleft()
            below = _below(here, name, make=make)
            try:
                found = _checked(below, os.path.join(at, name), None if name == "/" else status)
                if stat.S_ISLNK(found.st_mode):
                    links += 1
                    if links > _MOST_LINKS:
                        raise UnsafeError(f"{path} leads through more than {_MOST_LINKS} links")
                    left.extendleft(reversed(_names(os.readlink("", dir_fd=below))))
                    continue
                here, below, at, status = below, here, os.path.join(at, name), found
            finally:
                if below >= 0:
                    os.close(below)
        assert status is not None  # an absolute path has a first component
        _check_last(status, at)
    except BaseException:
        if here >= 0:
            os.close(here)
        raise
    return here


def _names(path: str) -> list[str]:
    """Components of a path, or of a link's target; "/" is one, at the beginning of those that are absolute."""
    return ["/"] * path.startswith("/") + [name for name in path.split("/") if name not in ("", ".")]


def _below(here: int, name: str, *, make: bool) -> int:
    try:
        return os.open(name, _COMPONENT, dir_fd=here)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process was quicker: the look at it tells whose it is
        os.mkdir(name, 0o700, dir_fd=here)
    return os.open(name, _COMPONENT, dir_fd=here)


def _checked(fd: int, at: str, above: os.stat_result | None) -> os.stat_result:
    """The status of a directory or link in the directory `above` (None: it is "/").

    Raises UnsafeError where somebody else may decide what it is.
    """
    status = os.fstat(fd)
    shared = above is not None and bool(above.st_mode & _OTHERS_WRITE)
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        raise UnsafeError(f"{at} is not a directory")
    if status.st_uid not in (0, os.geteuid()) and (shared or status.st_uid != _unmapped_owner()):
        raise UnsafeError(f"{at} belongs to user {status.st_uid}, neither to root nor to user {os.geteuid()}")
    if stat.S_ISLNK(status.st_mode):
        if shared:
            raise UnsafeError(f"{at} is a symbolic link in a directory where others may write")
    elif status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise UnsafeError(f"others may write into {at} (mode {stat.S_IMODE(status.st_mode):04o}), which is not sticky")
    return status


def _check_last(status: os.stat_result, at: str) -> None:
    if status.st_uid != os.geteuid():
        raise UnsafeError(f"{at} belongs to user {status.st_uid}, not to user {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise UnsafeError(f"others may write into {at} (mode {stat.S_IMODE(status.st_mode):04o})")
    owner = _fuse_owner(status.st_dev)
    if owner not in (None, 0, os.geteuid()):
        raise UnsafeError(f"{at} lies on a FUSE file system that user {owner} has mounted")


@cache
def _unmapped_owner() -> int:
    """Whom the kernel shows as owner of the system's own files where this process is in a user namespace that has no
    number for root (rootless containers); -1 outside of such.
    """
    try:
        with open("/proc/self/uid_map") as file:
            if sum(int(line.split()[2]) for line in file) >= 2**32 - 1:
                return -1
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return -1


def _fuse_owner(device: int) -> int | None:
    """Who mounted the FUSE file system on this device; None for other file systems."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            for line in file:
                mount, _, about = line.partition(" - ")
                if mount.split(" ", 3)[2] != wanted:
                    continue
                kind, _, options = about.strip().split(" ", 2)
                if kind.startswith("fuse"):
                    return next((int(o[8:]) for o in options.split(",") if o.startswith("user_id=")), None)
    except (OSError, ValueError, IndexError):
        pass
    return None
