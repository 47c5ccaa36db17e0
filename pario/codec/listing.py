"""The names that a packed folder or tar has, from the parts of its reserved entry (docs/packing.md, "The format").

    tree             of a folder: deflated JSON, see `folder_rows`
    tar, members     of a tar: its bytes without the values, and where these were (packing/tars.py)
    N.tree, N.tar …  those of source N of several

Anybody may have written them: every path is checked, and nothing here follows a link.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Sequence
from decimal import Decimal
from typing import IO, Any, NamedTuple

import numpy as np

from pario.codec.packing import Packing
from pario.errors import CorruptedError
from pario.text import DAMAGED, read_json

__all__ = ["LONGEST_KEY", "Row", "folder_rows", "inflated", "key_of", "misplaced", "rows_of", "tar_ranges"]

#: Bytes of a key, as LMDB is built everywhere.
LONGEST_KEY = 511
#: What the names of a folder may inflate to: this many bytes, this many times the part, and this many for each record.
_TREE, _TIMES, _LONGEST_ROW = 64 << 20, 100, 4 << 10


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


def inflated(part: bytes, most: int) -> bytes:
    """What a part of the reserved entry inflates to. Raises ValueError if it is damaged, or if that is more than `most`
    bytes: anybody may have written it, and a few bytes can say that they are terabytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(part, most + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from None
    if len(found) > most:
        raise ValueError(f"it inflates to more than {most:,} bytes")
    if not stream.eof or stream.unused_data:
        raise ValueError("it ends too early, or bytes follow its end")
    return found


def _most(part: bytes, records: int) -> int:
    return _TREE + _TIMES * len(part) + _LONGEST_ROW * records


def folder_rows(part: bytes, dataset: str, records: int) -> tuple[list[Row], dict[str, str], dict[str, str]]:
    """(the rows of a part `tree`, names of users by their numbers, and of groups). Raises CorruptedError."""
    try:
        told: dict[str, Any] = read_json(inflated(part, _most(part, records)))
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
    return owners and 0 <= row.mode < 1 << 16 and abs(row.mtime_ns) < 1 << 63 and b"\0" not in (row.target or b"")


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
    more, n = packing.more, packing.n
    try:
        told = enumerate(more["sources"]) if more.get("source") == "several" else [("", {**more, "prefix": ""})]
        each = [(f"{number}.".lstrip("."), str(one["source"]), os.fsencode(one["prefix"])) for number, one in told]
    except DAMAGED as e:
        raise CorruptedError(f"its list of sources is damaged: {e}", path=dataset) from e
    found: dict[bytes, Row] = {}
    for first, kind, prefix in each:
        rows: list[Row] | None = None
        if kind == "folder" and f"{first}tree" in packing.parts:
            rows = folder_rows(packing.parts[f"{first}tree"], dataset, n)[0]
        elif kind == "tar" and f"{first}tar" in packing.parts:
            rows = _tar_rows(packing.parts[f"{first}tar"], packing.parts.get(f"{first}members", b""), n)
        if rows is None:
            return None
        for row in rows:
            target = row.target if row.target is None or not row.is_record else prefix + row.target
            path = (prefix + row.path).rstrip(b"/")
            found[path] = row._replace(path=path, target=target, before=prefix)
    for path in [b"x", *found]:
        while path.strip(b"/"):
            path = os.path.dirname(path)
            found.setdefault(path, Row(path, stat.S_IFDIR | 0o755, -1, 0, 0))
    every = [found[path] for path in sorted(found)]
    files = sum(row.is_record for row in every)
    if packing.more.get("source") == "folder" and files != n:
        raise CorruptedError(f"{n} records for {files} names of files", path=dataset)
    return every if files == n and all(map(_is_possible, every)) and misplaced(every) is None else None


# -- tars --------------------------------------------------------------------------------------------------------------


def tar_ranges(part: bytes, records: int) -> np.ndarray:
    """i64[m, 3], the part `members`: record, offset in the tar, bytes. Raises ValueError."""
    return np.frombuffer(inflated(part, 24 * records), "<i8").reshape(-1, 3)


def _without_values(rest: bytes, ranges: np.ndarray) -> IO[bytes]:
    """The tar again, with holes where the values were: the kernel keeps no memory for these. The caller closes it."""
    file = open(os.memfd_create("pario-tar"), "w+b")  # noqa: SIM115
    left, at = memoryview(rest), 0
    for _, offset, nbytes in ranges.tolist():
        file.write(left[: offset - at])
        left, at = left[offset - at :], offset + nbytes
        file.seek(at)
    file.write(left)
    file.seek(0)
    return file


def _tar_rows(rest: bytes, members: bytes, records: int) -> list[Row] | None:
    """Of each name the last member. None if it cannot be told."""
    found: dict[bytes, Row] = {}
    linked: dict[bytes, list[bytes]] = {}  # further names of each
    try:
        holes = _without_values(inflated(rest, _most(rest, records)), tar_ranges(members, records))
        with holes, tarfile.open(fileobj=holes, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
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
    return list(found.values())


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _nanoseconds(member: tarfile.TarInfo) -> int:
    return int(Decimal(member.pax_headers.get("mtime", member.mtime)) * 10**9)
