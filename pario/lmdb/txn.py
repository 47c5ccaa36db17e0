"""Read-only transactions: one snapshot, and what is looked up in it."""

from __future__ import annotations

import threading
from array import array
from typing import Any

from pario.lmdb import abi, errors
from pario.lmdb.cursor import Cursor
from pario.lmdb.database import _Database
from pario.lmdb.native import compile_now, compiled_get, later
from pario.lmdb.objects import slot_of
from pario.lmdb.store import Handle, Store

_get: Any = later("get", globals())


class _Slots:
    """What the compiled `get` looks at: engine.get_method."""

    __slots__ = ("_fast", "_slow")


class Transaction(_Slots):
    """A snapshot of the environment. As a context manager: ends at its end.

    env : the environment; db : default database; parent, write : for writers, refused
    buffers : keys and values as read-only memoryviews instead of bytes

    A transaction may be used by several threads at once. Nothing is locked and no reader slot taken: when a writer
    commits twice, so that pages of this snapshot may be overwritten, the next read from the file raises BadTxnError.
    It has the newest snapshot; where reading the meta page takes longer than a millisecond, that of up to 0.1 s ago.
    """

    __slots__ = ("__weakref__", "_at", "_buffers", "_db", "_name", "_open", "_packed", "_store", "_words", "env")

    def __init__(
        self,
        env: Any,
        db: _Database | None = None,
        parent: Transaction | None = None,
        write: bool = False,
        buffers: bool = False,
    ) -> None:
        if write or parent is not None:
            raise _refusal(parent)
        self.env = env
        self._store: Store = env._newest()
        self._buffers = buffers
        self._db = db
        handle = self._store.handles[None] if db is None else self._handle(db)
        self._words = words = array("q", (1, self._store.at, handle.at))
        self._at = words.buffer_info()[0]
        self._packed = packed = self._store.packed(handle)
        self._fast = 0 if buffers or packed is not None else self._at
        self._slow = _get_any
        self._open = True

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'Transaction' object: begin one in the process that reads")

    def __repr__(self) -> str:
        return f"<Transaction {self._store.snapshot.txnid} of {self._store.file.path!r}>"

    def get(self, key: Any, default: Any = None, db: _Database | None = None) -> Any:
        """The value of `key` (its first duplicate), or `default` if the key is missing."""
        # The first call puts a compiled method in the place of this one.
        if Transaction.get is _first_get:
            _compile_get(self)
        return Transaction.get(self, key, default, db)

    def _get_any(self, key: Any, default: Any = None, db: _Database | None = None) -> Any:
        raised = self._store.file.raised  # of the compiled method, which is left to this one to tell
        if raised and threading.current_thread() is threading.main_thread():
            raise raised.pop()
        at, packed = 0, self._packed
        if db is not None:
            handle = self._handle(db)
            at, packed = handle.at, self._store.packed(handle)
        if packed is not None and packed.cursor is not packed.of_entries:  # a key may lie inside an entry
            return self.cursor(db).get(key, default)
        value = _get(self._at, at, key)
        if value.__class__ is bytes:
            if packed is not None:
                if key == packed.key:
                    return default
                if key not in packed.names:
                    value = packed.one(value)
            return memoryview(value) if self._buffers else value
        if value is False:
            return default
        if abi.code_of(value) == abi.NOT_BYTES:
            return self._get_any(abi.plain_bytes(key), default, db)
        raise self._store.error(value, "get")

    def cursor(self, db: _Database | None = None) -> Cursor:
        """A cursor on `db` or the default database."""
        return Cursor(db if db is not None else self._db, self)

    def stat(self, db: _Database | None = None) -> dict[str, int]:
        """Page size, depth, pages and entries of a database."""
        self._check()
        handle = self._handle(db if db is not None else self._db)
        return stat_of(handle, self._store)

    def id(self) -> int:
        """The transaction number of the snapshot."""
        self._check()
        return self._store.snapshot.txnid

    def commit(self) -> None:
        """End the transaction."""
        self._check()
        self.abort()

    def abort(self) -> None:
        """End the transaction. Idempotent."""
        if self._open:
            self._open = False
            self._words[abi.ALIVE] = 0
            self.env._end_scans(self)

    put = errors.refusing("put", "key value dupdata overwrite append db")
    replace = errors.refusing("replace", "key value db")
    pop = errors.refusing("pop", "key db")
    delete = errors.refusing("delete", "key value db")
    drop = errors.refusing("drop", "db delete")

    def _check(self) -> None:
        if not self._open or not self._store.words[abi.OPEN]:
            raise errors.closed()

    def _handle(self, db: _Database | None) -> Handle:
        """The database in this snapshot."""
        if db is None:
            return self._store.handles[None]
        if db.__class__ is not _Database:
            raise TypeError(f"db must be a _Database from open_db(), not {type(db).__name__}")
        if db._env() is not self.env:
            raise errors.Error("Database handle belongs to another environment.")
        handle = self._store.handle(db._name)
        if handle is None:
            raise errors.InvalidParameterError(f"the database {db._name!r} is not in this transaction's snapshot")
        return handle


_first_get, _get_any = Transaction.get, Transaction._get_any
_get_any.__name__, _get_any.__qualname__ = _first_get.__name__, _first_get.__qualname__  # in its messages
_GET_DOC = "get($self, /, key, default=None, db=None)\n--\n\nThe value of `key`, of its first duplicate, or `default`."


def _compile_get(txn: Transaction) -> None:
    """Let Transaction.get be the compiled method, if the slots lie where it expects them; else the one in Python."""
    compile_now()
    expected = (txn._fast, _get_any)
    found = tuple(slot_of(txn, i) for i in range(2))
    made = compiled_get(Transaction, _GET_DOC) if found == tuple(map(id, expected)) else None
    Transaction.get = made or _get_any  # type: ignore[method-assign]


def stat_of(handle: Handle, store: Store) -> dict[str, int]:
    db, packed = handle.db, store.packed(handle)
    return {
        "psize": store.snapshot.page_size,
        "depth": db.md_depth,
        "branch_pages": db.md_branch_pages,
        "leaf_pages": db.md_leaf_pages,
        "overflow_pages": db.md_overflow_pages,
        "entries": db.md_entries - (0 if packed is None else packed.hidden),
    }


def _refusal(parent: Transaction | None) -> errors.Error:
    if parent is not None:
        return errors.InvalidParameterError("Read-only transactions cannot be nested.")
    return errors.readonly("Cannot start write transaction with read-only env")
