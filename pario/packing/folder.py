"""A folder tree as records: the key is the path below the folder, the value the file's content. Links, empty folders,
modes, times and owners are no records: they go into a part of the reserved entry, `tree`, as deflated JSON:

    {"rows": [[path, mode, mtime_ns, uid, gid, target or null], ...], "users": {uid: name}, "groups": {gid: name}}

in the order of the paths' bytes, "" (the folder itself) first. `mode` is st_mode, with the kind. For a symbolic link
`target` is its text, for a further name of a file with several (hard links) the first one. Bytes of a path that are no
UTF-8 stand as Python's os.fsdecode writes them.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from pario.errors import CorruptedError, FileError, OptionError, SnapshotError
from pario.packing.items import Items, inflated
from pario.records import Records
from pario.text import DAMAGED, read_json

#: Bytes of a key, as LMDB is built everywhere.
_LONGEST = 511
#: What the names of a folder may inflate to: this many bytes, this many times the part, and this many for each record.
_TREE, _TIMES, _LONGEST_ROW = 64 << 20, 100, 4 << 10


class Row(NamedTuple):
    """One name below the folder. target : of a symbolic link; or the first name of the same file"""

    path: bytes
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    target: bytes | None = None

    @property
    def is_record(self) -> bool:
        return stat.S_ISREG(self.mode)


class Tree(NamedTuple):
    """A folder's names, sorted. sizes : of those that are records; skipped : sockets, devices and pipes."""

    rows: list[Row]
    sizes: list[int]
    skipped: list[bytes]

    def part(self) -> bytes:
        """As it is kept in the reserved entry."""
        rows = [
            (*(os.fsdecode(row.path), *row[1:5]), None if row.target is None else os.fsdecode(row.target))
            for row in self.rows
        ]
        users: dict[int, str] = {}
        groups: dict[int, str] = {}
        for row in self.rows:
            with suppress(KeyError):
                users.setdefault(row.uid, pwd.getpwuid(row.uid).pw_name)
            with suppress(KeyError):
                groups.setdefault(row.gid, grp.getgrgid(row.gid).gr_name)
        return zlib.compress(json.dumps({"rows": rows, "users": users, "groups": groups}).encode(), 6)


def read_tree(folder: str) -> Tree:
    """All names below `folder`; links are not followed. Raises FileError."""
    root = os.fsencode(folder)
    found: list[tuple[Row, int]] = []
    skipped: list[bytes] = []
    first: dict[tuple[int, int], bytes] = {}  # of files with several names
    open_folders = [b""]
    while open_folders:
        below = open_folders.pop()
        try:
            with os.scandir(os.path.join(root, below)) as entries:
                names = sorted(entry.name for entry in entries)
            for name in names:
                path = os.path.join(below, name)
                status = os.lstat(os.path.join(root, path))
                if stat.S_ISDIR(status.st_mode):
                    open_folders.append(path)
                elif not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                    skipped.append(path)
                    continue
                target = os.readlink(os.path.join(root, path)) if stat.S_ISLNK(status.st_mode) else None
                found.append((_row(path, status, target), status.st_size))
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    which = status.st_dev, status.st_ino
                    first[which] = min(path, first.get(which, path))
                    found[-1] = (found[-1][0]._replace(target=b"%d/%d" % which), status.st_size)
        except OSError as e:
            where = os.path.join(folder, os.fsdecode(below))
            raise FileError(
                f"cannot read it: {e.strerror}", path=(e.filename and os.fsdecode(e.filename)) or where
            ) from e
    too_long = next((row.path for row, _ in found if row.is_record and len(row.path) > _LONGEST), None)
    if too_long is not None:
        raise OptionError(
            f"a path below it has {len(too_long)} bytes, and keys of an LMDB have at most {_LONGEST}: {too_long!r}",
            path=folder,
            hint="Pack the folder below, or shorten the names.",
        )
    names_of = {b"%d/%d" % which: path for which, path in first.items()}
    rows = [_row(b"", os.lstat(root + b"/"), None)]
    sizes = []
    for row, size in sorted(found):
        if row.is_record:
            sizes.append(size)
            if row.target is not None:
                original = names_of[row.target]
                row = row._replace(target=None if original == row.path else original)
        rows.append(row)
    return Tree(rows, sizes, skipped)


def _is_possible(row: Row) -> bool:
    owners = 0 <= row.uid < 0xFFFFFFFF and 0 <= row.gid < 0xFFFFFFFF
    return owners and 0 <= row.mode < 1 << 16 and abs(row.mtime_ns) < 1 << 63 and b"\0" not in (row.target or b"")


def _row(path: bytes, status: os.stat_result, target: bytes | None) -> Row:
    return Row(path, status.st_mode, status.st_mtime_ns, status.st_uid, status.st_gid, target)


