"""One LMDB opened for looking at: its snapshot, its trees and its bytes, without an index of the records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.comm.solo import Solo
from pario.comm.world import get_world
from pario.commands.screen import printable, screen
from pario.commands.verify_pages import runs_of
from pario.dataset.packed import packing_of
from pario.errors import DatabaseError, EmptyError, LauncherError, ParioError, ReadError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import resolve
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA, F_SUBDATA, MDB_DUPSORT, MDB_INTEGERKEY, Db
from pario.format.page import Page
from pario.format.tar import BLOCK, is_header
from pario.format.tree import Tree, database_names, named_database
from pario.locate.hidden import is_entry, looks_reserved
from pario.plan.coalesce import coalesce
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing
    from pario.locate.base import Index

#: Reads under way at once per rank.
INFLIGHT = 8
#: Bytes of values that are read at once per rank, unless one value is larger.
CHUNK = 32 << 20


class Item(NamedTuple):
    """A record as a command shows it; `value` may be cut. about : its id is estimated, as nobody counted up to it."""

    id: int
    key: bytes
    nbytes: int
    value: bytes
    about: bool = False


def is_tar(path: str) -> bool:
    """Whether the path names a tar, or several; rank 0 looks. Collective."""
    world = command_world()
    found = path.endswith(".tar")
    if world.rank == 0 and os.path.isfile(path):
        with suppress(OSError), open(path, "rb") as file:
            found = is_header(file.read(BLOCK))
    return bool(world.bcast(found))


def command_world() -> AnyWorld:
    try:
        return get_world()
    except LauncherError:  # a process that MPI sees alone can look by itself
        return Solo()


class Dataset:
    """Collective over all ranks: construction and `close`.

    path : as given by the user
    names : named databases, empty if the main database holds records
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.world = command_world()
        with together(self.world, "opening the dataset"):
            self.path = resolve(path)
            self.fetcher = PosixFetcher(self.path)
            self.snapshot = read_snapshot(self.fetcher)
        self.snapshot = self.world.bcast(self.snapshot)
        self.pool = ReadPool(self.fetcher, INFLIGHT)
        self.main = self.tree(self.snapshot.main)
        self._packings: dict[int, Packing | None] = {}
        self._with_entry: set[int] = set()

    def read_page(self, pgno: int) -> bytes:
        """The page, read whole. Raises ReadError."""
        size = self.snapshot.page_size
        return self.fetcher.pread(pgno * size, size)

    def read(self, offsets: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(u8[n], i64[k]: where in it each of these parts of the file begins). Raises FileError."""
        file = self.fetcher
        plan = coalesce(
            offsets, nbytes, align=file.align, gap_bytes=64 << 10, read_bytes=4 << 20, file_bytes=file.nbytes
        )
        data = np.empty(plan.nbytes, np.uint8)
        self.pool.read(plan.reads, data, plan.starts)
        return data, plan.record_starts

    def stored(self, index: Index, ids: np.ndarray) -> Records:
        """These records (i64[m]) as they lie in the file, of a block all of it. Raises FileError."""
        offsets, nbytes = index.extents_of(ids)
        return Records(ids, *self.read(offsets, nbytes), nbytes)

    def tree(self, db: Db) -> Tree:
        return Tree(self.read_page, self.snapshot, db)

    def names(self, most: int | None = None) -> list[bytes]:
        """Named databases; looks no further than the first leaf page if that holds records only."""
        if self.snapshot.main.md_root < 0:
            return []
        first = next(self.main.leaves())
        if not any(first.node(i).flags == F_SUBDATA for i in range(first.n)) and self.snapshot.main.md_leaf_pages > 64:
            return []
        return list(islice(database_names(self.main), most))

    def database(self, db: str | None) -> Tree:
        """The tree of records that `db` names; None is the main database. Raises DatabaseError, EmptyError."""
        if db is not None:
            tree = self.tree(named_database(self.main, db.encode()))
        else:
            tree = self.main
            names = self.names(most=6)
            if names:
                listed = ", ".join(repr(name_of(name)) for name in names[:5]) + (" and more" if len(names) > 5 else "")
                raise DatabaseError(
                    f"the main database holds named databases: {listed}", hint=f"Choose one: --db {name_of(names[0])}"
                )
        if tree.db.md_root < 0:
            raise EmptyError("the database holds no record")
        return tree

    def packed(self, tree: Tree) -> Packing | None:
        """How the values are packed; None if they are not. The first call for a tree reads the way to its last record.

        Raises CorruptedError, OptionError.
        """
        root = tree.db.md_root
        if root not in self._packings:
            self._packings[root] = self._find_packing(tree)
        return self._packings[root]

    def _find_packing(self, tree: Tree) -> Packing | None:
        if tree.db.md_root < 0 or tree.flags & MDB_DUPSORT:
            return None
        page, i = tree.last()[-1]
        if not looks_reserved(page.node(i).key, tree.flags):
            return None
        _, _, entry = self._stored(page, i, self.snapshot.file_bytes)
        if not is_entry(entry):
            return None
        self._with_entry.add(tree.db.md_root)
        beside = len(self.names()) if tree.db.md_root == self.snapshot.main.md_root else 0
        packing = packing_of(entry, tree.db.md_entries - 1 - beside, self.path)
        if beside:
            packing.refuse_blocks(self.path)
        return packing

    def has_entry(self, tree: Tree) -> bool:
        """Whether `packed` has found a reserved entry, sound or not."""
        return tree.db.md_root in self._with_entry

    def entries(self, tree: Tree) -> int:
        """Number of records, without the reserved entry of packed values."""
        packing = self.packed(tree)
        return tree.db.md_entries if packing is None else tree.db.md_entries - 1 + packing.n - packing.entries

    def first_items(self, tree: Tree, count: int, value_bytes: int) -> list[Item]:
        """The first `count` records in key order, each value's first `value_bytes`; reads no more than they need."""
        items: list[Item] = []
        count = min(count, self.entries(tree))
        for leaf, i in tree.items():
            for key, nbytes, value in self._values(tree, leaf, i, value_bytes):
                items.append(Item(len(items), key, nbytes, value))
                if len(items) == count:
                    return items
        return items

    def middle_item(self, tree: Tree, value_bytes: int) -> Item:
        """A record from the middle of the tree, in key order. Reads one page per level, and the value."""
        pgno, level, before, width = tree.db.md_root, 1, 0.0, 1.0
        while True:
            page = tree.page(pgno, level)
            i = page.n // 2
            before += width * i / page.n  # the share of the records that lie before it, if all pages hold as many
            width /= page.n
            if level == tree.db.md_depth:
                break
            pgno, level = page.child(i), level + 1
        about = level > 1 or bool(tree.flags & MDB_DUPSORT)
        if self.packed(tree) is not None and looks_reserved(page.node(i).key, tree.flags):
            return self.last_item(tree, value_bytes)
        return Item(round(before * self.entries(tree)), *next(self._values(tree, page, i, value_bytes)), about)

    def last_item(self, tree: Tree, value_bytes: int) -> Item:
        """The last record in key order."""
        page, i = tree.last()[-1] if self.packed(tree) is None else _before_last(tree)
        node = page.node(i)
        dups = tree.dups(node)
        if dups is None:
            *_, found = self._values(tree, page, i, value_bytes)  # a block has several
        else:
            leaf, k = dups.last()[-1]
            value = leaf.key(k)
            found = node.key, len(value), value[:value_bytes]
        return Item(self.entries(tree) - 1, *found)

    def _values(self, tree: Tree, leaf: Page, i: int, most: int) -> Iterator[tuple[bytes, int, bytes]]:
        node = leaf.node(i)
        dups = tree.dups(node)
        packing = self.packed(tree)
        if packing is not None:
            key, _, stored = self._stored(leaf, i, self.snapshot.file_bytes)
            items = packing.block(stored, key) if packing.is_block(stored) else ([key], [packing.unpack_one(stored)])
            for one, value in zip(*items, strict=True):
                yield one, len(value), value[:most]
        elif dups is None:
            yield self._stored(leaf, i, most)
        else:
            for page, k in dups.items():
                value = page.key(k)
                yield node.key, len(value), value[:most]

    def _stored(self, leaf: Page, i: int, most: int) -> tuple[bytes, int, bytes]:
        """(key, bytes, the first `most` of them) of a value as it lies in the file."""
        node = leaf.node(i)
        key = node.key
        if node.flags & F_BIGDATA:
            run = node.overflow()
            wanted = min(most, run.nbytes)
            value = self.fetcher.pread(run.offset, wanted)
            if len(value) < wanted:
                raise ReadError(f"the file ends inside the value of key {key!r}", page=run.pgno, offset=run.offset)
            return key, run.nbytes, value
        return key, node.nbytes, bytes(node.data[:most])

    def together(self, work: Callable[[], Any], doing: str) -> Any:
        """Call `work` on this rank; raise on all ranks if it fails on one."""
        with together(self.world, doing):
            try:
                return work()
            except ParioError as e:
                e.at(path=self.path)
                raise

    def close(self) -> None:
        """Collective."""
        self.pool.close()
        self.fetcher.close()
        self.world.close()


def _before_last(tree: Tree) -> tuple[Page, int]:
    """The leaf and the item of the last record but one."""
    path = tree.last()
    level = max(k for k, (_, i) in enumerate(path) if i > 0)  # there is one, else there were a single record
    page, i = path[level][0], path[level][1] - 1
    for below in range(level + 1, len(path)):
        page = tree.page(page.child(i), below + 1)
        i = page.n - 1
    return page, i


def key_text(tree: Tree, key: bytes) -> str:
    """The key as people read it: integer keys as numbers."""
    if tree.flags & MDB_INTEGERKEY:
        order: Any = tree.snapshot.byteorder
        return str(int.from_bytes(key, order))
    return printable(key)


def selected(text: str | None) -> Any:
    """What `Loader(select=)` takes, from the command line."""
    if text is None or text == "all":
        return text
    numbers = re.fullmatch(r"(\d*):(\d*)", text)
    return text.encode() if numbers is None else slice(*(int(n) if n else None for n in numbers.groups()))


def pieces(nbytes: np.ndarray, what: str) -> Iterator[slice]:
    """Neighbours that are read at once, with a progress bar. nbytes : i64[k], that each of all takes"""
    bar = screen.bar(int(nbytes.sum()), what, "B")
    for part in runs_of(nbytes, CHUNK):
        yield part
        bar.update(int(nbytes[part].sum()))
    screen.end_bar()


def name_of(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
