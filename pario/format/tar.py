"""A tar as a data file: the state of it that is read, and its members, found header by header.

    header     content, filled up to whole blocks     header     ...     two blocks of zeros

`Members` knows no file: `read_at(offset, nbytes)` returns bytes from any source. It takes what POSIX (ustar, pax), GNU
and V7 tars hold, as Python's tarfile does, and trusts none of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pario.errors import CorruptedError, InvalidError
from pario.format.layout import Db
from pario.format.meta import Snapshot

BLOCK = 512
#: Bytes of a name, and of a header that holds one: nobody has longer ones.
LONGEST_NAME, _LONGEST_HEADER = 4 << 10, 1 << 20
#: Of a whole file, old and new; more kinds may follow, which POSIX has readers take for files, and tarfile skips.
_FILES = (b"0", b"\0", b"7")
_LINKS = (b"1", b"2", b"3", b"4", b"5", b"6")  # and devices, folders, pipes: no content follows, whatever they say
_SPARSE, _LONG_NAME, _LONG_LINK, _GLOBAL, _PAX = b"S", b"L", b"K", b"g", (b"x", b"X")
#: Reading begins with this much, and takes up to that much where members are small.
_LEAST, _MOST = 4 << 10, 1 << 20
_ASCII = bytes(range(128))

_NO_TREE = Db(0, 0, 0, 0, 0, 0, 0, -1)


@dataclass(frozen=True)
class TarSnapshot(Snapshot):
    """The state of a tar: its size, and in place of a transaction's number the time of its last change (ns).
    Both are its stamp, as struct statx has them."""

    @classmethod
    def of(cls, file_bytes: int, mtime_ns: int) -> TarSnapshot:
        return cls(
            version=0,
            word=8,
            byteorder="little",
            page_size=BLOCK,
            sum_size=0,
            flags=0,
            mapsize=file_bytes,
            last_pgno=-(-file_bytes // BLOCK) - 1,
            txnid=mtime_ns,
            meta=-1,
            main=_NO_TREE,
            free=_NO_TREE,
            file_bytes=file_bytes,
            stamp=struct.pack("=qqI", file_bytes, *divmod(mtime_ns, 10**9)),
        )

    @property
    def header(self) -> int:
        return 0

    @property
    def has_pages(self) -> bool:
        return False

    @property
    def value_bytes(self) -> tuple[int, int]:
        return BLOCK, self.file_bytes

    @property
    def said(self) -> str:
        return f"{self.file_bytes:,} bytes, last changed {self.txnid / 1e9:.3f} s after 1970"


def is_header(block: bytes) -> bool:
    """Whether this block has the checksum of a tar's header."""
    try:
        said = _number(block[148:156])
    except ValueError:
        return False
    rest = block[:148] + b" " * 8 + block[156:]
    plain = sum(rest)
    # Some writers took bytes for signed ones.
    return len(block) == BLOCK and said in (plain, plain - 256 * len(rest.translate(None, _ASCII)))


class Member(NamedTuple):
    """A file in a tar. name : without a leading "./"; offset, nbytes : of its content; linked : it is a further name of
    another one, and has no content of its own"""

    name: bytes
    offset: int
    nbytes: int
    linked: bool = False


