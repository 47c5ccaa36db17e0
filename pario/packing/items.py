"""What is packed, as numbered records in key order: the contract of every source, and the databases of an LMDB.

Items ── ReaderItems   a database, read by all ranks through its index (a packed one gives its raw values)
      ── TreeItems     the records that lie beside named databases in the main one, for which there is no index
      ── folder.FileItems, tars.MemberItems, several.Merged, several.Subset
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from pario.codec.packing import Packing
from pario.comm.base import AnyWorld, together
from pario.dataset.packed import packing_of
from pario.dataset.reader import Reader
from pario.errors import CorruptedError, DecodeError, FileError
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import check_snapshot, read_snapshot
from pario.format.layout import F_BIGDATA, F_SUBDATA, MDB_DUPSORT
from pario.format.meta import Snapshot
from pario.format.tree import Tree, database_names, named_database, names_in
from pario.locate.base import key_of
from pario.locate.hidden import is_entry, looks_reserved
from pario.records import Records

#: Of a main database with more leaf pages, not all are read before its records are.
_FEW_LEAVES = 64


class Items(ABC):
    """Records 0..n-1 of one database, in the order of their keys. Any thread; nothing is collective.

    n : number of records
    flags : LMDB's md_flags of the database that they come from, and go to
    txnid : of the state of the LMDB that they are, None if they are of no LMDB
    sizes : i64[n], bytes of each value
    """

    n: int
    flags: int = 0
    txnid: int | None = None
    sizes: np.ndarray

    @abstractmethod
    def keys(self, begin: int, stop: int) -> list[bytes]:
        """The keys of records begin..stop-1."""

    @abstractmethod
    def read(self, ids: np.ndarray) -> Records:
        """The values of these records (i64[m]), in this order, in new memory. Raises FileError and its children."""

    def close(self) -> None:
        """Idempotent."""
        return None

    @property
    def nbytes(self) -> int:
        """Of all values."""
        return int(self.sizes.sum())


class Database(NamedTuple):
    """One database of an LMDB file. name : None is the main one; mixed : named databases lie beside its records."""

    path: str
    name: bytes | None
    flags: int
    records: int
    mixed: bool = False


def databases_of(path: str, names: Sequence[bytes] | None = None) -> tuple[Snapshot, list[Database]]:
    """The state of an LMDB's data file, and its databases: the main one first. Raises FileError.

    names : of the named ones, where they are known
    """
    with closing(PosixFetcher(path)) as fetcher:
        try:
            snapshot = read_snapshot(fetcher)
            main = _main_tree(fetcher, snapshot)
            names = _names(main) if names is None else names
            found = [Database(path, None, main.db.md_flags, main.db.md_entries - len(names), mixed=bool(names))]
            for name in names:
                db = named_database(main, name)
                found.append(Database(path, name, db.md_flags, db.md_entries))
            check_snapshot(fetcher, snapshot)
            return snapshot, found
        except FileError as e:
            raise e.at(path=path) from None


def _names(main: Tree) -> list[bytes]:
    """Of the named databases. In a large main database the first and the last leaf page say whether there are any: to
    read all others for that would take as long as packing them. (Where they lie, the Reader raises DatabaseError.)"""
    if main.db.md_root < 0 or main.flags & MDB_DUPSORT:
        return []
    ends = [main.first()[-1][0], main.last()[-1][0]]
    if main.db.md_leaf_pages > _FEW_LEAVES and not any(list(names_in(leaf)) for leaf in ends):
        return []
    return list(database_names(main))


def open_items(database: Database, world: AnyWorld) -> Items:
    """Collective over `world`. Raises FileError on all ranks."""
    if database.records == 0:
        return NoItems(database.flags)
    if database.mixed or (database.name is None and database.records == 1):  # which may be the reserved entry alone
        with together(world, "reading the main database"):
            return TreeItems(database)
    reader = Reader(database.path, comm=world, db=database.name, save_index=False)
    return ReaderItems(reader, database.flags)


class NoItems(Items):
    """An empty database."""

    n = 0

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.sizes = np.empty(0, np.int64)

    def keys(self, begin: int, stop: int) -> list[bytes]:
        return []

    def read(self, ids: np.ndarray) -> Records:
        return Records.of(ids, [])


class ReaderItems(Items):
    """Those of an open Reader. packing : how they are stored, None if as they are."""

    def __init__(self, reader: Reader, flags: int) -> None:
        self._reader = reader
        self.flags = flags
        self.txnid = reader.snapshot.txnid
        self.n = len(reader)
        self.packing = reader.packing
        stored = reader.index.extents["nbytes"]
        self.sizes = np.ascontiguousarray(stored) if self.packing is None else self.packing.sizes

    def keys(self, begin: int, stop: int) -> list[bytes]:
        try:
            return self._reader.keys(np.arange(begin, stop))
        except DecodeError as e:
            raise _damaged(e.what, self._reader.path, e.record, e.key) from None

    def read(self, ids: np.ndarray) -> Records:
        stored = self._reader.read_stored(ids)
        return _unpacked(self, self.packing, stored, self._reader.path, lambda i: key_of(self._reader.index, i))

    def close(self) -> None:
        self._reader.abandon()


class TreeItems(Items):
    """The records beside named databases, found page by page: there are few of them."""

    def __init__(self, database: Database) -> None:
        self._fetcher = PosixFetcher(database.path)
        self._snapshot = read_snapshot(self._fetcher)
        self.txnid = self._snapshot.txnid
        self._lock = threading.Lock()
        self.flags = database.flags
        self._keys: list[bytes] = []
        self._values: list[bytes | tuple[int, int]] = []  # or (offset, bytes) in the file
        for leaf, i in _main_tree(self._fetcher, self._snapshot).items():
            node = leaf.node(i)
            if node.flags == F_SUBDATA:
                continue
            self._keys.append(bytes(node.key))
            if node.flags & F_BIGDATA:
                run = node.overflow()
                self._values.append((run.offset, run.nbytes))
            else:
                self._values.append(bytes(node.data[: node.nbytes]))
        check_snapshot(self._fetcher, self._snapshot)
        self.packing: Packing | None = None
        if self._keys and looks_reserved(self._keys[-1], self.flags):
            entry = self._value(len(self._keys) - 1)
            if is_entry(entry):
                del self._keys[-1], self._values[-1]
                self.packing = packing_of(entry, len(self._keys), database.path)
                self.packing.refuse_blocks(database.path)
        self.n = len(self._keys)
        stored = (value[1] if isinstance(value, tuple) else len(value) for value in self._values)
        self.sizes = np.fromiter(stored, np.int64, self.n) if self.packing is None else np.asarray(self.packing.sizes)

    def _value(self, record: int) -> bytes:
        value = self._values[record]
        if not isinstance(value, tuple):
            return value
        found = self._fetcher.pread(*value)
        if len(found) < value[1]:
            raise CorruptedError("the file ends inside a value", path=self._fetcher.path, key=self._keys[record])
        return bytes(found)

    def keys(self, begin: int, stop: int) -> list[bytes]:
        return self._keys[begin:stop]

    def read(self, ids: np.ndarray) -> Records:
        values = [self._value(record) for record in ids.tolist()]
        with self._lock:
            check_snapshot(self._fetcher, self._snapshot)
        return _unpacked(self, self.packing, Records.of(ids, values), self._fetcher.path, self._keys.__getitem__)

    def close(self) -> None:
        self._fetcher.close()


def _unpacked(
    items: Items, packing: Packing | None, stored: Records, path: str, key: Callable[[int], bytes | None]
) -> Records:
    """The values of these records. key : key(record), for the error"""
    if packing is None:
        return stored
    sizes = items.sizes[stored.ids]
    starts, out = np.cumsum(sizes) - sizes, np.empty(int(sizes.sum()), np.uint8)
    for row, reason in packing.unpack(stored, out, starts, sizes, packing.ordinals(stored.ids)):
        record = int(stored.ids[row])
        raise _damaged(reason, path, record, key(record))
    return Records(stored.ids, out, starts, sizes)


def _damaged(reason: str, path: str, record: int | None, key: bytes | None) -> CorruptedError:
    hint = "Bring the file back from its source."
    return CorruptedError(f"a packed value is damaged: {reason}", path=path, record=record, key=key, hint=hint)


def _main_tree(fetcher: PosixFetcher, snapshot: Snapshot) -> Tree:
    size = snapshot.page_size
    return Tree(lambda pgno: fetcher.pread(pgno * size, size), snapshot, snapshot.main)
