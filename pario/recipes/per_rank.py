"""Recipe "plain", the baseline of the others: every rank reads for itself, with the real py-lmdb.

In key order a cursor walks over all records, including those of the other ranks, as Caffe's does; in other orders `get`
looks up each record's key. Values are views of the mapping, which the decoder copies into the batch: one copy, as in a
loop written by hand. The mapping is the file, so the index says where each view lies; asking every view for its address
would cost more than the search in the tree.

LMDB's mapping has a risk that pario cannot remove: if the store fails, or the file is truncated after it was opened,
the process ends with SIGBUS. (On opening, pario checks that the file is as long as its meta pages say.)
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from pario.comm.base import together
from pario.errors import CorruptedError, FileError, OptionError, SnapshotError
from pario.feed.source import Context, Piece, Source, Supply
from pario.lmdb.real import real
from pario.locate.base import Index
from pario.plan.seats import seat_share
from pario.plan.selection import runs_of
from pario.plan.stream import Work
from pario.records import Records

_OPEN_ALREADY = "py-lmdb opens a file once per process: close the other one, or use another recipe"


class PlainLmdb:
    """One rank's environment of the real py-lmdb, with a transaction that lasts until `close`.

    path : the data file
    index : index of the database; the transaction must see the same state of the file
    keys : keys of all records in key order, for orders other than key order; None: not needed

    Raises OptionError without py-lmdb, FileError if py-lmdb cannot open the file, SnapshotError.
    """

    def __init__(self, path: str, index: Index, keys: list[bytes] | None) -> None:
        if real is None:
            raise OptionError("the recipe plain reads through py-lmdb, which is not installed", hint="pip install lmdb")
        db, snapshot = index.database.name, index.snapshot
        self.path = path
        self.keys = keys
        self._env: Any = None
        try:
            self._env = real.open(path, subdir=False, readonly=True, lock=False, max_dbs=1 if db is not None else 0)
            handle = self._env.open_db(db, create=False) if db is not None else None
            self.txn = self._env.begin(db=handle, buffers=True)
            dupsort = self._env.open_db(db, txn=self.txn, create=False).flags(self.txn)["dupsort"]
        except real.Error as e:
            self.close()
            hint = _OPEN_ALREADY if "already open" in str(e) else None
            raise FileError(f"py-lmdb cannot open it: {e}", path=path, hint=hint) from e
        if self.txn.id() != snapshot.txnid:
            raise SnapshotError(
                f"a writer committed while the file was opened: transaction {self.txn.id()}, not {snapshot.txnid}",
                path=path,
                hint="Open it again.",
            )
        #: with duplicates and keys: i64[n], each record's number among the values of its key
        self.places = _places(keys) if dupsort and keys is not None else None
        #: address of the mapping: a value's address minus its offset in the file
        self.base = self._find_base(index)

    def _find_base(self, index: Index) -> int:
        with self.txn.cursor() as cursor:
            for record, value in enumerate(cursor.iternext(keys=False, values=True)):
                if len(value):
                    return _address(value) - int(index.places(np.array([record]))["offset"][0])
        return 0  # no record has any bytes

    def close(self) -> None:
        """Idempotent. Views of values are invalid afterwards."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


