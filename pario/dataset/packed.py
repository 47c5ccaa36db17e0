"""How the values of a dataset are packed: the codecs of its files, from their reserved entries (locate/hidden.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.errors import CorruptedError, DecodeError, ParioError
from pario.locate.base import Index
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing
    from pario.decode.unpacking import Unpacking

def open_packed(index: Index, world: AnyWorld) -> Unpacking | None:
    """How to unpack the records of `index`; None if no file is packed, which all ranks know. Collective otherwise.

    Raises on all ranks CorruptedError for an entry that is damaged, OptionError where a node lacks a codec's package.
    """
    if not any(index.entries):
        return None
    packings: list[Packing | None] = []
    stretches = index.files.stretches
    with together(world, "opening the codecs"):
        for entry, stretch in zip(index.entries, stretches, strict=True):
            n = stretch.stop - stretch.start
            where = stretch.database.path, world.rank
            packings.append(None if entry is None else packing_of(entry, n, *where, records=True))
    if world.rank:  # what else is packed into an entry (of folders: names and times), rank 0 alone is asked for
        index.entries = tuple(None if entry is None else b"" for entry in index.entries)
    from pario.decode.unpacking import Unpacking  # only here, and so in `packing_of`: it brings codecs

    return Unpacking(packings, [stretch.start for stretch in stretches])


def packing_of(entry: bytes, n: int, path: str, rank: int = 0, *, records: bool = False) -> Packing:
    """The packing of a database of n entries, from its reserved entry. Raises CorruptedError, OptionError.

    records : n counts records, of which a block has several
    """
    from pario.codec.packing import Packing

    try:
        packing = Packing.from_entry(entry)
        said = packing.n if records else packing.entries
        if said != n:
            raise CorruptedError(f"its reserved entry says that it has {said:,} packed values, and it has {n:,}")
        return packing
    except ParioError as e:
        raise e.at(path=path, rank=rank, record=n) from None  # type: ignore[misc]


def find_keys_within(index: Index, unpacking: Unpacking | None, read: Callable[[np.ndarray], Records]) -> None:
    """Let the index give keys of records that lie in blocks. read(ids) : their values as they lie in the file

    Its `keys` then raises DecodeError for records of a block that is damaged, and what `read` raises.
    """
    if unpacking is None or not unpacking.has_blocks:
        return

    def keys_within(ids: np.ndarray) -> list[bytes]:
        of_entries = index.entry_keys(ids)
        keys, failures = unpacking.keys(read(ids), of_entries)
        for row, why in failures:
            record = int(ids[row])
            raise DecodeError(why, path=index.files.path_of(record), record=record, key=of_entries[row])
        return keys

    index.keys_within = keys_within
