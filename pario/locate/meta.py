"""Records that say something about a dataset and are no samples of it: counts, lists of keys, formats.

Writers of LMDBs keep them under names of their own beside the samples. They are recognised by their exact keys, in a
database whose keys are bytes: names that nobody gives to a sample wherever they stand, plain words only where nothing
but such names stands before them or behind them in key order (among the words of a vocabulary "length" is a sample).
A key with several values is none of them.

All keys of a complete index are at hand. Where the index is to grow, the branch pages that are read anyhow say in
which leaf page a name would stand (`Route`), and only the numbers of records in the first and the last leaf are known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import islice, takewhile

from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, Layout
from pario.format.page import Page
from pario.format.tree import branch_slot, key_order

#: No sample has one of these names. (tensorpack and folder2lmdb; STR; TAPE, ATOM3D; MeanFlow; ASE; OpenFold)
_SURE = (
    *(b"__keys__", b"__len__", b"num-samples", b"num_samples", b"num_examples", b"serialization_format", b"id_to_idx"),
    *(b"created_at", b"deleted_ids", b"_type"),
)
#: Words that samples of other datasets may have as names. (OC20, StyleGAN; ViLBERT, MMF; ASE)
_WORDS = (b"length", b"keys", b"metadata", b"nextid")
NAMES = frozenset(_SURE + _WORDS)


def find_meta(key: Callable[[int], bytes], n: int, flags: int, layout: Layout) -> dict[int, bytes]:
    """Record id -> key of the meta records among n records; {} if no other record would be left.

    key : called for a handful of records; flags : of the database
    """
    if flags & MDB_INTEGERKEY:
        return {}
    found = dict(enumerate(_leading(key(i) for i in range(n))))
    found |= {n - 1 - i: name for i, name in enumerate(_leading(key(i) for i in range(n - 1, -1, -1)))}
    order = key_order(flags, layout)
    low, high = order(key(0)), order(key(n - 1))
    for name in _SURE:
        if low < order(name) < high:  # type: ignore[operator]
            i = bisect_left(range(n), order(name), key=lambda i: order(key(i)))  # type: ignore[type-var]
            if key(i) == name:
                found[i] = name
    if flags & MDB_DUPSORT:
        found = {i: name for i, name in found.items() if not any(0 <= j < n and key(j) == name for j in (i - 1, i + 1))}
    return found if len(found) < n else {}


def _leading(keys: Iterable[bytes]) -> list[bytes]:
    """The names that stand before the first other key."""
    return list(takewhile(NAMES.__contains__, islice(keys, 2 * len(NAMES))))


def meta_in(first: list[bytes], last: list[bytes], n: int) -> dict[int, bytes] | None:
    """The meta records in the first and the last leaf page, of a database whose index grows. None: there may be others
    in the leaves next to them, whose records have no numbers yet.

    first, last : keys of these leaves; n : records of the database
    """
    before, behind = _leading(first), _leading(reversed(last))
    if len(before) == len(first) or len(behind) == len(last):
        return None
    found = dict(enumerate(before)) | {n - 1 - i: name for i, name in enumerate(behind)}
    for keys, low in ((first, 0), (last, n - len(last))):
        found |= {low + i: name for i, name in enumerate(keys) if name in _SURE}
    return found


class Route:
    """The leaf page of each name, found while the branch pages of a tree are read from the root down.

    leaves : name -> page number, of the page that `seen` has met last on its way
    """

    def __init__(self, root: int, flags: int, layout: Layout) -> None:
        self._order = key_order(flags, layout)
        self.leaves = {} if flags & MDB_INTEGERKEY else dict.fromkeys(_SURE, root)

    def seen(self, page: Page) -> None:
        """A branch page; parents before their children."""
        for name, pgno in self.leaves.items():
            if pgno == page.pgno:
                self.leaves[name] = page.child(branch_slot(page, self._order(name), self._order))
