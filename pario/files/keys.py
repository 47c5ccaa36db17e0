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


class Leaf(Page):
    """A page and its keys.

    keys : in the form that the database orders by (`Tree.order`); of a branch page the first one means nothing
    below : page numbers of the children; none of a leaf page
    """

    __slots__ = ("below", "keys")

    def __init__(self, tree: Tree, pgno: int, level: int) -> None:
        super().__init__(tree.read_page(pgno), pgno, tree.snapshot)
        tree.check_page(self, level)
        first = int(self.kind == "branch")
        keys = _ordered([Page.key(self, i) for i in range(first, self.n)], tree, self)
        self.keys = [None, *keys] if first else keys
        self.below: list[int] = self.children().tolist() if first else []


def _ordered(raw: list[bytes], tree: Tree, page: Page) -> list[Any]:
    """These keys as the database orders them. Raises CorruptedError where they do not ascend."""
    keys: list[Any] = raw if tree.order is bytes else [tree.order(key) for key in raw]
    if not all(map(lt, keys, keys[1:])):
        for before, after in pairwise(raw):
            check_ascending(tree.order, before, after, page)
    return keys


class Inside(NamedTuple):
    """A record of a block (codec/packing.py), in place of the node of an entry."""

    key: bytes
    value: bytes
    flags: int = 0


#: (keys, values) of a node that holds a block; None: it holds one record
Unblock = Callable[[Node], tuple[list[bytes], list[bytes]] | None]


class Spread(Leaf):
    """A leaf page of a database with blocks: its items are their records."""

    __slots__ = ("_nodes",)

    def __init__(self, tree: Tree, pgno: int, level: int, unblock: Unblock) -> None:
        super().__init__(tree, pgno, level)
        nodes: list[Node | Inside] = []
        for node in map(super().node, range(self.n)):
            block = unblock(node)
            nodes += [node] if block is None else map(Inside, *block)
        self._nodes, self.n = nodes, len(nodes)
        self.keys = _ordered([node.key for node in nodes], tree, self)

    def key(self, i: int) -> bytes:
        return self._nodes[i].key

    def node(self, i: int) -> Node | Inside:  # type: ignore[override]
        return self._nodes[i]


#: (page, item) from the root to an item
Path = list[tuple[Leaf, int]]


class Keys(Tree):
    """The keys of one database. path : of the data file, for messages; unblock : it has blocks"""

    first: Callable[[], Path]  # type: ignore[assignment]  # their pages come from `page` below
    last: Callable[[], Path]  # type: ignore[assignment]
    next: Callable[[Path], Path]  # type: ignore[assignment]

    def __init__(
        self, read_page: ReadPage, snapshot: Snapshot, db: Db, path: str, unblock: Unblock | None = None
    ) -> None:
        super().__init__(read_page, snapshot, db)
        self._path = path
        self._unblock = unblock
        self._lock = threading.Lock()
        self._leaves: dict[int, Leaf] = {}
        self._branches: dict[int, Leaf] = {}

    def at(self, pgno: int) -> Leaf:
        """A leaf page of this tree."""
        return self._leaves.get(pgno) or self.page(pgno, self.db.md_depth)

    def path_to(self, wanted: bytes | int) -> Path:
        """The path to the first item with a key not less than `wanted` (as `Tree.order` makes it); [] past the end."""
        path: Path = []
        pgno = self.db.md_root
        if pgno < 0:
            return path
        for level in range(1, self.db.md_depth):
            branch = self._branches.get(pgno) or self.page(pgno, level)
            i = bisect_right(branch.keys, wanted, 1) - 1
            path.append((branch, i))
            pgno = branch.below[i]
        leaf = self.at(pgno)
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
        path = self.path_to(wanted)
        return path[-1] if path and path[-1][0].keys[path[-1][1]] == wanted else None

    def page(self, pgno: int, level: int) -> Leaf:
        is_leaf = level >= self.db.md_depth
        kept, most = (self._leaves, _LEAVES) if is_leaf else (self._branches, _BRANCHES)
        found = kept.get(pgno)
        if found is None:
            try:
                blocks = self._unblock if is_leaf else None
                found = Leaf(self, pgno, level) if blocks is None else Spread(self, pgno, level, blocks)
            except ParioError as e:
                raise e.at(path=self._path) from None
            with self._lock:
                while len(kept) >= most:
                    del kept[next(iter(kept))]
                kept[pgno] = found
        return found
