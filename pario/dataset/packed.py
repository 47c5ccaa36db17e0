"""How the values of a dataset are packed: the codecs of its files, from their reserved entries (locate/hidden.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pario.comm.base import AnyWorld, together
from pario.errors import CorruptedError, ParioError
from pario.locate.base import Index

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


def refuse_blocks(packing: Packing, path: str) -> Packing:
    """The packing, of records beside named databases, which no pario puts into blocks. Raises CorruptedError."""
    if packing.counts is not None:
        raise CorruptedError("blocks of records lie beside named databases", path=path)
    return packing
