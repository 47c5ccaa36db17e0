"""Walk a B+tree with a given `read_page(pgno)`: leaves in key order, first, last, seek, steps, named databases.

This module knows no file: `read_page` returns the P bytes of a page from any source. A path from the root down to one
item is a list of (page, index) pairs; it is cheap to copy and never outlives its snapshot.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator

import numpy as np

from pario.errors import CorruptedError, DatabaseError
from pario.format.layout import (
    F_DUPDATA,
    F_SUBDATA,
    MAX_DEPTH,
    MDB_DUPFIXED,
    MDB_DUPSORT,
    MDB_INTEGERDUP,
    MDB_INTEGERKEY,
    MDB_REVERSEDUP,
    MDB_REVERSEKEY,
    Db,
    Layout,
)
from pario.format.meta import Snapshot
from pario.format.page import Node, Page, SubPage

ReadPage = Callable[[int], "bytes | memoryview | np.ndarray"]
#: key -> a value whose < orders keys as the database does
Order = Callable[[bytes], "bytes | int"]
#: (page, index) from the root to an item
Path = list[tuple[Page, int]]

#: An error message lists at most this many names.
_NAMES_SHOWN = 20


def key_order(flags: int, layout: Layout) -> Order:
    """How a database with these flags orders its keys."""
    if flags & MDB_REVERSEKEY:  # overrides INTEGERKEY
        return _reverse
    if flags & MDB_INTEGERKEY:
        return _integer(layout)
    return bytes


def dup_order(flags: int, layout: Layout) -> Order:
    """How a DUPSORT database with these flags orders the duplicates of a key."""
    if flags & MDB_INTEGERDUP:
        return _integer(layout)
    if flags & MDB_REVERSEDUP:
        return _reverse
    return bytes


def _reverse(key: bytes) -> bytes:
    return bytes(key)[::-1]


def _integer(layout: Layout) -> Order:
    byteorder = layout.byteorder
    return lambda key: int.from_bytes(key, byteorder)  # type: ignore[arg-type]


class Tree:
    """One B+tree of a snapshot: the main database, a named one, or the duplicates of one key.

    Parameters
    ----------
    read_page : page number -> the page's P bytes
    snapshot : the state of the file
    db : the tree's record
    dups_of : flags of the DUPSORT database whose duplicates this tree holds; they determine its order
    """

    def __init__(self, read_page: ReadPage, snapshot: Snapshot, db: Db, *, dups_of: int | None = None) -> None:
        self.read_page = read_page
        self.snapshot = snapshot
        self.db = db
        self.flags = db.md_flags
        self.is_dups = dups_of is not None
        #: duplicates of one width: the leaves are LEAF2 pages
        self.fixed = self.is_dups and bool(db.md_flags & MDB_DUPFIXED)
        layout = snapshot.layout
        self.order = key_order(self.flags, layout) if dups_of is None else dup_order(dups_of, layout)

    def page(self, pgno: int, level: int) -> Page:
        """The page, which must be a leaf exactly at level md_depth (the root is level 1)."""
        page = Page(self.read_page(pgno), pgno, self.snapshot)
        self.check_page(page, level)
        return page

    def check_page(self, page: Page, level: int) -> None:
        """Raises CorruptedError if this level of this tree cannot have a page of this kind."""
        depth = min(MAX_DEPTH, self.db.md_depth)
        if level < depth:
            expected = "branch"
        elif self.fixed:
            expected = "leaf2"
        else:
            expected = "leaf"
        if page.kind != expected:
            raise page.fault(f"a {page.kind} page at level {level} of {depth}, where a {expected} page belongs")
        if expected == "leaf2" and page.pad != self.db.md_pad:
            raise page.fault(f"items of {page.pad} bytes in a tree of {self.db.md_pad}-byte items")

    def leaves(self) -> Iterator[Page]:
        """All leaf pages in key order."""
        left = self.snapshot.file_bytes // self.snapshot.page_size
        path = self.first()
        while path:
            page = path[-1][0]
            if not left:  # branches that share children have more leaves than the file has pages
                raise page.fault("the tree reaches one of its pages twice")
            left -= 1
            yield page
            path = self._turn(path)

    def items(self) -> Iterator[tuple[Page, int]]:
        """(leaf, index) of all items in key order; a key with duplicates is one item."""
        for leaf in self.leaves():
            for i in range(leaf.n):
                yield leaf, i

    def first(self) -> Path:
        """The path to the first item; [] in an empty tree."""
        return [] if self.db.md_root < 0 else self._down([], self.db.md_root, last=False)

    def last(self) -> Path:
        """The path to the last item; [] in an empty tree."""
        return [] if self.db.md_root < 0 else self._down([], self.db.md_root, last=True)

    def seek(self, key: bytes) -> tuple[Path, bool]:
        """The path to the first item with a key >= `key`, and whether its key is equal; ([], False) past the end."""
        if self.db.md_root < 0:
            return [], False
        wanted = self.order(key)
        path: Path = []
        pgno = self.db.md_root
        while True:
            page = self.page(pgno, len(path) + 1)
            if page.kind != "branch":
                break
            i = branch_slot(page, wanted, self.order)
            path.append((page, i))
            pgno = page.child(i)
        low = bisect_left(range(page.n), wanted, key=lambda i: self.order(page.key(i)))
        if low == page.n:
            return self._turn([*path, (page, page.n - 1)]), False
        path.append((page, low))
        return path, page.key(low) == key

    def next(self, path: Path) -> Path:
        """The path to the following item; [] after the last."""
        page, i = path[-1]
        return [*path[:-1], (page, i + 1)] if i + 1 < page.n else self._turn(path)

    def dups(self, node: Node) -> SubPage | Tree | None:
        """The duplicates of a key: a sub-page, a tree, or None if it has a single value.

        Raises CorruptedError in a database without duplicates.
        """
        if not node.flags & F_DUPDATA:
            return None
        if node.flags & F_SUBDATA:
            return self.below(node)
        self._check_dupsort(node)
        return node.sub_page()

    def below(self, node: Node) -> Tree:
        """The tree whose root is in an F_SUBDATA node: the duplicates of its key, or a named database.

        Raises CorruptedError for duplicates in a database without MDB_DUPSORT.
        """
        if not node.flags & F_DUPDATA:
            return Tree(self.read_page, self.snapshot, node.db())
        self._check_dupsort(node)
        return Tree(self.read_page, self.snapshot, node.db(), dups_of=self.flags)

    def _check_dupsort(self, node: Node) -> None:
        if not self.flags & MDB_DUPSORT:
            raise node.page.fault(
                f"item {node.i} has duplicates in a database without (no MDB_DUPSORT)", node.key_start
            )

    def _down(self, path: Path, pgno: int, last: bool) -> Path:
        """The path from page `pgno` down to the first or last item below."""
        path = list(path)
        while True:
            page = self.page(pgno, len(path) + 1)
            i = page.n - 1 if last else 0
            path.append((page, i))
            if page.kind != "branch":
                return path
            pgno = page.child(i)

    def _turn(self, path: Path) -> Path:
        """The path to the first item of the next leaf."""
        for level in range(len(path) - 2, -1, -1):
            page, i = path[level]
            if i + 1 < page.n:
                return self._down([*path[:level], (page, i + 1)], page.child(i + 1), last=False)
        return []


def branch_slot(page: Page, wanted: bytes | int, order: Order) -> int:
    """The child of a branch page below which a key stands, or would stand; wanted : the key, as `order` makes it."""
    # The key of slot 0 is not set: slot 0 covers everything below the key of slot 1.
    return bisect_right(range(page.n), wanted, lo=1, key=lambda i: order(page.key(i))) - 1


def database_names(main: Tree) -> Iterator[bytes]:
    """Names of the named databases, in key order, as the user wrote them. Reads the main tree's pages."""
    if main.flags & MDB_DUPSORT:
        return
    for leaf in main.leaves():
        yield from names_in(leaf)


