"""The names that a packed folder or tar has, from the parts of its reserved entry (docs/packing.md, "The format").

    tree             of a folder: deflated JSON, see `folder_rows`
    tar, members     of a tar: its bytes without the values, and where these were (packing/tars.py)
    N.tree, N.tar …  those of source N of several

Anybody may have written them: every path is checked, and nothing here follows a link.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

from pario.codec.packing import Packing, inflated
from pario.errors import CorruptedError, OptionError
from pario.text import DAMAGED, read_json

#: Bytes of a key, as LMDB is built everywhere.
LONGEST_KEY = 511
#: The time of a folder that nobody named; no file has it.
UNKNOWN_TIME = -(1 << 63)
#: What the names of a folder may inflate to: this many bytes, this many times the part, and this many for each record.
_TREE, _TIMES, _LONGEST_ROW = 64 << 20, 100, 4 << 10
#: Linux' PATH_MAX: no system call takes a longer path, or makes a link to one.
_LONGEST_PATH = 4 << 10
#: Bytes of a tar's long name or table of a member's properties, and how many properties all members may share.
_LONGEST_HEADER, _SHARED = 1 << 20, 100


_Names = dict[str, str]


class Row(NamedTuple):
    """One name below the folder.

    target : of a symbolic link; or the first name of the same file
    before : what the record's key has before that of the path, being of one of several sources
    """

    path: bytes
    mode: int
    mtime_ns: int
    uid: int
    gid: int
    target: bytes | None = None
    before: bytes = b""

    @property
    def is_record(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def key(self) -> bytes:
        return self.before + key_of(self.path.removeprefix(self.before))


def key_of(path: bytes) -> bytes:
    """The path itself, or as much of it as a key may have, with its digest."""
    if len(path) <= LONGEST_KEY:
        return path
    end = b"%~" + hashlib.blake2b(path, digest_size=16).hexdigest().encode()
    return path[: LONGEST_KEY - len(end)] + end


def by_key(paths: Iterable[bytes], where: str) -> dict[bytes, bytes]:
    """Each path by its key. Raises OptionError if two have the same: one is what `key_of` makes of the other."""
    found: dict[bytes, bytes] = {}
    for path in paths:
        if (other := found.setdefault(key_of(path), path)) != path:
            raise OptionError(f"{other!r} and {path!r} have the same key", path=where, hint="Rename one of them.")
    return found


def _most(part: bytes, records: int, sources: int) -> int:
    return _TREE // sources + _TIMES * len(part) + _LONGEST_ROW * records


def folder_rows(part: bytes, dataset: str, records: int, sources: int = 1) -> tuple[list[Row], _Names, _Names]:
    """(the rows of a part `tree`, names of users by their numbers, and of groups). Raises CorruptedError.

    records : of this folder; sources : how many are read, which together take no more memory than one may
    """
    try:
        told: dict[str, Any] = read_json(inflated(part, _most(part, records, sources)))
        rows = [
            Row(os.fsencode(path), int(mode), int(mtime), int(uid), int(gid), None if t is None else os.fsencode(t))
            for path, mode, mtime, uid, gid, t in told["rows"]
        ]
        if not all(map(_is_possible, rows)):
            raise ValueError("a mode, an owner, a time or a link that no file has")
        users, groups = dict(told["users"]), dict(told["groups"])
    except DAMAGED as e:
        raise CorruptedError(f"the part with the names of the folder is damaged: {e}", path=dataset) from e
    wrong = misplaced(rows)
    if wrong is not None:
        raise CorruptedError(f"{wrong[0]} of the folder leads {wrong[1]}", path=dataset, key=wrong[2])
    return rows, users, groups


def _is_possible(row: Row) -> bool:
    owners = 0 <= row.uid < 0xFFFFFFFF and 0 <= row.gid < 0xFFFFFFFF
    kind, target = stat.S_IFMT(row.mode), row.target or b""
    leads = b"\0" not in target and (kind != stat.S_IFLNK or 0 < len(target) < _LONGEST_PATH)
    named = len(row.path) <= _LONGEST_PATH and kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    return owners and named and leads and 0 <= row.mode < 1 << 16 and abs(row.mtime_ns) < 1 << 63


def misplaced(rows: Sequence[Row]) -> tuple[str, str, bytes] | None:
    """What is wrong with the first path that is none below the folder, and the path; None: all are."""
    folders = {row.path for row in rows if stat.S_ISDIR(row.mode)}
    files = {row.path for row in rows if row.is_record}
    seen: set[bytes] = set()
    for row in rows:
        parts = row.path.split(b"/")
        bad = row.path and (b"\0" in row.path or any(part in (b"", b".", b"..") for part in parts))
        if bad or row.path in seen or os.path.dirname(row.path) not in folders:
            return "a path", "elsewhere", row.path
        if row.is_record and row.target is not None and row.target not in files:
            return "a link", "to no file of it", row.path
        seen.add(row.path)
    return None


def rows_of(packing: Packing, dataset: str) -> list[Row] | None:
    """All names of what was packed, in the order of their paths, with the folders that nobody named. None: nothing but
    keys is known, since it was an LMDB, or a tar has paths that lead out of a folder. Raises CorruptedError."""
    more, n, several = packing.more, packing.n, packing.more.get("source") == "several"
    try:
        told = enumerate(more["sources"]) if several else [("", {**more, "prefix": ""})]
        each = [(f"{number}.".lstrip("."), str(one["source"]), os.fsencode(one["prefix"])) for number, one in told]
        owners = np.frombuffer(inflated(packing.parts["owners"], 4 * n), "<u4") if several else np.zeros(n, "<u4")
        order = np.argsort(owners, kind="stable")
        sizes = np.split(packing.sizes[order], np.searchsorted(owners[order], np.arange(1, len(each))))
    except DAMAGED as e:
        raise CorruptedError(f"its list of sources is damaged: {e}", path=dataset) from e
    found: dict[bytes, Row] = {}
    for (first, kind, prefix), mine in zip(each, sizes, strict=False):
        rows: list[Row] | None = None
        if kind == "folder" and f"{first}tree" in packing.parts:
            rows = folder_rows(packing.parts[f"{first}tree"], dataset, len(mine), len(each))[0]
        elif kind == "tar" and f"{first}tar" in packing.parts:
            rest = packing.parts[f"{first}tar"]
            rows = _tar_rows(rest, packing.parts.get(f"{first}members", b""), mine, _most(rest, len(mine), len(each)))
        if rows is None or len(prefix) > LONGEST_KEY:
            return None
        for row in rows:
            target = row.target if row.target is None or not row.is_record else prefix + row.target
            path = prefix + row.path if row.path else prefix.rstrip(b"/")
            found[path] = row._replace(path=path, target=target, before=prefix)
    spare = _TREE + _LONGEST_ROW * n
    for path in [b"x", *found]:
        # Long paths of many parts would have more folders that nobody named than fit into memory.
        while path.strip(b"/") and (path := os.path.dirname(path)) not in found and spare >= 0:
            found[path] = Row(path, stat.S_IFDIR | 0o755, UNKNOWN_TIME, 0, 0)
            spare -= len(path)
    every = [found[path] for path in sorted(found)]
    files = sum(row.is_record for row in every)
    if more.get("source") == "folder" and files != n:
        raise CorruptedError(f"{n} records for {files} names of files", path=dataset)
    return every if spare >= 0 and files == n and misplaced(every) is None else None


# -- tars --------------------------------------------------------------------------------------------------------------


def tar_ranges(part: bytes, sizes: np.ndarray) -> np.ndarray:
    """i64[m, 3], the part `members`: record, offset in the tar, bytes. Raises ValueError if it does not fit them.

    sizes : i64[n], of the records
    """
    records, offsets, nbytes = (ranges := np.frombuffer(inflated(part, 24 * len(sizes)), "<i8").reshape(-1, 3)).T
    inside = ((records >= 0) & (records < len(sizes)) & (offsets >= 0)).all()
    if not inside or (sizes[records] != nbytes).any() or (np.diff(offsets) < nbytes[:-1]).any():
        raise ValueError("the table of the tar's members does not fit the records")
    return ranges


class _Headers(io.BufferedRandom):
    """A tar with holes where the values were: the kernel keeps no memory for these. tarfile would read as many bytes as
    a header says, and read the same ones again and again; here it gets no more than there are."""

    def __init__(self, rest: bytes, ranges: np.ndarray) -> None:
        super().__init__(io.FileIO(os.memfd_create("pario-tar"), "r+"))
        left, at = memoryview(rest), 0
        for _, offset, nbytes in ranges.tolist():
            self.write(left[: offset - at])
            left, at = left[offset - at :], offset + nbytes
            self.seek(at)
        self.write(left)
        self.seek(0)
        # Before each header tarfile reads one more byte.
        self._left = 2 * len(rest) + tarfile.RECORDSIZE

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= size or 0
        if size is None or not 0 <= size <= min(_LONGEST_HEADER, self._left):
            raise ValueError("a header that is too long, or one that leads back")
        return super().read(size)


def _tar_rows(rest: bytes, members: bytes, sizes: np.ndarray, most: int) -> list[Row] | None:
    """Of each name the last member. None if it cannot be told."""
    found: dict[bytes, Row] = {}
    linked: dict[bytes, list[bytes]] = {}  # further names of each
    try:
        holes = _Headers(inflated(rest, most), tar_ranges(members, sizes))
        with holes, tarfile.open(fileobj=holes, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined] # which would keep what all share once for each
                if len(tar.pax_headers) > _SHARED:
                    return None
                path, first = (_raw(text.removeprefix("./")) for text in (member.name, member.linkname))
                path = b"" if path == b"." else path
                if not (member.isdir() or member.issym() or member.isreg() or (member.islnk() and first in found)):
                    continue
                for name in linked.pop(path, []):  # their content stays that of the member before
                    found[name] = found[name]._replace(target=None)
                kind = stat.S_IFDIR if member.isdir() else stat.S_IFLNK if member.issym() else stat.S_IFREG
                mode, target = kind | (member.mode & 0o7777), _raw(member.linkname) if member.issym() else None
                if member.islnk() and first != path:
                    target, mode = found[first].target or first, found[first].mode
                    linked.setdefault(target, []).append(path)
                uid, gid = member.uid & 0x7FFFFFFF, member.gid & 0x7FFFFFFF
                found[path] = Row(path, mode, _nanoseconds(member), uid, gid, target)
    except (tarfile.TarError, OSError, EOFError, ArithmeticError, *DAMAGED):
        return None
    return list(found.values()) if all(map(_is_possible, found.values())) else None


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _nanoseconds(member: tarfile.TarInfo) -> int:
    time = Decimal(member.pax_headers.get("mtime", member.mtime))
    if not time.is_finite() or time.adjusted() > 18:  # int() would write all its zeros
        raise ValueError("a time that no file has")
    return int(time * 10**9)
