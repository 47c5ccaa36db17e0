"""Environments: one data file, opened for reading."""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pario.errors import MissingError, ParioError
from pario.format.tree import database_names
from pario.lmdb import errors
from pario.lmdb.database import _Database
from pario.lmdb.real import real
from pario.lmdb.served import limits, use_service
from pario.lmdb.store import DataFile, Store
from pario.lmdb.txn import Transaction, stat_of
from pario.machine import absolute, closing_fd

if TYPE_CHECKING:
    from pario.lmdb.announced import Announced

#: Pages that one environment keeps in memory at most: the branch and leaf pages of some 10 million large records.
CACHE_BYTES = 64 << 20

#: Data format -> the LMDB that writes it.
_ENGINES = {1: (0, 9, 36), 2: (0, 9, 90), 3: (1, 0, 2)}
_MAX_KEY_V1 = 511


class Environment:
    """An LMDB environment for reading. Takes every argument of py-lmdb's; those that matter here:

    path : the directory, or with subdir=False the data file
    map_size : only shown by `info()`
    readonly : False is accepted; writing raises ReadonlyError all the same
    readahead : False (for random reads) switches off the kernel's read-ahead
    max_dbs : named databases that may be opened
    lib_version : 0 or 1 to accept only files of LMDB 0.9 or 1.0
    cache_bytes : memory for branch and leaf pages

    Nothing is mapped, locked or written. An environment may be opened more than once, pickled (the copy opens the file
    again when it is first used), used after a fork and by several threads.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[Any],
        map_size: int = 10485760,
        subdir: bool = True,
        readonly: bool = False,
        metasync: bool = True,
        sync: bool = True,
        map_async: bool = False,
        mode: int = 0o755,
        create: bool = True,
        readahead: bool = True,
        writemap: bool = False,
        meminit: bool = True,
        max_readers: int = 126,
        max_dbs: int = 0,
        max_spare_txns: int = 0,
        lock: bool = True,
        lib_version: int = -1,
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        arguments = dict(locals())  # all of them, by name
        del arguments["self"]
        self._start({**arguments, "path": os.fspath(path)})
        _check_arguments(self._arguments)
        self._open()

    def _start(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._path = os.fsdecode(arguments["path"])
        self._at = absolute(self._path)
        self._readahead = bool(arguments["readahead"])
        self._map_size: int = arguments["map_size"]
        self._closed = False
        self._file: DataFile | None = None
        self._store: Store | None = None
        self._dbs: dict[bytes | None, _Database] = {}
        #: stores that transactions may still use
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        self._announced: Announced | None = None
        #: cursors with iterators
        self._scans: weakref.WeakSet[Any] = weakref.WeakSet()

    def _open(self) -> None:
        path, subdir = self._at, self._arguments["subdir"]
        file_path = os.path.join(path, "data.mdb") if subdir else path
        try:
            if not subdir and os.path.isdir(path):
                raise MissingError("Is a directory", path=path, hint="For a directory leave subdir=False out")
            if subdir and os.path.isfile(path):
                raise MissingError("Not a directory", path=path, hint="For a data file pass subdir=False")
            if not os.path.exists(file_path):
                if not self._arguments["readonly"] and self._arguments["create"]:
                    raise errors.readonly(f"{self._path}: there is no LMDB, and making one is writing")
                raise MissingError("No such file or directory", path=file_path)
            if not os.path.isfile(file_path):
                raise MissingError("not a regular file", path=file_path)
            file = DataFile(file_path, self._readahead, limits())
            store = Store(file, self._arguments["cache_bytes"])
        except ParioError as e:
            raise errors.translated(e, path) from e
        wanted = self._arguments["lib_version"]
        if wanted >= 0 and (store.snapshot.version > 1) != (wanted == 1):
            raise errors.InvalidError(f"{path}: data format {store.snapshot.version}, not that of lib_version={wanted}")
        use_service(store)
        self._file = file
        self._set(store)

    def _set(self, store: Store) -> Store:
        self._stores.add(store)
        self._store = store
        return store

    def _newest(self) -> Store:
        """The store of the newest snapshot; on a slow store that of up to a tenth of a second ago. Opens the file
        first if this object was unpickled."""
        store = self._store
        try:
            if store is None:
                if self._closed:
                    raise errors.closed()
                self._open()
                assert self._store is not None
                return self._store
            if store.is_new_enough():
                return store
            return self._set(Store(store.file, self._arguments["cache_bytes"]))
        except ParioError as e:
            raise errors.translated(e, self._path) from e
        except OSError as e:
            raise errors.Error(f"{self._path}: {e.strerror}", e.errno or 0, path=self._path) from e

    def __reduce__(self) -> Any:
        if self._closed:
            raise TypeError("cannot pickle a closed Environment")
        return (_unpickled, (type(self), {**self._arguments, "path": self._at}))

    def __enter__(self) -> Environment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Environment {self._path!r}{' (closed)' if self._closed else ''}>"

    @property
    def readonly(self) -> bool:
        """As it was opened; pario writes nothing either way."""
        return bool(self._arguments["readonly"])

    def close(self) -> None:
        """End all transactions and cursors. Idempotent."""
        self._closed = True
        if self._announced is not None:
            self._announced.close()
        self._end_all()
        self._file = None

    def _end_all(self) -> None:
        self._end_scans()
        for store in list(self._stores):
            store.close()
        self._store = None

    def _end_scans(self, txn: Transaction | None = None) -> None:
        """Stop the iterators of a transaction, or of all."""
        if len(self._scans):
            for cursor in list(self._scans):
                if txn is None or cursor.txn is txn:
                    cursor._end_batch()

    # -- what it is ----------------------------------------------------------------------------------------------------

    def path(self) -> str:
        """The path with which it was opened."""
        self._check()
        return self._path

    def flags(self) -> dict[str, bool]:
        """The arguments with which it was opened."""
        self._check()
        names = ("subdir", "readonly", "metasync", "sync", "map_async", "readahead", "writemap", "meminit", "lock")
        return {name: bool(self._arguments[name]) for name in names}

    def stat(self) -> dict[str, int]:
        """Page size, depth, pages and entries of the main database."""
        store = self._newest()
        return stat_of(store.handles[None], store)

    def info(self) -> dict[str, int]:
        """Sizes and the newest transaction. There is no map: `map_addr` is 0."""
        snapshot = self._newest().snapshot
        return {
            "map_addr": 0,
            "map_size": max(self._map_size or snapshot.mapsize, (snapshot.last_pgno + 1) * snapshot.page_size),
            "last_pgno": snapshot.last_pgno,
            "last_txnid": snapshot.txnid,
            "max_readers": self._arguments["max_readers"],
            "num_readers": 0,
        }

    def max_key_size(self) -> int:
        """Length of the longest key that the LMDB library which wrote the file allows."""
        snapshot = self._newest().snapshot
        if snapshot.version == 1:
            return _MAX_KEY_V1
        largest_node = ((snapshot.page_size - snapshot.header - snapshot.sum_size) // 2 & -2) - 2
        return largest_node - snapshot.layout.db.itemsize - struct.calcsize("=IHH")

    def max_readers(self) -> int:
        """As it was opened; pario takes no reader locks."""
        self._check()
        return int(self._arguments["max_readers"])

    def lib_version(self) -> tuple[int, int, int]:
        """The version of LMDB whose format the file has."""
        return _ENGINES[self._newest().snapshot.version]

    def readers(self) -> str:
        """An empty table: pario takes no reader locks."""
        self._check()
        return "(no active readers)\n" if self._arguments["lock"] else "(no reader locks)\n"

    def reader_check(self) -> int:
        """0: pario clears no stale readers."""
        self._check()
        return 0

    def set_mapsize(self, map_size: int) -> None:
        """Ends all transactions, as LMDB's users expect; only `info()` shows the size."""
        self._check()
        if map_size < 0:
            raise OverflowError("map_size must be >= 0")
        self._map_size = map_size
        self._arguments = {**self._arguments, "map_size": map_size}
        self._end_all()
        self._open()

    def sync(self, force: bool = False) -> None:
        """Raises ReadonlyError."""
        self._check()
        raise errors.readonly("sync")

    # -- databases and transactions ------------------------------------------------------------------------------------

    def begin(
        self,
        db: _Database | None = None,
        parent: Transaction | None = None,
        write: bool = False,
        buffers: bool = False,
    ) -> Transaction:
        """A transaction; see `Transaction`."""
        return Transaction(self, db, parent, write, buffers)

    def open_db(
        self,
        key: Any = None,
        txn: Transaction | None = None,
        reverse_key: bool = False,
        dupsort: bool = False,
        create: bool = True,
        integerkey: bool = False,
        integerdup: bool = False,
        dupfixed: bool = False,
    ) -> _Database:
        """A named database, or with key=None the main one. The flags are those of the file, whatever is passed.

        Raises NotFoundError (ReadonlyError with create=True) if there is none, DbsFullError beyond max_dbs.
        """
        if isinstance(key, str):
            raise TypeError("key must be bytes, not str")
        if key is None and (reverse_key or dupsort or integerkey or integerdup or dupfixed):
            raise ValueError("May not set flags on the main database")
        self._check()
        if txn is not None:
            if txn.env is not self:
                raise errors.Error("Transaction belongs to another environment.")
            txn._check()
        name = None if key is None else bytes(memoryview(key))
        found = self._dbs.get(name)
        if found is not None:
            return found
        store = txn._store if txn is not None else self._newest()
        if name is not None:
            if not name and store.snapshot.version == 1:
                raise errors.BadValsizeError("open_db: an empty name")
            if len(self._dbs) - (None in self._dbs) >= self._arguments["max_dbs"]:
                raise errors.DbsFullError(
                    "open_db: no more databases than max_dbs can be open",
                    hint="Pass a larger max_dbs to Environment",
                )
        handle = store.handle(name)
        if handle is None:
            if create:
                raise errors.readonly(f"open_db: there is no database {name!r}, and making one is writing")
            raise errors.NotFoundError(f"open_db: there is no database {name!r}")
        found = self._dbs[name] = _Database(self, name, handle.db.md_flags)
        return found

    def will_read(self, keys: Iterable[Any], db: _Database | None = None) -> None:
        """pario's own, besides py-lmdb's interface: this process, or others of the node, will read the records of these
        keys soon, about in this order. Returns at once; threads read them ahead into the node's page cache, where
        anyone who asks for one finds it.

        keys : looked up later, so keys that are missing are no error; db : as for `begin`

        What one call announces may take a quarter of the memory that is available; the rest of it is not read ahead.
        """
        self._check()
        txn = self.begin(db=db)
        announced = self._announced
        if announced is None or not announced.is_ours or announced.file is not txn._store.file:
            from pario.lmdb.announced import Announced

            announced = self._announced = Announced(txn._store.file)
        announced.bring(txn, list(keys))

    def dbs(self, txn: Transaction | None = None) -> list[Any]:
        """Names of the named databases, at most max_dbs of them."""
        self._check()
        if txn is not None:
            txn._check()
        store = txn._store if txn is not None else self._newest()
        names: list[Any] = []
        try:
            for name in database_names(store.tree()):
                try:
                    self.open_db(name, txn=txn, create=False)
                except errors.DbsFullError:
                    continue
                names.append(memoryview(name) if txn is not None and txn._buffers else name)
        except ParioError as e:
            raise errors.translated(e.at(path=store.file.path), "dbs") from e  # type: ignore[arg-type]
        return names

    def copy(self, path: str | bytes | os.PathLike[Any], compact: bool = False, txn: Transaction | None = None) -> None:
        """A consistent copy in the directory `path` (with subdir=False: the file), which must not hold one yet.

        compact : accepted; free pages are copied all the same. txn : of this snapshot, with compact only
        """
        from pario.lmdb.copying import copy_to

        file_path = os.fsdecode(os.fspath(path))
        file_path = os.path.join(file_path, "data.mdb") if self._arguments["subdir"] else file_path
        store = self._store_to_copy(compact, txn)
        try:
            fd = os.open(file_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as e:
            raise errors.Error(f"{file_path}: {e.strerror}", e.errno or 0, path=file_path) from e
        with closing_fd(fd):
            copy_to(fd, store)

    def copyfd(self, fd: int, compact: bool = False, txn: Transaction | None = None) -> None:
        """Like `copy`, into an open file."""
        from pario.lmdb.copying import copy_to

        copy_to(fd, self._store_to_copy(compact, txn))

    def _store_to_copy(self, compact: bool, txn: Transaction | None) -> Store:
        self._check()
        if txn is None:
            return self._newest()
        if not compact:
            raise TypeError("txn argument only compatible with compact=True")
        txn._check()
        return txn._store

    def _check(self) -> None:
        if self._closed:
            raise errors.closed()


def _unpickled(cls: type[Environment], arguments: dict[str, Any]) -> Environment:
    env = cls.__new__(cls)
    env._start(arguments)
    return env


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name in ("map_size", "max_dbs", "max_readers", "max_spare_txns", "mode"):
        if arguments[name] < 0:
            raise OverflowError(f"{name} must be >= 0, got {arguments[name]!r}")
    if arguments["max_readers"] == 0:
        raise errors.InvalidParameterError("max_readers must be at least 1")
    wanted = arguments["lib_version"]
    if wanted < -1:
        raise OverflowError(f"lib_version must be 0 or 1, got {wanted!r}")
    if wanted > 1:
        raise errors.Error(f"lib_version must be 0 or 1, got {wanted!r}")


def version(subpatch: bool = False, *, lib_version: int | None = None) -> tuple[int, ...]:
    """The version of LMDB: of the real library if it is installed, else the newest whose files pario reads."""
    if real is not None:
        return tuple(real.version(subpatch) if lib_version is None else real.version(subpatch, lib_version=lib_version))
    if lib_version not in (None, 0, 1):
        raise errors.Error(f"lib_version must be 0 or 1, got {lib_version!r}")
    return (_ENGINES[3] if lib_version == 1 else _ENGINES[1]) + ((0,) if subpatch else ())
