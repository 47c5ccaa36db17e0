"""The one writer: a thread that appends records to the partial LMDB in the order of their keys (MDB_APPEND).

A batch that another rank sends has two parts, one after the other:

    head     i64 count, i64 bytes of the keys, i64 of the values, i64[count] sizes of the keys, i64[count] of values,
             keys
    values
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import lmdb
import numpy as np

from pario.errors import CorruptedError, FileError
from pario.format.layout import MDB_DUPFIXED, MDB_DUPSORT, MDB_INTEGERDUP, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.threads import Workers

#: A commit after this many bytes, or seconds: that much work is lost by a kill.
COMMIT_BYTES, COMMIT_S = 64 << 20, 10.0
#: A value of half a page takes a page of its own, and a node has a header: this much room per byte is never too little.
_ROOM = 3
_LEAST_MAP = 16 << 20
_WAITING = 2  # batches


class Batch(NamedTuple):
    """Records in key order: their keys, bytes of each value i64[n], the values u8[...] one after the other.

    (Keys stay as they are where nobody else is to get them, and values are cut by functions in C: joining and cutting
    both in Python took 260 ns of a record's 490 on the way into an LMDB, this 170.)
    """

    keys: list[bytes]
    nbytes: np.ndarray
    values: np.ndarray

    def parts(self) -> list[np.ndarray]:
        """[head u8[...], values], as another rank is to get them."""
        sizes = np.fromiter(map(len, self.keys), np.int64, len(self.keys))
        head = np.array([len(sizes), int(sizes.sum()), len(self.values)], np.int64)
        told = b"".join([head.tobytes(), sizes.tobytes(), np.ascontiguousarray(self.nbytes).tobytes(), *self.keys])
        return [np.frombuffer(told, np.uint8), self.values]


def split(whole: np.ndarray) -> list[Batch]:
    """The batches, of which `whole` u8[...] has the parts, one after the other."""
    found, at = [], 0
    while at < len(whole):
        count, keys, values = np.frombuffer(whole[at : at + 24], np.int64).tolist()
        sizes = np.frombuffer(whole[at + 24 : at + 24 + 16 * count], np.int64)
        begin = at + 24 + 16 * count
        at = begin + keys + values
        cut = list(_cut(whole[begin : begin + keys].tobytes(), sizes[:count]))
        found.append(Batch(cut, sizes[count:], whole[begin + keys : at]))
    return found


def _cut(data: Any, sizes: np.ndarray) -> Iterator[Any]:
    """Slices of these sizes, one after the other. data : bytes, or a memoryview"""
    ends = np.cumsum(sizes)
    return map(data.__getitem__, map(slice, (ends - sizes).tolist(), ends.tolist()))


class Writer:
    """Writes one LMDB. Its methods are called by one thread; the work is done by another one of its own, which keeps
    up to two batches waiting: `append` blocks while there are more.

    thread : a lane of one thread, for it alone until `close`
    path : of the LMDB; subdir : it is a folder with data.mdb
    databases : how many named ones it will have

    Raises FileError; that of a batch at one of the next calls.
    """

    def __init__(self, thread: Workers, path: str, *, subdir: bool, databases: int) -> None:
        self.path = path
        self._given = path, subdir, databases
        self._thread = thread
        self._under_way: deque[Future[Any]] = deque()
        self._txn: Any = None
        self._db: Any = None
        self._flags = 0
        self._bytes = 0  # in this transaction
        self._committed = time.monotonic()
        self._env: Any = None
        self._failed: BaseException | None = None
        self._do(self._open)

    @property
    def longest_key(self) -> int:
        return int(self._env.max_key_size())

    def begin(self, name: bytes | None, flags: int, names: Sequence[bytes]) -> int:
        """The next batches are of this database (None: the main one, in which `names` are those of the others).
        Returns how many entries it has already."""
        return int(self._do(self._begin, name, flags, names))

    def append(self, batches: Sequence[Batch]) -> None:
        self.check()
        self._under_way.append(self._thread.call(self._guarded, self._append, batches))
        while len(self._under_way) > _WAITING:
            self._under_way.popleft().result()

    def put(self, key: bytes, value: bytes) -> None:
        """The last entry of the database."""
        self.append([Batch([key], np.array([len(value)]), np.frombuffer(value, np.uint8))])

    def check(self) -> None:
        """Raise what has gone wrong in the meantime."""
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()

    def flush(self) -> None:
        """Wait for all batches, and commit."""
        self._do(self._commit)

    def close(self) -> None:
        """What is not committed is lost. Idempotent."""
        if self._env is not None:
            self._thread.call(self._close).result()

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _do(self, work: Any, *arguments: Any) -> Any:
        while self._under_way:
            self._under_way.popleft().result()
        return self._thread.call(self._guarded, work, *arguments).result()

    def _guarded(self, work: Any, *arguments: Any) -> Any:
        # A batch behind one that is lost would leave a hole, which going on would never fill.
        if self._failed is not None:
            raise self._failed
        try:
            return work(*arguments)
        except (lmdb.Error, OSError) as e:
            self._abort()
            self._failed = self._error(e)
            raise self._failed from e
        except BaseException as e:
            self._abort()
            self._failed = e
            raise

    def _error(self, e: Exception) -> FileError:
        full = isinstance(e, lmdb.DiskError) or os.strerror(errno.ENOSPC) in str(e) or self._is_full()
        if full or os.strerror(errno.EDQUOT) in str(e):
            return FileError(
                f"no space is left for the new dataset: {e}",
                path=self.path,
                hint="Make room and give the same command again: it goes on where it stopped.",
            )
        if isinstance(e, lmdb.BadValsizeError):
            what = f"a key is empty, or longer than the {self.longest_key} bytes that LMDB takes"
            return FileError(what, path=self.path)
        if isinstance(e, (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError)):
            return CorruptedError(f"the unfinished dataset is damaged: {e}", path=self.path)
        return FileError(f"cannot write the new dataset: {e}", path=self.path)

    def _is_full(self) -> bool:
        room = os.statvfs(os.path.dirname(self.path))
        return room.f_bavail * room.f_frsize < 1 << 20

    def _open(self) -> None:
        path, subdir, databases = self._given
        # Synchronous commits: a partial file survives the crash of a machine, too.
        self._env = lmdb.open(
            path, subdir=subdir, map_size=_LEAST_MAP, max_dbs=databases + 1, mode=0o666, meminit=False, readahead=False
        )

    def _begin(self, name: bytes | None, flags: int, names: Sequence[bytes]) -> int:
        self._commit()
        self._flags = flags
        self._make_room(1 << 20)
        if name is None:
            self._db = self._env.open_db(None)
        else:
            self._db = self._env.open_db(
                name,
                reverse_key=bool(flags & MDB_REVERSEKEY),
                dupsort=bool(flags & MDB_DUPSORT),
                integerkey=bool(flags & MDB_INTEGERKEY),
                dupfixed=bool(flags & MDB_DUPFIXED),
                integerdup=bool(flags & MDB_INTEGERDUP),
            )
        with self._env.begin() as txn:
            entries = int(txn.stat(self._db)["entries"])
            return entries - sum(txn.get(other, db=self._db) is not None for other in names) if names else entries

    def _append(self, batches: Sequence[Batch]) -> None:
        for keys, nbytes, values in batches:
            size = sum(map(len, keys)) + len(values)
            self._make_room(size + 64 * len(keys))
            if self._txn is None:
                self._txn = self._env.begin(write=True, db=self._db)
            pairs = zip(keys, _cut(memoryview(values), nbytes), strict=True)
            with self._txn.cursor(db=self._db) as cursor:
                consumed, added = cursor.putmulti(pairs, append=True)
            if added != len(keys) or consumed != added:
                raise CorruptedError(
                    f"{len(keys) - added} of {len(keys)} keys are not in the order of this database's flags",
                    path=self.path,
                    hint="Its writer seems to have set a comparison function of its own (mdb_set_compare).",
                )
            self._bytes += size
            if self._bytes > COMMIT_BYTES or time.monotonic() - self._committed > COMMIT_S:
                self._commit()

    def _make_room(self, nbytes: int) -> None:
        """Let the map grow before it is full, which needs a commit."""
        info = self._env.info()
        size = self._env.stat()["psize"]
        wanted = (info["last_pgno"] + 1) * size + _ROOM * (self._bytes + nbytes) + (1 << 20)
        if wanted > info["map_size"]:
            self._commit()
            self._env.set_mapsize((max(wanted, 2 * info["map_size"]) // size + 1) * size)

    def _commit(self) -> None:
        txn, self._txn = self._txn, None
        if txn is not None:
            txn.commit()
        self._bytes, self._committed = 0, time.monotonic()

    def _abort(self) -> None:
        txn, self._txn = self._txn, None
        self._bytes = 0
        if txn is not None:
            txn.abort()

    def _close(self) -> None:
        self._abort()
        env, self._env = self._env, None
        if env is not None:
            env.close()
