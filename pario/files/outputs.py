"""Outputs of programs under a view: written once, to a folder of the node, merged into the shared folder at the end.

A file is whole when pario has seen that nobody can write to it any more while the process that made it still ran, or
when that process ended by itself. What a killed process had open is not whole and is never merged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

from pario.errors import OptionError
from pario.machine import closing_fd


class Merged(NamedTuple):
    """Names below the output folder.

    merged : now in the shared folder
    conflicts : refused because the name was taken, while the program ran or at the end
    broken : made by a process that was killed, or still open
    kept : the folder with what was not merged, "" if there is nothing
    """

    merged: list[str]
    conflicts: list[str]
    broken: list[str]
    kept: str


class Outputs:
    """
    folder : where outputs are merged at the end; its parent exists
    local : a folder of this node for a new one of ours; default: the system's for temporary files
    """

    def __init__(self, folder: str, local: str | None = None) -> None:
        self.folder = os.path.abspath(folder)
        if not os.path.isdir(os.path.dirname(self.folder)) or (
            os.path.lexists(self.folder) and not os.path.isdir(self.folder)
        ):
            raise OptionError(
                f"{folder!r} cannot be the folder of the outputs: it is no folder, or lies in none",
                hint="Name a folder, or a new one below a folder that exists.",
            )
        try:
            self.local = os.path.realpath(tempfile.mkdtemp(prefix="pario-output-", dir=local))
        except OSError as e:
            raise OptionError(
                f"no outputs can be kept in {os.fspath(local or tempfile.gettempdir())!r}: {e.strerror}",
                hint="Name a folder of this node that exists and that you may write to, with --local.",
            ) from None
        if not _has_leases(self.local):
            os.rmdir(self.local)
            raise OptionError(
                f"the file system of {self.local!r} cannot tell whether a file is still open (fcntl leases)",
                hint="Name a folder on a disk of this node, or in memory, with --local.",
            )
        self.root = -1  # the number of its prefix
        self.closed = False
        self._writers: dict[str, Hashable] = {}
        self._whole: set[str] = set()
        self._conflicts: set[str] = set()

    def here(self, path: str) -> str:
        """Where an output of this run lies."""
        return os.path.join(self.local, path) if path else self.local

    def there(self, path: str) -> str:
        """Where it is after merging."""
        return os.path.join(self.folder, path) if path else self.folder

    def below(self, real: bytes) -> str | None:
        """Which output a real path of this node's folder is."""
        head = os.fsencode(self.local)
        if real == head:
            return ""
        return os.fsdecode(real[len(head) + 1 :]) if real.startswith(head + b"/") else None

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(self.here(path)) or os.path.isdir(self.there(path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.here(path)) or os.path.lexists(self.there(path))

    def make_parents(self, path: str) -> None:
        """Folders that the shared folder has, here, too. Raises OSError."""
        above = os.path.dirname(path)
        if not self.is_folder(above):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.makedirs(self.here(above), exist_ok=True)

    def leave(self) -> None:
        """Remove this node's folder, if nothing is in it."""
        with contextlib.suppress(OSError):
            os.rmdir(self.local)

    # -- who writes --

    def begin(self, path: str, process: Hashable) -> None:
        self._whole.discard(path)  # a file of this name that was removed
        self._writers[path] = process

    def forget(self, path: str) -> None:
        """Nobody has got what was begun."""
        self._writers.pop(path, None)
        with contextlib.suppress(OSError):
            os.unlink(self.here(path))

    def refuse(self, path: str) -> OSError:
        """A second process, or the same one again, wants to write a file."""
        self._conflicts.add(path)
        return OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def look(self, process: Hashable, ends: bool = False) -> None:
        """This process lives and makes a call: what it made and nobody can write to any more is whole. ends : by the
        call it ends by itself, with what it has open"""
        for path in [path for path, writer in self._writers.items() if writer == process]:
            if ends or _nobody_writes(self.here(path)):
                self._whole.add(path)
                del self._writers[path]

    def rename(self, old: str, new: str) -> None:
        """Raises OSError."""
        os.rename(self.here(old), self.here(new))
        for path in [each for each in self._whole if each == new or each.startswith(new + "/")]:
            self._whole.discard(path)  # they were removed
        for path in [each for each in (*self._writers, *self._whole) if each == old or each.startswith(old + "/")]:
            renamed = new + path[len(old) :]
            if path in self._whole:
                self._whole.remove(path)
                self._whole.add(renamed)
            else:
                self._writers[renamed] = self._writers.pop(path)

    # -- at the end --

    def merge(self) -> Merged:
        """Bring whole files into the shared folder, none over another."""
        self.closed = True
        merged, broken, conflicts = [], [], sorted(self._conflicts)
        os.makedirs(self.folder, exist_ok=True)
        for above, folders, names in os.walk(self.local):
            relative = os.path.relpath(above, self.local)
            for name in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.normpath(os.path.join(self.folder, relative, name)))
            for name in sorted(names):
                path = os.path.normpath(os.path.join(relative, name))
                if path not in self._whole or not _nobody_writes(self.here(path)):
                    broken.append(path)
                elif _bring(self.here(path), self.there(path)):
                    merged.append(path)
                    os.unlink(self.here(path))
                elif path not in conflicts:
                    conflicts.append(path)
        kept = self.local if any(names for _, _, names in os.walk(self.local)) else ""
        if not kept:
            shutil.rmtree(self.local, ignore_errors=True)
        return Merged(merged, conflicts, broken, kept)


def _has_leases(folder: str) -> bool:
    path = os.path.join(folder, "lease")
    Path(path).touch()
    try:
        return _nobody_writes(path)
    finally:
        os.unlink(path)


def _nobody_writes(path: str) -> bool:
    """The kernel grants a lease for reading only if no descriptor or mapping anywhere can write."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError), closing_fd(os.open(path, flags)) as fd:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    return False


def _bring(source: str, target: str) -> bool:
    """Copy a file under a name that nobody has; False if it is taken. Others see it whole or not at all."""
    with contextlib.suppress(OSError):
        os.link(source, target)  # on the same file system
        return True
    if os.path.lexists(target):
        return False
    above, name = os.path.split(target)
    fd, made = tempfile.mkstemp(prefix=f".{name[:100]}-", dir=above)
    try:
        with open(fd, "wb") as out, Path(source).open("rb") as file:
            shutil.copyfileobj(file, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
        shutil.copystat(source, made)
        try:
            os.link(made, target)
        except FileExistsError:
            return False
        except OSError:  # no hard links here
            if os.path.lexists(target):
                return False
            os.rename(made, target)
            return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
    return True
