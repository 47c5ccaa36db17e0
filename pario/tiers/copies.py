"""The copies that disk tiers keep below a folder, for the disk's administrator: what is there, whether it is right, and
away with it. Only what a disk tier made is touched, and nothing that a job uses."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass

import numpy as np

from pario.errors import ParioError
from pario.kernels.private import PrivateDirectory
from pario.machine import closing_fd
from pario.tiers.disk import DiskTier
from pario.tiers.disk_files import FILES, lock_use, root_of
from pario.tiers.grid import Grid
from pario.tiers.map import read_head

_IDENTITY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Copy:
    """A copy of one state of a data file.

    folder, identity : where it lies, and the name of its directory
    path : of the data file, as the job that made the copy named it
    grid : of the data file
    held_bytes : of the chunks that are there; disk_bytes : what it takes on the disk
    used_at : when a job opened it last, seconds since the epoch
    in_use : a job uses it now
    """

    folder: str
    identity: str
    path: str
    grid: Grid
    held_bytes: int
    disk_bytes: int
    used_at: float
    in_use: bool

    @property
    def days(self) -> float:
        """Since it was used last."""
        return max(0.0, time.time() - self.used_at) / 86400


def copies_below(folder: str) -> list[Copy]:
    """This user's copies, the one used last first. Raises OSError (UnsafeError) if the folder cannot be trusted."""
    root = root_of(folder)
    if not os.path.isdir(root):
        return []
    found = [_look(folder, name) for name in os.listdir(root) if _IDENTITY.fullmatch(name)]
    return sorted((copy for copy in found if copy is not None), key=lambda copy: -copy.used_at)


def verify(copy: Copy) -> tuple[int, int]:
    """(chunks that were right, chunks that were not), all of them read. Damaged ones count as absent from then on.

    Raises OSError, ParioError.
    """
    tier = DiskTier(
        copy.folder, bytes.fromhex(copy.identity), copy.grid, copy.grid.file_bytes + (1 << 40), path=copy.path
    )
    right = wrong = 0
    with contextlib.closing(tier):
        for chunk in np.flatnonzero(tier.held()).tolist():
            offset, nbytes = copy.grid.span(chunk)
            good = tier.read(offset, np.empty(nbytes, np.uint8))
            right, wrong = right + good, wrong + (not good)
    return right, wrong


def remove(copy: Copy) -> bool:
    """Remove it; False if a job uses it. Raises OSError."""
    where = os.path.join(root_of(copy.folder), copy.identity)
    directory = PrivateDirectory(where)
    with closing_fd(directory.open_file("lock")) as lock:
        if not lock_use(lock, alone=True):
            return False
        for name in FILES:  # the lock is the last one: anyone who waits for it finds that it has gone
            with contextlib.suppress(FileNotFoundError):
                directory.remove(name)
        with contextlib.suppress(OSError):  # somebody begins anew
            os.rmdir(where)
    return True


def _look(folder: str, identity: str) -> Copy | None:
    """None if it is no copy, or going away."""
    directory = PrivateDirectory(os.path.join(root_of(folder), identity))
    try:
        sizes = [os.stat(os.path.join(directory.path, name), follow_symlinks=False) for name in ("data", "map", "lock")]
        head = read_head(directory.read("map"))
        if head is None or head.identity.hex() != identity:
            return None
        lock = directory.open_file("lock")
    except (FileNotFoundError, ParioError):
        return None
    with closing_fd(lock):
        in_use = not lock_use(lock, alone=True)
    path = b""
    with contextlib.suppress(FileNotFoundError):
        path = directory.read("path")
    held = sum(head.grid.span(chunk)[1] for chunk in np.flatnonzero(head.held).tolist())
    disk_bytes = sum(512 * status.st_blocks for status in sizes)
    return Copy(
        folder, identity, os.fsdecode(path), head.grid, held, disk_bytes, used_at=sizes[2].st_mtime, in_use=in_use
    )
