"""Opening an index by all ranks together: loaded from its side-car, made by a walk, or left to grow. Several files' are
joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.fetch.pool import ReadPool
from pario.locate.base import Index
from pario.locate.database import Database
from pario.locate.hidden import entry_at, find_entry, hide
from pario.locate.index import KeyTable, Places, RecordIndex, arrange, key_table
from pario.locate.meta import find_meta, meta_in
from pario.locate.sidecar import Mark, Saved, Trustees, find_saved, open_keys, same_sidecar, save_any
from pario.locate.walk import Begun, Located, begin, build, check_size
from pario.records import EXTENT

if TYPE_CHECKING:
    from pario.locate.growing import GrowingIndex
    from pario.locate.joined import JoinedIndex


class Whole(NamedTuple):
    """A database whose places are all known.

    saved : what rank 0 has of it; elsewhere None, or nothing that counts
    bytes_read : see `Index`
    """

    database: Database
    saved: Saved | None
    bytes_read: int


class Told(NamedTuple):
    """What rank 0 tells of it: see `Saved` and `Places`."""

    sidecar: str | None
    mark: Mark | None
    trustees: Trustees
    meta: dict[int, bytes]
    n: int
    has_order: bool
    content_id: str
    mean_bytes: float
    entry: bytes | None


def open_index(
    database: Database,
    pool: ReadPool | None,
    world: AnyWorld,
    *,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
    saved: Saved | None = None,
    grow: Callable[[], ReadPool] | None = None,
) -> Index:
    """The index of a database: from its side-car if that is valid, else made anew and saved, or growing.

    Collective over `world`; an error is raised on all ranks. Only rank 0 touches the side-car, others when asked for
    keys. Where it cannot be saved, a warning is logged and the keys stay in memory.

    pool : of the open file; None on ranks (never rank 0) that leave the reading to the others
    save : write a side-car (one that is there is used in any case)
    progress : called as progress(done, total) on rank 0 while the index is made, in its leaf pages
    saved : on rank 0: what `find_saved` said already
    grow : let it grow while records are read, where that reads little more; brings this rank's open file when it is
        asked for places that are not known yet. None: make it now

    Raises DatabaseError (EmptyError among them), CorruptedError, ReadError, SnapshotError.
    """
    database, saved, trustees = _look(database, pool, world, saved)
    if database.record is not None:
        return _complete(Whole(database, saved, 0), world)
    begun: Begun | None = None
    if grow is not None and database.snapshot.has_pages:
        begun = begin(pool, database, world)
        database = replace(database, record=begun[1])
        growing = _growing(database, trustees, pool, world, begun, grow, keep_keys=save and world.rank == 0)
        if growing is not None:
            return growing
    return _complete(_walk(Saved(database, trustees), pool, world, begun, save, progress), world)


def open_joined(
    databases: Sequence[Database],
    pools: Iterable[ReadPool | None],
    bases: np.ndarray,
    world: AnyWorld,
    *,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> JoinedIndex:
    """The index of several files, as if their records were those of one. Each file has a side-car of its own.

    Collective over `world`, raises as `open_index` does.

    pools : one for each file, as for `open_index`; is asked for the next one when it is needed
    bases : i64[files], the address at which each begins
    progress : counts the leaf pages of one file after the other
    """
    from pario.locate.joined import JoinedIndex, Part, join_places

    parts: list[Part] = []
    keys: list[KeyTable | Callable[[], KeyTable]] = []
    for database, pool in zip(databases, pools, strict=True):
        database, saved, trustees = _look(database, pool, world, None)
        whole = Whole(database, saved, 0)
        if database.record is None:
            whole = _walk(Saved(database, trustees), pool, world, None, save, progress)
            database = whole.database
        told, table = _told(whole, world)
        keys.append(table)
        part = Part(database, told.n, told.mean_bytes, told.meta, whole.bytes_read, told.sidecar, told.entry)
        if whole.saved is not None:
            part.places, part.ends = whole.saved.places, whole.saved.ends
        parts.append(part)
    joined: Places | None = None
    with together(world, "joining the indexes of several files"):
        if world.rank == 0:
            joined = join_places(parts, bases)
    has_order, content_id, mean_bytes = world.bcast(
        (joined.by_offset is not None, joined.content_id, joined.mean_bytes) if joined is not None else None
    )
    extents = world.share_array(joined.extents if joined is not None else None)
    by_offset = world.share_array(joined.by_offset if joined is not None else None) if has_order else None
    return JoinedIndex(parts, Places(extents, by_offset, content_id, mean_bytes), keys)


def _look(
    database: Database, pool: ReadPool | None, world: AnyWorld, saved: Saved | None
) -> tuple[Database, Saved | None, Trustees]:
    """(the database as far as it is known, what rank 0 has of it, who may write its side-car). Collective."""
    snapshot = database.snapshot
    with together(world, "looking for a saved index"):
        if world.rank == 0 and (saved is None or saved.database.snapshot != snapshot):
            assert pool is not None  # rank 0 has one
            saved = find_saved(pool, snapshot, database.name)
        if world.rank == 0 and saved is not None and saved.places is not None and saved.entry is None:
            assert pool is not None
            hide(saved, find_entry(pool, saved))
    known, trustees = world.bcast((saved.database, saved.trustees) if saved else None)
    return replace(database, record=known.record, fingerprint=known.fingerprint), saved, trustees


def _walk(
    saved: Saved,
    pool: ReadPool | None,
    world: AnyWorld,
    begun: Begun | None,
    save: bool,
    progress: Callable[[int, int], None] | None,
) -> Whole:
    """All of the database, read from its leaf pages, or from the headers of a tar. Collective."""
    database = saved.database
    if not database.snapshot.has_pages:
        from pario.locate.tars import build_tar

        saved.database, located = build_tar(pool, database, world)
    else:
        begun = begun or begin(pool, database, world)
        saved.database = replace(database, record=begun[1])
        located = build(pool, saved.database, world, progress, begun=begun)
    with together(world, "saving the index"):
        if world.rank == 0:
            assert pool is not None
            saved = _kept(saved, located, save, pool)
    return Whole(saved.database, saved, located.bytes_read)


def _kept(saved: Saved, located: Located, save: bool, pool: ReadPool) -> Saved:
    """What rank 0 knows after a walk."""
    assert located.extents is not None
    assert located.key_data is not None
    assert located.key_nbytes is not None
    saved.places = arrange(located.extents, saved.database.path)
    saved.keys = key_table(located.key_data, located.key_nbytes, located.key_counts)
    saved.ends = saved.keys.ends(located.n)
    record = saved.database.record
    assert record is not None  # the walk has found it
    entry = find_entry(pool, saved)
    n = located.n - (entry is not None)
    saved.meta = find_meta(saved.keys.one, n, record.md_flags, saved.database.snapshot.layout)
    if save:
        save_any(saved)  # with the reserved entry: the side-car has what the file has
    hide(saved, entry)
    return saved


def _told(whole: Whole, world: AnyWorld) -> tuple[Told, KeyTable | Callable[[], KeyTable]]:
    """What all ranks must know of what rank 0 has, and how they open the keys. Collective."""
    saved, database = whole.saved, whole.database
    places = saved.places if saved is not None else None
    told: Told | None = None
    if saved is not None and places is not None:
        order = places.by_offset is not None
        words = saved.sidecar, saved.mark, saved.trustees, saved.meta
        told = Told(*words, len(places.extents), order, places.content_id, places.mean_bytes, saved.entry)
    told = world.bcast(told)
    assert told is not None  # rank 0 has told it
    opener = partial(open_keys, told.sidecar or "", database.fingerprint, told.trustees)
    return told, _spread_keys(world, saved, told.sidecar, told.mark, opener)


def _complete(whole: Whole, world: AnyWorld) -> RecordIndex:
    """The index that rank 0 has, for all ranks. Collective."""
    saved = whole.saved
    told, keys = _told(whole, world)
    places = saved.places if saved is not None else None
    extents = world.share_array(places.extents if places is not None else None)
    by_offset = world.share_array(places.by_offset if places is not None else None) if told.has_order else None
    index = RecordIndex(
        whole.database,
        Places(extents, by_offset, told.content_id, told.mean_bytes),
        keys,
        ends=saved.ends if saved is not None else {},
        sidecar=told.sidecar,
        bytes_read=whole.bytes_read,
        trusted=whole.bytes_read > 0,
    )
    index.meta, index.entries = told.meta, (told.entry,)
    return index


def _growing(
    database: Database,
    trustees: Trustees,
    pool: ReadPool | None,
    world: AnyWorld,
    begun: Begun,
    pool_of: Callable[[], ReadPool],
    *,
    keep_keys: bool,
) -> GrowingIndex | None:
    """An index of which the first and the last record are known, on rank 0. None if it may not grow, or if there are
    meta records in leaves between them, whose ids only a complete index knows. Collective."""
    from pario.locate.frontier import Growth, check_entries
    from pario.locate.growing import GrowingIndex, may_grow

    walk, record, leaves = begun
    if not may_grow(database.snapshot, record, world.allreduce_sum(pool is not None)):
        return None
    n, m = record.md_entries, len(leaves)
    ends: dict[int, bytes] = {}
    meta: dict[int, bytes] | None = None
    entry: bytes | None = None
    between = False
    with walk.together("looking at the tree"):
        check_entries(record, m, database.snapshot.page_size, database.path)
        if pool is not None:
            check_size(pool, database.snapshot)
        if world.rank == 0:
            between = walk.meta_between(leaves)
    if world.bcast(between):
        return None
    with together(world, "reading the first and the last leaf page"):
        memory = world.shared_bytes(n * EXTENT.itemsize + (m + 1) * 8)
        growth = Growth(
            database,
            leaves=leaves,
            extents=memory[: n * EXTENT.itemsize].view(EXTENT),
            first=memory[n * EXTENT.itemsize :].view(np.int64),
            pool=pool_of,
            keep_keys=keep_keys,
        )
        if world.rank == 0:
            assert pool is not None
            first, last = growth.end()
            entry = entry_at(pool, last[-1], record.md_flags, growth.extents[n - 1 :], n, database.path)
            if entry is not None:
                n, last = n - 1, last[:-1]
            ends = {0: first[0], **{n - 1 - i: key for i, key in enumerate(last[:-3:-1])}}
            meta = meta_in(first, last, n)
    meta, entry = world.bcast((meta, entry))
    if meta is None:
        growth.close()
        return None
    bytes_read = world.allreduce_sum(walk.pages.bytes_read + growth.pages.bytes_read)
    saved = Saved(database, trustees, entry=entry)
    index = GrowingIndex(saved, growth, ends=ends, bytes_read=bytes_read)
    index.meta = meta
    return index


def _spread_keys(
    world: AnyWorld, saved: Saved | None, sidecar: str | None, mark: Mark | None, opener: Callable[[], KeyTable]
) -> KeyTable | Callable[[], KeyTable]:
    """How to open the table of keys where every node can read it from the side-car, else the table, shared by the
    node. Collective."""
    keys = saved.keys if saved is not None else None
    if sidecar is not None:
        # A cache directory may be one per node. Each looks, and opens nothing that nobody may ask for.
        unseen = world.is_leader and world.rank != 0 and not same_sidecar(sidecar, mark)
        if world.allreduce_sum(int(unseen)) == 0:
            return opener
    what = None
    with together(world, "reading the keys"):
        if world.rank == 0:
            if keys is None:
                keys = opener()
            what = keys.width, keys.starts is not None, keys.first is not None
    width, has_starts, has_first = world.bcast(what)

    def share(a: Any) -> np.ndarray:
        return world.share_array(None if a is None else np.asarray(a[:]))

    # Rank 0's arguments count; on the others they are None.
    shared = KeyTable(
        share(keys.data if keys else None),
        width,
        share(keys.starts if keys else None) if has_starts else None,
        share(keys.first if keys else None) if has_first else None,
    )
    if keys is not None:
        keys.close()
    return shared
