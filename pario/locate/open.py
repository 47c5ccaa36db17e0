"""Opening an index by all ranks together: loaded from its side-car, made by a walk, or left to grow. Several files' are
joined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.fetch.pool import ReadPool
from pario.locate.base import Index, Stretch
from pario.locate.database import Database
from pario.locate.hidden import counts_of, entry_at, find_entry, hide, keys_of_entries
from pario.locate.index import KeyTable, Places, RecordIndex, arrange, key_table
from pario.locate.meta import find_meta, meta_in
from pario.locate.sidecar import Mark, Saved, find_saved, open_keys, same_sidecar, save_any
from pario.locate.walk import Begun, Located, Walk, begin, build, check_size
from pario.records import EXTENT

if TYPE_CHECKING:
    from pario.locate.growing import GrowingIndex


#: Seconds that a first epoch may begin later for an index of all records, out of which it runs faster: people take them
#: for the start of a script. (165 MB of 3 KB records in key order, cold, opening and one epoch: 4 ranks on 2 nodes
#: 370 ms while the index grows, so 259; 2 ranks on one 310, so 205.)
SOON_S = 0.25
#: Leaf pages that foretell how long all of them take.
_SAMPLE = 16


def open_index(
    database: Database,
    pool: ReadPool | None,
    world: AnyWorld,
    *,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
    saved: Saved | None = None,
    grow: Callable[[], ReadPool] | None = None,
    soon_s: float = 0.0,
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
    soon_s : make it now in any case if that takes less than about this many seconds

    Raises DatabaseError (EmptyError among them), CorruptedError, ReadError, SnapshotError.
    """
    saved = _look(database, pool, world, saved)
    begun: Begun | None = None
    if saved.database.record is None and grow is not None and database.snapshot.has_pages:
        begun = begin(pool, saved.database, world)
        growing = _growing(saved, pool, world, begun, grow, keep_keys=save and world.rank == 0, soon_s=soon_s)
        if growing is not None:
            return growing
    return _whole([(saved, pool)], np.zeros(1, np.int64), world, begun, save, progress)