class FileItems(Items):
    """The regular files of a tree."""

    def __init__(self, folder: str, tree: Tree) -> None:
        self._root = os.fsencode(folder)
        self._rows = [row for row in tree.rows if row.is_record]
        self.n = len(self._rows)
        self.sizes = np.array(tree.sizes, np.int64)

    def keys(self, begin: int, stop: int) -> list[bytes]:
        return [row.path for row in self._rows[begin:stop]]

    def read(self, ids: np.ndarray) -> Records:
        return Records.of(ids, [self._content(record) for record in ids.tolist()])

    def _content(self, record: int) -> bytes:
        row, size = self._rows[record], int(self.sizes[record])
        path = os.path.join(self._root, row.path)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
                content = bytearray()
                while len(content) <= size and (more := file.read(size + 1 - len(content))):
                    content += more
                status = os.fstat(file.fileno())
        except OSError as e:
            raise FileError(f"cannot read it: {e.strerror}", path=os.fsdecode(path)) from e
        if len(content) != size or status.st_mtime_ns != row.mtime_ns:
            raise SnapshotError(
                "the file was changed while the folder was packed", path=os.fsdecode(path), hint="Pack it again."
            )
        return bytes(content)


class Restorer:
    """Makes the tree again, in a new folder that belongs to us alone. Collective use: rank 0 calls `folders`, then any
    rank `write`s files, then rank 0 calls `finish`, and `finish_root` when the folder has its final name.

    Paths come from a file that anybody may have written: none may lead out of the folder. Links are made at the very
    end, so that nothing is written through one of them.

    Raises CorruptedError for such a path, FileError where the system refuses.
    """

    def __init__(self, folder: str, part: bytes, dataset: str, records: int = 0) -> None:
        self._root = os.fsencode(folder)
        self._dataset = dataset
        try:
            told: dict[str, Any] = read_json(inflated(part, _TREE + _TIMES * len(part) + _LONGEST_ROW * records))
            self.rows = [
                Row(os.fsencode(path), int(mode), int(mtime), int(uid), int(gid), None if t is None else os.fsencode(t))
                for path, mode, mtime, uid, gid, t in told["rows"]
            ]
            if not all(map(_is_possible, self.rows)):
                raise ValueError("a mode, an owner, a time or a link that no file has")
            self._users, self._groups = dict(told["users"]), dict(told["groups"])
        except DAMAGED as e:
            raise CorruptedError(f"the part with the names of the folder is damaged: {e}", path=dataset) from e
        self._check()

    def _check(self) -> None:
        folders = {row.path for row in self.rows if stat.S_ISDIR(row.mode)}
        files = {row.path for row in self.rows if row.is_record}
        seen: set[bytes] = set()
        for row in self.rows:
            parts = row.path.split(b"/")
            bad = row.path and (b"\0" in row.path or any(part in (b"", b".", b"..") for part in parts))
            if bad or row.path in seen or os.path.dirname(row.path) not in folders:
                raise CorruptedError("a path of the folder leads elsewhere", path=self._dataset, key=row.path)
            if row.is_record and row.target is not None and row.target not in files:
                raise CorruptedError("a link of the folder leads to no file of it", path=self._dataset, key=row.path)
            seen.add(row.path)

    @property
    def files(self) -> list[Row]:
        """The rows that are records, in their order."""
        return [row for row in self.rows if row.is_record]

    def folders(self) -> None:
        for row in self.rows:
            if stat.S_ISDIR(row.mode) and row.path:
                os.mkdir(self._at(row), 0o700)

    def write(self, row: Row, content: memoryview) -> None:
        """Content is not written for a further name of a file."""
        if row.target is None:
            with open(
                os.open(self._at(row), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb"
            ) as file:
                file.write(content)

    def finish(self) -> None:
        """Links; then owners, modes and times, those of folders last and from below, but for the folder itself."""
        for row in self.rows:
            if row.is_record and row.target is not None:
                os.link(os.path.join(self._root, row.target), self._at(row), follow_symlinks=False)
        for row in self.rows:
            if stat.S_ISLNK(row.mode):
                os.symlink(row.target or b"", self._at(row))
                self._own(row, self._at(row))
                os.utime(self._at(row), ns=(row.mtime_ns, row.mtime_ns), follow_symlinks=False)
        for row in reversed(self.rows):
            if not stat.S_ISLNK(row.mode) and row.path:
                self._dress(row, self._at(row))

    def finish_root(self, fd: int) -> None:
        """The folder's own owner, mode and time, where it lies by now: one that may not be written cannot be renamed.

        fd : of the folder
        """
        for row in self.rows:
            if not row.path:
                self._dress(row, fd)

    def _dress(self, row: Row, at: bytes | int) -> None:
        self._own(row, at)
        # Only root gives a file to whom it claims to be: with anybody else's rights it must not run.
        os.chmod(at, stat.S_IMODE(row.mode) & (0o7777 if os.geteuid() == 0 else 0o1777))
        os.utime(at, ns=(row.mtime_ns, row.mtime_ns))

    def _own(self, row: Row, at: bytes | int) -> None:
        """Give it its owner, if we may; names count before numbers."""
        uid, gid = row.uid, row.gid
        with suppress(KeyError, TypeError, ValueError):
            uid = pwd.getpwnam(self._users[str(row.uid)]).pw_uid
        with suppress(KeyError, TypeError, ValueError):
            gid = grp.getgrnam(self._groups[str(row.gid)]).gr_gid
        chown: Callable[..., None] = os.fchown if isinstance(at, int) else os.lchown
        if os.geteuid() == 0:
            chown(at, uid, gid)
        else:
            with suppress(OSError):
                chown(at, -1, gid)

    def _at(self, row: Row) -> bytes:
        return os.path.join(self._root, row.path) if row.path else self._root
