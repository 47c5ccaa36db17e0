"""Keys of one database in their order, by the pages of its B+-tree: where a key lies, and what follows it.

Of the pages read last, the keys lie in lists, so that a look-up is one bisection per level. Any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from operator import lt
from typing import Any, NamedTuple

from pario.errors import ParioError
from pario.format.layout import Db
from pario.format.meta import Snapshot
from pario.format.page import Node, Page
from pario.format.tree import ReadPage, Tree, check_ascending

#: Leaf pages whose keys are kept, per database: some 10 MB.
_LEAVES = 1024
#: Branch pages: those of some 100 million large records.
_BRANCHES = 16384


class Leaf:
    """A page and its keys.

    keys : in the form that the database orders by (`Tree.order`); of a branch page the first one means nothing
    children : page numbers; none of a leaf page
    """

    __slots__ = ("children", "keys", "page")

    def __init__(self, page: Page, tree: Tree) -> None:
        self.page = page
        first = int(page.kind == "branch")
        keys = _ordered([page.key(i) for i in range(first, page.n)], tree, page)
        self.keys = [None, *keys] if first else keys
        self.children: list[int] = page.children().tolist() if first else []

    def key(self, i: int) -> bytes:
        return self.page.key(i)

    def node(self, i: int) -> Node | Inside:
        return self.page.node(i)


def _ordered(raw: list[bytes], tree: Tree, page: Page) -> list[Any]:
    """These keys as the database orders them. Raises CorruptedError where they do not ascend."""
    keys: list[Any] = raw if tree.order is bytes else [tree.order(key) for key in raw]
    if not all(map(lt, keys, keys[1:])):
        for before, after in pairwise(raw):
            check_ascending(tree.order, before, after, page)
    return keys


class Inside(NamedTuple):
    """A record of a block (codec/packing.py), in place of the node of an entry."""

    page: Page
    key: bytes
    value: bytes
    flags: int = 0


#: (keys, values) of a node that holds a block; None: it holds one record
Unblock = Callable[[Node], tuple[list[bytes], list[bytes]] | None]


class Spread(Leaf):
    """A leaf page of a database with blocks: its items are their records."""

    __slots__ = ("_nodes",)

    def __init__(self, leaf: Leaf, tree: Tree, unblock: Unblock) -> None:
        self.page, self.children = leaf.page, []
        self._nodes: list[Node | Inside] = []
        for i in range(leaf.page.n):
            node = leaf.page.node(i)
            block = unblock(node)
            if block is None:
                self._nodes.append(node)
            else:
                self._nodes += [Inside(leaf.page, key, value) for key, value in zip(*block, strict=True)]
        self.keys = _ordered([node.key for node in self._nodes], tree, leaf.page)

    def key(self, i: int) -> bytes:
        return self._nodes[i].key

    def node(self, i: int) -> Node | Inside:
        return self._nodes[i]


#: (page, item) from the root to an item
Path = list[tuple[Leaf, int]]


class Keys:
    """The keys of one database. path : of the data file, for messages; unblock : it has blocks"""

    def __init__(
        self, read_page: ReadPage, snapshot: Snapshot, db: Db, path: str, unblock: Unblock | None = None
    ) -> None:
        self._path = path
        self._unblock = unblock
        self.tree = Tree(read_page, snapshot, db)
        self._lock = threading.Lock()
        self._leaves: dict[int, Leaf] = {}
        self._branches: dict[int, Leaf] = {}

    def at(self, pgno: int) -> Leaf:
        """A leaf page of this tree."""
        return self._leaves.get(pgno) or self._load(pgno, self.tree.db.md_depth)

    def seek(self, wanted: bytes | int) -> Path:
        """The path to the first item with a key not less than `wanted` (as `Tree.order` makes it); [] past the end."""
        path: Path = []
        pgno, depth = self.tree.db.md_root, self.tree.db.md_depth
        if pgno < 0:
            return path
        for level in range(1, depth):
            branch = self._branches.get(pgno) or self._load(pgno, level)
            i = bisect_right(branch.keys, wanted, 1) - 1
            path.append((branch, i))
            pgno = branch.children[i]
        leaf = self._leaves.get(pgno) or self._load(pgno, depth)
        i = bisect_left(leaf.keys, wanted)
        if i < len(leaf.keys):
            path.append((leaf, i))
            return path
        path = self.next([*path, (leaf, i - 1)])
        if path and self._unblock is not None:  # the next page begins with the last key of its first block
            path[-1] = path[-1][0], bisect_left(path[-1][0].keys, wanted, hi=len(path[-1][0].keys) - 1)
        return path

    def find(self, wanted: bytes | int) -> tuple[Leaf, int] | None:
        """The item with this key, in the form of `Tree.order`, if there is one."""
        path = self.seek(wanted)
        return path[-1] if path and path[-1][0].keys[path[-1][1]] == wanted else None

    def first(self) -> Path:
        return self._down([], self.tree.db.md_root, last=False) if self.tree.db.md_root >= 0 else []

    def last(self) -> Path:
        return self._down([], self.tree.db.md_root, last=True) if self.tree.db.md_root >= 0 else []

    def next(self, path: Path) -> Path:
        """The path to the item that follows; [] after the last."""
        leaf, i = path[-1]
        if i + 1 < len(leaf.keys):
            return [*path[:-1], (leaf, i + 1)]
        for level in range(len(path) - 2, -1, -1):
            branch, i = path[level]
            if i + 1 < len(branch.children):
                return self._down([*path[:level], (branch, i + 1)], branch.children[i + 1], last=False)
        return []

    def _down(self, path: Path, pgno: int, *, last: bool) -> Path:
        depth = self.tree.db.md_depth
        while True:
            level = len(path) + 1
            page = self._load(pgno, level)
            i = len(page.keys) - 1 if last else 0
            path.append((page, i))
            if level >= depth:
                return path
            pgno = page.children[i]

    def _load(self, pgno: int, level: int) -> Leaf:
        kept, most = (self._leaves, _LEAVES) if level >= self.tree.db.md_depth else (self._branches, _BRANCHES)
        found = kept.get(pgno)
        if found is None:
            try:
                found = Leaf(self.tree.page(pgno, level), self.tree)
                if self._unblock is not None and not found.children:
                    found = Spread(found, self.tree, self._unblock)
            except ParioError as e:
                raise e.at(path=self._path) from None
            with self._lock:
                while len(kept) >= most:
                    del kept[next(iter(kept))]
                kept[pgno] = found
        return found
