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
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from pario.codec.listing import LONGEST_KEY, Row, by_key, folder_rows
from pario.errors import FileError, OptionError, SnapshotError
from pario.machine import closing_fd
from pario.packing.items import Items
from pario.records import Records
from pario.text import counted

#: Names in a message.
_NAMES = 5
_KEEP = "Use --links keep, which leaves links that lead out of the folder links."


class Tree(NamedTuple):
    """A folder's names, sorted.

    sizes : of those that are records
    skipped : sockets, devices and pipes
    followed : where the links lead in whose place something from outside is packed
    kept : links that lead out of the folder, and stay links
    """

    rows: list[Row]
    sizes: list[int]
    skipped: list[bytes]
    followed: dict[bytes, bytes]
    kept: list[bytes]

    def told(self) -> list[str]:
        """What is not as everybody would expect."""
        lines = [f"left out (neither file, folder nor link): {os.fsdecode(path)}" for path in self.skipped]
        if self.followed:
            what = "followed, and what they lead to is packed in their place"
            lines.append(f"symbolic links that lead out of the folder, {what}: {_listed(self.followed)}")
        if self.kept:
            what = "kept as links, and what they lead to is not packed"
            lines.append(f"symbolic links that lead out of the folder, {what}: {_listed(self.kept)}")
        links, told = [row for row in self.rows if stat.S_ISLNK(row.mode)], {*self.kept}
        if fixed := [row.path for row in links if (row.target or b"").startswith(b"/") and row.path not in told]:
            lines.append(f"symbolic links by absolute paths, kept, lead where they led before: {_listed(fixed)}")
        if not self.sizes:
            lines.append(f"no record is packed: the folder holds no file, {counted(len(links), 'symbolic link')}")
        return lines

    def part(self) -> bytes:
        """As it is kept in the reserved entry."""
        rows = [(os.fsdecode(row.path), *row[1:5], row.target and os.fsdecode(row.target)) for row in self.rows]
        users: dict[int, str] = {}
        groups: dict[int, str] = {}
        for row in self.rows:
            with suppress(KeyError):
                users.setdefault(row.uid, pwd.getpwuid(row.uid).pw_name)
            with suppress(KeyError):
                groups.setdefault(row.gid, grp.getgrgid(row.gid).gr_name)
        return zlib.compress(json.dumps({"rows": rows, "users": users, "groups": groups}).encode(), 6)