def open_joined(
    databases: Sequence[Database],
    pools: Iterable[ReadPool | None],
    bases: np.ndarray,
    world: AnyWorld,
    *,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Index:
    """The index of several files, as if their records were those of one. Each file has a side-car of its own.

    Collective over `world`, raises as `open_index` does.

    pools : one for each file, as for `open_index`; is asked for the next one when it is needed
    bases : i64[files], the address at which each begins
    progress : counts the leaf pages of one file after the other
    """
    found = ((_look(database, pool, world, None), pool) for database, pool in zip(databases, pools, strict=True))
    return _whole(found, bases, world, None, save, progress)


def _look(database: Database, pool: ReadPool | None, world: AnyWorld, saved: Saved | None) -> Saved:
    """What is known of a database without reading it: on other ranks than 0 its state, and who may write its side-car.
    Collective."""
    snapshot = database.snapshot
    with together(world, "looking for a saved index"):
        if world.rank == 0:
            assert pool is not None  # rank 0 has one
            if saved is None or saved.database.snapshot != snapshot:
                saved = find_saved(pool, snapshot, database.name)
            if saved.places is not None and saved.entry is None:
                hide(saved, find_entry(pool, saved))
    known, trustees = world.bcast((saved.database, saved.trustees) if saved else None)
    saved = saved or Saved(database, trustees)
    saved.database = replace(database, record=known.record, fingerprint=known.fingerprint)
    return saved


def _whole(
    files: Iterable[tuple[Saved, ReadPool | None]],
    bases: np.ndarray,
    world: AnyWorld,
    begun: Begun | None,
    save: bool,
    progress: Callable[[int, int], None] | None,
) -> RecordIndex:
    """The index of files that are read now, if no side-car had all of their records. Collective.

    bases : i64[files], the address at which each begins
    """
    stretches: list[Stretch] = []
    parts: list[Places] = []  # on rank 0
    tables: list[KeyTable | Callable[[], KeyTable]] = []
    for saved, pool in files:
        bytes_read = 0 if saved.database.record is not None else _walk(saved, pool, world, begun, save, progress)
        told = None
        start = stretches[-1].stop if stretches else 0
        if saved.places is not None:
            parts.append(saved.places)
            known = saved.places.mean_bytes, saved.sidecar, saved.meta, saved.ends, saved.entry
            told = start + len(saved.places.extents), known, saved.mark, saved.trustees
            saved.places = None
        stop, known, mark, trustees = world.bcast(told)
        stretch = Stretch(saved.database, start, stop, bytes_read, *known)
        opener = partial(open_keys, stretch.sidecar or "", saved.database.fingerprint, trustees)
        table = _spread_keys(world, saved.keys, stretch.sidecar, mark, opener)
        tables.append(keys_of_entries(stretch.entry, saved.database.path, table))
        stretches.append(stretch)
    keys, places = tables[0], parts[0] if parts else None
    if len(stretches) > 1:
        from pario.locate.joined import JoinedKeys, join_places

        keys, places = JoinedKeys(tables, stretches), None
        with together(world, "joining the indexes of several files"):
            if world.rank == 0:
                places = join_places(parts, stretches, bases)
    content_id, mean_bytes, has_order = world.bcast(
        None if places is None else (places.content_id, places.mean_bytes, places.by_offset is not None)
    )
    extents = world.share_array(None if places is None else places.extents)
    by_offset = world.share_array(None if places is None else places.by_offset) if has_order else None
    return RecordIndex(stretches, Places(extents, by_offset, content_id, mean_bytes), keys)


def _walk(
    saved: Saved,
    pool: ReadPool | None,
    world: AnyWorld,
    begun: Begun | None,
    save: bool,
    progress: Callable[[int, int], None] | None,
) -> int:
    """All of the database, read from its leaf pages, or from the headers of a tar. Collective. Returns how many bytes
    all ranks have read."""
    if not saved.database.snapshot.has_pages:
        from pario.locate.tars import build_tar

        saved.database, located = build_tar(pool, saved.database, world)
    else:
        begun = begun or begin(pool, saved.database, world)
        saved.database = replace(saved.database, record=begun[1])
        located = build(pool, saved.database, world, progress, begun=begun)
    with together(world, "saving the index"):
        if world.rank == 0:
            assert pool is not None
            _keep(saved, located, save, pool)
    return located.bytes_read


def _keep(saved: Saved, located: Located, save: bool, pool: ReadPool) -> None:
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


def _growing(
    saved: Saved,
    pool: ReadPool | None,
    world: AnyWorld,
    begun: Begun,
    pool_of: Callable[[], ReadPool],
    *,
    keep_keys: bool,
    soon_s: float,
) -> GrowingIndex | None:
    """An index of which the first and the last record are known. None if it may not grow, if all is soon read, or
    if there are meta records in leaves between them, whose ids only a complete index knows. Collective."""
    from pario.locate.frontier import Growth, check_entries
    from pario.locate.growing import GrowingIndex, may_grow

    walk, record, leaves = begun
    database = replace(saved.database, record=record)
    readers = world.allreduce_sum(pool is not None)
    if not may_grow(database.snapshot, record, readers):
        return None
    n, m = record.md_entries, len(leaves)
    told: tuple[dict[int, bytes] | None, dict[int, bytes], bytes | None] | None = None
    whole = False
    with walk.together("looking at the tree"):
        check_entries(record, m, database.snapshot.page_size, database.path)
        if pool is not None:
            check_size(pool, database.snapshot)
        if world.rank == 0:
            whole = (soon_s > 0 and _walk_s(walk, leaves) / readers < soon_s) or walk.meta_between(leaves)
    if world.bcast(whole):
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
            told = meta_in(first, last, n), ends, entry
            if counts_of(entry, database.path) is not None:  # which records lie where is known of all, or of none
                told = None, ends, entry
    meta, ends, entry = world.bcast(told)
    if meta is None:
        growth.close()
        return None
    bytes_read = world.allreduce_sum(walk.pages.bytes_read + growth.pages.bytes_read)
    saved.database = database
    tree_bytes = (record.md_overflow_pages + record.md_leaf_pages) * database.snapshot.page_size
    mean_bytes = max(1.0, tree_bytes / growth.n - database.snapshot.header)
    stretch = Stretch(database, 0, growth.n - (entry is not None), bytes_read, mean_bytes, None, meta, ends, entry)
    return GrowingIndex(stretch, saved, growth)


def _walk_s(walk: Walk, leaves: np.ndarray) -> float:
    """Seconds that one rank needs for these leaf pages, as some of them foretell. (Not the branch pages: of an earlier
    start the page cache may have all of them. Nor is their time without that of loading kernels.)"""
    sample = leaves[np.linspace(0, len(leaves) - 1, _SAMPLE).astype(np.int64)]
    begin = time.perf_counter()
    list(walk.pages.batches(sample))
    return (time.perf_counter() - begin) / _SAMPLE * len(leaves)


def _spread_keys(
    world: AnyWorld, keys: KeyTable | None, sidecar: str | None, mark: Mark | None, opener: Callable[[], KeyTable]
) -> KeyTable | Callable[[], KeyTable]:
    """How to open the table of keys where every node can read it from the side-car, else the table, shared by the
    node. Collective."""
    if sidecar is not None:
        # A cache directory may be one per node. Each looks, and opens nothing that nobody may ask for.
        unseen = world.is_leader and world.rank != 0 and not same_sidecar(sidecar, mark)
        if world.allreduce_sum(int(unseen)) == 0:
            return opener
    what = None
    with together(world, "reading the keys"):
        if world.rank == 0:
            keys = keys or opener()
            what = keys.width, keys.starts is not None, keys.first is not None
    width, has_starts, has_first = world.bcast(what)

    def share(a: Any) -> np.ndarray:
        return world.share_array(None if a is None else a[:])

    # Rank 0's arguments count; on the others they are None.
    shared = KeyTable(
        share(keys and keys.data),
        width,
        share(keys and keys.starts) if has_starts else None,
        share(keys and keys.first) if has_first else None,
    )
    if keys is not None:
        keys.close()
    return shared
