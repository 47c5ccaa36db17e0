"""The side-car: a complete index as a file beside the data, or in the user's cache directory (its format: stored.py).

What it says
    fingerprint (which state of which file), content_id, key_width, meta (ids of the meta records, see meta.py), and for
    people: data_file, database, page_size, txnid
Its arrays
    extents      i64[n, 2]: offset in the data file and bytes of every value, in key order
    by_offset    i64[n]: record ids in file order; absent where file order is key order
    key_data     u8[...]: all keys one after the other; a key with several values once
    key_starts   i64[k + 1]: where they start; absent where all keys have `key_width` bytes
    key_first    i64[k]: the first record of every key; absent where every key has one record

It is written to a temporary file and renamed, and believed only if everything fits: its owner and mode (`Trustees`),
the fingerprint, the shapes, the checksums, extents that lie apart inside the file, and a sample of the file's leaf
pages (probe.py). Anything else is rebuilt. Keys stay in the file until somebody asks for them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from errno import EPERM
from stat import S_IMODE, S_ISREG, S_IWGRP, S_IWOTH
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from pario.errors import FileError, SnapshotError
from pario.fetch.pool import ReadPool
from pario.format.meta import Snapshot
from pario.locate.database import Database, state_digest
from pario.locate.index import KeyTable, Places, content_id_of
from pario.locate.meta import NAMES
from pario.locate.probe import probe
from pario.locate.stored import StoredArray, read_stored, write_stored
from pario.machine import closing_fd
from pario.records import EXTENT

#: Of the side-car; one that says something else is rebuilt.
INDEX_VERSION = 2
#: File names are limited in length; database names are not.
_LONGEST_NAME = 100

#: Of a side-car, less what the umask takes: nobody else may write it, or it would not be believed.
_MODE = 0o644

_log = logging.getLogger(__name__)

T = TypeVar("T")

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


#: of a look at a side-car: it is opened; its beginning, extents and keys are read
_OPERATIONS = 4


def find_saved(pool: ReadPool, snapshot: Snapshot, db: bytes | None, *, look: bool = True) -> Saved:
    """The first valid side-car of the open file; not collective. look=False: as if there were none."""
    (file,) = pool.fetcher.files
    status = file.status()
    database = Database(file.path, snapshot, db, fingerprint=_fingerprint(status, snapshot, db))
    nothing = Saved(database, Trustees.of(status))

    def load(sidecar: str) -> Saved:
        pool.fetcher.announce(_OPERATIONS)
        return _load(sidecar, nothing, pool)

    unfit: list[str] = []
    found = next(those_that_fit(sidecar_places(file.path, db) if look else (), load, unfit), nothing)
    for why in unfit:
        _log.info("a saved index is not used: %s", why)
    return found


def those_that_fit(sidecars: Iterable[str], load: Callable[[str], T], unfit: list[str]) -> Iterator[T]:
    """What load(sidecar) returns, of each side-car that is there. Why it raises for the others is added to `unfit`."""
    for sidecar in sidecars:
        try:
            yield load(sidecar)
        except FileNotFoundError:
            continue
        except Exception as e:  # what is damaged may say anything
            unfit.append(f"{sidecar}: {e}")


def saved_index(
    path: str, status: os.stat_result, snapshot: Snapshot, db: bytes | str | None = None
) -> tuple[str | None, list[str]]:
    """(the saved index that fits this state of the file, or None; those that are there and do not, with why).

    Looks at attributes only: `open_index` may still refuse one whose content is damaged.
    status : of the open data file
    """
    fingerprint = _fingerprint(status, snapshot, db.encode() if isinstance(db, str) else db)

    def load(sidecar: str) -> str:
        with open_trusted(sidecar, Trustees.of(status)) as raw:
            _read(raw, fingerprint)
        return sidecar

    unfit: list[str] = []
    return next(those_that_fit(sidecar_places(path, db), load, unfit), None), unfit


def sidecar_places(path: str, db: bytes | str | None = None, ending: str = ".index") -> Iterator[str]:
    """Where a side-car of a data file may lie: beside it, then in the user's cache directory."""
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
        said, arrays = _read(raw, database.fingerprint)
        places = _places_in(said, arrays, database.snapshot)
        n, keys = len(places.extents), _keys_in(said, arrays, raw)
        database = replace(database, record=probe(pool, database, places, keys))
        # Everybody who loads data asks for these two: no need to open it once more.
        ends = keys.ends(n)
        meta = _meta_in(said, keys, n)
    return replace(wanted, database=database, places=places, sidecar=sidecar, mark=mark, ends=ends, meta=meta)


def _read(raw: BinaryIO, fingerprint: str) -> tuple[dict[str, Any], dict[str, StoredArray]]:
    said, arrays = read_stored(raw)
    if said.get("fingerprint") != fingerprint:
        raise ValueError("the data file has changed since")
    return said, arrays


def _meta_in(said: dict[str, Any], keys: KeyTable, n: int) -> dict[int, bytes]:
    """The meta records. Raises ValueError where the side-car gives their names to others."""
    ids = [int(i) for i in said["meta"]]
    if not ids:
        return {}
    if len(ids) > 4 * len(NAMES) or len(ids) >= n or not all(0 <= i < n for i in ids):
        raise ValueError("its meta records cannot be")
    found = dict(zip(ids, keys.get(np.array(ids)), strict=True))
    if not NAMES.issuperset(found.values()):
        raise ValueError("its meta records have other keys")
    return found


