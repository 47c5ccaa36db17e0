"""The index of a database: record id -> where its value lies, and its key. Made once, saved as an HDF5 side-car.

The side-car (group `/`)
    attributes   format, index_version, fingerprint (which state of which file), content_id, n, key_width, and for
                 people: data_file, database, page_size, txnid
    extents      i64[n, 2]: offset in the data file and bytes of every value, in key order
    by_offset    i64[n]: record ids in file order; absent where file order is key order
    key_data     u8[...]: all keys one after the other; a key with several duplicates once
    key_starts   i64[k + 1]: where they start; absent where all keys have `key_width` bytes
    key_first    i64[k]: the first record of every key; absent where every key has one record

It is written to a temporary file and renamed, and believed only if everything fits: the fingerprint, the shapes, the
checksums, extents inside the file. Anything else is rebuilt. Keys stay in the file until somebody asks for them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from pario.comm.world import AnyWorld
from pario.errors import CorruptedError, OptionError, SnapshotError
from pario.fetch.base import Fetcher, ReadPool
from pario.format.meta import Snapshot
from pario.kernels.verify import check_runs
from pario.locate.speculate import Growth, may_grow
from pario.locate.walk import Begun, begin, build, check_size
from pario.records import EXTENT

__all__ = ["RecordIndex", "Saved", "find_saved", "open_index", "saved_index", "sidecar_places"]

#: Of the side-car; one that says something else is rebuilt.
INDEX_VERSION = 1
_FORMAT = "pario index"
#: Keys are stored in pieces of so many bytes, each with a checksum, so that a few can be read without the others.
_CHUNK_BYTES = 64 << 10
#: Ids that lie so close together are looked up by one read of a side-car.
_NEAR_IDS = 1024
#: Of so many records or leaf pages at equal distances, each this often lies behind the one before it. (Half of them do
#: where records were inserted at random.)
_IN_ORDER, _SAMPLE = 0.75, 64
#: File names end somewhere; a database's name may not.
_LONGEST_NAME = 100

_log = logging.getLogger(__name__)


class RecordIndex:
    """All records of one database in one snapshot. Ids are 0..n-1 in key order.

    It may be growing still (`growth`): then the places of records become known while they are read, and what asks for
    all of them (`extents`, `by_offset`, `content_id`) reads the missing leaf pages first, on the rank that asks, and
    raises CorruptedError, ReadError or SnapshotError like reading does.

    n : records
    extents : EXTENT[n], read-only, shared by the ranks of a node
    by_offset : i64[n], record ids in file order, shared likewise; None where file order is id order
    path : the data file; database: name of the named database or None
    snapshot : the state of the file that it was made from
    header_bytes : H; the value on overflow pages starts so many bytes after its page
    page_size : bytes
    mean_bytes : of a value; while the index grows an estimate that is rather too large
    fingerprint : hex, of the file and its state (size, mtime, inode, transaction, ...): what the side-car must repeat
    content_id : hex, of the extents: the same for every copy of the file
    sidecar : path of the saved index, or None
    bytes_read : of branch and leaf pages by all ranks together to make it; 0 if it was loaded. Of an index that grows,
        of what was read before the first record.
    growth : what is known of an index that grows, else None
    trusted : it was made just now from the file itself, or holds several values per key, of which the nodes that hold
        them say less
    """

    def __init__(
        self,
        *,
        path: str,
        database: bytes | None,
        snapshot: Snapshot,
        parts: _Parts | Growth,
        fingerprint: str,
        mean_bytes: float,
        keys: _Keys | None,
        ends: dict[int, bytes],
        sidecar: str | None,
        bytes_read: int,
        trusted: bool = True,
    ) -> None:
        self.path = path
        self.database = database
        self.snapshot = snapshot
        self.n = len(parts.extents)
        self.growth = parts if isinstance(parts, Growth) else None
        self._parts = parts if isinstance(parts, _Parts) else None
        self.header_bytes = snapshot.header
        self.page_size = snapshot.page_size
        self.fingerprint = fingerprint
        self.mean_bytes = mean_bytes
        self.sidecar = sidecar
        self.bytes_read = bytes_read
        self.trusted = trusted
        self._keys = keys
        self._ends = ends
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"RecordIndex({self.path!r}, records={self.n:,}, sidecar={self.sidecar!r})"

    @property
    def extents(self) -> np.ndarray:
        return self._whole().extents

    @property
    def by_offset(self) -> np.ndarray | None:
        return self._whole().by_offset

    @property
    def content_id(self) -> str:
        return self._whole().content_id

    def _whole(self) -> _Parts:
        with self._lock:
            if self._parts is None:
                assert self.growth is not None
                self.growth.complete()
                extents = self.growth.extents.view()
                extents.flags.writeable = False
                self._parts = _arrange(extents, self.path)
                self.mean_bytes = self._parts.mean_bytes
            return self._parts

    def places(self, ids: np.ndarray) -> np.ndarray:
        """EXTENT[m] of these records (i64[m], in 0..n-1); of an index that grows as soon as they are known."""
        if self.growth is None:
            return self.extents[ids]
        self.growth.reach(ids)
        return self.growth.extents[ids]

    @property
    def in_file_order(self) -> bool:
        """Does the file hold the records in key order, but for a few? From a sample, or from where the leaf pages lie
        while the index grows; reads nothing."""
        if self.growth is None and self.by_offset is None:
            return True
        # From one end to the other, so that disorder among neighbours does not count.
        places = self.extents["offset"] if self.growth is None else self.growth.leaves
        some = places[np.linspace(0, len(places) - 1, _SAMPLE).astype(np.int64)]
        steps = np.diff(some // self.page_size if self.growth is None else some)
        steps = steps[steps != 0]
        return bool((steps > 0).mean() >= _IN_ORDER) if len(steps) else True

    @cached_property
    def largest_bytes(self) -> int:
        """Of the largest value; of a complete index."""
        return int(self.extents["nbytes"].max())

    def save(self) -> None:
        """Complete an index that grows, and keep it as a side-car. On rank 0, where `Growth` kept the keys; later calls
        do nothing. Raises what completing it raises; where it cannot be saved, a warning is logged."""
        growth = self.growth
        if growth is None or not growth.keeps_keys:
            return
        parts = self._whole()
        data, nbytes = growth.all_keys()
        with self._lock:
            self._keys = _key_table(data, nbytes, None)
            saved = Saved(self.snapshot, self.fingerprint, parts, keys=self._keys)
            _save_any(self.path, self.database, saved)
            self.sidecar = saved.sidecar
            growth.forget_keys()

    def keys(self, ids: np.ndarray | list[int]) -> list[bytes]:
        """The keys of these records, in this order; not collective, from any thread.

        ids : i64[m], in 0..n-1
        Raises OptionError for an id out of range, SnapshotError if the side-car was replaced since; while the index
        grows what reading leaf pages raises.
        """
        wanted = np.asarray(ids, np.int64).reshape(-1)
        if len(wanted) == 0:
            return []
        if int(wanted.min()) < 0 or int(wanted.max()) >= self.n:
            raise OptionError(
                f"record ids must lie in 0..{self.n - 1}, got {int(wanted.min())}..{int(wanted.max())}", path=self.path
            )
        if all(i in self._ends for i in wanted.tolist()):
            return [self._ends[i] for i in wanted.tolist()]
        with self._lock:
            if self._keys is None and self.growth is not None:
                return self.growth.keys(wanted)
            if self._keys is None:
                assert self.sidecar is not None  # either the keys or a place to find them
                self._keys = _open_keys(self.sidecar, self.fingerprint)
            return self._keys.get(wanted)

    def check_headers(
        self, data: np.ndarray, starts: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray, ids: np.ndarray
    ) -> None:
        """Do these values, at `starts` in `data` and at `offsets` in the file, come behind the page headers that belong
        there? Raises CorruptedError. (Files of other machines' byte order or word size are not looked at.)"""
        if not self.snapshot.native:
            return
        bad = check_runs(data, starts, offsets, nbytes, self.page_size, self.header_bytes)
        if bad >= 0:
            what = "the page header before this record's value is not that of its overflow pages"
            raise self.damaged(what, int(offsets[bad]) - self.header_bytes, int(ids[bad]))

    def damaged(self, what: str, offset: int, record: int) -> CorruptedError:
        """The error of a record whose bytes at `offset` are not what this index says."""
        return CorruptedError(
            what,
            path=self.path,
            page=offset // self.page_size,
            offset=offset,
            record=record,
            hint="The file is damaged, or was rewritten since its index was made: delete the .pario.h5 beside "
            "it and try again; `python -m pario verify` looks at every record.",
        )

    def close(self) -> None:
        """Close the side-car if keys were read from it, and let go of the arrays, so that the window that holds them
        can be freed; idempotent, not collective."""
        with self._lock:
            if self._keys is not None and self._keys.in_file:
                self._keys.close()
            self._keys = None
            if self.growth is not None:
                self.growth.close()
            self._parts = _Parts(np.empty(0, EXTENT), None, "", 0.0)


class _Keys:
    """Keys in memory or in an open side-car: arrays and HDF5 datasets are sliced alike.

    data : u8[...]; width : bytes of every key, or -1; starts : i64[k + 1] if they differ
    first : i64[k], the first record of each key, or None
    """

    def __init__(self, data: Any, width: int, starts: Any, first: Any, files: tuple[Any, ...] = ()) -> None:
        self.data = data
        self.width = width
        self.starts = starts
        self.first = first
        self._files = files

    @property
    def in_file(self) -> bool:
        return bool(self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def get(self, ids: np.ndarray) -> list[bytes]:
        if self.first is not None:
            self.first = np.asarray(self.first)
            ids = np.searchsorted(self.first, ids, side="right") - 1
        distinct, back = np.unique(ids, return_inverse=True)
        found: list[bytes] = []
        for near in np.split(distinct, np.flatnonzero(np.diff(distinct) > _NEAR_IDS) + 1):
            low, high = int(near[0]), int(near[-1]) + 1
            if self.width >= 0:
                starts = np.arange(low, high + 1, dtype=np.int64) * self.width
            else:
                starts = np.asarray(self.starts[low : high + 1])
            data = np.asarray(self.data[int(starts[0]) : int(starts[-1])]).tobytes()
            begin, end = (starts - starts[0])[near - low], (starts - starts[0])[near - low + 1]
            found += [data[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        return [found[i] for i in back.tolist()]


@dataclass
class Saved:
    """What rank 0 knows. A side-car that could not be believed leaves all but the first two empty.

    mark : of the side-car, what every node that sees the same one sees
    ends : keys of the first and the last record; all keys only if the index was just made
    trusted : see RecordIndex
    """

    snapshot: Snapshot
    fingerprint: str
    parts: _Parts | None = None
    sidecar: str | None = None
    mark: _Mark | None = None
    ends: dict[int, bytes] = field(default_factory=dict)
    keys: _Keys | None = None
    trusted: bool = True


#: size and mtime in nanoseconds of a side-car
_Mark = tuple[int, int]


class _Parts:
    """What the ranks will share."""

    def __init__(
        self, extents: np.ndarray, by_offset: np.ndarray | None, content_id: str, mean_bytes: float
    ) -> None:
        self.extents = extents
        self.by_offset = by_offset
        self.content_id = content_id
        self.mean_bytes = mean_bytes


def find_saved(fetcher: Fetcher, snapshot: Snapshot, db: bytes | None, *, look: bool = True) -> Saved:
    """The first valid side-car of the open file; not collective. look=False: as if there were none."""
    found = Saved(snapshot, _fingerprint(fetcher.status(), snapshot, db))
    for place in _places(fetcher.path, db) if look else ():
        try:
            return _load(place, found)
        except FileNotFoundError:
            continue
        except Exception as e:  # h5py raises many kinds for a damaged file
            _log.info("the saved index %s is not used: %s", place, e)
    return found


def open_index(
    path: str,
    pool: ReadPool | None,
    snapshot: Snapshot,
    world: AnyWorld,
    db: bytes | str | None = None,
    save: bool = True,
    progress: Callable[[int, int], None] | None = None,
    *,
    saved: Saved | None = None,
    grow: Callable[[], ReadPool] | None = None,
) -> RecordIndex:
    """The index of a database: from its side-car if that is valid, else made anew and saved, or growing.

    Collective over `world`; an error is raised on all ranks. Only rank 0 touches the side-car, others when asked for
    keys. Where it cannot be saved, a warning is logged and the keys stay in memory.

    path : the data file
    pool : of the open file; None on ranks (never rank 0) that leave the reading to the others
    db : name of a named database; None is the main one
    save : write a side-car (one that is there is used in any case)
    saved : on rank 0: what `find_saved` said already
    progress : called as progress(done, total) on rank 0 while the index is made, in its leaf pages
    grow : let it grow while records are read, where that reads little more; brings this rank's open file when it is
        asked for places that are not known yet. None: make it now

    Raises DatabaseError (EmptyError among them), CorruptedError, ReadError, SnapshotError.
    """
    name = db.encode() if isinstance(db, str) else db
    error: BaseException | None = None
    if world.rank == 0 and (saved is None or saved.snapshot != snapshot):
        try:
            assert pool is not None  # rank 0 has one
            saved = find_saved(pool.fetcher, snapshot, name)
        except BaseException as e:
            error = e
    world.agree(error, "looking for a saved index")
    loaded = world.bcast(saved is not None and saved.parts is not None)

    bytes_read = 0
    if not loaded:
        begun = begin(pool, snapshot, name, world, path)
        if grow is not None and may_grow(snapshot, begun[1], world.allreduce_sum(pool is not None)):
            return _growing(path, pool, snapshot, world, name, save, begun, saved, grow)
        located = build(pool, snapshot, name, world, progress, path=path, begun=begun)
        bytes_read = located.bytes_read
        if saved is not None:
            try:
                assert located.extents is not None
                assert located.key_data is not None
                assert located.key_nbytes is not None
                saved.parts = _arrange(located.extents, path)
                saved.keys = _key_table(located.key_data, located.key_nbytes, located.key_counts)
                saved.ends = _ends(saved.keys, len(saved.parts.extents))
                if save:
                    _save_any(path, name, saved)
            except BaseException as e:
                error = e
        del located
        world.agree(error, "saving the index")
    parts = saved.parts if saved is not None else None
    fingerprint, sidecar, mark, trusted, has_order, content_id, mean_bytes = world.bcast(
        (
            *(saved.fingerprint, saved.sidecar, saved.mark, saved.trusted),
            *(parts.by_offset is not None, parts.content_id, parts.mean_bytes),
        )
        if saved is not None and parts is not None
        else None
    )
    keys = _spread_keys(world, saved.keys if saved is not None else None, sidecar, mark, fingerprint)
    extents = world.share_array(parts.extents if parts is not None else None)
    by_offset = world.share_array(parts.by_offset if parts is not None else None) if has_order else None
    return RecordIndex(
        path=path,
        database=name,
        snapshot=snapshot,
        parts=_Parts(extents, by_offset, content_id, mean_bytes),
        fingerprint=fingerprint,
        mean_bytes=mean_bytes,
        keys=keys,
        ends=saved.ends if saved is not None else {},
        sidecar=sidecar,
        bytes_read=bytes_read,
        trusted=trusted,
    )


def _growing(
    path: str,
    pool: ReadPool | None,
    snapshot: Snapshot,
    world: AnyWorld,
    db: bytes | None,
    save: bool,
    begun: Begun,
    saved: Saved | None,
    pool_of: Callable[[], ReadPool],
) -> RecordIndex:
    """An index of which the first and the last record are known, on rank 0. Collective."""
    walk, record, leaves = begun
    n, m = record.md_entries, len(leaves)
    growth: Growth | None = None
    ends: dict[int, bytes] = {}
    error: BaseException | None = None
    try:
        Growth.check_entries(record, m, snapshot.page_size, path)
        if pool is not None:
            check_size(pool, snapshot)
    except BaseException as e:
        error = e
    world.agree(error, "looking at the tree")
    try:
        memory = world.shared_bytes(n * EXTENT.itemsize + (m + 1) * 8)
        growth = Growth(
            snapshot=snapshot,
            record=record,
            named=db is not None,
            leaves=leaves,
            extents=memory[: n * EXTENT.itemsize].view(EXTENT),
            first=memory[n * EXTENT.itemsize :].view(np.int64),
            pool=pool_of,
            path=path,
            keep_keys=save and world.rank == 0,
        )
        if world.rank == 0:
            ends = dict(zip((0, n - 1), growth.end(), strict=True))
    except BaseException as e:
        error = e
    world.agree(error, "reading the first and the last leaf page")
    assert growth is not None  # agree raised otherwise
    tree_bytes = (record.md_overflow_pages + record.md_leaf_pages) * snapshot.page_size
    return RecordIndex(
        path=path,
        database=db,
        snapshot=snapshot,
        parts=growth,
        fingerprint=world.bcast(saved.fingerprint if saved is not None else None),
        mean_bytes=max(1.0, tree_bytes / n - snapshot.header),
        keys=None,
        ends=ends,
        sidecar=None,
        bytes_read=world.allreduce_sum(walk.pages.bytes_read + growth.bytes_read),
    )


def saved_index(
    path: str, status: os.stat_result, snapshot: Snapshot, db: bytes | str | None = None
) -> tuple[str | None, list[str]]:
    """(the saved index that fits this state of the file, or None; those that are there and do not, with why).

    Looks at attributes only: `open_index` may still refuse one whose content is damaged.
    status : of the open data file
    """
    fingerprint = _fingerprint(status, snapshot, db.encode() if isinstance(db, str) else db)
    unfit: list[str] = []
    for place in sidecar_places(path, db):
        try:
            with open(place, "rb") as raw, _h5_file(raw) as file:
                _check_attributes(file, fingerprint)
            return place, unfit
        except FileNotFoundError:
            continue
        except Exception as e:  # as in find_saved
            unfit.append(f"{place}: {e}")
    return None, unfit


def sidecar_places(path: str, db: bytes | str | None = None) -> list[str]:
    """Where the side-car of a data file may lie: beside it, then in the user's cache directory."""
    return list(_places(path, db))


def _places(path: str, db: bytes | str | None) -> Iterator[str]:
    name = db.encode() if isinstance(db, str) else db
    suffix = ".pario.h5"
    if name is not None:
        safe = quote(name, safe="")
        if len(safe) > _LONGEST_NAME:
            safe = hashlib.blake2b(name, digest_size=16).hexdigest()
        suffix = f".db-{safe}{suffix}"
    yield path + suffix
    # The cache knows the file by its place, so that a new index replaces the old one. (Only now: the real path costs a
    # look at every directory.)
    place = hashlib.blake2b(repr((os.path.realpath(path), name)).encode(), digest_size=16).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache")
    yield os.path.join(cache, "pario", f"{place}.h5")


def _fingerprint(status: os.stat_result, snapshot: Snapshot, db: bytes | None) -> str:
    """Which state of which file. The path is no part of it: the same file has several on several nodes.

    status : of the open file that the snapshot was read from, not of what its path may lead to by now
    """
    what = {
        "index_version": INDEX_VERSION,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "format": [snapshot.version, snapshot.word, snapshot.byteorder],
        "page_size": snapshot.page_size,
        "sum_size": snapshot.sum_size,
        "txnid": snapshot.txnid,
        "main": list(snapshot.main),
        "last_pgno": snapshot.last_pgno,
        "db": None if db is None else db.hex(),
    }
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()


def _content_id(extents: np.ndarray) -> str:
    digest = hashlib.blake2b(f"{_FORMAT} {INDEX_VERSION} {len(extents)}".encode(), digest_size=16)
    digest.update(memoryview(extents.view(np.uint8)))
    return digest.hexdigest()


def _arrange(extents: np.ndarray, path: str) -> _Parts:
    """File order, and the check that no two values share bytes."""
    by_offset: np.ndarray | None = None
    offsets = extents["offset"]
    ordered = extents
    if not (offsets[1:] > offsets[:-1]).all():
        by_offset = np.argsort(offsets, kind="stable").astype(np.int64, copy=False)
        ordered = extents[by_offset]
    clash = ordered["offset"][:-1] + ordered["nbytes"][:-1] > ordered["offset"][1:]
    if clash.any():
        i = int(np.argmax(clash))
        first, second = (i, i + 1) if by_offset is None else (int(by_offset[i]), int(by_offset[i + 1]))
        offset = int(ordered["offset"][i + 1])
        raise CorruptedError(
            f"the values of records {first} and {second} overlap", path=path, offset=offset, record=second
        )
    return _Parts(extents, by_offset, _content_id(extents), float(extents["nbytes"].mean()))


def _key_table(data: np.ndarray, nbytes: np.ndarray, counts: np.ndarray | None) -> _Keys:
    width = int(nbytes[0])
    starts = None
    if not (nbytes == width).all():
        width = -1
        starts = np.zeros(len(nbytes) + 1, np.int64)
        np.cumsum(nbytes, out=starts[1:])
    first = None
    if counts is not None:
        first = np.cumsum(counts) - counts
    return _Keys(data, width, starts, first)


def _spread_keys(
    world: AnyWorld, keys: _Keys | None, sidecar: str | None, mark: _Mark | None, fingerprint: str
) -> _Keys | None:
    """None where every node can read the keys from the side-car, else the keys, shared by the node. Collective."""
    if sidecar is not None:
        # A cache directory may be one per node. Each looks, and opens nothing that nobody may ask for.
        unseen = world.is_leader and world.rank != 0 and not _matches(sidecar, mark)
        if world.allreduce_sum(int(unseen)) == 0:
            return None
    error: BaseException | None = None
    what = None
    if world.rank == 0:
        try:
            if keys is None:
                assert sidecar is not None
                keys = _open_keys(sidecar, fingerprint)
            what = keys.width, keys.starts is not None, keys.first is not None
        except BaseException as e:
            error = e
    world.agree(error, "reading the keys")
    width, has_starts, has_first = world.bcast(what)

    def share(a: Any) -> np.ndarray:
        return world.share_array(None if a is None else np.asarray(a[:]))

    # Rank 0's arguments count; on the others they are None.
    shared = _Keys(
        share(keys.data if keys else None),
        width,
        share(keys.starts if keys else None) if has_starts else None,
        share(keys.first if keys else None) if has_first else None,
    )
    if keys is not None:
        keys.close()
    return shared


# -- the side-car ------------------------------------------------------------------------------------------------------


class _Sink(io.RawIOBase):
    """A file for the HDF5 library that keeps the first error for itself.

    HDF5 that meets a full disk leaves objects behind that can neither be flushed nor closed. Here it never hears of it:
    what follows the first error is dropped, and `raise_error` tells afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._file = open(fd, "r+b", buffering=0)  # noqa: SIM115
        self._error: OSError | None = None

    def _try(self, call: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        if self._error is not None:
            return otherwise
        try:
            return call(*arguments)
        except OSError as e:
            self._error = e
            return otherwise

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            written = self._try(self._file.write, view[done:], otherwise=len(view) - done)
            done += int(written or 0)
        return done

    def truncate(self, size: int | None = None) -> int:
        self._try(self._file.truncate, size, otherwise=None)
        return self.tell()

    def finish(self) -> None:
        """To the disk; raises the first error."""
        self._try(os.fsync, self._file.fileno(), otherwise=None)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._file.close()
        super().close()


def _load(place: str, wanted: Saved) -> Saved:
    """`wanted`, completed. Raises anything if the side-car is missing, damaged, or of another file or state."""
    with open(place, "rb") as raw:
        mark = _mark(os.fstat(raw.fileno()))
        with _h5_file(raw) as file:
            _check_attributes(file, wanted.fingerprint)
            parts = _load_parts(file, wanted.snapshot)
            # Everybody who loads data asks for these two: no need to open it once more.
            ends = _ends(_keys_in(file, raw), len(parts.extents))
            trusted = "key_first" in file
    return replace(wanted, parts=parts, sidecar=place, mark=mark, ends=ends, trusted=trusted)


def _load_parts(file: Any, snapshot: Snapshot) -> _Parts:
    n = int(file.attrs["n"])
    extents = np.empty((n, 2), np.int64)
    _read_all(file["extents"], extents)
    by_offset = None
    if "by_offset" in file:
        by_offset = np.empty(n, np.int64)
        _read_all(file["by_offset"], by_offset)
    _check_keys(file, n)
    content_id = str(file.attrs["content_id"])
    found = extents.reshape(-1).view(EXTENT)
    if n < 1 or _content_id(found) != content_id:
        raise ValueError("its extents do not fit their checksum")
    if (extents < 0).any() or (found["offset"] + found["nbytes"] > snapshot.file_bytes).any():
        raise ValueError("its extents lie outside the file")
    offsets = found["offset"]
    if by_offset is not None:
        if by_offset.min() < 0 or by_offset.max() >= n:
            raise ValueError("its file order has ids out of range")
        offsets = offsets[by_offset]
    # Strictly ascending offsets: every id occurs once.
    if not (offsets[1:] > offsets[:-1]).all():
        raise ValueError("its file order does not ascend")
    return _Parts(found, by_offset, content_id, float(found["nbytes"].mean()))


def _open_keys(place: str, fingerprint: str) -> _Keys:
    """The side-car's keys; the file stays open and is read on demand."""
    raw = None
    try:
        raw = open(place, "rb")  # noqa: SIM115
        file = _h5_file(raw)
        _check_attributes(file, fingerprint)
        return _keys_in(file, raw)
    except Exception as e:  # h5py raises many kinds for a damaged file
        if raw is not None:
            raw.close()
        raise SnapshotError(
            f"the saved index was replaced or damaged since it was opened: {e}",
            path=place,
            hint="Open the dataset again",
        ) from e


def _keys_in(file: Any, raw: Any) -> _Keys:
    starts, first = file.get("key_starts"), file.get("key_first")
    width = int(file.attrs["key_width"])
    return _Keys(file["key_data"], width, starts, first, (file, raw))


def _ends(keys: _Keys, n: int) -> dict[int, bytes]:
    return dict(zip((0, n - 1), keys.get(np.array([0, n - 1])), strict=True))


def _mark(status: os.stat_result) -> _Mark:
    return status.st_size, status.st_mtime_ns


def _matches(place: str, mark: _Mark | None) -> bool:
    """Does this node see the side-car that rank 0 saw? What is in it is checked when somebody asks for keys."""
    try:
        return _mark(os.stat(place)) == mark
    except OSError:
        return False


def _h5_file(raw: Any) -> Any:
    """An HDF5 file over an open Python file: without HDF5's own locks, which network file systems often refuse."""
    import h5py

    return h5py.File(raw, "r")


def _check_attributes(file: Any, fingerprint: str) -> None:
    if file.attrs.get("format") != _FORMAT:
        raise ValueError("it is not an index of pario")
    if file.attrs.get("index_version") != INDEX_VERSION:
        raise ValueError(f"it has index version {file.attrs.get('index_version')}, not {INDEX_VERSION}")
    if file.attrs.get("fingerprint") != fingerprint:
        raise ValueError("the data file has changed since")


def _check_keys(file: Any, n: int) -> None:
    """Shapes only: the keys stay where they are."""
    width = int(file.attrs["key_width"])
    k = file["key_first"].shape[0] if "key_first" in file else n
    if width >= 0:
        sound = file["key_data"].shape == (k * width,)
    else:
        starts = file["key_starts"]
        sound = starts.shape == (k + 1,) and file["key_data"].shape == (int(starts[-1]),)
    if not sound or file["key_data"].dtype != np.uint8:
        raise ValueError("its keys have the wrong shape")


def _read_all(dataset: Any, out: np.ndarray) -> None:
    if dataset.shape != out.shape or dataset.dtype != out.dtype:
        raise ValueError(f"{dataset.name} is {dataset.dtype}{list(dataset.shape)}, not {out.dtype}{list(out.shape)}")
    dataset.read_direct(out)


def _save_any(path: str, db: bytes | None, saved: Saved) -> None:
    """Sets `sidecar` and `mark` where it could be saved."""
    refusals = []
    for place in _places(path, db):
        try:
            folder = os.path.dirname(place) or os.curdir
            if not os.path.isdir(folder):
                os.makedirs(folder, mode=0o700)
            _save(place, path, db, saved)
            saved.sidecar, saved.mark = place, _mark(os.stat(place))
        except OSError as e:
            refusals.append(f"{place}: {e.strerror or e}")
            continue
        _log.info("the index of %s is saved as %s", path, place)
        return
    _log.warning(
        "the index of %s cannot be saved and will be made again next time; its keys stay in memory (%s)",
        path,
        "; ".join(refusals),
    )


def _save(place: str, path: str, db: bytes | None, saved: Saved) -> None:
    """Write and rename, so that nobody ever sees half of it. Raises OSError."""
    temporary = f"{place}.{socket.gethostname()}-{os.getpid()}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    nameless = True
    try:
        # A killed job leaves nothing behind: the file has no name before it is complete.
        fd = os.open(os.path.dirname(place) or os.curdir, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except (OSError, AttributeError):  # not every file system can do that
        nameless = False
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    sink = _Sink(fd)
    try:
        _write(sink, path, db, saved)
        sink.finish()
        if nameless:  # with a dir_fd, or else Python takes the call that would link to the link
            os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=fd, follow_symlinks=True)
        os.replace(temporary, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        sink.close()


def _write(sink: _Sink, path: str, db: bytes | None, saved: Saved) -> None:
    import h5py

    snapshot, parts, keys = saved.snapshot, saved.parts, saved.keys
    assert parts is not None
    assert keys is not None
    n = len(parts.extents)
    with h5py.File(sink, "w", libver="v110") as file:
        file.attrs["format"] = _FORMAT
        file.attrs["index_version"] = INDEX_VERSION
        file.attrs["fingerprint"] = saved.fingerprint
        file.attrs["content_id"] = parts.content_id
        file.attrs["n"] = n
        file.attrs["key_width"] = keys.width
        file.attrs["data_file"] = os.path.basename(path)
        file.attrs["database"] = "(main)" if db is None else db.decode(errors="backslashreplace")
        file.attrs["page_size"] = snapshot.page_size
        file.attrs["txnid"] = snapshot.txnid
        # Contiguous: loading is one read. `content_id` is their checksum.
        file.create_dataset("extents", data=parts.extents.view(np.int64).reshape(n, 2))
        if parts.by_offset is not None:
            file.create_dataset("by_offset", data=parts.by_offset)
        for name, array in (("key_data", keys.data), ("key_starts", keys.starts), ("key_first", keys.first)):
            if array is None:
                continue
            if len(array):
                chunk = max(1, min(len(array), _CHUNK_BYTES // array.itemsize))
                file.create_dataset(name, data=array, chunks=(chunk,), fletcher32=True)
            else:
                file.create_dataset(name, data=array)
