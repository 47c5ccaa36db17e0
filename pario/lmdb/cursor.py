"""Cursors: a place in a database, moved by compiled functions; iterators that fetch many items per call.

An iterator and its cursor share one place. Iterators fetch batches, so that the cursor stands at a batch's end while
the user is in its middle. The place is put right when somebody asks for it: the batch's list iterator knows how many
items it has given out, and can be told to stop, upon which the generator goes on from wherever the cursor is.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.format.layout import MDB_DUPFIXED, MDB_DUPSORT
from pario.lmdb import abi, errors
from pario.lmdb.native import later

if TYPE_CHECKING:
    from pario.lmdb.database import _Database

_move: Any = later("move", globals())
_find: Any = later("find", globals())
_look: Any = later("look", globals())
_collect: Any = later("collect", globals())
_find_many: Any = later("find_many", globals())

#: Items per batch: few at first, since many a loop ends early.
_FIRST_BATCH, _GROWTH, _LARGEST_BATCH = 1, 8, 512
#: Bytes of long values after which a batch ends: what the processor's cache holds while nothing waits for the storage,
#: with readahead=True much more as soon as something does.
_BATCH_BYTES, _BATCH_BYTES_WAITING = 128 << 10, 4 << 20


class Cursor:
    """A place in a database, in key order. Moves return whether there is something; after a move that returns False,
    or raises, key and value are empty. After a missed seek the cursor stands nowhere.
    """

    __slots__ = (
        "__weakref__", "_at", "_before", "_buffers", "_given", "_inside", "_moves", "_op", "_packed", "_words",
        "_wraps", "db", "txn",
    )  # fmt: skip

    def __init__(self, db: _Database | None, txn: Any) -> None:
        txn._check()
        handle = txn._handle(db)
        self.db = db
        self.txn = txn
        self._buffers = txn._buffers
        self._words = words = array("q", bytes(8 * abi.CURSOR_WORDS))
        words[abi.C_TXN] = txn._at
        words[abi.C_HANDLE] = handle.at
        self._at = words.buffer_info()[0]
        self._given: Any = None  # the list iterator of the current batch
        self._before = words
        self._moves = self._op = 0
        self._packed = packed = txn._store.packed(handle)
        self._wraps = self._buffers or packed is not None
        if packed is not None:
            self.__class__ = packed.cursor
            self._inside: Any = None

    def close(self) -> None:
        """Close the cursor; later calls of other methods raise. Idempotent."""
        self._end_batch()
        self._words[abi.C_TXN] = 0

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Cursor' object: make one in the process that reads")

    # -- what is here --------------------------------------------------------------------------------------------------

    def key(self) -> Any:
        """The key at the cursor; b"" if the cursor stands nowhere."""
        return self._look(abi.KEY)

    def value(self) -> Any:
        """The value at the cursor; b"" if the cursor stands nowhere."""
        return self._look(abi.VALUE)

    def item(self) -> Any:
        """(key, value)"""
        return self._look(abi.ITEM)

    def count(self) -> int:
        """Number of values of the key."""
        if self._given is not None:
            self._settle()
        self._check()
        words, dupsort = self._words, self.txn._handle(self.db).db.md_flags & MDB_DUPSORT
        if not dupsort or not words[abi.C_SET]:
            code = abi.UNPOSITIONED if dupsort else abi.INCOMPATIBLE
            raise self.txn._store.error(struct.pack("=6q", code, 0, 0, 0, 0, 0), "count")
        words[abi.C_END] = 0  # as in LMDB, anyone who counts stands on the key again
        return words[abi.C_DUP_ENTRIES] if words[abi.C_DUPS] else 1

    def _look(self, what: int) -> Any:
        if self._given is not None:
            self._settle()
        if not self._words[abi.C_VALID] and self._words[abi.C_TXN]:
            self.txn._check()
            nothing: Any = memoryview(b"") if self._buffers else b""
            return (nothing, nothing) if what == abi.ITEM else nothing
        found = _look(self._at, what)
        if found.__class__ is bytearray:
            raise self._error(found, "read")
        return self._wrapped([found], what)[0] if self._wraps else found

    # -- moves ---------------------------------------------------------------------------------------------------------

    def first(self) -> bool:
        """Move to the first item. Returns False if the database is empty."""
        return self._go(abi.FIRST)

    def last(self) -> bool:
        """Move to the last item."""
        return self._go(abi.LAST)

    def next(self) -> bool:
        """Move to the next item, which may be a duplicate; to the first item if the cursor stands nowhere."""
        if self._given is not None:
            self._settle()
        done = _move(self._at, 2)
        if done is True or done is False:
            return done
        raise self._error(done, "next")

    def prev(self) -> bool:
        """Move to the previous item; to the last item if the cursor stands nowhere."""
        return self._go(abi.PREV)

    def first_dup(self) -> bool:
        """Move to the first duplicate of the key."""
        return self._go(abi.FIRST_DUP)

    def last_dup(self) -> bool:
        """Move to the last duplicate of the key."""
        return self._go(abi.LAST_DUP)

    def next_dup(self) -> bool:
        """Move to the next duplicate of the key."""
        return self._go(abi.NEXT_DUP)

    def prev_dup(self) -> bool:
        """Move to the previous duplicate of the key."""
        return self._go(abi.PREV_DUP)

    def next_nodup(self) -> bool:
        """Move to the first duplicate of the next key."""
        return self._go(abi.NEXT_NODUP)

    def prev_nodup(self) -> bool:
        """Move to the last duplicate of the previous key."""
        return self._go(abi.PREV_NODUP)

    def set_key(self, key: Any) -> bool:
        """Move to a key, at its first duplicate."""
        return self._seek(abi.SET_KEY, key, b"")

    def set_range(self, key: Any) -> bool:
        """Move to the first key that is >= `key`."""
        return self._seek(abi.SET_RANGE, key, b"")

    def set_key_dup(self, key: Any, value: Any) -> bool:
        """Move to a key and value."""
        return self._seek(abi.SET_KEY_DUP, key, value)

    def set_range_dup(self, key: Any, value: Any) -> bool:
        """Move to the first duplicate of a key that is >= `value`."""
        return self._seek(abi.SET_RANGE_DUP, key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        """Move to a key as `set_key` does. Returns its value, or `default` if the key is missing."""
        return self._look(abi.VALUE) if self._seek(abi.SET_KEY, key, b"") else default

    def _go(self, op: int) -> bool:
        if self._given is not None:
            self._settle()
        done = _move(self._at, op)
        if done is True or done is False:
            return done
        raise self._error(done, "move")

    def _seek(self, op: int, key: Any, value: Any) -> bool:
        if self._given is not None:
            self._settle()
        done = _find(self._at, op, key, value)
        if done is True or done is False:
            return done
        if abi.code_of(done) == abi.NOT_BYTES:
            return self._seek(op, abi.plain_bytes(key), abi.plain_bytes(value))
        raise self._error(done, "seek")

    def _error(self, noted: bytearray, what: str) -> errors.Error:
        self._words[abi.C_VALID] = 0
        error: errors.Error = self.txn._store.error(noted, what)
        return error

    # -- iterators -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.iternext()

    def iternext(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        """Iterate forward from the cursor, or from the first item if it stands nowhere, over items, keys or values."""
        return self._iterate(abi.NEXT, abi.FIRST, keys, values)

    def iterprev(self, keys: bool = True, values: bool = True) -> Iterator[Any]:
        """Iterate backward from the cursor, or from the last item if it stands nowhere."""
        return self._iterate(abi.PREV, abi.LAST, keys, values)

    def iternext_dup(self, keys: bool = False, values: bool = True) -> Iterator[Any]:
        """Iterate forward over the duplicates of the key."""
        return self._iterate(abi.NEXT_DUP, None, keys, values)

    def iterprev_dup(self, keys: bool = False, values: bool = True) -> Iterator[Any]:
        """Iterate backward over the duplicates of the key."""
        return self._iterate(abi.PREV_DUP, None, keys, values)

    def iternext_nodup(self, keys: bool = True, values: bool = False) -> Iterator[Any]:
        """Iterate forward over the keys, each once."""
        return self._iterate(abi.NEXT_NODUP, abi.FIRST, keys, values)

    def iterprev_nodup(self, keys: bool = True, values: bool = False) -> Iterator[Any]:
        """Iterate backward over the keys, each once."""
        return self._iterate(abi.PREV_NODUP, abi.LAST, keys, values)

    def _iter_from(self, k: Any, reverse: bool) -> Iterator[Any]:
        found = self.first() if not k and not reverse else self.set_range(k)
        if reverse:
            if not found:
                self.last()
            return self.iterprev()
        return self.iternext() if found else iter(())

    def _iterate(self, op: int, start: int | None, keys: bool, values: bool) -> Iterator[Any]:
        if self._given is not None:
            self._settle()
        if not self._words[abi.C_VALID]:
            if start is not None:
                self._go(start)
            else:
                self._check()
        what = abi.KEY if not values else abi.VALUE if not keys else abi.ITEM
        self.txn.env._scans.add(self)
        return self._batches(op, what)

    def _batches(self, op: int, what: int) -> Iterator[Any]:
        most, started, aim = _FIRST_BATCH, 0, _BATCH_BYTES
        counters = self.txn._store.words
        while True:
            waited = counters[abi.WAITED]
            batch = self._fetch(op, started, most, aim, what)
            if counters[abi.WAITED] == waited:
                aim = _BATCH_BYTES
            elif self.txn.env._readahead:
                aim = _BATCH_BYTES_WAITING
            if not batch:
                return
            self._given = given = iter(batch)
            self._moves, self._op = started, op
            started = 1
            yield from given
            if self._given is given:
                self._given = None
            most = min(most * _GROWTH, _LARGEST_BATCH)

    def _fetch(self, op: int, started: int, most: int, aim: int, what: int) -> list[Any]:
        if self._given is not None:
            self._settle()
        self._before = self._words[:]
        batch = _collect(self._at, op, started, most, aim, what)
        if batch.__class__ is not list and most > 1:
            # What comes before the place of the error is given out first.
            self._words[:] = self._before
            batch = _collect(self._at, op, started, 1, aim, what)
        if batch.__class__ is not list:
            raise self._error(batch, "iterate")
        return self._wrapped(batch, what)

    def _settle(self) -> None:
        """Move the cursor to the item that the iterator returned last."""
        left = self._end_batch()
        if left:
            here = self._words
            txn = here[abi.C_TXN]
            here[:] = self._before
            here[abi.C_TXN] = txn
            for _ in range(self._moves - left):
                Cursor._go(self, self._op)  # to items that have been there

    def _end_batch(self) -> int:
        """Stop the iterator. Returns the number of items that it had left.

        `_moves` becomes the number of moves to the last item of the batch.
        """
        given, self._given = self._given, None
        if given is None:
            return 0
        left: int = given.__length_hint__()
        if left:
            _, (items,), _index = given.__reduce__()
            given.__setstate__(len(items))
            self._moves += len(items) - 1
        return left

    def _check(self) -> None:
        if not self._words[abi.C_TXN]:
            raise errors.closed()
        self.txn._check()

    # -- many keys -----------------------------------------------------------------------------------------------------

    def getmulti(
        self,
        keys: Iterable[Any],
        dupdata: bool = False,
        dupfixed_bytes: int | None = None,
        keyfixed: bool = False,
        values: bool = True,
    ) -> Any:
        """The items [(key, value), ...] of the keys that exist, in the given order.

        dupdata : all duplicates of each key; values=False : [key, ...]
        dupfixed_bytes, keyfixed : with both a memoryview of all keys and values one after the other
        """
        if dupfixed_bytes and dupfixed_bytes < 0:
            raise OverflowError("Integer argument must be >= 0")
        if (dupfixed_bytes or keyfixed) and not dupdata:
            raise TypeError("dupdata is required for dupfixed_bytes/keyfixed.")
        if keyfixed and not dupfixed_bytes:
            raise TypeError("dupfixed_bytes is required for keyfixed.")
        if not values and dupdata:
            raise TypeError("values=False is incompatible with dupdata.")
        self._check()
        if self._given is not None:
            self._settle()
        if not dupdata:
            return self._get_many(list(keys), abi.ITEM if values else abi.KEY)
        found: list[Any] = []
        for key in keys:
            if self.set_key(key):
                many = self._iterate(abi.NEXT_DUP, None, True, True)
                found.extend(self._fixed_duplicates(dupfixed_bytes) if dupfixed_bytes else many)
        if not keyfixed:
            return found
        widths = {len(key) for key, _ in found}
        if len(widths) > 1:
            raise ValueError("keyfixed=True requires all keys to be the same size")
        return memoryview(b"".join(part for pair in found for part in pair))

    def _get_many(self, keys: list[Any], what: int) -> list[Any]:
        found, jobs = self._found(keys, what)
        if keys:
            self._seek(abi.SET_KEY, keys[-1], b"")
        if len(jobs):
            self.txn._store.read_values(jobs)
        return self._wrapped(found, what)

    def _found(self, keys: list[Any], what: int) -> tuple[list[Any], np.ndarray]:
        """The items, and the long values that are still to be read: i64[m, JOB_WORDS], ascending by page."""
        noted = np.empty(1 + abi.JOB_WORDS * len(keys), np.int64)
        found = _find_many(self._at, keys, what, noted.ctypes.data)
        if found.__class__ is not list:
            if abi.code_of(found) == abi.NOT_BYTES:
                return self._found([abi.plain_bytes(key) for key in keys], what)
            raise self._error(found, "getmulti")
        jobs = noted[1 : 1 + abi.JOB_WORDS * int(noted[0])].reshape(-1, abi.JOB_WORDS)
        return found, jobs[np.argsort(jobs[:, 0], kind="stable")]

    def _runs(self, keys: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Where the long values of these keys lie in the file, with the header before them: (offsets, bytes), i64[m],
        ascending. Reads their leaf pages."""
        _, jobs = self._found(keys, abi.ITEM)
        snapshot = self.txn._store.snapshot
        return jobs[:, 0] * snapshot.page_size, jobs[:, 1] + snapshot.layout.header

    def _wrapped(self, found: list[Any], what: int) -> list[Any]:
        """Memoryviews if the transaction wants them."""
        if not self._buffers:
            return found
        if what == abi.ITEM:
            return [(memoryview(k), memoryview(v)) for k, v in found]
        return [memoryview(x) for x in found]

    def _fixed_duplicates(self, nbytes: int) -> Iterator[tuple[Any, Any]]:
        """(key, nbytes of values) pairs of the key where the cursor stands: all its values, one after the other."""
        if not self.txn._handle(self.db).db.md_flags & MDB_DUPFIXED:
            raise errors.IncompatibleError("getmulti: the database was not created with dupfixed=True")
        key = self.key()
        raw = b"".join(self._iterate(abi.NEXT_DUP, None, False, True))
        part: Any = memoryview(raw) if self._buffers else raw
        return ((key, part[i : i + nbytes]) for i in range(0, len(raw), nbytes))

    # -- writing -------------------------------------------------------------------------------------------------------

    put = errors.refusing("put", "key value dupdata overwrite append")
    putmulti = errors.refusing("putmulti", "items dupdata overwrite append")
    replace = errors.refusing("replace", "key value")
    pop = errors.refusing("pop", "key")
    delete = errors.refusing("delete", "dupdata")
