"""Does a side-car fit the file? A sample of leaf pages and the list of free pages tell; no value is read.

Checksums and fingerprint say that a side-car is whole and of this state of the file, not that it was made from it. Each
record's page is checked when it is read (fetch/checked.py), which finds places that hold no value of this length. What
is left are sound values under wrong numbers, and old values in free pages: these are looked for here.
"""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np

from pario.errors import CorruptedError
from pario.fetch.pool import ReadPool
from pario.format.layout import F_BIGDATA, MDB_DUPSORT, MDB_INTEGERKEY, Db
from pario.format.page import Node
from pario.format.tree import Tree, named_database
from pario.locate.database import Database
from pario.locate.index import KeyTable, Places
from pario.locate.leaves import LeafScan
from pario.locate.walk import PageReader

#: Leaf pages, besides the first and the last one, and branch pages of a level that lead to them. A file with no more
#: leaf pages is compared as a whole.
_LEAVES, _BRANCHES = 30, 6
#: Leaf pages whose keys are compared, too: those of a side-car are read for it.
_KEYED = 4
#: A longer list of free pages is not looked at.
_FREE_ENTRIES, _FREE_PAGES = 256, 64


class _TreeOfDuplicates(Exception):
    """A leaf page whose records are partly elsewhere."""


def probe(pool: ReadPool, database: Database, places: Places, keys: KeyTable) -> Db:
    """The entry of the database's tree. Raises ValueError where the side-car's content does not fit the file, and what
    reading pages raises.

    places, keys : of the side-car
    """
    snapshot = database.snapshot
    if not snapshot.has_pages:
        from pario.locate.tars import probe_tar

        return probe_tar(pool, database, places, keys)
    pages = PageReader(lambda: pool, snapshot)
    record = snapshot.main
    if database.name is not None:
        record = named_database(Tree(pages.one, snapshot, snapshot.main), database.name)
    if len(places.extents) != record.md_entries:
        raise ValueError(f"it has {len(places.extents):,} records, the file {record.md_entries:,}")
    if bool(record.md_flags & MDB_DUPSORT) != (keys.first is not None):
        raise ValueError("only one of it and the file has several values for a key")
    _check_leaves(pages, database, record, places, keys)
    _check_free(pages, database, places)
    return record


# -- leaf pages --------------------------------------------------------------------------------------------------------


def _check_leaves(pages: PageReader, database: Database, record: Db, places: Places, keys: KeyTable) -> None:
    leaves = _sample(pages, Tree(pages.one, database.snapshot, record))
    n, size = len(places.extents), database.snapshot.page_size
    keyed = {0, len(leaves) - 1, *random.sample(range(len(leaves)), min(len(leaves), _KEYED - 2))}
    number = before = 0
    found: list[tuple[int, int, LeafScan]] = []
    for pgnos, buf, at in pages.batches(leaves):
        for pgno, start in zip(pgnos.tolist(), at.tolist(), strict=True):
            number += 1
            with suppress(_TreeOfDuplicates):
                found.append((number, pgno, _scanned(buf[start : start + size], pgno, database, record)))
    begins = np.array([scan.extents["offset"][0] for *_, scan in found], np.int64)
    for first, (number, pgno, scan) in zip(_ids_at(places, begins).tolist(), found, strict=True):
        stop = first + scan.n
        same = first >= before and np.array_equal(places.extents[first:stop], scan.extents)
        if not same or (number == 1 and first) or (number == len(leaves) and stop != n):
            raise ValueError(f"the records of leaf page {pgno} lie elsewhere, or have other numbers")
        if number - 1 in keyed and keys.get(np.arange(first, stop)) != _keys_of(scan):
            raise ValueError(f"the records of leaf page {pgno} have other keys")
        before = stop


def _sample(pages: PageReader, tree: Tree) -> np.ndarray:
    """i64[m], page numbers of leaves in key order, the first and the last among them; reads each level at once."""
    level = np.array([tree.db.md_root], np.int64)
    for depth in range(1, tree.db.md_depth):
        below = []
        for page in pages.pages(level):
            tree.check_page(page, depth)
            below.append(page.children())
        children = np.concatenate(below)
        most = _LEAVES if depth == tree.db.md_depth - 1 else _BRANCHES
        between = range(1, len(children) - 1)
        chosen = sorted(random.sample(between, min(len(between), most)))
        level = children[np.unique([0, *chosen, len(children) - 1])]
    return level


def _scanned(page: np.ndarray, pgno: int, database: Database, record: Db) -> LeafScan:
    def expand(nodes: list[Node]) -> list[np.ndarray]:
        raise _TreeOfDuplicates

    named = database.name is not None
    scan = LeafScan(database.snapshot, record.md_flags, named=named, records=256, expand=expand)
    scan.add(page, np.zeros(1, np.int64), np.array([pgno]))
    return scan


def _keys_of(scan: LeafScan) -> list[bytes]:
    """The key of each record."""
    keys, counts = scan.keys(), scan.key_counts
    if counts is None:
        return keys
    return [key for key, count in zip(keys, counts.tolist(), strict=True) for _ in range(count)]


# -- free pages --------------------------------------------------------------------------------------------------------


def _check_free(pages: PageReader, database: Database, places: Places) -> None:
    """No value lies in a page that is free: what stands there is old, and looks sound."""
    snapshot = database.snapshot
    free = snapshot.free
    if free.md_root < 0 or free.md_entries > _FREE_ENTRIES or free.md_overflow_pages > _FREE_PAGES:
        return
    # Its record in the meta page holds other things in place of flags and item size.
    tree = Tree(pages.one, snapshot, free._replace(md_flags=MDB_INTEGERKEY, md_pad=0))
    found = [_free_pages(pages, leaf.node(i)) for leaf, i in tree.items()]
    begins = np.concatenate([np.empty(0, np.int64), *found]) * snapshot.page_size
    ids = _ids_at(places, begins + snapshot.page_size - 1)
    extents = places.extents[ids[ids >= 0]]
    if bool((extents["offset"] + extents["nbytes"] > begins[ids >= 0]).any()):
        raise ValueError("some of its records lie in free pages")


def _free_pages(pages: PageReader, node: Node) -> np.ndarray:
    """i64[k]: the pages that one transaction left free."""
    snapshot = node.page.snapshot
    value: bytes | memoryview = node.data
    if node.flags & F_BIGDATA:
        run = node.overflow()
        value = b"".join(pages.one(run.pgno + k) for k in range(run.pages))[snapshot.header :][: run.nbytes]
    order = "<" if snapshot.byteorder == "little" else ">"
    numbers = np.frombuffer(value, f"{order}u{snapshot.word}", len(value) // snapshot.word).astype(np.int64)
    if not len(numbers) or not 0 <= numbers[0] < len(numbers):
        raise CorruptedError("an entry of the list of free pages has no right count", page=node.page.pgno)
    return numbers[1 : 1 + numbers[0]]


def _ids_at(places: Places, offsets: np.ndarray) -> np.ndarray:
    """i64[k]: the record whose value begins nearest at or before each of these places; -1: none."""
    begins, by_offset = places.extents["offset"], places.by_offset
    low, high = np.zeros(len(offsets), np.int64), np.full(len(offsets), len(begins))
    while bool((low < high).any()):  # `np.searchsorted` would copy all places
        middle = np.minimum((low + high) // 2, len(begins) - 1)
        left = (begins[middle if by_offset is None else by_offset[middle]] <= offsets) & (low < high)
        low, high = np.where(left, middle + 1, low), np.where(left | (low >= high), high, middle)
    return low - 1 if by_offset is None else np.where(low > 0, by_offset[low - 1], -1)
