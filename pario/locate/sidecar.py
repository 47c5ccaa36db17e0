"""The side-car: a complete index as an HDF5 file beside the data, or in the user's cache directory.

Group `/`
    attributes   format, index_version, fingerprint (which state of which file), content_id, n, key_width, meta (ids of
                 the meta records, see meta.py; may be absent), and for people: data_file, database, page_size, txnid
    extents      i64[n, 2]: offset in the data file and bytes of every value, in key order
    by_offset    i64[n]: record ids in file order; absent where file order is key order
    key_data     u8[...]: all keys one after the other; a key with several values once
    key_starts   i64[k + 1]: where they start; absent where all keys have `key_width` bytes
    key_first    i64[k]: the first record of every key; absent where every key has one record

It is written to a temporary file and renamed, and believed only if everything fits: its owner and mode (`Trustees`),
the fingerprint, the shapes, the checksums, extents that lie apart inside the file, and a sample of the file's leaf
pages (probe.py). Anything else is rebuilt. Keys stay in the file until somebody asks for them (stored.py).
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import EPERM
from functools import partial
from stat import S_IMODE, S_ISREG, S_IWGRP, S_IWOTH
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

import numpy as np

from pario.errors import SnapshotError
from pario.fetch.pool import ReadPool
from pario.format.meta import Snapshot
from pario.locate.database import Database, state_digest
from pario.locate.index import KeyTable, Places, content_id_of
from pario.locate.meta import NAMES, find_meta
from pario.locate.probe import probe
from pario.locate.stored import PIECE_BYTES, StoredArray
from pario.records import EXTENT

#: Of the side-car; one that says something else is rebuilt.
INDEX_VERSION = 1
_FORMAT = "pario index"
#: File names are limited in length; database names are not.
_LONGEST_NAME = 100

#: Of a side-car, less what the umask takes: nobody else may write it, or it would not be believed.
_MODE = 0o644

_log = logging.getLogger(__name__)

#: size and mtime in nanoseconds of a side-car: what every node that sees the same one sees
Mark = tuple[int, int]


class Trustees(NamedTuple):
    """Who may write a side-car that is believed: this user, root, and who may write the data file.

    uid, gid, mode : of the data file
    """

    uid: int
    gid: int
    mode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Trustees:
        return cls(status.st_uid, status.st_gid, status.st_mode)

    def check(self, status: os.stat_result) -> None:
        """Raises ValueError unless an open side-car with this status is theirs."""
        if not S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_uid not in (os.geteuid(), 0, self.uid):
            raise ValueError(f"it belongs to user {status.st_uid}, who owns neither the data file nor this process")
        everybody = bool(self.mode & S_IWOTH)
        group = everybody or (bool(self.mode & S_IWGRP) and status.st_gid == self.gid)
        if (status.st_mode & S_IWOTH and not everybody) or (status.st_mode & S_IWGRP and not group):
            raise ValueError(f"users who may not write the data file may write it (mode {S_IMODE(status.st_mode):o})")


@dataclass
class Saved:
    """What rank 0 knows. A side-car that could not be believed leaves all but the database empty.

    mark : of the side-car
    ends : keys of the first record and the last two
    keys : all of them; only if the index was just made
    meta : of the index, see there
    entry : the value of the reserved entry of a packed database; what else is known here then leaves it out (hidden.py)
    """

    database: Database
    trustees: Trustees
    places: Places | None = None
    sidecar: str | None = None
    mark: Mark | None = None
    ends: dict[int, bytes] = field(default_factory=dict)
    keys: KeyTable | None = None
    meta: dict[int, bytes] = field(default_factory=dict)
    entry: bytes | None = None


#: of a look at a side-car: it is opened, and HDF5 reads what is in it
_OPERATIONS = 4


def find_saved(pool: ReadPool, snapshot: Snapshot, db: bytes | None, *, look: bool = True) -> Saved:
    """The first valid side-car of the open file; not collective. look=False: as if there were none."""
    (file,) = pool.fetcher.files
    status = file.status()
    database = Database(file.path, snapshot, db, fingerprint=_fingerprint(status, snapshot, db))
    found = Saved(database, Trustees.of(status))
    for sidecar in _places(file.path, db) if look else ():
        pool.fetcher.announce(_OPERATIONS)
        try:
            return _load(sidecar, found, pool)
        except FileNotFoundError:
            continue
        except Exception as e:  # h5py raises many kinds for a damaged file
            _log.info("the saved index %s is not used: %s", sidecar, e)
    return found


def saved_index(
    path: str, status: os.stat_result, snapshot: Snapshot, db: bytes | str | None = None
) -> tuple[str | None, list[str]]:
    """(the saved index that fits this state of the file, or None; those that are there and do not, with why).

    Looks at attributes only: `open_index` may still refuse one whose content is damaged.
    status : of the open data file
    """
    fingerprint = _fingerprint(status, snapshot, db.encode() if isinstance(db, str) else db)
    unfit: list[str] = []
    for sidecar in sidecar_places(path, db):
        try:
            with open_trusted(sidecar, Trustees.of(status)) as raw, _h5_file(raw) as file:
                _check_attributes(file, fingerprint)
            return sidecar, unfit
        except FileNotFoundError:
            continue
        except Exception as e:  # as in find_saved
            unfit.append(f"{sidecar}: {e}")
    return None, unfit


def sidecar_places(path: str, db: bytes | str | None = None, ending: str = ".h5") -> list[str]:
    """Where a side-car of a data file may lie: beside it, then in the user's cache directory."""
    return list(_places(path, db, ending))


