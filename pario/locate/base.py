"""The contract of an index: record id -> where its value lies, and its key.

An index is either complete (`index.py`: everything is known when it is opened) or growing (`growing.py`: leaf pages are
scanned while records are read). Both implement this contract, and `open.py` opens both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pario.errors import DecodeError, OptionError
from pario.fetch.joined import bases_of, joined_name
from pario.format.layout import MDB_INTEGERKEY, MDB_REVERSEKEY, Db
from pario.locate.database import Database
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule
from pario.plan.selection import Selection
from pario.stats.rank import RankStats

if TYPE_CHECKING:
    from pario.locate.guess import Speculator

@dataclass(frozen=True)
class Places:
    """Where all records lie. The arrays are shared by the ranks of a node.

    extents : EXTENT[n]; by_offset : i64[n], ids in file order, or None where that is id order
    content_id : of the extents; mean_bytes : of a value
    """

    extents: np.ndarray
    by_offset: np.ndarray | None
    content_id: str
    mean_bytes: float


class Stretch(NamedTuple):
    """Records that lie in one file: ids start..stop-1, in key order; what all ranks know of them.

    bytes_read, mean_bytes, sidecar : as of `Index`, in this file
    meta, ends : number in the file -> key, of the meta records, and of the first record and the last two
    entry : see `Index.entries`
    """

    database: Database
    start: int
    stop: int
    bytes_read: int
    mean_bytes: float
    sidecar: str | None
    meta: dict[int, bytes]
    ends: dict[int, bytes]
    entry: bytes | None

    @property
    def record(self) -> Db:
        """The entry of the database's tree in the file, with its flags and page counts."""
        assert self.database.record is not None  # found when the index was opened
        return self.database.record

    @property
    def in_byte_order(self) -> bool:
        """Whether keys are ordered as bytes, so that those with one prefix are neighbours."""
        return not self.record.md_flags & (MDB_INTEGERKEY | MDB_REVERSEKEY)


