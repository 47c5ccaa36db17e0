"""What getdents answers for folders of a view: entries are made once, and kept in memory within a bound.

A folder's entries are cut into pieces, as much as a call by the C library asks for. A piece that is not kept any more
is made again from its first name on, so that neither its place in a large folder nor other listings make that slow.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from errno import EINVAL
from typing import TYPE_CHECKING, NamedTuple

from pario.files.notify import failed
from pario.files.spots import Spot

if TYPE_CHECKING:
    from pario.files.tree import Node

_TYPES = {"folder": 4, "file": 8, "link": 10}  # DT_DIR, DT_REG, DT_LNK
_PIECE_BYTES = 32 << 10
#: Of the pieces that are kept, with what each takes besides its entries; and how many pieces are known by where they
#: begin.
_KEPT_BYTES, _OWN_BYTES, _STARTS = 64 << 20, 512, 1 << 16


#: (folder, what to begin with) -> names in it, with "." and ".." before them if that is None
Names = Callable[[Spot, "Node | None"], Iterator[tuple[bytes, "Node"]]]


class _Piece(NamedTuple):
    """ends : where each entry ends in `data`; following : what the next piece begins with, None behind the last one"""

    data: bytes
    ends: array[int]
    following: Node | None


class _Folder:
    """firsts, starts : position and node of the first entry of each piece as far as they are known
    end : the position behind all, once it is known"""

    __slots__ = ("end", "firsts", "starts")

    def __init__(self) -> None:
        self.firsts = [0]
        self.starts: list[Node | None] = [None]
        self.end: int | None = None


class Entries:
    """For one thread at a time. names : must give the same names whenever it is asked"""

    def __init__(self, names: Names, most_bytes: int = _KEPT_BYTES, most_starts: int = _STARTS) -> None:
        self._names = names
        self._most_bytes, self._most_starts = most_bytes, most_starts
        self._folders: OrderedDict[tuple[Spot, bool], _Folder] = OrderedDict()
        self._pieces: OrderedDict[tuple[Spot, bool, int], _Piece] = OrderedDict()
        self._starts = self.nbytes = 0

    def answer(self, spot: Spot, position: int, most: int, old: bool = False) -> tuple[bytes, int]:
        """Entries of a folder, of `most` bytes at most, from a position on, 0 ".", 1 "..", then the names, and the
        position behind the last one. Raises what `names` raises, OSError (EINVAL) if the first does not fit.

        old : struct linux_dirent, not linux_dirent64
        """
        folder = self._folders.get((spot, old))
        if folder is None:
            folder = self._folders[spot, old] = _Folder()
            self._starts += 1
        self._folders.move_to_end((spot, old))
        while folder.end is None or position < folder.end:
            k = bisect_right(folder.firsts, position) - 1
            piece, first = self._piece(spot, old, folder, k), position - folder.firsts[k]
            if first >= len(piece.ends):
                continue  # now it is known where the next one begins
            begin = piece.ends[first - 1] if first else 0
            last = bisect_right(piece.ends, begin + most, first)
            if last == first:
                raise failed(EINVAL)
            return piece.data[begin : piece.ends[last - 1]], position + last - first
        return b"", position

    def _piece(self, spot: Spot, old: bool, folder: _Folder, k: int) -> _Piece:
        key = (spot, old, k)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._pieces[key] = self._made(spot, old, folder.firsts[k], folder.starts[k])
            self.nbytes += _nbytes(piece)
        self._pieces.move_to_end(key)
        if k + 1 == len(folder.firsts):
            behind = folder.firsts[k] + len(piece.ends)
            if piece.following is None:
                folder.end = behind
            else:
                folder.firsts.append(behind)
                folder.starts.append(piece.following)
                self._starts += 1
        while self.nbytes > self._most_bytes and len(self._pieces) > 1:
            self.nbytes -= _nbytes(self._pieces.popitem(last=False)[1])
        while self._starts > self._most_starts and len(self._folders) > 1:
            self._starts -= len(self._folders.popitem(last=False)[1].firsts)
        return piece

    def _made(self, spot: Spot, old: bool, position: int, start: Node | None) -> _Piece:
        make, done, ends = _old_entry if old else _entry, bytearray(), array("H")
        for name, node in self._names(spot, start):
            position += 1
            entry = make(node.number, position, _TYPES[node.kind], name)
            if len(done) + len(entry) > _PIECE_BYTES:
                return _Piece(bytes(done), ends, node)
            done += entry
            ends.append(len(done))
        return _Piece(bytes(done), ends, None)


def _nbytes(piece: _Piece) -> int:
    return len(piece.data) + 2 * len(piece.ends) + _OWN_BYTES


def _entry(number: int, offset: int, kind: int, name: bytes) -> bytes:
    """struct linux_dirent64"""
    length = (19 + len(name) + 1 + 7) & ~7
    return struct.pack("<QqHB", number, offset, length, kind) + name.ljust(length - 19, b"\0")


def _old_entry(number: int, offset: int, kind: int, name: bytes) -> bytes:
    """struct linux_dirent, whose last byte is the type"""
    length = (18 + len(name) + 2 + 7) & ~7
    return struct.pack("<QQH", number, offset, length) + name.ljust(length - 19, b"\0") + bytes([kind])
