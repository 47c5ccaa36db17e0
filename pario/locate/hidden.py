"""The reserved entry of a packed database (codec/packing.py): its last record, which readers do not see.

It says how the values are packed. A database whose last key has not the reserved form costs nothing: the first and the
last key are known to anyone who opens an index. One that is packed costs one read, of the entry.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pario.errors import CorruptedError, EmptyError, FileError
from pario.fetch.pool import ReadPool
from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.locate.index import KeyTable, Places
from pario.locate.sidecar import Saved

#: Bytes that show whether a value is an entry.
_HEAD = 64
#: in the reserved key, forwards or backwards; codec/packing.py has its form
_NAME = b"pario-packed"

def find_entry(pool: ReadPool, saved: Saved) -> bytes | None:
    """The value of the reserved entry; None where the values are not packed. Reads it; not collective.

    saved : of the whole database: its record, places, and ends
    Raises EmptyError if there is nothing but the entry, ReadError, CorruptedError.
    """
    places, record, path = saved.places, saved.database.record, saved.database.path
    assert places is not None
    assert record is not None
    n = len(places.extents)
    return entry_at(pool, saved.ends[n - 1], record.md_flags, places.extents[n - 1 :], n, path)


def entry_at(pool: ReadPool, key: bytes, flags: int, extent: np.ndarray, n: int, path: str) -> bytes | None:
    """`find_entry`, of a last record. key, extent EXTENT[1] : the record's; flags, n : of the database"""
    if not looks_reserved(key, flags):
        return None
    offset, nbytes = int(extent["offset"][0]), int(extent["nbytes"][0])
    if not is_entry(pool.fetcher.pread(offset, min(nbytes, _HEAD))):
        return None
    entry = pool.fetcher.pread(offset, nbytes)
    if len(entry) < nbytes:
        raise CorruptedError("the file ends inside its last record", path=path, offset=offset, record=n - 1)
    if n == 1:
        raise EmptyError("the database holds no record", path=path)
    return entry


def looks_reserved(key: bytes, flags: int) -> bool:
    """Whether the last key of a database with these flags has the form of the reserved one; `is_entry` decides."""
    # Nearly none deserves a closer look, of databases that are not packed.
    if flags & MDB_DUPSORT or not (_NAME in key or _NAME[::-1] in key or not key.strip(b"\xff")):
        return False
    from pario.codec.packing import is_reserved_key  # not before it is wanted

    reverse = bool(flags & MDB_REVERSEKEY)  # overrides INTEGERKEY
    return is_reserved_key(key, integer=bool(flags & MDB_INTEGERKEY) and not reverse, reverse=reverse)


def is_entry(value: bytes) -> bool:
    """Whether a value begins as a reserved entry does."""
    from pario.codec.packing import MAGIC

    return value[: len(MAGIC) - 1] == MAGIC[:-1]  # the last byte is a version, which `Packing` looks at


def hide(saved: Saved, entry: bytes | None) -> None:
    """Leave the reserved entry out of what rank 0 knows, if there is one."""
    if entry is None or saved.places is None:
        return
    saved.entry = entry
    saved.ends.pop(len(saved.places.extents) - 1, None)
    saved.places = without_last(saved.places)
    counts = counts_of(entry, saved.database.path)
    if counts is not None:
        _spread(saved, counts)


def counts_of(entry: bytes | None, path: str) -> np.ndarray | None:
    """i64[entries], how many records each entry of a packed database holds; None: one each. Raises CorruptedError."""
    if entry is None:
        return None
    from pario.codec.packing import counts_in

    try:
        return counts_in(entry)
    except FileError as e:
        raise e.at(path=path) from None


def _spread(saved: Saved, counts: np.ndarray) -> None:
    """From entries to records: those of a block have one place. Of keys, the last record of an entry has its entry's.
    """
    places, path = saved.places, saved.database.path
    assert places is not None
    if len(counts) != len(places.extents):
        told = f"its reserved entry says that it has {len(counts):,} entries, and it has {len(places.extents):,}"
        raise CorruptedError(told, path=path)
    ends, by_offset = np.cumsum(counts), places.by_offset
    if by_offset is not None:
        mine = counts[by_offset]
        firsts = np.repeat(ends[by_offset] - mine - (np.cumsum(mine) - mine), mine)
        by_offset = firsts + np.arange(len(firsts))
    mean_bytes = float(places.extents["nbytes"].sum() / ends[-1])
    saved.places = Places(np.repeat(places.extents, counts), by_offset, places.content_id, mean_bytes)
    saved.ends = {int(ends[i]) - 1: key for i, key in saved.ends.items()}
    saved.meta = {int(ends[i]) - 1: key for i, key in saved.meta.items()}


def keys_of_entries(
    entry: bytes | None, path: str, keys: KeyTable | Callable[[], KeyTable]
) -> KeyTable | Callable[[], KeyTable]:
    """The table in which a record has the key of its entry. keys : of entries, or what opens them"""
    counts = counts_of(entry, path)
    if counts is None:
        return keys

    def opened() -> KeyTable:
        table = keys() if callable(keys) else keys
        table.first = np.cumsum(counts) - counts
        return table

    return opened


def without_last(places: Places) -> Places:
    """The places of all records but the last one; `content_id` stays that of the whole database."""
    last = len(places.extents) - 1
    extents, by_offset = places.extents[:last], places.by_offset
    if by_offset is not None:
        by_offset = by_offset[by_offset != last]
        if (by_offset[1:] > by_offset[:-1]).all():
            by_offset = None
    return Places(extents, by_offset, places.content_id, float(extents["nbytes"].mean()))
