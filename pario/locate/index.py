"""The complete index: every record's place in memory that the ranks of a node share, keys there or in the side-car."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pario.errors import CorruptedError
from pario.locate.base import Index, Places, Stretch
from pario.plan.schedule import Schedule, slot_capacity
from pario.plan.selection import Selection
from pario.records import EXTENT

#: Ids that lie so close together are looked up by one read of a side-car.
_NEAR_IDS = 1024


#: After an index was closed.
NOWHERE = Places(np.empty(0, EXTENT), None, "", 0.0)


class KeyTable:
    """All keys, in memory or in an open side-car (stored.py): both are sliced alike. One thread at a time.

    data : u8[...], all keys one after the other; a key with several values once
    width : bytes of every key, or -1; starts : i64[k + 1] if they differ
    first : i64[k], the first record of each key: of one with several values, or of a block of records (hidden.py); None
        where every key has one record
    files : to close with it
    """

    def __init__(self, data: Any, width: int, starts: Any, first: Any, files: tuple[Any, ...] = ()) -> None:
        self.data = data
        self.width = width
        self.starts = starts
        self.first = first
        self._files = files

    def close(self) -> None:
        for file in self._files:
            file.close()

    def get(self, ids: np.ndarray) -> list[bytes]:
        """The keys of these records (i64[m]), in this order."""
        if self.first is not None:
            self.first = self.first[:]  # in memory from now on
            ids = np.searchsorted(self.first, ids, side="right") - 1
        if len(ids) and (np.diff(ids) == 1).all():  # one after the other: all that go through a file ask so
            return self._near(ids)
        distinct, back = np.unique(ids, return_inverse=True)
        found: list[bytes] = []
        for near in np.split(distinct, np.flatnonzero(np.diff(distinct) > _NEAR_IDS) + 1):
            found += self._near(near)
        return [found[i] for i in back.tolist()]

    def _near(self, numbers: np.ndarray) -> list[bytes]:
        """The keys with these numbers in the table (i64[m], ascending): by one read of it."""
        low, high = int(numbers[0]), int(numbers[-1]) + 1
        if self.width >= 0:
            starts = np.arange(low, high + 1, dtype=np.int64) * self.width
        else:
            starts = self.starts[low : high + 1]
        data = self.data[int(starts[0]) : int(starts[-1])].tobytes()
        starts, numbers = starts - starts[0], numbers - low
        return list(map(data.__getitem__, map(slice, starts[numbers].tolist(), starts[numbers + 1].tolist())))

    def one(self, record: int) -> bytes:
        """The key of one record."""
        return self.get(np.array([record]))[0]

    def ends(self, n: int) -> dict[int, bytes]:
        """Record id -> key of the first and the last two of n records: the last one may be hidden (hidden.py)."""
        ids = sorted({0, max(n - 2, 0), n - 1})
        return dict(zip(ids, self.get(np.array(ids)), strict=True))


class RecordIndex(Index):
    """An index of which all is known.

    places : of all records
    keys : the table of all keys, or a function that opens it when somebody asks for a key
    """

    sizes_known = True
    is_complete = True

    def __init__(
        self, stretches: Sequence[Stretch], places: Places, keys: KeyTable | Callable[[], KeyTable]
    ) -> None:
        super().__init__(stretches, places.mean_bytes)
        self._places = places
        self._keys: KeyTable | Callable[[], KeyTable] | None = keys
        self._lock = threading.Lock()

    def _whole(self) -> Places:
        return self._places

    def places(self, ids: np.ndarray) -> np.ndarray:
        return self._places.extents[ids]

    def entry_keys(self, ids: np.ndarray) -> list[bytes]:
        with self._lock:
            if callable(self._keys):
                self._keys = self._keys()
            assert self._keys is not None  # until it is closed
            return self._keys.get(ids)

    def group_bytes(self, schedule: Schedule, node_size: int, align: int, chosen: Selection | None = None) -> int:
        capacity = slot_capacity(
            self.extents,
            schedule,
            node_size,
            lead_bytes=self.header_bytes,
            # Whole pages: neighbouring values are read with what lies between them in a page.
            align=max(self.page_size, align),
            by_offset=self.by_offset,
            chosen=chosen,
        )
        # For the leaf pages that lie between values; all of the file at the most, as no byte is read twice.
        return min(capacity + capacity // 32, self.file_bytes) + 2 * self.page_size

    def close(self) -> None:
        with self._lock:
            if isinstance(self._keys, KeyTable):
                self._keys.close()
            self._keys = None
            self._places = NOWHERE  # so that the memory that holds the arrays goes back


def arrange(extents: np.ndarray, path: str) -> Places:
    """All extents put into file order; EXTENT[n]. Raises CorruptedError if two values share bytes."""
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
    return Places(extents, by_offset, content_id_of(extents), float(extents["nbytes"].mean()))


def content_id_of(extents: np.ndarray) -> str:
    """Hex, of EXTENT[n]."""
    digest = hashlib.blake2b(f"pario index 1 {len(extents)}".encode(), digest_size=16)
    digest.update(memoryview(extents.view(np.uint8)))
    return digest.hexdigest()


def key_table(data: np.ndarray, nbytes: np.ndarray, counts: np.ndarray | None) -> KeyTable:
    """The keys of a walk.

    data : u8[...], all keys one after the other; nbytes : u16[k], their lengths
    counts : i64[k], records of each key; None where every key has one
    """
    width = int(nbytes[0])
    starts = None
    if not (nbytes == width).all():
        width = -1
        starts = np.zeros(len(nbytes) + 1, np.int64)
        np.cumsum(nbytes, out=starts[1:])
    first = None
    if counts is not None:
        first = np.cumsum(counts) - counts
    return KeyTable(data, width, starts, first)