class PerRank(Supply):
    """Each rank's own py-lmdb. Construction is collective; raises on all ranks together."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        reader = context.reader
        with together(context.world, "opening the dataset with py-lmdb"):
            keys = None if context.stream.shuffle is False else reader.keys(np.arange(len(reader)))
            self._plain = PlainLmdb(reader.path, reader.index, keys)

    def needs_ring(self, way: str) -> bool:
        return False

    def source(self, work: Work, way: str) -> Source:
        return PerRankSource(self.context, work, self._plain)

    def close(self, limit_s: float = math.inf) -> bool:
        if limit_s > 0:  # otherwise a thread may still decode from its mapping
            self._plain.close()
        return True


class PerRankSource(Source):
    """One rank's records of one epoch. Looking them up counts as `share` (waiting for bytes) and as `locate`."""

    def __init__(self, context: Context, work: Work, plain: PlainLmdb) -> None:
        super().__init__(context, work)
        schedule, index = work.schedule, context.reader.index
        self._source = plain
        self._order = work.order
        self._index = index
        self._seats = context.seats
        self._ids = np.empty((work.table_steps, schedule.batch_size), np.int64)
        self._next_group = 0
        self._ready = 0
        memory = (ctypes.c_uint8 * index.snapshot.file_bytes).from_address(plain.base)
        self._map = np.frombuffer(memory, np.uint8)
        self._cursor: Any = plain.txn.cursor()
        #: keys only: stepping over a record does not touch its value
        self._walk: Iterator[Any] = self._cursor.iternext(keys=True, values=False)
        self._position = 0  # record id of the walk's next item
        context.decode.held.held_bytes = context.options.held_bytes
        context.stats.reader = False

    def pieces(self, step: int, steps: int = 1) -> list[Piece]:
        return [Piece(step, 0, 0, self._schedule.rows(step, self._seats.mine), True)]

    def take(self, piece: Piece, check: Callable[[], None]) -> Records:
        begin = time.perf_counter()
        while self._ready <= piece.step:
            self._next()
        ids = self._ids[piece.step % len(self._ids), : piece.stop]
        views = self._get(ids) if self._source.keys is not None else self._step_to(ids)
        places = self._index.places(ids)
        nbytes = np.ascontiguousarray(places["nbytes"])
        self._compare(ids, views, places)
        took = time.perf_counter() - begin
        self._stats.share += took
        self._stats.locate += took
        self._stats.node_bytes += int(nbytes.sum())
        return Records(ids, self._map, np.ascontiguousarray(places["offset"]), nbytes)

    def release(self, piece: Piece) -> bool:
        """Raises SnapshotError if a writer may have overwritten the records meanwhile."""
        self._context.reader.checked.snapshot()
        return True

    def _next(self) -> None:
        """Compute which records the next steps have."""
        group = self._next_group
        numbers, steps, rows = seat_share(self._schedule, self._order, group, self._seats)
        self._ids[steps % len(self._ids), rows] = self._context.ids_of(numbers, self._order)
        self._ready = self._schedule.group_ready_ticks(group)
        self._next_group = group + 1

    def _step_to(self, ids: np.ndarray) -> list[Any]:
        """Values of records further on in key order; the cursor walks over those between them."""
        walk, value = self._walk, self._cursor.value
        views: list[Any] = []
        for first, stop in runs_of(ids).tolist():
            deque(islice(walk, first - self._position), maxlen=0)
            self._position = stop
            views += [value() for _ in islice(walk, stop - first)]
        if len(views) < len(ids):
            raise CorruptedError("LMDB's cursor is at its end too early", path=self._source.path, record=int(ids[0]))
        return views

    def _get(self, ids: np.ndarray) -> list[Any]:
        """Values by their keys."""
        keys, get, places = self._source.keys, self._source.txn.get, self._source.places
        assert keys is not None
        if places is not None:
            return [self._duplicate(keys[i], int(places[i])) for i in ids.tolist()]
        views = [get(keys[i]) for i in ids.tolist()]
        if None in views:
            record = int(ids[views.index(None)])
            raise CorruptedError("LMDB finds no record of this key", path=self._source.path, record=record)
        return views

    def _compare(self, ids: np.ndarray, views: list[Any], places: np.ndarray) -> None:
        """Raise an error unless LMDB's values match the index: all lengths, and the first address."""
        fits = list(map(len, views)) == places["nbytes"].tolist()
        if fits and len(ids) and len(views[0]):
            fits = _address(views[0]) - self._source.base == places["offset"][0]
        if not fits:
            raise CorruptedError(
                "LMDB finds other values than the index says",
                path=self._source.path,
                record=int(ids[0]),
                hint="Delete the .pario.index beside the file and try again.",
            )

    def _duplicate(self, key: bytes, number: int) -> Any:
        cursor = self._cursor
        found = cursor.set_key(key)
        for _ in range(number):
            found = found and cursor.next_dup()
        if not found:
            raise CorruptedError(f"LMDB finds no value {number} of the key {key!r}", path=self._source.path)
        return cursor.value()


def _address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


def _places(keys: list[bytes]) -> np.ndarray:
    new = np.array([True, *(a != b for a, b in zip(keys[1:], keys, strict=False))])
    first = np.flatnonzero(new)
    return np.arange(len(keys)) - np.repeat(first, np.diff(np.append(first, len(keys))))
