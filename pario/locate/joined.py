"""The index of several files: their records one after the other, in one space of addresses (fetch/joined.py).

    file 0    ids 0 .. n0 - 1             addresses 0 ..
    file 1    ids n0 .. n0 + n1 - 1       addresses bases[1] ..

Ids go in key order within a file. Keys may come in several files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from pario.errors import CorruptedError
from pario.locate.base import Stretch
from pario.locate.index import KeyTable, Places
from pario.records import EXTENT


def join_places(parts: list[Places], stretches: Sequence[Stretch], bases: np.ndarray) -> Places:
    """The places of all records. Raises CorruptedError.

    parts : of each file; they are taken out of this list, and given up
    bases : i64[files], the address at which each begins
    """
    total = stretches[-1].stop
    extents = np.empty(total, EXTENT)
    # File order is id order if it is so in each file.
    ordered = all(places.by_offset is None for places in parts)
    by_offset = None if ordered else np.empty(total, np.int64)
    digest = hashlib.blake2b(f"pario joined 1 {len(parts)}".encode(), digest_size=16)
    for (database, start, stop, *_), base in zip(stretches, bases.tolist(), strict=True):
        places = parts.pop(0)
        ends = places.extents["offset"] + places.extents["nbytes"]
        if int(ends.max()) > database.snapshot.file_bytes:  # it would reach into the next file
            record = int(ends.argmax())
            raise CorruptedError("a value ends behind the end of the file", path=database.path, record=record)
        extents[start:stop] = places.extents
        extents["offset"][start:stop] += base
        if by_offset is not None:
            by_offset[start:stop] = np.arange(stop - start) if places.by_offset is None else places.by_offset
            by_offset[start:stop] += start
        digest.update(bytes.fromhex(places.content_id))
    return Places(extents, by_offset, digest.hexdigest(), float(extents["nbytes"].mean()))


class JoinedKeys(KeyTable):
    """The keys of several files.

    tables : of each file, or a function that opens it when somebody asks for one of its keys
    stretches : the records of each file
    """

    def __init__(self, tables: list[KeyTable | Callable[[], KeyTable]], stretches: Sequence[Stretch]) -> None:
        self._tables = tables
        self._starts = np.array([stretch.start for stretch in stretches])

    def get(self, ids: np.ndarray) -> list[bytes]:
        numbers = np.searchsorted(self._starts, ids, side="right") - 1
        found: list[bytes] = [b""] * len(ids)
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            keys = self._table(number).get(ids[mine] - self._starts[number])
            for k, key in zip(mine.tolist(), keys, strict=True):
                found[k] = key
        return found

    def _table(self, number: int) -> KeyTable:
        table = self._tables[number]
        if callable(table):
            table = self._tables[number] = table()
        return table

    def close(self) -> None:
        for table in self._tables:
            if isinstance(table, KeyTable):
                table.close()
