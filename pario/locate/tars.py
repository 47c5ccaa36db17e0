"""Where the files in a tar lie: their names are the keys, in the order of their bytes, as in the LMDB that
`python -m pario data pack` makes of it. One rank goes from header to header, past the contents."""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.errors import EmptyError, OptionError
from pario.fetch.pool import ReadPool
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import Db
from pario.format.tar import BLOCK, Members
from pario.locate.database import Database
from pario.locate.index import KeyTable, Places
from pario.locate.walk import Located, explained
from pario.records import EXTENT

_log = logging.getLogger("pario")

#: Members whose headers are compared with a side-car, besides the first and the last one.
_PROBED = 6
#: Bytes of a name that every header has room for.
_PLAIN_NAME = 98


def build_tar(pool: ReadPool | None, database: Database, world: AnyWorld) -> tuple[Database, Located]:
    """(the database with its record, its records, whose arrays exist on rank 0). Collective; raises on all ranks.

    pool : of the open file; rank 0 has one
    """
    located: Located | None = None
    with together(world, "looking for the files of a tar"):
        if world.rank == 0:
            assert pool is not None  # rank 0 has one
            located = walk_tar(pool, database)
    n, bytes_read = world.bcast(located and (located.n, located.bytes_read))
    found = located or Located(n, None, None, None, None, bytes_read)
    return replace(database, record=record_of(n)), found


def record_of(n: int) -> Db:
    """What stands for the entry of a tree: n keys in the order of their bytes."""
    return Db(0, 0, 1, 0, 0, 0, n, 0)


def walk_tar(pool: ReadPool, database: Database) -> Located:
    """Not collective. Raises CorruptedError, InvalidError, EmptyError, OptionError, ReadError, SnapshotError."""
    path, snapshot = database.path, database.snapshot
    if database.name is not None:
        raise OptionError(f"db={database.name!r}: a tar has no named databases", path=path)
    members = Members(pool.fetcher.pread, snapshot.file_bytes)
    found: dict[bytes, tuple[int, int]] = {}
    links = twice = 0
    with explained(lambda: pool, snapshot, path):
        for member in members:
            if member.linked:
                links += 1
                continue
            twice += member.name in found
            found[member.name] = member.offset, member.nbytes
        check_snapshot(pool.fetcher, snapshot)
    if not found:
        raise EmptyError("the tar holds no file", path=path)
    for count, what in (
        (links, "are further names of others (hard links): a record has one name"),
        (twice, "have the name of a later one, which counts"),
        (not members.has_end, "at the end lacks the mark of a tar's end behind it: perhaps the file was cut off"),
    ):
        if count:
            _log.warning("%s: %d of its members %s", path, count, what)
    keys = sorted(found)
    return Located(
        n=len(keys),
        extents=np.array([found[key] for key in keys], EXTENT),
        key_data=np.frombuffer(b"".join(keys), np.uint8),
        key_nbytes=np.fromiter(map(len, keys), np.int64, len(keys)),
        key_counts=None,
        bytes_read=members.bytes_read,
    )


def probe_tar(pool: ReadPool, database: Database, places: Places, keys: KeyTable) -> Db:
    """The record of the tar. Raises ValueError where the side-car does not fit the headers of the tar: a few are read.

    places, keys : of the side-car
    """
    n = len(places.extents)
    ids = np.unique([0, n - 1, *random.sample(range(n), min(n, _PROBED))])
    for extent, key in zip(places.extents[ids].tolist(), keys.get(ids), strict=True):
        begin = extent[0] - BLOCK
        name, offset, nbytes, linked = next(iter(Members(pool.fetcher.pread, database.snapshot.file_bytes, begin)))
        # What fits no header stands in one of its own, before this one.
        other = name != key and key.isascii() and len(key) <= _PLAIN_NAME
        if linked or other or (offset, nbytes) != extent:
            raise ValueError(f"no member {key!r} of {extent[1]:,} bytes lies there")
    return record_of(n)

