"""The index of several files: their records one after the other, in one space of addresses (fetch/joined.py).

    file 0    ids 0 .. n0 - 1             addresses 0 ..
    file 1    ids n0 .. n0 + n1 - 1       addresses bases[1] ..

Ids go in key order within a file. Keys may come in several files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pario.errors import CorruptedError
from pario.fetch.joined import bases_of, joined_name
from pario.locate.base import Files, Stretch
from pario.locate.database import Database
from pario.locate.index import KeyTable, Places, RecordIndex
from pario.records import EXTENT


@dataclass
class Part:
    """What is known of one file.

    n : its records
    mean_bytes, meta, bytes_read, sidecar, entry : as of its own index
    places, ends : of its own index, too; on rank 0, the places until they are joined
    """

    database: Database
    n: int
    mean_bytes: float
    meta: dict[int, bytes]
    bytes_read: int
    sidecar: str | None
    entry: bytes | None = None
    places: Places | None = None
    ends: dict[int, bytes] = field(default_factory=dict)


def join_places(parts: Sequence[Part], bases: np.ndarray) -> Places:
    """The places of all records; those of the parts are given up. Raises CorruptedError.

    bases : i64[files], the address at which each begins
    """
    total = sum(part.n for part in parts)
    extents = np.empty(total, EXTENT)
    # File order is id order if it is so in each file.
    ordered = all(part.places is not None and part.places.by_offset is None for part in parts)
    by_offset = None if ordered else np.empty(total, np.int64)
    digest = hashlib.blake2b(f"pario joined 1 {len(parts)}".encode(), digest_size=16)
    start = 0
    for part, base in zip(parts, bases.tolist(), strict=True):
        places, part.places = part.places, None
        assert places is not None  # on rank 0
        ends = places.extents["offset"] + places.extents["nbytes"]
        if int(ends.max()) > part.database.snapshot.file_bytes:  # it would reach into the next file
            record = int(ends.argmax())
            raise CorruptedError("a value ends behind the end of the file", path=part.database.path, record=record)
        mine = slice(start, start + part.n)
        extents[mine] = places.extents
        extents["offset"][mine] += base
        if by_offset is not None:
            by_offset[mine] = np.arange(part.n) if places.by_offset is None else places.by_offset
            by_offset[mine] += start
        digest.update(bytes.fromhex(places.content_id))
        start += part.n
    return Places(extents, by_offset, digest.hexdigest(), float(extents["nbytes"].mean()))


class JoinedKeys(KeyTable):
    """The keys of several files.

    tables : of each file, or a function that opens it when somebody asks for one of its keys
    starts : i64[files + 1], the first id of each file, and the number of records
    """

    def __init__(self, tables: Sequence[KeyTable | Callable[[], KeyTable]], starts: np.ndarray) -> None:
        self._tables = list(tables)
        self._starts = starts

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


class JoinedIndex(RecordIndex):
    """The index of several files. `database` and `snapshot` are the first one's: `files` has all. `sidecar` is None.

    parts : the files; places : of all records; keys : of each file
    """

    def __init__(
        self, parts: Sequence[Part], places: Places, keys: Sequence[KeyTable | Callable[[], KeyTable]]
    ) -> None:
        starts = np.concatenate([[0], np.cumsum([part.n for part in parts])])
        firsts = starts.tolist()
        super().__init__(
            parts[0].database,
            places,
            JoinedKeys(keys, starts),
            ends={first + i: key for part, first in zip(parts, firsts, strict=False) for i, key in part.ends.items()},
            sidecar=parts[0].sidecar if all(part.sidecar for part in parts) else None,
            bytes_read=sum(part.bytes_read for part in parts),
            trusted=all(part.bytes_read for part in parts),
        )
        self.entries = tuple(part.entry for part in parts)
        snapshots = [part.database.snapshot for part in parts]
        self.path = joined_name([part.database.path for part in parts])
        self.header_bytes = max(snapshot.header for snapshot in snapshots)
        self.page_size = max(snapshot.page_size for snapshot in snapshots)
        sizes = [snapshot.file_bytes for snapshot in snapshots]
        self.file_bytes = int(bases_of(sizes)[-1]) + sizes[-1]
        self.meta = {first + i: key for part, first in zip(parts, firsts, strict=False) for i, key in part.meta.items()}
        self.files = Files(
            [
                Stretch(part.database, first, first + part.n, part.bytes_read, part.mean_bytes)
                for part, first in zip(parts, firsts, strict=False)
            ]
        )