def _places(path: str, db: bytes | str | None, ending: str = ".h5") -> Iterator[str]:
    name = db.encode() if isinstance(db, str) else db
    suffix = f".pario{ending}"
    if name is not None:
        safe = quote(name, safe="")
        if len(safe) > _LONGEST_NAME:
            safe = hashlib.blake2b(name, digest_size=16).hexdigest()
        suffix = f".db-{safe}{suffix}"
    yield path + suffix
    # The cache knows the file by its real path, so that a new index replaces the old one. (Only now: finding the real
    # path costs a look at every directory.)
    name_there = hashlib.blake2b(repr((os.path.realpath(path), name)).encode(), digest_size=16).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    # A user without HOME and without an entry in passwd has none; a relative one the XDG specification calls invalid.
    if os.path.isabs(cache):
        yield os.path.join(cache, "pario", name_there + ending)


def _fingerprint(status: os.stat_result, snapshot: Snapshot, db: bytes | None) -> str:
    """Which state of which file. The path is no part of it: the same file has several on several nodes.

    status : of the open file that the snapshot was read from, not of what its path may lead to by now
    """
    of_file = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}
    return state_digest(snapshot, db, index_version=INDEX_VERSION, **of_file)


class _Sink(io.RawIOBase):
    """A file for the HDF5 library that keeps the first error for itself.

    HDF5 that meets a full disk leaves objects behind that can neither be flushed nor closed. Here it never hears of it:
    what follows the first error is dropped, and `raise_error` tells afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._file = open(fd, "r+b", buffering=0, closefd=False)  # noqa: SIM115
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


def open_trusted(sidecar: str, trustees: Trustees) -> BinaryIO:
    """Open it; raises ValueError where it is somebody's who must not be believed, OSError."""
    # A pipe would keep us waiting.
    raw = open(sidecar, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    try:
        trustees.check(os.fstat(raw.fileno()))
    except BaseException:
        raw.close()
        raise
    return raw


def _load(sidecar: str, wanted: Saved, pool: ReadPool) -> Saved:
    """`wanted`, completed. Raises anything if the side-car is missing, damaged, or of another file or state."""
    database = wanted.database
    with open_trusted(sidecar, wanted.trustees) as raw:
        mark = _mark(os.fstat(raw.fileno()))
        with _h5_file(raw) as file:
            _check_attributes(file, database.fingerprint)
            places = _load_places(file, database.snapshot)
            keys = _keys_in(file, raw)
            database = replace(database, record=probe(pool, database, places, keys))
            # Everybody who loads data asks for these two: no need to open it once more.
            ends = keys.ends(len(places.extents))
            meta = _meta_in(file, keys, database)
    return replace(wanted, database=database, places=places, sidecar=sidecar, mark=mark, ends=ends, meta=meta)


def _meta_in(file: Any, keys: KeyTable, database: Database) -> dict[int, bytes]:
    """The meta records. Raises ValueError where the side-car gives their names to others."""
    n, record = int(file.attrs["n"]), database.record
    assert record is not None  # found by `probe`
    said = file.attrs.get("meta")
    if said is None:  # written before there was this attribute
        return find_meta(keys.one, n, record.md_flags, database.snapshot.layout)
    ids = [int(i) for i in said]
    if not ids:
        return {}
    if len(ids) > 4 * len(NAMES) or len(ids) >= n or not all(0 <= i < n for i in ids):
        raise ValueError("its meta records cannot be")
    found = dict(zip(ids, keys.get(np.array(ids)), strict=True))
    if not NAMES.issuperset(found.values()):
        raise ValueError("its meta records have other keys")
    return found


def _load_places(file: Any, snapshot: Snapshot) -> Places:
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
    if n < 1 or content_id_of(found) != content_id:
        raise ValueError("its extents do not fit their checksum")
    first, end = snapshot.value_bytes
    # Compared without a sum, which could overflow.
    if (found["offset"] < first).any() or (extents < 0).any() or (found["nbytes"] > end - found["offset"]).any():
        raise ValueError("its extents lie outside the pages in use")
    ordered = found
    if by_offset is not None:
        if by_offset.min() < 0 or by_offset.max() >= n:
            raise ValueError("its file order has ids out of range")
        ordered = found[by_offset]
    offsets = ordered["offset"]
    # Strictly ascending offsets: every id occurs once.
    if not (offsets[1:] > offsets[:-1]).all():
        raise ValueError("its file order does not ascend")
    if (offsets[:-1] + ordered["nbytes"][:-1] > offsets[1:]).any():
        raise ValueError("its extents overlap")
    return Places(found, by_offset, content_id, float(found["nbytes"].mean()))


def open_keys(sidecar: str, fingerprint: str, trustees: Trustees) -> KeyTable:
    """The side-car's keys; the file stays open and is read on demand."""
    raw = None
    try:
        raw = open_trusted(sidecar, trustees)
        with _h5_file(raw) as file:
            _check_attributes(file, fingerprint)
            return _keys_in(file, raw)
    except Exception as e:  # h5py raises many kinds for a damaged file
        if raw is not None:
            raw.close()
        raise SnapshotError(
            f"the saved index was replaced or damaged since it was opened: {e}",
            path=sidecar,
            hint="Open the dataset again",
        ) from e


def _keys_in(file: Any, raw: Any) -> KeyTable:
    starts, first = (StoredArray(file[name], raw) if name in file else None for name in ("key_starts", "key_first"))
    return KeyTable(StoredArray(file["key_data"], raw), int(file.attrs["key_width"]), starts, first, (raw,))


def _mark(status: os.stat_result) -> Mark:
    return status.st_size, status.st_mtime_ns


def same_sidecar(sidecar: str, mark: Mark | None) -> bool:
    """Does this node see the side-car that rank 0 saw? What is in it is checked when somebody asks for keys."""
    try:
        return _mark(os.stat(sidecar)) == mark
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


def save_any(saved: Saved) -> None:
    """Save it at the first place that takes it, and set `sidecar` and `mark`; else log a warning."""
    path, db = saved.database.path, saved.database.name
    refusals = []
    for sidecar in _places(path, db):
        try:
            save_whole(sidecar, partial(_write, saved))
            saved.sidecar, saved.mark = sidecar, _mark(os.stat(sidecar))
        except OSError as e:
            refusals.append(f"{sidecar}: {e.strerror or e}")
            continue
        _log.info("the index of %s is saved as %s", path, sidecar)
        return
    _log.warning(
        "the index of %s cannot be saved and will be made again next time; its keys stay in memory (%s)",
        path,
        "; ".join(refusals),
    )


def save_whole(sidecar: str, write: Callable[[int], None]) -> None:
    """Write and rename, so that nobody ever sees half of it. Raises OSError.

    write : writes to a descriptor all that belongs there, to the disk, and leaves it open
    What another user keeps there stays: each would take the other's away at every start, and believe none.
    """
    with suppress(FileNotFoundError):
        if os.stat(sidecar).st_uid != os.geteuid() != 0:
            raise PermissionError(EPERM, "another user's side-car is there")
    folder = os.path.dirname(sidecar) or os.curdir
    if not os.path.isdir(folder):
        os.makedirs(folder, mode=0o700)
    temporary = f"{sidecar}.{socket.gethostname()}-{os.getpid()}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    nameless = True
    try:
        # A killed job leaves nothing behind: the file has no name before it is complete.
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, _MODE)
    except (OSError, AttributeError):  # not every file system can do that
        nameless = False
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        write(fd)
        if nameless:  # with a dir_fd, or else Python takes the call that would link to the link
            os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=fd, follow_symlinks=True)
        os.replace(temporary, sidecar)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _write(saved: Saved, fd: int) -> None:
    import h5py

    database, places, keys = saved.database, saved.places, saved.keys
    assert places is not None
    assert keys is not None
    n, sink = len(places.extents), _Sink(fd)
    with h5py.File(sink, "w", libver="v110") as file:
        file.attrs["format"] = _FORMAT
        file.attrs["index_version"] = INDEX_VERSION
        file.attrs["fingerprint"] = database.fingerprint
        file.attrs["content_id"] = places.content_id
        file.attrs["n"] = n
        file.attrs["key_width"] = keys.width
        file.attrs["meta"] = np.array(sorted(saved.meta), np.int64)
        file.attrs["data_file"] = os.path.basename(database.path)
        file.attrs["database"] = "(main)" if database.name is None else database.name.decode(errors="backslashreplace")
        file.attrs["page_size"] = database.snapshot.page_size
        file.attrs["txnid"] = database.snapshot.txnid
        # Contiguous: loading is one read. `content_id` is their checksum.
        file.create_dataset("extents", data=places.extents.view(np.int64).reshape(n, 2))
        if places.by_offset is not None:
            file.create_dataset("by_offset", data=places.by_offset)
        for name, array in (("key_data", keys.data), ("key_starts", keys.starts), ("key_first", keys.first)):
            if array is None:
                continue
            if len(array):
                chunk = max(1, min(len(array), PIECE_BYTES // array.itemsize))
                file.create_dataset(name, data=array, chunks=(chunk,), fletcher32=True)
            else:
                file.create_dataset(name, data=array)
    sink.finish()
