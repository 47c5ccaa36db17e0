"""`verify`: look at every page and every record of the newest snapshot, and say what is damaged.

At the end of each database, the index that training would use is compared with what was found, and so are the
checksums of its values, if `checksum` has saved them.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pario.commands.dataset import CHUNK, Dataset, name_of, pieces
from pario.commands.screen import counted, decimal_bytes, screen, seconds
from pario.commands.verify_pages import PageUse, runs_of
from pario.commands.verify_tree import TreeCheck, check_free_list, leaf_pages
from pario.dataset.packed import find_keys_within
from pario.decode.unpacking import Unpacking, laid_out
from pario.errors import ChecksumError, CorruptedError, FileError, ParioError
from pario.fetch.snapshot import check_snapshot
from pario.format.layout import MDB_DUPSORT
from pario.format.tree import Tree, ascends, key_order, named_database
from pario.locate.base import Index
from pario.locate.database import Database
from pario.locate.open import open_index
from pario.locate.sums import MISMATCH, Found, find_sums
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing

#: Damages that are shown; all are counted.
SHOWN = 20


def verify(path: str, db: str | None) -> int:
    """Exit status: 1 if anything is damaged. Collective over all ranks: leaf pages and records are divided."""
    dataset = Dataset(path)
    started = time.perf_counter()
    screen.tell(faults=[], databases=[])
    use = PageUse(dataset.snapshot)
    damages = _free_list(dataset, use)
    found, names = _database(dataset, use, None if db is None else db.encode())
    damages += found
    if db is None:
        for name in names:
            damages += _database(dataset, use, name)[0]
    damages += _pages(dataset, use, whole=db is None and damages == 0)
    check = partial(check_snapshot, dataset.fetcher, dataset.snapshot)
    dataset.together(check, "looking whether a writer was at work")
    took = seconds(time.perf_counter() - started)
    screen.tell(path=dataset.path, damaged=damages)
    screen.say(
        f"damaged in {counted(damages, 'place')}; the search took {took}"
        if damages
        else f"no damage found, in {took}. Checked: page headers, bounds and numbers; that no page is used twice, or "
        "used and free; key order; counts; every byte could be read. Not checked: what the bytes mean (LMDB keeps no "
        "checksum; pario's: see above), what is in free pages."
    )
    dataset.close()
    return 1 if damages else 0


def _say(dataset: Dataset, words: str, damages: list[ParioError], count: int | None = None) -> int:
    """Show the first of `count` damages (all of them by default); returns the count."""
    count = len(damages) if count is None else count
    for damage in damages[:SHOWN]:
        screen.add("faults", f"{words}: {damage.at(path=dataset.path)}")
        screen.say(f"{words}: {damage.at(path=dataset.path)}")
    if count > SHOWN:
        screen.say(f"{words}: and {count - SHOWN:,} more")
    return count


def _free_list(dataset: Dataset, use: PageUse) -> int:
    """Number of damages in the list of free pages, which rank 0 looks at. Collective."""
    look = partial(check_free_list, dataset, use) if dataset.world.rank == 0 else list
    found = dataset.together(look, "reading the list of free pages")
    return _say(dataset, "list of free pages", [fault.error for fault in dataset.world.bcast(found)])


def _database(dataset: Dataset, use: PageUse, name: bytes | None) -> tuple[int, list[bytes]]:
    """(number of damages, names of the databases that lie in this one). Collective."""
    words = "main database" if name is None else f'database "{name_of(name)}"'
    world = dataset.world
    tree = dataset.main
    if name is not None:
        tree = dataset.together(lambda: dataset.tree(named_database(dataset.main, name)), "opening the database")
    if tree.db.md_root < 0:
        screen.say(f"{words}: empty")
        return 0, []
    packing, hidden, of_entry = _packing(dataset, tree)
    saved, beside = _saved_sums(dataset, name, dataset.entries(tree) if packing else tree.db.md_entries - hidden)
    check = TreeCheck(dataset, tree, f"the {words}", use, sums=saved is not None)

    def find_leaves() -> np.ndarray | None:
        return leaf_pages(tree, use, f"the {words}", check.faults) if world.rank == 0 else None

    leaves = world.share_array(dataset.together(find_leaves, "reading the branch pages"))
    check.walk(leaves)
    first = world.exscan(check.records)
    overflow_pages = world.allreduce_sum(check.read_values(first))
    own = [e if record is None else e.at(record=first + record) for e, record in check.faults]
    shares = world.allgather((check.records, sum(check.sizes), check.names, own))
    records, value_bytes = (sum(share[k] for share in shares) for k in (0, 1))
    names = [name for share in shares for name in share[2]]
    damages = [damage for share in shares for damage in share[3]]
    if not damages and records != tree.db.md_entries:
        what = f"{records:,} records found, but the database says it has {tree.db.md_entries:,}"
        damages = [CorruptedError(what, page=tree.db.md_root)]
    if not damages and not names and records > hidden:  # databases, or a packed folder without files, have no index
        damages = _index_agrees(dataset, name, packing, check, records - hidden, first)
    damages = damages or of_entry
    count = len(damages)
    if packing is not None and not damages:
        count, damages = _packed_values(dataset, packing, check)
        have = "all of them have" if not count else "not all of them have"
        screen.say(f"{words}: packed values; {have} the size and the checksum that they were packed with")
    if saved is not None and not names:
        if not damages:
            count, damages = _other_values(dataset, packing, check, saved, first)
            beside = f"every value was compared with the checksums in {beside}"
        else:
            beside = f"the values were not compared with the checksums in {beside}: their pages are damaged"
    count = _say(dataset, words, damages, count)
    state = f"{count:,} damaged" if count else "all sound"
    held = f", {counted(len(names), 'named database')} among them" if names else ""
    if not names:
        screen.say(f"{words}: {beside}")
    n = records - hidden + (packing.n - packing.entries if packing is not None and not count else 0)
    facts = {"records": n, "value_bytes": value_bytes, "damaged": count}
    screen.add("databases", {"name": None if name is None else name_of(name), **facts})
    found = counted(n, "record")
    screen.say(f"{words}: {found} found{held}, {decimal_bytes(value_bytes)} of values; {state}")
    if not count:
        _note_counters(tree, words, len(leaves), overflow_pages)
    return count, names


def _packing(dataset: Dataset, tree: Tree) -> tuple[Packing | None, int, list[ParioError]]:
    """(how the values are packed, the number of reserved entries, what is wrong with it). Collective."""
    wrong: list[ParioError] = []

    def look() -> Packing | None:
        try:
            return dataset.packed(tree)
        except FileError as e:  # of a page the check of the tree will say it, too
            if dataset.has_entry(tree):
                wrong.append(e)
            return None

    packing = dataset.together(look, "opening the codecs")
    return packing, int(dataset.has_entry(tree)), wrong


def _saved_sums(dataset: Dataset, name: bytes | None, n: int) -> tuple[np.ndarray | None, str]:
    """(the saved checksums u64[n] that fit, or None; where they are, or why there are none). Collective."""
    world = dataset.world

    def find() -> tuple[Found | None, list[str]]:
        (file,) = dataset.fetcher.files
        database = Database(dataset.path, dataset.snapshot, name)
        return find_sums(database, file.status(), n) if world.rank == 0 else (None, [])

    found, unfit = dataset.together(find, "reading the checksums")
    where, unfit = world.bcast((found.sidecar if found is not None else None, unfit))
    if where is not None:
        return world.share_array(found.values if found is not None else None), where
    anew = "`python -m pario data checksum` saves checksums of the values, to compare them with"
    return None, f"no checksums fit ({'; '.join(unfit)}); {anew}" if unfit else f"no checksums; {anew}"


def _first_records(packing: Packing | None, first: int, n: int, most: int) -> np.ndarray:
    """i64[m <= n], ids of the first records of n entries from `first` on, without the reserved one; less than `most`"""
    ids = np.arange(first, first + n) if packing is None else packing.firsts[first : first + n]
    return np.asarray(ids[ids < most])


def _other_values(
    dataset: Dataset, packing: Packing | None, check: TreeCheck, saved: np.ndarray, first: int
) -> tuple[int, list[ParioError]]:
    """(how many values are not those of the checksums, the errors about the first ones of each rank). Collective.

    saved : u64[n], by record; first : number of this rank's first entry
    """
    ids = _first_records(packing, first, check.records, len(saved))
    theirs = saved[ids]
    mine = np.array(check.sums, np.uint64)[: len(theirs)]  # not of the reserved entry of packed values
    other = np.flatnonzero(mine != theirs)
    errors: list[ParioError] = []
    for k in other[:SHOWN].tolist():
        offset = check.offsets[k]
        what = f"{MISMATCH}: expected {int(theirs[k]):#018x}, found {int(mine[k]):#018x}"
        page = (offset - 1) // dataset.snapshot.page_size
        errors.append(ChecksumError(what, page=page, offset=offset, record=int(ids[k])))
    everyones = dataset.world.allgather((len(other), errors))
    return sum(count for count, _ in everyones), [error for _, first_ones in everyones for error in first_ones]


def _packed_values(dataset: Dataset, packing: Packing, check: TreeCheck) -> tuple[int, list[ParioError]]:
    """(how many packed values have not the size and the checksum that they were packed with, the errors about the first
    ones of each rank), after unpacking all. Collective."""
    # Named databases may lie among the records of the main one: they have no packed values.
    offsets, nbytes = (np.delete(np.array(found, np.int64), check.named_rows) for found in (check.offsets, check.sizes))
    first = dataset.world.exscan(len(offsets))
    mine = np.arange(first, min(first + len(offsets), packing.entries))  # not the reserved entry
    if packing.counts is not None:
        counts = packing.counts[mine]
        offsets, nbytes = (np.repeat(found[: len(mine)], counts) for found in (offsets, nbytes))
        begin = int(packing.firsts[first]) if len(mine) else 0
        mine = np.arange(begin, begin + len(offsets))
    count, errors = 0, list[ParioError]()
    work = dataset.together(lambda: packing.sizes[mine], "reading the table of sizes")
    for part in pieces(np.maximum(work, nbytes[: len(mine)]), "packed values"):
        for row, why in _damaged(dataset, packing, mine[part], offsets[part], nbytes[part]):
            count += 1
            if len(errors) < SHOWN:
                at = part.start + row
                errors.append(CorruptedError(why, record=int(mine[at]), offset=int(offsets[at])))
    everyones = dataset.world.allgather((count, errors))
    return sum(count for count, _ in everyones), [error for _, told in everyones for error in told]


def _damaged(
    dataset: Dataset, packing: Packing, ids: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray
) -> list[tuple[int, str]]:
    """(row, reason) of these values, which this reads and unpacks."""
    data, begins = dataset.read(offsets, nbytes)
    sizes = packing.sizes[ids]
    starts, total = laid_out(sizes)
    stored = Records(ids, data, begins, nbytes)
    return packing.unpack(stored, np.empty(total, np.uint8), starts, sizes, packing.ordinals(ids))


def _note_counters(tree: Tree, words: str, leaf_count: int, overflow_pages: int) -> None:
    """Say where the statistics of a sound database do not fit. Nothing is lost by it: nobody reads by them."""
    d = tree.db
    if (d.md_leaf_pages == leaf_count or tree.flags & MDB_DUPSORT) and d.md_overflow_pages == overflow_pages:
        return
    screen.say(
        f"{words}: note: its statistics say {d.md_leaf_pages:,} leaf pages and {d.md_overflow_pages:,} overflow pages; "
        f"found: {leaf_count:,} and {overflow_pages:,}"
    )


def _pages(dataset: Dataset, use: PageUse, *, whole: bool) -> int:
    """Number of page ranges that are used twice. Collective.

    whole : all trees were looked at and are sound, so that the pages can be counted
    """
    count, errors = use.twice(dataset.world)
    _say(dataset, "pages", list(errors), count)
    if whole and not count and dataset.world.rank == 0:
        used, free, lost = use.totals()
        more = f"; {lost:,} neither used nor free: lost to LMDB, and harmless" if lost else ""
        screen.say(f"pages: {used:,} in use, {free:,} free{more}")
    return count


def _index_agrees(
    dataset: Dataset, name: bytes | None, packing: Packing | None, check: TreeCheck, entries: int, first: int
) -> list[ParioError]:
    """Does the index (saved or newly made) say the same as what was found? Collective."""
    try:
        index = open_index(Database(dataset.path, dataset.snapshot, name), dataset.pool, dataset.world, save=False)
    except ParioError as e:
        return [e]
    hint = f"Delete {index.sidecar} and run `python -m pario data index`" if index.sidecar else None
    wrong: list[ParioError]
    records = entries + (packing.n - packing.entries if packing is not None else 0)
    if index.n != records:
        wrong = [CorruptedError(f"the index has {index.n:,} records where {records:,} were found", hint=hint)]
    else:
        mine: ParioError | None = _first_elsewhere(index, packing, check, first, hint)
        if mine is None and packing is not None and packing.counts is not None:
            mine = _first_misplaced(dataset, index, packing, first, check.records)
        wrong = [error for error in dataset.world.allgather(mine) if error]
    index.close()
    return wrong


def _first_misplaced(
    dataset: Dataset, index: Index, packing: Packing, first: int, entries: int
) -> ParioError | None:
    """The error about the first key that does not ascend, in blocks or beside them, of this rank's entries."""
    find_keys_within(index, Unpacking([packing], [0]), partial(dataset.stored, index))
    order = key_order(index.files.stretches[0].record.md_flags, dataset.snapshot.layout)
    ends, before = np.append(packing.firsts, packing.n), b""
    ids = np.arange(ends[min(first, len(ends) - 1)], ends[min(first + entries, len(ends) - 1)])
    try:
        for part in runs_of(index.extents_of(ids)[1], CHUNK):
            for record, key in zip(ids[part].tolist(), index.keys(ids[part]), strict=True):
                if before and not ascends(order, before, key):
                    raise CorruptedError("its key does not ascend", record=record, key=key)
                before = key
    except ParioError as e:
        return e
    return None


def _first_elsewhere(
    index: Index, packing: Packing | None, check: TreeCheck, first: int, hint: str | None
) -> CorruptedError | None:
    """The error about this rank's first record that the index places elsewhere, if there is one."""
    offsets, sizes = np.array(check.offsets, np.int64), np.array(check.sizes, np.int64)
    ids = _first_records(packing, first, check.records, index.n)
    theirs = index.extents[ids]
    offsets, sizes = offsets[: len(theirs)], sizes[: len(theirs)]  # not the reserved entry of packed values
    elsewhere = (theirs["offset"] != offsets) | (theirs["nbytes"] != sizes)
    if not elsewhere.any():
        return None
    k = int(np.argmax(elsewhere))
    return CorruptedError(
        f"the index says that this record has {theirs['nbytes'][k]:,} bytes at offset {theirs['offset'][k]:,} of the "
        f"file; it has {sizes[k]:,} bytes at {offsets[k]:,} (first of {counted(int(elsewhere.sum()), 'record')})",
        page=int(offsets[k]) // index.page_size,
        record=int(ids[k]),
        hint=hint,
    )
