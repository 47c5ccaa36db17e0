"""Real, empty folders that stand for the folders of a view.

A program that opens a folder gets a descriptor of one of them, and one that changes into a folder works in one. So the
kernel inherits, duplicates and closes them as it does any other. They lie side by side, not in each other: making one
never changes another, whose times a program may be watching.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile

from pario.files.spots import Spot

__all__ = ["Skeleton"]

_NAME = "pario-view-"
_LOCK = "lock"


class Skeleton:
    """parent : where to make them; default: in memory if there is a writable folder for that."""

    def __init__(self, parent: str | None = None) -> None:
        if parent is None:
            parent = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else tempfile.gettempdir()
        _sweep(parent)
        while True:
            self.base = os.path.realpath(tempfile.mkdtemp(prefix=f"{_NAME}{os.getuid()}-", dir=parent))
            # Held until this process ends, however it does.
            lock = os.path.join(self.base, _LOCK)
            self._lock = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another supervisor has just swept it away
        self._head = os.fsencode(self.base) + b"/"
        self._folders: list[Spot] = []
        self._numbers: dict[Spot, int] = {}

    def folder(self, spot: Spot, mtime: float) -> str:
        """Path of the folder that stands for one of the view. Raises OSError."""
        spot = Spot(spot.root, spot.path)
        number = self._numbers.get(spot)
        if number is None:
            number = len(self._folders)
            path = self._path(number)
            os.mkdir(path)
            os.chmod(path, 0o755)
            os.utime(path, (mtime, mtime))
            self._folders.append(spot)
            self._numbers[spot] = number
        return self._path(number)

    def spot(self, path: bytes) -> Spot | None:
        """Which folder of the view a real path stands for; None for any other path."""
        if not path.startswith(self._head):
            return None
        name = path[len(self._head) :]
        return self._folders[int(name)] if name.isdigit() and int(name) < len(self._folders) else None

    def _path(self, number: int) -> str:
        return f"{self.base}/{number}"

    def close(self) -> None:
        shutil.rmtree(self.base, ignore_errors=True)
        os.close(self._lock)


def _sweep(parent: str) -> None:
    """Remove what supervisors of this user left behind that were killed."""
    mine = f"{_NAME}{os.getuid()}-"
    for entry in os.scandir(parent):
        if not entry.name.startswith(mine):
            continue
        with contextlib.suppress(OSError):  # it may have just ended
            found = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path, ignore_errors=True)
            finally:
                os.close(lock)