class Members:
    """The regular files of a tar, in their order. Raises CorruptedError and InvalidError, with the offset.

    read_at : bytes at an offset, fewer at the end of the file
    file_bytes : of the tar; start : where the first header is

    Attributes
    ----------
    bytes_read : so far
    has_end : whether blocks of zeros ended it; known at the end
    """

    def __init__(self, read_at: Callable[[int, int], bytes], file_bytes: int, start: int = 0) -> None:
        self._read_at, self._size, self._at = read_at, file_bytes, start
        self._window, self._window_at, self._ahead = b"", 0, _LEAST
        self._before = b""
        self.bytes_read = 0
        self.has_end = False

    def __iter__(self) -> Iterator[Member]:
        shared: dict[bytes, bytes] = {}  # what a pax header says of all members behind it
        own: dict[bytes, bytes] = {}
        while True:
            at = self._at
            block = self._take(at, BLOCK)
            if not block or not any(block):
                self._end(block)
                return
            if len(block) < BLOCK or not is_header(block):
                raise self._fault("neither a header nor the end of the tar is there", at)
            try:
                nbytes = _number(block[124:136])
            except ValueError:
                raise self._fault("a header has no number for its size", at) from None
            kind = block[156:157]
            if kind in (_LONG_NAME, _LONG_LINK, _GLOBAL, *_PAX):
                self._at = self._behind(at, nbytes)
                if kind != _LONG_LINK:
                    told = self._header(at, nbytes)
                    if kind == _LONG_NAME:
                        own[b"path"] = told.split(b"\0", 1)[0]
                    else:
                        self._told(told, shared if kind == _GLOBAL else own, at)
                if kind == _GLOBAL and {b"path", b"size"} & shared.keys():
                    raise self._fault("a header for all members sets their name or size", at)
                continue
            said = {**shared, **own}
            own = {}
            name = said.get(b"path") or _name(block)
            self._before = name
            if kind == _SPARSE or any(one.startswith(b"GNU.sparse") for one in said):
                hint = "`python -m pario data pack` reads sparse files; or make the tar without --sparse"
                raise InvalidError("a sparse file, which lies in pieces", offset=at, key=name, hint=hint)
            if len(name) > LONGEST_NAME:
                raise self._fault(f"a name has {len(name):,} bytes, and paths have at most {LONGEST_NAME:,}", at)
            if b"size" in said:
                nbytes = _decimal(said[b"size"])
                if nbytes < 0:
                    raise self._fault(f"a pax header says that the size is {said[b'size'][:24]!r}", at)
            if kind in _LINKS or (kind == b"\0" and name.endswith(b"/")):
                self._at = at + BLOCK
                if kind == b"1":
                    yield Member(name.removeprefix(b"./"), at + BLOCK, 0, linked=True)
                continue
            self._at = self._behind(at, nbytes)
            if kind in _FILES:
                yield Member(name.removeprefix(b"./"), at + BLOCK, nbytes)

    def _behind(self, at: int, nbytes: int) -> int:
        """Where the header behind a member of this size is."""
        end = at + BLOCK - (-nbytes // BLOCK) * BLOCK
        if nbytes < 0 or end > self._size:
            what = f"a member of {nbytes:,} bytes would end behind the end of the file, which has {self._size:,}"
            raise self._fault(what, at, "It was cut off, or its copy is incomplete: bring it back from its source")
        return end

    def _header(self, at: int, nbytes: int) -> bytes:
        if nbytes > _LONGEST_HEADER:
            raise self._fault(f"a header of {nbytes:,} bytes; {_LONGEST_HEADER:,} are enough for any name", at)
        return self._take(at + BLOCK, nbytes)

    def _told(self, told: bytes, into: dict[bytes, bytes], at: int) -> None:
        """The records of a pax header: b"<length> <keyword>=<value>\\n", one after the other."""
        begin, end = 0, len(told.rstrip(b"\0"))
        while begin < end:  # in place: what is left is not copied for each of perhaps 100,000 records
            digits, blank, _ = told[begin : begin + 20].partition(b" ")
            stop = begin + (_decimal(digits) if blank else -1)
            keyword, equals, value = told[begin + len(digits) + 1 : max(stop - 1, 0)].partition(b"=")
            if stop > len(told) or told[stop - 1 : stop] != b"\n" or not equals:
                raise self._fault(f"a pax header holds {told[begin : begin + 24]!r}, which is no record", at)
            if keyword in (b"path", b"size") or keyword.startswith(b"GNU.sparse"):
                into[keyword] = value
            begin = stop

    def _take(self, at: int, nbytes: int) -> bytes:
        """The bytes there, with a read that brings the next headers where they are near."""
        skip = at - self._window_at
        if not 0 <= skip <= len(self._window) - nbytes:
            near = at - self._window_at - len(self._window) < len(self._window)
            self._ahead = min(2 * self._ahead, _MOST) if near else max(self._ahead // 4, _LEAST)
            self._window = self._read_at(at, max(nbytes, min(self._ahead, self._size - at)))
            self._window_at, skip = at, 0
            self.bytes_read += len(self._window)
        return self._window[skip : skip + nbytes]

    def _end(self, block: bytes) -> None:
        """Nothing but zeros, or what no tar is, may follow the end."""
        self.has_end = bool(block)
        at = self._at
        while block and at < min(self._size, self._at + _MOST) and not any(block):
            at += BLOCK
            block = self._take(at, BLOCK)
        if is_header(block):
            hint = "Name the tars in a list, or join them by `tar --concatenate`; `cat` leaves the end of each inside"
            raise InvalidError("another tar follows behind the end of this one", offset=at, hint=hint)

    def _fault(self, what: str, at: int, hint: str = "") -> CorruptedError:
        behind = f", behind the member {self._before.decode(errors='backslashreplace')!r}" if self._before else ""
        hint = hint or "`tar -tf` says whether the tar is whole: bring it back from its source"
        return CorruptedError(what + behind, offset=at, hint=hint)


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _number(field: bytes) -> int:
    """Octal digits, or 8 bits in each byte where the first one says so. Raises ValueError."""
    if field[:1] in (b"\x80", b"\xff"):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 255 else 0)
    digits = field.split(b"\0", 1)[0].strip()
    if digits and not digits.isdigit():  # int() takes signs and underscores
        raise ValueError("no number")
    return int(digits or b"0", 8)


def _decimal(digits: bytes) -> int:
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1
