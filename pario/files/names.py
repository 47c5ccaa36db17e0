"""Names of files from the keys of records, and back; extensions from how data begin. Pure; docs/files.md states the
rules for users.

    key      --cut at /-->  components  --escaped()-->  names  --joined by /-->  path

In a name, % stands before everything that is not the component itself:

    %XX             a byte that a name cannot have or show: control bytes, %, and what is not UTF-8 (XX: two digits of
                    0-9 A-F); the dots of the components "." and ".."; / where a database has no folders
    %               alone: the component without bytes
    ...%~DIGEST     a component whose name would be too long: its beginning, and 32 digits of 0-9 a-f
    ...%            at the end: the record, where a folder has the name without the %
    ...%db          at the end: the named database, likewise

No component has two names, and no two components have one (as long as BLAKE2b-128 has no collision).
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

#: NAME_MAX of Linux: bytes of a name.
LONGEST = 255

_DIGEST_BYTES = 16
#: Characters that are escaped: control characters of ASCII and Latin-1, %, and bytes that are not UTF-8 (as Python's
#: surrogateescape has them).
_ESCAPED = re.compile("[%\0-\x1f\x7f-\x9f\ud800-\udfff]")
_ESCAPED_FLAT = re.compile("[%/\0-\x1f\x7f-\x9f\ud800-\udfff]")
_ESCAPE = re.compile("%([0-9A-F]{2})")
_BARE = re.compile("%(?![0-9A-F]{2})")
_SHORT = re.compile(f"(.*)%~([0-9a-f]{{{2 * _DIGEST_BYTES}}})", re.DOTALL)
_DOTS = {".": "%2E", "..": "%2E%2E"}

#: What stands at the end of the name of a record or a named database, if a folder has the name.
RECORD_MARK, DATABASE_MARK = "%", "%db"

#: Bytes of a value's beginning that `extension_of` looks at.
HEAD_BYTES = 16

_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF87a": ".gif",
    b"GIF89a": ".gif",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"\x93NUMPY": ".npy",
    b"PK\x03\x04": ".zip",
    b"\x1f\x8b\x08": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"\xfd7zXZ\0": ".xz",
    b"BZh": ".bz2",
    b"\x04\x22\x4d\x18": ".lz4",
    b"%PDF-": ".pdf",
    b"\x89HDF\r\n\x1a\n": ".h5",
    b"PAR1": ".parquet",
    b"fLaC": ".flac",
    b"OggS": ".ogg",
    b"ID3": ".mp3",
    b"\x1a\x45\xdf\xa3": ".mkv",
    b"SIMPLE  =": ".fits",
}
#: RIFF....WEBP: the kind stands behind the size.
_RIFF = {b"WEBP": ".webp", b"WAVE": ".wav", b"AVI ": ".avi"}
_BRANDS = {b"avif": ".avif", b"heic": ".heic", b"jxl ": ".jxl"}

EXTENSIONS = frozenset([*_BEGINNINGS.values(), *_RIFF.values(), *_BRANDS.values(), ".mp4"])
LONGEST_EXTENSION = max(map(len, EXTENSIONS))


class Part(NamedTuple):
    """What a name says.

    start : the component, or what it begins with
    digest : of the whole component where `start` is only its beginning, else ""
    mark : RECORD_MARK, DATABASE_MARK or ""
    """

    start: bytes
    digest: str = ""
    mark: str = ""


def name_of(part: bytes, mark: str = "", *, flat: bool = False, longest: int = LONGEST) -> str:
    """The name of one component.

    flat : `part` is a whole key, of a database without folders
    longest : bytes that the name may have
    """
    name = _escaped(part, flat)
    room = longest - len(mark)
    # A character has at most 4 bytes.
    if 4 * len(name) > room and len(name.encode()) > room:
        name = _shortened(part, flat, room)
    return name + mark


def part_of(name: str, *, flat: bool = False, longest: int = LONGEST) -> Part | None:
    """What `name_of` was given; None: it makes no such name. Arguments as there."""
    mark = ""
    if "%" in name:
        if name.endswith(DATABASE_MARK):
            mark = DATABASE_MARK
        elif name.endswith(RECORD_MARK) and name != RECORD_MARK:
            mark = RECORD_MARK
    bare = name[: len(name) - len(mark)]
    if not bare:
        return None
    short = _SHORT.fullmatch(bare) if "%~" in bare else None
    try:
        start = _unescaped(short[1] if short else bare)
    except UnicodeEncodeError:  # a lone surrogate
        return None
    if start is None:
        return None
    if short:
        return Part(start, short[2], mark)
    return Part(start, "", mark) if name_of(start, mark, flat=flat, longest=longest) == name else None


def digest_of(part: bytes) -> str:
    """What stands for the rest of a component in a shortened name."""
    return hashlib.blake2b(part, digest_size=_DIGEST_BYTES).hexdigest()


def is_plain(path: str, longest: int = LONGEST) -> bool:
    """Whether each name of a path is the component itself: the path is the key. May be False for a few others."""
    most = longest if path.isascii() else longest // 4
    if _ESCAPED.search(path) or (len(path) > most and max(map(len, path.split("/"))) > most):
        return False
    return bool(path) and not (path[0] in "/." or path[-1] == "/" or "//" in path or "/." in path)


def _escaped(part: bytes, flat: bool) -> str:
    name = part.decode("utf-8", "surrogateescape")
    if not name:
        return "%"
    if name in _DOTS:
        return _DOTS[name]
    return (_ESCAPED_FLAT if flat else _ESCAPED).sub(_escape, name)


def _escape(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogateescape"))


def _unescaped(name: str) -> bytes | None:
    if name == "%":
        return b""
    if "%" not in name:
        return name.encode("utf-8", "surrogateescape")
    if _BARE.search(name):
        return None
    pieces = _ESCAPE.split(name)  # text, two digits, text, two digits, ..., text
    return b"".join(
        bytes((int(piece, 16),)) if i % 2 else piece.encode("utf-8", "surrogateescape")
        for i, piece in enumerate(pieces)
    )


def _shortened(part: bytes, flat: bool, room: int) -> str:
    """The longest beginning of whole characters and escapes that leaves room for the digest."""
    end = "%~" + digest_of(part)
    left = room - len(end)
    taken: list[str] = []
    escaped = _ESCAPED_FLAT if flat else _ESCAPED
    for character in part.decode("utf-8", "surrogateescape"):
        piece = escaped.sub(_escape, character)
        left -= len(piece.encode())
        if left < 0:
            break
        taken.append(piece)
    return "".join(taken) + end


def extension_of(head: bytes) -> str:
    """What programs expect of a value that begins with `head` (HEAD_BYTES, or the whole value); "" if it is of none of
    these kinds."""
    for beginning, extension in _BEGINNINGS.items():
        if head.startswith(beginning):
            return extension
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], ".mp4")
    return ""
