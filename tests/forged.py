"""Forged side-cars: fingerprint and checksums are right, the content is not of this file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lmdb_cases import opened, oracle
from sidecars import Arrays, edit

import pario
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import F_BIGDATA, F_DUPDATA
from pario.format.page import Page
from pario.format.tree import Tree, named_database
from pario.locate.index import content_id_of
from pario.records import EXTENT

__all__ = ["DB", "FORGERIES", "OF_DUPLICATES", "Forgery", "Set", "forge", "write"]

DB = b"records"
#: Bytes of values: in leaf pages, and on one and on three overflow pages.
SIZES = (300, 701, 3000, 0, 1500, 10_000, 900, 2500)


@dataclass
class Set:
    """A database of a file, and what a forger wants to know of them.

    values, keys : of all records, in key order
    extents : i64[n, 2], where they lie
    elsewhere : i64[k, 2] each: bytes that look like values and are none of this database's
    page_size, header : bytes
    dups : keys have several values
    """

    path: Path
    values: list[bytes]
    keys: list[bytes]
    extents: np.ndarray
    elsewhere: dict[str, np.ndarray]
    page_size: int
    header: int
    dups: bool

    @property
    def on_runs(self) -> np.ndarray:
        """Ids of records on overflow pages."""
        return np.flatnonzero(self.extents[:, 0] % self.page_size == self.header)

    @property
    def in_leaves(self) -> np.ndarray:
        """Ids of records inside leaf pages that are not empty."""
        return np.flatnonzero((self.extents[:, 0] % self.page_size != self.header) & (self.extents[:, 1] > 0))

    @property
    def key_room(self) -> int:
        """Bytes from the beginning of a key of five bytes to its value."""
        return 5 if self.header == 16 else 6

    @property
    def longest(self) -> int:
        return int(self.extents[:, 1].argmax())


def write(folder: Path, n: int = 120, *, sizes: tuple[int, ...] = SIZES, dups: bool = False, version: int = 1) -> Set:
    """A file of two databases alike, with old values of them in free pages, and the side-car of one."""
    rng = np.random.default_rng(n)
    path = folder / "data.mdb"
    before = np.empty((0, 2), np.int64)
    with opened(folder, version) as env:
        for times in range(3):
            for name in (b"others", DB):
                db = env.open_db(name, dupsort=dups)
                with env.begin(write=True, db=db) as txn:
                    for i in range(n):
                        size = 20 + i % 50 if dups else sizes[(i + times) % len(sizes)]
                        txn.put(b"%05d" % (i // 9 if dups else i), rng.bytes(size))
            if times == 1:
                before = _extents(path, DB)
    keys, values = zip(*oracle(os.fspath(path), DB), strict=True)
    extents = _extents(path, DB)
    with pario.Reader(path, db=DB) as reader:
        snapshot = reader.snapshot
    made = Set(path, list(values), list(keys), extents, {}, snapshot.page_size, snapshot.header, dups)
    others = _extents(path, b"others")
    made.elsewhere = {"others": others, **_structures(made), "old": _free(before, extents, others)}
    return made


def _extents(path: Path, db: bytes) -> np.ndarray:
    with pario.Reader(path, db=db, save_index=db == DB) as reader:
        return np.array(reader.index.extents).view(np.int64).reshape(-1, 2)


def _structures(made: Set) -> dict[str, np.ndarray]:
    """Parts of pages that are no values."""
    fetcher = PosixFetcher(os.fspath(made.path))
    snapshot = read_snapshot(fetcher)
    size = snapshot.page_size

    def read(pgno: int) -> bytes:
        return fetcher.pread(pgno * size, size)

    main = Tree(read, snapshot, snapshot.main)
    databases = [leaf.node(i) for leaf, i in main.items()]
    own = Tree(read, snapshot, named_database(main, DB))
    numbers = [node for leaf, i in own.items() if (node := leaf.node(i)).flags == F_BIGDATA]
    root = Page(read(own.db.md_root), own.db.md_root, snapshot)
    subs = [node for leaf, i in own.items() if (node := leaf.node(i)).flags == F_DUPDATA]
    lists = Tree(read, snapshot, snapshot.free._replace(md_flags=8, md_pad=0))
    entries = [node for leaf, i in lists.items() if (node := leaf.node(i)).flags == 0]
    fetcher.close()
    found = {"databases": databases, "numbers": numbers, "sub-pages": subs, "free list": entries}
    places = {name: np.array([(node.offset, len(node.data)) for node in nodes]) for name, nodes in found.items()}
    assert root.kind == "branch"
    return {**places, "branch": np.array([(root.pgno * size + root.key_span(1)[0], 5)])}


def _free(before: np.ndarray, *now: np.ndarray) -> np.ndarray:
    """Those of earlier values whose pages hold none by now."""
    used = np.concatenate([places[:, 0] // 4096 for places in now])
    return before[~np.isin(before[:, 0] // 4096, used)]


def forge(made: Set, extents: np.ndarray, *, keys: list[bytes] | None = None, first: np.ndarray | None = None) -> None:
    """Write this content into the side-car; checksums and fingerprint are right.

    keys : all of one length, as in the file
    first : i64[k], the first record of each key
    """
    extents = np.ascontiguousarray(extents, np.int64)
    keys = (keys or made.keys)[: len(extents)]
    if made.dups:
        first = np.flatnonzero([i == 0 or key != keys[i - 1] for i, key in enumerate(keys)]) if first is None else first
        keys = sorted(set(keys))
    content = {"extents": extents.reshape(-1), "key_data": np.frombuffer(b"".join(keys), np.uint8), "key_first": first}
    if not (np.diff(extents[:, 0]) > 0).all():
        content["by_offset"] = np.argsort(extents[:, 0], kind="stable")

    def change(said: dict[str, Any], arrays: Arrays) -> None:
        arrays.clear()
        arrays.update({name: array for name, array in content.items() if array is not None})
        said["content_id"] = content_id_of(extents.reshape(-1).view(EXTENT))

    edit(f"{made.path}.db-{DB.decode()}.pario.index", change)


# -- what is forged ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgery:
    """change(set, its extents, to change): returns what else `forge` takes, or extents of another number, or None.

    found : "loading": the places cannot be; "reading": a record's own page tells; "sample": only the comparison with
        the file's leaf pages or with its list of free pages tells
    """

    found: str
    change: Callable[[Set, np.ndarray], dict[str, object] | None]


def _moved(which: Callable[[Set], object], by: int) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        extents[which(made), 0] += by

    return change


def _longer(which: Callable[[Set], object], by: int) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        extents[which(made), 1] = np.maximum(extents[which(made), 1] + by, 0)

    return change


def _put(which: Callable[[Set], object], place: tuple[int, int]) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        extents[which(made)] = place

    return change


def _taken(name: str, which: Callable[[Set], int], row: int = 0) -> Callable[[Set, np.ndarray], None]:
    """One record lies where something else lies."""

    def change(made: Set, extents: np.ndarray) -> None:
        extents[which(made)] = made.elsewhere[name][row]

    return change


def _exchanged(pair: Callable[[Set], np.ndarray]) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        a, b = pair(made)
        extents[[a, b]] = extents[[b, a]]

    return change


def _in_page(part: Callable[[Set, int], tuple[int, int]]) -> Callable[[Set, np.ndarray], None]:
    """A record of a leaf page lies at (offset in this page, bytes)."""

    def change(made: Set, extents: np.ndarray) -> None:
        record = _leaf(made)
        page = extents[record, 0] // made.page_size * made.page_size
        at, nbytes = part(made, int(extents[record, 0] - page))
        extents[record] = page + at, nbytes

    return change


def _leaf(made: Set) -> int:
    return int(made.in_leaves[len(made.in_leaves) // 2])


def _run(made: Set) -> int:
    return int(made.on_runs[len(made.on_runs) // 2])


def _at_header(made: Set, extents: np.ndarray) -> None:
    extents[_run(made), 0] -= made.header


def _all(made: Set) -> slice:
    return slice(None)


def _neighbours(made: Set) -> np.ndarray:
    """Two records next to each other in one leaf page."""
    ids = made.in_leaves
    pages = made.extents[ids, 0] // made.page_size
    at = np.flatnonzero((np.diff(pages) == 0) & (np.diff(ids) == 1))[0]
    return ids[[at, at + 1]]


def _old(made: Set, on_runs: bool) -> np.ndarray:
    old = made.elsewhere["old"]
    return old[((old[:, 0] % made.page_size == made.header) == on_runs) & (old[:, 1] > 0)][0]


def _permuted(order: Callable[[int], np.ndarray]) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        extents[:] = extents[order(len(extents))]

    return change


def _of_all_others(made: Set, extents: np.ndarray) -> None:
    extents[:] = made.elsewhere["others"]


def _other_keys(made: Set, extents: np.ndarray) -> dict[str, object]:
    keys = list(made.keys)
    keys[3], keys[4] = keys[4], keys[3]
    return {"keys": keys}


def _old_of(on_runs: bool) -> Callable[[Set, np.ndarray], None]:
    def change(made: Set, extents: np.ndarray) -> None:
        extents[_run(made) if on_runs else _leaf(made)] = _old(made, on_runs)

    return change


FORGERIES: dict[str, Forgery] = {
    "a value moved on": Forgery("reading", _moved(_leaf, 8)),
    "a value moved back by a byte": Forgery("reading", _moved(_leaf, -1)),
    "all values moved on": Forgery("reading", _moved(_all, 8)),
    "all values moved back": Forgery("reading", _moved(_all, -2)),
    "all values a page on": Forgery("reading", _moved(_all, 4096)),
    "all values a page back": Forgery("reading", _moved(_all, -4096)),
    "a large value moved on": Forgery("reading", _moved(_run, 8)),
    "a large value from its header on": Forgery("reading", _at_header),
    "a large value from its second page on": Forgery(
        "reading", lambda made, e: e.__setitem__(made.longest, e[made.longest] + [4096, -6000])
    ),
    "a large value in the middle of its pages": Forgery(
        "reading", lambda made, e: e.__setitem__(made.longest, e[made.longest] + [5000, -6000])
    ),
    "into a key": Forgery("reading", _in_page(lambda made, at: (at - made.key_room, 5))),
    "into the header of a node": Forgery("reading", _in_page(lambda made, at: (at - made.key_room - 8, 6))),
    "a node with its key": Forgery("reading", _in_page(lambda made, at: (at - made.key_room - 8, 20))),
    "into the header of a page": Forgery("reading", _in_page(lambda made, at: (0, 12))),
    "behind the header of a page": Forgery("reading", _in_page(lambda made, at: (made.header, 2))),
    "among the node pointers": Forgery("reading", _in_page(lambda made, at: (made.header + 2, 2))),
    "the number of an overflow page": Forgery("reading", _taken("numbers", _run)),
    "the entry of a database": Forgery("reading", _taken("databases", _leaf)),
    "a key of a branch page": Forgery("reading", _taken("branch", _leaf)),
    "a value a byte longer": Forgery("reading", _longer(_leaf, 1)),
    "a value a byte shorter": Forgery("reading", _longer(_leaf, -1)),
    "an empty value": Forgery("reading", _longer(_leaf, -10_000)),
    "a value beyond its page": Forgery("reading", _longer(_leaf, 5000)),
    "a large value beyond its pages": Forgery("reading", _longer(lambda made: made.longest, 4096)),
    "all values a byte shorter": Forgery("reading", _longer(_all, -1)),
    "all values empty": Forgery("reading", _longer(_all, -20_000)),
    "a large value shorter within its last page": Forgery("sample", _longer(_run, -7)),
    "neighbours exchanged": Forgery("sample", _exchanged(_neighbours)),
    "values of two leaf pages exchanged": Forgery("sample", _exchanged(lambda made: made.in_leaves[[2, -3]])),
    "large values exchanged": Forgery("sample", _exchanged(lambda made: made.on_runs[[1, -2]])),
    "a large value and a small one exchanged": Forgery("sample", _exchanged(lambda made: (_leaf(made), _run(made)))),
    "numbers turned around": Forgery("sample", _permuted(lambda n: np.arange(n)[::-1])),
    "numbers one on": Forgery("sample", _permuted(lambda n: np.roll(np.arange(n), 1))),
    "numbers mixed": Forgery("sample", _permuted(lambda n: np.random.default_rng(1).permutation(n))),
    "the last record missing": Forgery("sample", lambda made, e: {"extents": e[:-1]}),
    "half of the records missing": Forgery("sample", lambda made, e: {"extents": e[: len(e) // 2]}),
    "a value of another database": Forgery("sample", _taken("others", _leaf, 4)),
    "a large value of another database": Forgery("sample", _taken("others", _run, -2)),
    "all values of another database": Forgery("sample", _of_all_others),
    "an entry of the list of free pages": Forgery("sample", _taken("free list", _leaf)),
    "an old value in a free page": Forgery("sample", _old_of(False)),
    "an old large value in free pages": Forgery("sample", _old_of(True)),
    "keys exchanged": Forgery("sample", _other_keys),
    "several values per key": Forgery("sample", lambda made, e: {"first": np.arange(len(e))}),
    "in a meta page": Forgery("loading", _put(_leaf, (4096 + 40, 40))),
    "in no page": Forgery("loading", _put(_leaf, (1 << 40, 40))),
    "before the file": Forgery("loading", _put(_leaf, (-4096, 40))),
    "a negative length": Forgery("loading", _put(_leaf, (9000, -1))),
    "a length that overflows": Forgery("loading", _put(_leaf, (8192, (1 << 63) - 1))),
    "twice the same": Forgery("loading", lambda made, e: e.__setitem__(5, e[6])),
}

#: Of a database with several values per key, in sub-pages.
OF_DUPLICATES: dict[str, Forgery] = {
    "a value moved on": Forgery("reading", _moved(_leaf, 2)),
    "all values moved on": Forgery("reading", _moved(_all, 2)),
    "a value a byte longer": Forgery("reading", _longer(_leaf, 1)),
    "all values a byte shorter": Forgery("reading", _longer(_all, -1)),
    "into the header of an item": Forgery("reading", _in_page(lambda made, at: (at - 8, 6))),
    "two values in one": Forgery("reading", _longer(_leaf, 40)),
    "a whole sub-page": Forgery("reading", lambda made, e: e.__setitem__(0, made.elsewhere["sub-pages"][0])),
    "values exchanged": Forgery("sample", _exchanged(lambda made: made.in_leaves[[2, -3]])),
    "numbers one on": Forgery("sample", _permuted(lambda n: np.roll(np.arange(n), 1))),
    "all values of another database": Forgery("sample", _of_all_others),
    "keys of other records": Forgery("sample", lambda made, e: {"first": np.arange(len(set(made.keys)))}),
}