def names_in(leaf: Page) -> Iterator[bytes]:
    """Names of the databases whose records lie in this leaf of the main tree."""
    for i in range(leaf.n):
        node = leaf.node(i)
        if node.flags == F_SUBDATA:
            yield clean_name(node.key, leaf.snapshot)


def clean_name(key: bytes, snapshot: Snapshot) -> bytes:
    """Formats 2 and 3 keep names with a NUL at the end."""
    return key[:-1] if snapshot.version > 1 and key.endswith(b"\0") else key


def named_database(main: Tree, name: bytes) -> Db:
    """The record of a named database. Raises DatabaseError, which lists the names, or CorruptedError."""
    snapshot = main.snapshot
    if main.flags & MDB_DUPSORT:
        raise DatabaseError("the main database allows duplicates, so it holds no named databases")
    path, found = main.seek(name + b"\0" if snapshot.version > 1 else name)
    if found:
        page, i = path[-1]
        node = page.node(i)
        if node.flags == F_SUBDATA:
            return node.db()
    else:
        found = snapshot.version > 1 and main.seek(name)[1]
    if found:
        raise DatabaseError(f"{list_names([name])} is the key of a record of the main database, not a database")
    # Searching a main database of many records for a hint would cost too much.
    if main.db.md_leaf_pages > 64:
        raise DatabaseError(f"there is no database {list_names([name])}")
    names = list(database_names(main))
    hint = f"There are: {list_names(names)}" if names else "The file has no named databases: leave db out"
    raise DatabaseError(f"there is no database {list_names([name])}", hint=hint)


def only_named_databases(names: list[bytes], path: str, count: int | None = None) -> DatabaseError:
    """The error where records were wanted. names : some of them; count : how many there are, where it is known"""
    known = "" if count is None else f"{count} "
    return DatabaseError(
        f"the file holds {known}named database{'s' * (count != 1)}: {list_names(names)}",
        path=path,
        hint=f'Say which one to read, for example db="{names[0].decode(errors="backslashreplace")}"',
    )


def list_names(names: list[bytes]) -> str:
    """For a message."""
    shown = ", ".join(repr(name.decode(errors="backslashreplace")) for name in names[:_NAMES_SHOWN])
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def ascends(order: Order, before: bytes, after: bytes) -> bool:
    """Whether `before` < `after`. Integers of different widths have no order: True."""
    if order not in (bytes, _reverse) and len(before) != len(after):
        return True
    return order(before) < order(after)  # type: ignore[operator]


def check_ascending(order: Order, before: bytes, after: bytes, page: Page) -> None:
    """Raises CorruptedError, with the page that holds `after`, unless the keys ascend."""
    if not ascends(order, before, after):
        raise not_ascending(before, after, page.pgno, page.offset)


def not_ascending(before: bytes, after: bytes, pgno: int | None = None, offset: int | None = None) -> CorruptedError:
    """The error of two neighbours in the wrong order."""
    return CorruptedError(
        f"keys do not ascend: {before[:40]!r} before {after[:40]!r}",
        page=pgno,
        offset=offset,
        hint="Damage, or a program that set its own comparison function (mdb_set_compare)",
    )