def _places_in(said: dict[str, Any], arrays: dict[str, StoredArray], snapshot: Snapshot) -> Places:
    found = arrays["extents"][:].view(EXTENT)
    n, by_offset = len(found), arrays["by_offset"][:] if "by_offset" in arrays else None
    _check_keys(said, arrays, n)
    if n < 1 or content_id_of(found) != said["content_id"]:
        raise ValueError("its extents do not fit their checksum")
    first, end = snapshot.value_bytes
    offsets, nbytes = found["offset"], found["nbytes"]
    # Compared without a sum, which could overflow.
    if (offsets < first).any() or (nbytes < 0).any() or (nbytes > end - offsets).any():
        raise ValueError("its extents lie outside the pages in use")
    if by_offset is not None:
        if len(by_offset) != n or by_offset.min() < 0 or by_offset.max() >= n:
            raise ValueError("its file order has other ids")
        offsets, nbytes = offsets[by_offset], nbytes[by_offset]
    # Strictly ascending offsets: every id occurs once.
    if not (offsets[1:] > offsets[:-1]).all():
        raise ValueError("its file order does not ascend")
    if (offsets[:-1] + nbytes[:-1] > offsets[1:]).any():
        raise ValueError("its extents overlap")
    return Places(found, by_offset, said["content_id"], float(nbytes.mean()))


def open_keys(sidecar: str, fingerprint: str, trustees: Trustees) -> KeyTable:
    """The side-car's keys; the file stays open and is read on demand."""
    raw = None
    try:
        raw = open_trusted(sidecar, trustees)
        return _keys_in(*_read(raw, fingerprint), raw)
    except (OSError, ValueError, LookupError, TypeError) as e:
        if raw is not None:
            raw.close()
        raise SnapshotError(
            f"the saved index was replaced or damaged since it was opened: {e}",
            path=sidecar,
            hint="Open the dataset again",
        ) from e


def _keys_in(said: dict[str, Any], arrays: dict[str, StoredArray], raw: BinaryIO) -> KeyTable:
    width = int(said["key_width"])
    return KeyTable(arrays["key_data"], width, arrays.get("key_starts"), arrays.get("key_first"), (raw,))


def _mark(status: os.stat_result) -> Mark:
    return status.st_size, status.st_mtime_ns


def same_sidecar(sidecar: str, mark: Mark | None) -> bool:
    """Does this node see the side-car that rank 0 saw? What is in it is checked when somebody asks for keys."""
    try:
        return _mark(os.stat(sidecar)) == mark
    except OSError:
        return False


def _check_keys(said: dict[str, Any], arrays: dict[str, StoredArray], n: int) -> None:
    """Shapes only: the keys stay where they are."""
    width, starts, data = int(said["key_width"]), arrays.get("key_starts"), arrays["key_data"]
    k = arrays["key_first"].n if "key_first" in arrays else n
    if width >= 0:
        sound = data.n == k * width
    else:
        sound = starts is not None and starts.n == k + 1 and data.n == int(starts[k:][0])
    if not sound or data.dtype != np.uint8:
        raise ValueError("its keys have the wrong shape")


def save_any(saved: Saved) -> None:
    """Save it at the first place that takes it, and set `sidecar` and `mark`; else log a warning."""
    path, db = saved.database.path, saved.database.name
    try:
        saved.sidecar, saved.mark = save_first(sidecar_places(path, db), *_contents(saved))
        _log.info("the index of %s is saved as %s", path, saved.sidecar)
    except FileError as e:
        _log.warning(
            "the index of %s cannot be saved and will be made again next time; its keys stay in memory (%s)",
            path,
            e.what,
        )


def save_first(sidecars: Iterable[str], says: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[str, Mark]:
    """Save this at the first place that takes it, and return which. Raises FileError, which says why none did."""
    refusals = []
    for sidecar in sidecars:
        try:
            _save(sidecar, says, arrays)
            return sidecar, _mark(os.stat(sidecar))
        except OSError as e:
            refusals.append(f"{sidecar}: {e.strerror or e}")
    raise FileError("; ".join(refusals))


def _save(sidecar: str, says: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write and rename, so that nobody ever sees half of it. Raises OSError.

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
    with closing_fd(fd):
        try:
            write_stored(fd, says, arrays)
            if nameless:  # with a dir_fd, or else Python takes the call that would link to the link
                os.link(f"/proc/self/fd/{fd}", temporary, src_dir_fd=fd, follow_symlinks=True)
            os.replace(temporary, sidecar)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def _contents(saved: Saved) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What a side-car says, and its arrays."""
    database, places, keys = saved.database, saved.places, saved.keys
    assert places is not None
    assert keys is not None
    says = {
        "fingerprint": database.fingerprint,
        "content_id": places.content_id,
        "key_width": keys.width,
        "meta": sorted(saved.meta),
        "data_file": os.path.basename(database.path),
        "database": "(main)" if database.name is None else database.name.decode(errors="backslashreplace"),
        "page_size": database.snapshot.page_size,
        "txnid": database.snapshot.txnid,
    }
    arrays = {
        "extents": places.extents.view(np.int64),
        "by_offset": places.by_offset,
        "key_data": keys.data,
        "key_starts": keys.starts,
        "key_first": keys.first,
    }
    return says, {name: array for name, array in arrays.items() if array is not None}
