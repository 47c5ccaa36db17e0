"""Packed databases (docs/packing.md): values are unpacked where they become Python objects, and the reserved entry,
which is the last one, is nowhere to be seen.

A database is looked at when its first transaction begins: that reads the way down to its last key, the last leaf page
being one that most programs would not read then. Nothing else changes for databases that are not packed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from pario.errors import ParioError
from pario.format.layout import F_SUBDATA, MDB_DUPSORT
from pario.lmdb import abi, errors
from pario.lmdb.cursor import Cursor
from pario.lmdb.native import later

_move: Any = later("move", globals())
_look: Any = later("look", globals())

#: What the reserved key holds, in one order of its bytes or the other (codec/packing.py, which is not imported for
#: databases whose last key has neither).
_NAME = b"pario-packed"
#: Values are unpacked together as long as they have no more bytes than this, of a core's second cache.
_TOGETHER = 512 << 10
#: What a packed value has at least, and the number of the codec with which one begins at most in practice.
_LEAST, _MOST_SLOT = 5, 7
#: Moves that go back, or end at the last item.
_BACK = (abi.LAST, abi.PREV, abi.PREV_DUP, abi.PREV_NODUP)


class PackedValues:
    """How the values of one database are unpacked.

    key : of the reserved entry; start : what its value begins with, and no packed value
    names : keys of the named databases that lie beside the records; their values were never packed
    order : what orders keys, as of `format.tree.key_order`
    """

    #: of databases without blocks, and of this one
    of_entries: type[Cursor]
    cursor: type[Cursor]
    #: by how many the entries of the database are more than its records; less than 0 where they are blocks
    hidden = 1

    def __init__(
        self, key: bytes, start: bytes, packing: Any, path: str, names: frozenset[bytes], order: Any
    ) -> None:
        self.key = key
        self.start = start
        self.names = names
        self._packing = packing
        self._path = path
        self.order = order
        if packing.counts is not None:
            self.cursor, self.hidden = BlockCursor, 1 + packing.entries - packing.n
        self._last: tuple[Any, Any] = None, None

    def block(self, key: bytes, value: bytes) -> tuple[list[bytes], list[bytes]] | None:
        """(keys, values) of a block; None: the value is that of one record. Raises lmdb.CorruptedError."""
        if not self._packing.is_block(value):
            return None
        known, block = self._last
        if known != value:
            try:
                block = self._packing.block(value, key)
            except ParioError as e:
                raise self._damaged(e.what) from e
            self._last = value, block  # many a program asks for neighbours
        return block  # type: ignore[no-any-return]

    def one(self, value: bytes) -> bytes:
        """The value as it was. Raises lmdb.CorruptedError."""
        try:
            raw: bytes = self._packing.unpack_one(value)
        except ParioError as e:
            raise self._damaged(e.what) from e
        return raw

    def many(self, values: list[bytes]) -> list[bytes]:
        """The same for many at once."""
        from pario.records import Records

        if len(values) < 2:
            return [self.one(value) for value in values]
        records = Records.of(np.arange(len(values)), values)
        raw = self._packing.raw_nbytes(records)
        if (raw < 0).any():
            raise self._damaged(f"the header of value {int(np.argmax(raw < 0))} of {len(values)} makes no sense")
        found: list[bytes] = []
        cuts = [0, *(np.flatnonzero(np.diff(np.cumsum(raw) // _TOGETHER)) + 1).tolist(), len(values)]
        for first, stop in pairwise(cuts):
            sizes = raw[first:stop]
            ends = np.cumsum(sizes)
            out = np.empty(int(ends[-1]), np.uint8)
            failures = self._packing.unpack(records.part(first, stop), out, ends - sizes, sizes)
            if failures:
                raise self._damaged(failures[0][1])
            data, starts = out.data, [0, *ends.tolist()]
            found += [bytes(data[a:b]) for a, b in pairwise(starts)]
        return found

    def _damaged(self, what: str) -> errors.Error:
        return errors.CorruptedError(f"a packed value is damaged: {what}", path=self._path)


class _Unknown(PackedValues):
    """Of a database whose last record is damaged: nobody knows whether its values are packed. Those that cannot be
    packed are given as they are, for the others the damage is raised.
    """

    hidden = 0

    def __init__(self, error: errors.Error) -> None:
        self.key = self.start = b"\0 nobody's"
        self.names = frozenset()
        self._error = error

    def one(self, value: bytes) -> bytes:
        if len(value) < _LEAST or value[0] & 127 > _MOST_SLOT:
            return value
        if value[0] == 128 and value[1:5] != xxh3_64_intdigest(value[5:]).to_bytes(8, "little")[:4]:
            return value  # a pickle begins so, too: a block that is stored as it is has its checksum
        error = type(self._error)(f"nothing says whether this value is packed: {self._error.what}")
        error.__dict__.update({**self._error.__dict__, "what": error.what})
        raise error

    def many(self, values: list[bytes]) -> list[bytes]:
        return [self.one(value) for value in values]


class PackedCursor(Cursor):
    """A cursor that unpacks, and does not stand on the reserved entry. A cursor becomes one when it is made."""

    __slots__ = ()

    # -- where it stands -----------------------------------------------------------------------------------------------

    def next(self) -> bool:
        return self._go(abi.NEXT)

    def _go(self, op: int) -> bool:
        if not super()._go(op):
            return False
        if not self._is_hidden():
            return True
        return self._step_before(op in _BACK)

    def _step_before(self, stay: bool) -> bool:
        """From the reserved entry to the item before it, if there is one. Unless it is to `stay` there it stands as at
        the end of a database, or in an empty one. Returns whether it stands on an item."""
        before = _move(self._at, abi.PREV)
        if before.__class__ is bytearray:
            raise self._error(before, "move")
        if before and stay:
            return True
        self._words[abi.C_VALID] = 0
        self._words[abi.C_END if before else abi.C_SET] = before
        return False

    def _seek(self, op: int, key: Any, value: Any) -> bool:
        if not super()._seek(op, key, value):
            return False
        if self._is_hidden():
            self._stand_nowhere()
            return False
        return True

    def _is_hidden(self) -> bool:
        """Whether it stands on the reserved entry."""
        key = _look(self._at, abi.KEY)
        if key.__class__ is bytearray:
            raise self._error(key, "read")
        return bool(key == self._packed.key)

    def _stand_nowhere(self) -> None:
        words = self._words
        words[abi.C_SET] = words[abi.C_END] = words[abi.C_VALID] = 0

    # -- what it gives -------------------------------------------------------------------------------------------------

    def _look(self, what: int) -> Any:
        if what == abi.VALUE and self._packed.names:
            return self._look(abi.ITEM)[1]
        return super()._look(what)

    def _fetch(self, op: int, started: int, most: int, aim: int, what: int) -> list[Any]:
        if what == abi.VALUE and self._packed.names:  # the key says whether a value is packed
            return [value for _, value in self._fetch(op, started, most, aim, abi.ITEM)]
        batch = super()._fetch(op, started, most, aim, what)
        if self._words[abi.C_VALID] and self._is_hidden():
            self._step_before(bool(batch))  # `_wrapped` has left the entry out of the batch
        return batch

    def _wrapped(self, found: list[Any], what: int) -> list[Any]:
        packed = self._packed
        if what == abi.KEY:
            found = [key for key in found if key != packed.key]
        elif what == abi.VALUE:
            found = packed.many([value for value in found if not value.startswith(packed.start)])
        else:
            found = [item for item in found if item[0] != packed.key]
            names = packed.names
            values = iter(packed.many([value for key, value in found if key not in names]))
            found = [(key, value if key in names else next(values)) for key, value in found]
        return super()._wrapped(found, what)


PackedValues.cursor = PackedValues.of_entries = PackedCursor


class BlockCursor(PackedCursor):
    """A cursor over the records of a database that has blocks of them in its entries. The words say in which entry it
    stands, `_inside` (keys, values, number) where in its block; None: the entry is one record.
    """

    __slots__ = ()

    def _land(self, number: int) -> None:
        """It has come to another entry, at its record `number`; -1: the last one."""
        self._inside = None
        item = _look(self._at, abi.ITEM)
        if item.__class__ is bytearray:
            raise self._error(item, "read")
        try:
            block = self._packed.block(*item)
        except errors.Error:
            self._words[abi.C_VALID] = 0
            raise
        if block is not None:
            self._inside = [*block, number % len(block[0])]

    def _go(self, op: int) -> bool:
        if self._given is not None:
            self._settle()
        words, inside, step = self._words, self._inside, 0
        if words[abi.C_SET] and inside is not None and op not in (abi.FIRST, abi.LAST, abi.FIRST_DUP, abi.LAST_DUP):
            step = -1 if op in _BACK else 1
        if step and not (step > 0 and words[abi.C_END]) and 0 <= inside[2] + step < len(inside[0]):
            self._check()
            inside[2] += step
            words[abi.C_END], words[abi.C_VALID] = 0, 1
            return True
        if not super()._go(op):
            return False
        self._land(-1 if op in _BACK else 0)
        return True

    def _seek(self, op: int, key: Any, value: Any) -> bool:
        if op not in (abi.SET_KEY, abi.SET_RANGE):
            return super()._seek(op, key, value)  # raises
        key = key if key.__class__ is bytes else abi.plain_bytes(key)
        self._inside = None
        if not super()._seek(abi.SET_RANGE, key, value):
            return False
        self._land(0)
        inside, order = self._inside, self._packed.order
        if inside is not None:
            inside[2] = bisect_left(inside[0], order(key), hi=len(inside[0]) - 1, key=order)
        found = inside[0][inside[2]] if inside is not None else _look(self._at, abi.KEY)
        if op == abi.SET_KEY and found != key:
            self._stand_nowhere()
            return False
        return True

    def _look(self, what: int) -> Any:
        if self._given is not None:
            self._settle()
        inside = self._inside
        if inside is None or not self._words[abi.C_VALID]:
            return super()._look(what)
        self._check()
        keys, values, number = inside
        item = keys[number], values[number]
        return Cursor._wrapped(self, [item if what == abi.ITEM else item[what != abi.KEY]], what)[0]

    def _fetch(self, op: int, started: int, most: int, aim: int, what: int) -> list[Any]:
        if self._given is not None:
            self._settle()
        if not self._words[abi.C_VALID] or (started and not self._go(op)):
            return []
        return [self._look(what)]

    def _get_many(self, keys: list[Any], what: int) -> list[Any]:
        return [self._look(what) for key in keys if self._seek(abi.SET_KEY, key, b"")]


def find_packed(store: Any, handle: Any) -> PackedValues | None:
    """How the values of a database are packed; None if they are not. Raises lmdb errors.

    store, handle : a Store and a Handle of store.py
    """
    flags = handle.db.md_flags
    if handle.db.md_root < 0 or flags & MDB_DUPSORT:
        return None
    txn = array("q", (1, store.at, handle.at))
    words = array("q", bytes(8 * abi.CURSOR_WORDS))
    words[abi.C_TXN], words[abi.C_HANDLE] = txn.buffer_info()[0], handle.at
    cursor = words.buffer_info()[0]

    def done(found: Any) -> Any:
        if found.__class__ is bytearray:
            raise store.error(found, "looking at the last record")
        return found

    try:
        if done(_move(cursor, abi.LAST)) is not True:
            return None
        key = done(_look(cursor, abi.KEY))
    except errors.CorruptedError as e:
        return _Unknown(e)
    if _NAME not in key and _NAME[::-1] not in key and key.strip(b"\xff"):
        return None
    from pario.codec.packing import MAGIC, Packing
    from pario.format.tree import key_order
    from pario.locate.hidden import looks_reserved

    start = MAGIC[:-1]  # the last byte is a version, which `Packing` looks at
    if not looks_reserved(key, flags):
        return None
    entry = done(_look(cursor, abi.VALUE))
    if not entry.startswith(start):
        return None
    try:
        packing = Packing.from_entry(entry)
        names = frozenset[bytes]()
        if handle is store.handles[None]:
            # More entries than there are packed values and the reserved one. (Most have none: nothing more is read.)
            names = _names(store, handle.db.md_entries - 1 - packing.entries)
            if names:
                packing.refuse_blocks(store.file.path)
    except ParioError as e:
        raise errors.translated(e.at(path=store.file.path), "opening a packed database") from e  # type: ignore[arg-type]
    return PackedValues(key, start, packing, store.file.path, names, key_order(flags, store.snapshot.layout))


def _names(store: Any, count: int) -> frozenset[bytes]:
    """Keys of at most this many named databases: reads the main database's leaf pages until it has them."""
    found = set[bytes]()
    leaves = store.tree().leaves() if count > 0 else ()
    for leaf in leaves:
        nodes = map(leaf.node, range(leaf.n))
        found.update(bytes(node.key) for node in nodes if node.flags == F_SUBDATA)
        if len(found) >= count:
            break
    return frozenset(found)
