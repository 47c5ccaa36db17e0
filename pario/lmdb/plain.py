"""The reader that everybody would write: every rank for itself, with the real py-lmdb. What the others are measured
against (recipe "plain").

In key order a cursor walks over all records, those of the other ranks too, as Caffe's does; in other orders `get` with
the record's key. Values are views of the mapping, which the decoder copies into the batch: one copy, as in the best
loop that one can write oneself. Where a view lies in it the index tells, since the mapping is the file: to ask each of
them would cost more than the search in the tree.

What comes with LMDB's mapping and cannot be helped: a store that fails, or a file that is cut off after it was opened,
ends the process with SIGBUS. (That the file is as long as its meta pages say is checked when it is opened.)
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from pario.errors import CorruptedError, FileError, OptionError, SnapshotError
from pario.lmdb.real import real
from pario.locate.index import RecordIndex
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule, node_share
from pario.records import Records
from pario.stats.rank import RankStats

__all__ = ["PlainLmdb", "PlainTap"]

_OPEN_ALREADY = "py-lmdb opens a file once per process: close the other one, or use another recipe"


class PlainLmdb:
    """One rank's environment of the real py-lmdb, with a transaction that lasts until `close`.

    path : the data file
    index : of the database; the transaction must be of the same state of the file
    keys : of all records in key order, for orders other than key order; None: not wanted

    Raises OptionError where py-lmdb is missing, FileError where it cannot open the file, SnapshotError.
    """

    def __init__(self, path: str, index: RecordIndex, keys: list[bytes] | None) -> None:
        if real is None:
            raise OptionError("the recipe plain reads through py-lmdb, which is not here", hint="pip install lmdb")
        db, snapshot = index.database, index.snapshot
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
        #: dupsort with keys: i64[n], the how-manieth value of its key a record is
        self.places = _places(keys) if dupsort and keys is not None else None
        #: address of the mapping: a value's place in memory less its place in the file
        self.base = self._find_base(index)

    def _find_base(self, index: RecordIndex) -> int:
        with self.txn.cursor() as cursor:
            for record, value in enumerate(cursor.iternext(keys=False, values=True)):
                if len(value):
                    return _address(value) - int(index.places(np.array([record]))["offset"][0])
        return 0  # no record has any bytes

    def close(self) -> None:
        """Idempotent. No view of a value may be used afterwards."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


class PlainTap:
    """One rank's records of one epoch, step by step; the surface of `pario.feed.Tap`.

    check_snapshot : called before a step's records are given back; raises SnapshotError
    stats : of this rank: looking records up counts as `share`, the wait for bytes, and as `locate`
    """

    pieces = 1

    def __init__(
        self,
        source: PlainLmdb,
        schedule: Schedule,
        order: Order,
        *,
        index: RecordIndex,
        seat: int,
        table_steps: int,
        check_snapshot: Callable[[], None],
        stats: RankStats,
    ) -> None:
        self._source = source
        self._schedule = schedule
        self._order = order
        self._index = index
        self._seat = seat
        self._check_snapshot = check_snapshot
        self._stats = stats
        self._ids = np.empty((table_steps, schedule.batch_size), np.int64)
        self._next_group = 0
        self._ready = 0
        memory = (ctypes.c_uint8 * index.snapshot.file_bytes).from_address(source.base)
        self._map = np.frombuffer(memory, np.uint8)
        self._cursor: Any = source.txn.cursor()
        #: keys only: stepping over a record touches no byte of its value
        self._walk: Iterator[Any] = self._cursor.iternext(keys=True, values=False)
        self._position = 0  # of the record that the walk brings next

    def rows(self, step: int) -> int:
        """How many records this rank has in `step`."""
        return self._schedule.rows(step, self._seat)

    def take(self, step: int, piece: int, check: Callable[[], None]) -> tuple[int, Records]:
        """(0, this rank's records of `step`): views of LMDB's mapping."""
        begin = time.perf_counter()
        while self._ready <= step:
            self._next()
        ids = self._ids[step % len(self._ids), : self.rows(step)]
        views = self._get(ids) if self._source.keys is not None else self._step_to(ids)
        places = self._index.places(ids)
        nbytes = np.ascontiguousarray(places["nbytes"])
        self._compare(ids, views, places)
        took = time.perf_counter() - begin
        self._stats.share += took
        self._stats.locate += took
        self._stats.node_bytes += int(nbytes.sum())
        return 0, Records(ids, self._map, np.ascontiguousarray(places["offset"]), nbytes)

    def release(self, step: int, piece: int) -> None:
        """The records were used. Raises SnapshotError if a writer may have overwritten them meanwhile."""
        self._check_snapshot()

    def _next(self) -> None:
        """Which records the next steps have."""
        group = self._next_group
        numbers, steps, rows = node_share(self._schedule, self._order, group, self._seat, 1)
        by_offset = self._index.by_offset if self._order.space != "id" else None
        if by_offset is not None:
            numbers = by_offset[numbers]
        self._ids[steps % len(self._ids), rows] = numbers
        self._ready = self._schedule.group_ready_ticks(group)
        self._next_group = group + 1

    def _step_to(self, ids: np.ndarray) -> list[Any]:
        """Values of neighbouring records further on in key order."""
        if not len(ids):
            return []
        walk, value = self._walk, self._cursor.value
        deque(islice(walk, int(ids[0]) - self._position), maxlen=0)
        self._position = int(ids[-1]) + 1
        views = [value() for _ in islice(walk, len(ids))]
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
        """Is what LMDB found what the index says? All lengths, and where the first one lies."""
        fits = list(map(len, views)) == places["nbytes"].tolist()
        if fits and len(ids) and len(views[0]):
            fits = _address(views[0]) - self._source.base == places["offset"][0]
        if not fits:
            raise CorruptedError(
                "LMDB finds other values than the index says",
                path=self._source.path,
                record=int(ids[0]),
                hint="Delete the .pario.h5 beside the file and try again.",
            )

    def _duplicate(self, key: bytes, place: int) -> Any:
        cursor = self._cursor
        found = cursor.set_key(key)
        for _ in range(place):
            found = found and cursor.next_dup()
        if not found:
            raise CorruptedError(f"LMDB finds no value {place} of the key {key!r}", path=self._source.path)
        return cursor.value()


def _address(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


def _places(keys: list[bytes]) -> np.ndarray:
    new = np.array([True, *(a != b for a, b in zip(keys[1:], keys, strict=False))])
    first = np.flatnonzero(new)
    return np.arange(len(keys)) - np.repeat(first, np.diff(np.append(first, len(keys))))
