"""The contract of an index: record id -> where its value lies, and its key.

An index is either complete (`index.py`: everything is known when it is opened) or growing (`growing.py`: leaf pages are
scanned while records are read). Both implement this contract, and `open.py` opens both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pario.errors import OptionError
from pario.locate.database import Database
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule
from pario.plan.selection import Selection
from pario.stats.rank import RankStats

if TYPE_CHECKING:
    from pario.locate.guess import Speculator

class Stretch(NamedTuple):
    """Records that lie in one file: ids start..stop-1, in key order.

    bytes_read, mean_bytes : as of `Index`, in this file
    """

    database: Database
    start: int
    stop: int
    bytes_read: int
    mean_bytes: float


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
    Or those of several files, one file after the other (joined.py); then `files` says which database is whose.

    A growing index that is asked for something unknown reads leaf pages, which can raise CorruptedError, DatabaseError,
    ReadError or SnapshotError, as reading records does.

    database : the database that it describes
    n : number of records
    mean_bytes : mean size of a value; while the index grows, an estimate on the large side
    bytes_read : bytes of branch and leaf pages that all ranks together read to open it; 0 if a side-car was loaded
    sizes_known : whether all sizes were known when it was opened, so that `group_bytes` is exact
    sidecar : path of the saved index, or None
    trusted : whether this job built it from the file itself, and did not load it from a side-car
    files : which records lie in which file
    meta : id -> key of the records that are about the dataset and no samples of it (meta.py); on all ranks
    entries : of each file the value of its reserved entry, if its values are packed (hidden.py), else None. The entry
        is the last record of its database, and none of these n; on all ranks
    """

    sizes_known: bool
    trusted: bool

    def __init__(self, database: Database, n: int, mean_bytes: float, bytes_read: int) -> None:
        self.database = database
        self.n = n
        self.mean_bytes = mean_bytes
        self.bytes_read = bytes_read
        self.sidecar: str | None = None
        self.meta: dict[int, bytes] = {}
        self.entries: tuple[bytes | None, ...] = (None,)
        self.files = Files([Stretch(database, 0, n, bytes_read, mean_bytes)])
        self.path = database.path
        self.snapshot = database.snapshot
        self.file_bytes = database.snapshot.file_bytes
        self.header_bytes = database.snapshot.header
        self.page_size = database.snapshot.page_size

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, records={self.n:,}, sidecar={self.sidecar!r})"

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all extents are known; then the methods below read nothing but keys."""

    @property
    @abstractmethod
    def extents(self) -> np.ndarray:
        """EXTENT[n], read-only: offset in the file and bytes of every value. Completes a growing index."""

    @property
    @abstractmethod
    def by_offset(self) -> np.ndarray | None:
        """i64[n], record ids in file order; None if file order is id order. Completes a growing index."""

    @property
    @abstractmethod
    def content_id(self) -> str:
        """Hexadecimal hash of the extents, the same for every copy of the file. Completes a growing index."""

    @property
    @abstractmethod
    def largest_bytes(self) -> int | None:
        """Size of the largest value; None if that is unknown. Reads nothing."""

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

    @abstractmethod
    def keys(self, ids: np.ndarray | list[int]) -> list[bytes]:
        """The keys of these records, in the given order.

        ids : i64[m], in 0..n-1
        Raises OptionError for an id out of range, SnapshotError if the side-car was replaced since.
        """

    @abstractmethod
    def group_bytes(self, schedule: Schedule, node_size: int, align: int, chosen: Selection | None = None) -> int:
        """Bytes that a slot of the ring needs for any group of `schedule` in any epoch, on a node with `node_size`
        seats; an estimate unless `sizes_known`.

        align : alignment of the fetcher's reads in bytes
        chosen : which records the schedule's are; None: all
        """

    @abstractmethod
    def speculator(self, stats: RankStats, *, guess: bool) -> Speculator | None:
        """What reads an epoch in key order before its extents are known; None if `sizes_known`.

        guess : read page ranges that probably hold the records; False: read leaf pages first, then exactly the records
        """

    @abstractmethod
    def save(self) -> None:
        """Save a grown index as a side-car, on rank 0, after a complete epoch. Later calls do nothing. Logs a warning
        if it cannot be saved."""

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