def read_tree(folder: str, *, follow: bool = True, hashed: bool = False, most: int = 1 << 24) -> Tree:
    """All names below `folder`. Raises FileError, OptionError.

    follow : symbolic links that lead out of it to a file or a folder are; others stay links. In what one leads to no
        folder is followed that was before: where folders link to each other, each would multiply all others
    most : names behind links
    hashed : a path that is too long for a key is none, see `key_of`
    """
    root = os.fsencode(folder)
    found: list[tuple[Row, int]] = []
    tree = Tree([], [], [], {}, [])
    first: dict[tuple[int, int], bytes] = {}  # of files with several names
    # With the folders that one is in by way of links.
    open_folders: list[tuple[bytes, tuple[bytes, ...]]] = [(b"", (os.path.realpath(root),))]
    entered, behind = set[bytes](), 0  # folders and files that links lead to, and the names there
    while open_folders:
        below, above = open_folders.pop()
        try:
            # It may have become a link meanwhile.
            at = tree.followed.get(below) or os.path.join(root, below)
            with closing_fd(os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
                names = sorted(map(os.fsencode, os.listdir(fd)))
            behind += len(names) if len(above) > 1 else 0
            if behind > most:
                raise OptionError(f"links lead to more than {most:,} names", path=folder, hint=_KEEP)
            for name in names:
                path = os.path.join(below, name)
                status = os.lstat(os.path.join(root, path))
                around, is_link = above, stat.S_ISLNK(status.st_mode)
                real = os.path.realpath(os.path.join(root, path)) if is_link else b""
                if is_link and not _is_below(real, above[-1]) and os.path.exists(real):
                    kind = stat.S_IFMT((there := os.stat(real)).st_mode)
                    # To a folder that holds one of these it would lead round and round.
                    again = any(_is_below(each, real) for each in above) or (len(above) > 1 and real in entered)
                    if follow and kind in (stat.S_IFREG, stat.S_IFDIR) and not (kind == stat.S_IFDIR and again):
                        tree.followed[path], status, around = real, there, (*above, real)
                        entered.add(real)
                    else:
                        tree.kept.append(path)
                if stat.S_ISDIR(status.st_mode):
                    open_folders.append((path, around))
                elif not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
                    tree.skipped.append(path)
                    continue
                target = os.readlink(os.path.join(root, path)) if stat.S_ISLNK(status.st_mode) else None
                found.append((_row(path, status, target), status.st_size))
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and path not in tree.followed:
                    which = status.st_dev, status.st_ino
                    first[which] = min(path, first.get(which, path))
                    found[-1] = (found[-1][0]._replace(target=b"%d/%d" % which), status.st_size)
        except OSError as e:
            where = os.fsdecode(e.filename if isinstance(e.filename, bytes) else os.path.join(root, below))
            hint = _KEEP if len(above) > 1 else None
            raise FileError(f"cannot read it: {e.strerror}", path=where, hint=hint) from e
    paths = [row.path for row, _ in found if row.is_record]
    keys_of(paths, folder, hashed, "Use --keys hash, pack the folder below, or shorten the names.")
    names_of = {b"%d/%d" % which: path for which, path in first.items()}
    tree.rows.append(_row(b"", os.lstat(root + b"/"), None))
    for row, size in sorted(found):
        if row.is_record:
            tree.sizes.append(size)
            if row.target is not None:
                original = names_of[row.target]
                row = row._replace(target=None if original == row.path else original)
        tree.rows.append(row)
    return tree


def keys_of(names: Collection[bytes], path: str, hashed: bool, hint: str) -> dict[bytes, bytes]:
    """Key -> name. path, hint : for the error of a name that is too long for a key, unless keys are `hashed`"""
    too_long = next((name for name in names if len(name) > LONGEST_KEY), None)
    if too_long is not None and not hashed:
        told = f"a name in it has {len(too_long)} bytes, and keys of an LMDB have at most {LONGEST_KEY}: {too_long!r}"
        raise OptionError(told, path=path, hint=hint)
    return by_key(names, path)


def _is_below(path: bytes, folder: bytes) -> bool:
    return path == folder or path.startswith(folder.rstrip(b"/") + b"/")


def _listed(paths: Iterable[bytes]) -> str:
    names = [os.fsdecode(path) for path in paths]
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def _row(path: bytes, status: os.stat_result, target: bytes | None) -> Row:
    return Row(path, status.st_mode, status.st_mtime_ns, status.st_uid, status.st_gid, target)


class FileItems(Items):
    """The regular files of a tree."""

    def __init__(self, folder: str, tree: Tree) -> None:
        self._root = os.fsencode(folder)
        self._followed = tree.followed
        files = zip((row for row in tree.rows if row.is_record), tree.sizes, strict=True)
        ordered = sorted(files, key=lambda one: one[0].key)
        self._rows = [row for row, _ in ordered]
        self.n = len(ordered)
        self.sizes = np.array([size for _, size in ordered], np.int64)

    def keys(self, begin: int, stop: int) -> list[bytes]:
        return [row.key for row in self._rows[begin:stop]]

    def read(self, ids: np.ndarray) -> Records:
        return Records.of(ids, [self._content(record) for record in ids.tolist()])

    def _content(self, record: int) -> bytes:
        row, size = self._rows[record], int(self.sizes[record])
        path = self._followed.get(row.path) or os.path.join(self._root, row.path)
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
                content = bytearray()
                while len(content) <= size and (more := file.read(size + 1 - len(content))):
                    content += more
                status = os.fstat(file.fileno())
        except OSError as e:
            hint = _KEEP if row.path in self._followed else None
            raise FileError(f"cannot read it: {e.strerror}", path=os.fsdecode(path), hint=hint) from e
        if len(content) != size or status.st_mtime_ns != row.mtime_ns:
            told = "the file was changed while the folder was packed"
            raise SnapshotError(told, path=os.fsdecode(path), hint="Pack it again.")
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
        self.rows, self._users, self._groups = folder_rows(part, dataset, records)

    @property
    def files(self) -> list[Row]:
        """The rows that are records, in the order of their keys."""
        return sorted((row for row in self.rows if row.is_record), key=lambda row: row.key)

    def folders(self) -> None:
        for row in self.rows:
            if stat.S_ISDIR(row.mode) and row.path:
                os.mkdir(self._at(row), 0o700)

    def write(self, row: Row, content: memoryview) -> None:
        """Content is not written for a further name of a file."""
        if row.target is None:
            fd = os.open(self._at(row), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb") as file:
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
