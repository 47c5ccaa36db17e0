"""What getdents answers for folders of a view: answers are made once, and kept in memory within a bound.

An answer is as much as a call by the C library asks for. One that is not kept any more is made again from its first
name on, so that neither its place in a large folder nor other listings make that slow.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from errno import EINVAL
from typing import TYPE_CHECKING

from pario.files.notify import failed
from pario.files.spots import Spot

if TYPE_CHECKING:
    from pario.files.tree import Node

_TYPES = {"folder": 4, "file": 8, "link": 10}  # DT_DIR, DT_REG, DT_LNK
#: Of an answer; of the answers that are kept, with what each takes besides its entries; and how many places are known
#: at which answers begin.
_ANSWER_BYTES, _KEPT_BYTES, _OWN_BYTES, _STARTS = 32 << 10, 64 << 20, 512, 1 << 16


#: (folder, what to begin with) -> names in it, with "." and ".." before them if that is None
Names = Callable[[Spot, "Node | None"], Iterator[tuple[bytes, "Node"]]]


class Entries:
    """For one thread at a time. names : must give the same names whenever it is asked"""

    def __init__(self, names: Names, most_bytes: int = _KEPT_BYTES, most_starts: int = _STARTS) -> None:
        self._names = names
        self._most_bytes, self._most_starts = most_bytes, most_starts
        self._answers: OrderedDict[tuple[Spot, int, int, bool], tuple[bytes, int]] = OrderedDict()
        #: of each folder where answers begin, in order: positions, and what stands there
        self._starts: OrderedDict[Spot, tuple[list[int], list[Node | None]]] = OrderedDict()
        self._count = self.nbytes = 0

    def answer(self, spot: Spot, position: int, most: int, old: bool = False) -> tuple[bytes, int]:
        """Entries of a folder, of `most` bytes at most, from a position on, 0 ".", 1 "..", then the names, and the
        position behind the last one. Raises what `names` raises, OSError (EINVAL) if the first does not fit.

        old : struct linux_dirent, not linux_dirent64
        """
        key = spot, position, min(most, _ANSWER_BYTES), old
        found = self._answers.get(key)
        if found is None:
            found = self._answers[key] = self._made(*key)
            self.nbytes += len(found[0]) + _OWN_BYTES
        self._answers.move_to_end(key)
        while self.nbytes > self._most_bytes and len(self._answers) > 1:
            self.nbytes -= len(self._answers.popitem(last=False)[1][0]) + _OWN_BYTES
        return found

    def _made(self, spot: Spot, position: int, most: int, old: bool) -> tuple[bytes, int]:
        firsts, nodes = self._starts.setdefault(spot, ([0], [None]))
        self._starts.move_to_end(spot)
        make, done, k = _old_entry if old else _entry, bytearray(), bisect_right(firsts, position) - 1
        at = firsts[k]
        if at and nodes[k] is None:  # the end
            return b"", position
        for name, node in self._names(spot, nodes[k]):
            at += 1
            if at <= position:
                continue
            entry = make(node.number, at, _TYPES[node.kind], name)
            if len(done) + len(entry) > most:
                if not done:
                    raise failed(EINVAL)
                self._begin_at(spot, at - 1, node)
                return bytes(done), at - 1
            done += entry
        self._begin_at(spot, at, None)
        return bytes(done), max(at, position)

    def _begin_at(self, spot: Spot, position: int, node: Node | None) -> None:
        """The next answer begins there. node : None: it is empty"""
        firsts, nodes = self._starts[spot]
        k = bisect_right(firsts, position)
        if position > 1 and firsts[k - 1] != position:
            firsts.insert(k, position)
            nodes.insert(k, node)
            self._count += 1
        while self._count > self._most_starts and len(self._starts) > 1:
            self._count -= len(self._starts.popitem(last=False)[1][0]) - 1


def _entry(number: int, offset: int, kind: int, name: bytes) -> bytes:
    """struct linux_dirent64"""
    length = (19 + len(name) + 1 + 7) & ~7
    return struct.pack("<QqHB", number, offset, length, kind) + name.ljust(length - 19, b"\0")


def _old_entry(number: int, offset: int, kind: int, name: bytes) -> bytes:
    """struct linux_dirent, whose last byte is the type"""
    length = (18 + len(name) + 2 + 7) & ~7
    return struct.pack("<QQH", number, offset, length) + name.ljust(length - 19, b"\0") + bytes([kind])