class Files:
    """What lies in which file.

    stretches : of each file, in the order of ids
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)
        self._starts = [stretch.start for stretch in stretches]

    def __len__(self) -> int:
        return len(self.stretches)

    @property
    def paths(self) -> tuple[str, ...]:
        """The data files."""
        return tuple(stretch.database.path for stretch in self.stretches)

    def of(self, ids: np.ndarray | list[int]) -> np.ndarray:
        """i64[m]: for each of these records (in 0..n-1), which of `paths` it lies in."""
        return np.searchsorted(self._starts, ids, side="right") - 1

    def path_of(self, record: int) -> str:
        """The data file in which a record lies."""
        return self.stretches[int(self.of([record])[0])].database.path


class Index(ABC):
    """All records of one database in one snapshot. Ids are 0..n-1 in key order. Any thread; nothing is collective.
    Or those of several files, one file after the other (joined.py); then `files` says which database is whose, and
    `database` and `snapshot` are those of the first one.

    A growing index that is asked for something unknown reads leaf pages, which can raise CorruptedError, DatabaseError,
    ReadError or SnapshotError, as reading records does.

    database : the database that it describes
    n : number of records
    mean_bytes : mean size of a value; while the index grows, an estimate on the large side
    bytes_read : bytes of branch and leaf pages that all ranks together read to open it; 0 if a side-car was loaded
    sizes_known : whether all sizes were known when it was opened, so that `group_bytes` is exact
    sidecar : path of the saved index, of several files that of the first one; None if one of them has none
    files : which records lie in which file
    meta : id -> key of the records that are about the dataset and no samples of it (meta.py); on all ranks
    entries : of each file the value of its reserved entry, if its values are packed (hidden.py), else None. The entry
        is the last record of its database, and none of these n; on all ranks
    """

    sizes_known: bool
    #: keys of records that lie in blocks, if there are some: the reader sets it, who can unpack them
    keys_within: Callable[[np.ndarray], list[bytes]] | None = None

    def __init__(self, stretches: Sequence[Stretch], mean_bytes: float) -> None:
        snapshots = [stretch.database.snapshot for stretch in stretches]
        sizes = [snapshot.file_bytes for snapshot in snapshots]
        self.files = Files(stretches)
        self.database, self.snapshot = stretches[0].database, snapshots[0]
        self.n = stretches[-1].stop
        self.mean_bytes = mean_bytes
        self.bytes_read = sum(stretch.bytes_read for stretch in stretches)
        self.sidecar = stretches[0].sidecar if all(stretch.sidecar for stretch in stretches) else None
        self.meta = {stretch.start + i: key for stretch in stretches for i, key in stretch.meta.items()}
        self._ends = {stretch.start + i: key for stretch in stretches for i, key in stretch.ends.items()}
        self.entries = tuple(stretch.entry for stretch in stretches)
        self.path = joined_name(self.files.paths)
        self.file_bytes = int(bases_of(sizes)[-1]) + sizes[-1]
        self.header_bytes = max(snapshot.header for snapshot in snapshots)
        self.page_size = max(snapshot.page_size for snapshot in snapshots)

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, records={self.n:,}, sidecar={self.sidecar!r})"

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all extents are known; then the methods below read nothing but keys."""

    @abstractmethod
    def _whole(self) -> Places:
        """Where all records lie. Completes a growing index."""

    @property
    def extents(self) -> np.ndarray:
        """EXTENT[n], read-only: offset in the file and bytes of every value. Completes a growing index."""
        return self._whole().extents

    @property
    def by_offset(self) -> np.ndarray | None:
        """i64[n], record ids in file order; None if file order is id order. Completes a growing index."""
        return self._whole().by_offset

    @property
    def content_id(self) -> str:
        """Hexadecimal hash of the extents, the same for every copy of the file. Completes a growing index."""
        return self._whole().content_id

    @property
    def largest_bytes(self) -> int | None:
        """Size of the largest value; None if that is unknown. Reads nothing."""
        return self._largest if self.is_complete else None

    @cached_property
    def _largest(self) -> int:
        return int(self.extents["nbytes"].max())

    @abstractmethod
    def places(self, ids: np.ndarray) -> np.ndarray:
        """EXTENT[m], where the values of these records (i64[m], in 0..n-1) lie."""

    def extents_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(offset i64[m], bytes i64[m]) of these records' values, each contiguous; see `places`."""
        extents = self.places(ids)
        return np.ascontiguousarray(extents["offset"]), np.ascontiguousarray(extents["nbytes"])

    def ids_of(self, numbers: np.ndarray, order: Order) -> np.ndarray:
        """The record ids i64[m] of an order's numbers: ids, or places in the file (`Order.space`)."""
        by_offset = None if order.space == "id" else self.by_offset
        return numbers if by_offset is None else by_offset[numbers]

    def keys(self, ids: np.ndarray | list[int]) -> list[bytes]:
        """The keys of these records, in the given order.

        ids : i64[m], in 0..n-1
        Raises OptionError for an id out of range, SnapshotError if the side-car was replaced since.
        """
        wanted = self.checked(ids)
        if len(wanted) <= len(self._ends) and all(i in self._ends for i in wanted.tolist()):
            return [self._ends[i] for i in wanted.tolist()]  # everybody asks for these: nobody opens a table for them
        return self.entry_keys(wanted) if self.keys_within is None else self.keys_within(wanted)

    @abstractmethod
    def entry_keys(self, ids: np.ndarray) -> list[bytes]:
        """The keys that the database has for the entries in which these records (i64[m], in 0..n-1) lie: of a block
        of records the last one's. (codec/packing.py)"""

    @abstractmethod
    def group_bytes(self, schedule: Schedule, node_size: int, align: int, chosen: Selection | None = None) -> int:
        """Bytes that a slot of the ring needs for any group of `schedule` in any epoch, on a node with `node_size`
        seats; an estimate unless `sizes_known`.

        align : alignment of the fetcher's reads in bytes
        chosen : which records the schedule's are; None: all
        """

    def speculator(self, stats: RankStats, *, guess: bool) -> Speculator | None:
        """What reads an epoch in key order before its extents are known; None if `sizes_known`.

        guess : read page ranges that probably hold the records; False: read leaf pages first, then exactly the records
        """
        return None

    def save(self) -> None:
        """Save a grown index as a side-car, on rank 0, after a complete epoch. Later calls do nothing. Logs a warning
        if it cannot be saved."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release shared memory and files; idempotent."""

    def checked(self, ids: np.ndarray | list[int]) -> np.ndarray:
        """i64[m]: these record ids. Raises OptionError for one out of range."""
        wanted = np.ascontiguousarray(ids, np.int64).reshape(-1)
        if len(wanted) and (int(wanted.min()) < 0 or int(wanted.max()) >= self.n):
            raise OptionError(
                f"record ids must lie in 0..{self.n - 1}, got {int(wanted.min())}..{int(wanted.max())}", path=self.path
            )
        return wanted


def key_of(index: Index, record: int) -> bytes:
    """A record's key, for a message: in a damaged block that of its last record."""
    try:
        return index.keys([record])[0]
    except DecodeError:
        return index.entry_keys(np.array([record]))[0]
