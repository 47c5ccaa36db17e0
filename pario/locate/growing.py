"""An index that grows while records are read, with the surface of a complete one."""

from __future__ import annotations

import threading

import numpy as np

from pario.format.layout import MDB_DUPSORT, Db
from pario.format.meta import Snapshot
from pario.locate.base import Index, Stretch
from pario.locate.frontier import Growth
from pario.locate.guess import Speculator
from pario.locate.hidden import without_last
from pario.locate.index import NOWHERE, KeyTable, Places, arrange, key_table
from pario.locate.sidecar import Saved, save_any
from pario.plan.schedule import Schedule
from pario.plan.selection import Selection
from pario.stats.rank import RankStats

#: Below this many leaf pages, reading them all is cheaper than guessing.
LEAST_LEAVES = 16
#: Of all pages: what several readers may read of leaf pages that others read too.
MOST_REPEATED = 0.02
#: Slots for records of unknown sizes: times the mean size, and this many bytes more.
_ROOM = 1.25
_LEAST_ROOM = 64 << 10


def may_grow(snapshot: Snapshot, record: Db, readers: int) -> bool:
    """Whether a database is read well without an index: else it is walked first, by all ranks together.

    readers : ranks that read; each of them scans all leaves
    """
    repeated = record.md_leaf_pages * (readers - 1)
    return (
        snapshot.native
        and not record.md_flags & MDB_DUPSORT
        and record.md_leaf_pages >= LEAST_LEAVES
        and repeated <= MOST_REPEATED * (snapshot.last_pgno + 1)
    )


class GrowingIndex(Index):
    """An index whose places become known while records are read in key order (see `frontier.py`).

    saved : what a side-car will be of, once the index is complete
    growth : of this node
    """

    sizes_known = False

    def __init__(self, stretch: Stretch, saved: Saved, growth: Growth) -> None:
        super().__init__([stretch], stretch.mean_bytes)
        self.growth = growth
        self._saved = saved
        self._places: Places | None = None
        self._keys: KeyTable | None = None
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        return self._places is not None or self.growth.is_complete

    def _whole(self) -> Places:
        with self._lock:
            if self._places is None:
                self.growth.complete()
                extents = self.growth.extents.view()
                extents.flags.writeable = False
                self._saved.places = self._places = arrange(extents, self.path)
                if self.entries[0] is not None:
                    self._places = without_last(self._places)
                self.mean_bytes = self._places.mean_bytes
            return self._places

    def places(self, ids: np.ndarray) -> np.ndarray:
        self.growth.reach(ids)
        return self.growth.extents[ids]

    def entry_keys(self, ids: np.ndarray) -> list[bytes]:
        with self._lock:
            return self.growth.keys(ids) if self._keys is None else self._keys.get(ids)

    def group_bytes(self, schedule: Schedule, node_size: int, align: int, chosen: Selection | None = None) -> int:
        # What does not fit is read by the rank that takes it.
        most = schedule.max_group_records(node_size)
        return int(_ROOM * most * (self.mean_bytes + self.header_bytes)) + _LEAST_ROOM

    def speculator(self, stats: RankStats, *, guess: bool) -> Speculator:
        return Speculator(self.growth, stats, guess=guess)

    def save(self) -> None:
        """Also completes the index, on rank 0, where the keys were kept; raises what completing it raises."""
        growth = self.growth
        if growth.kept_keys is None:
            return
        self._whole()
        with self._lock:
            data, nbytes = zip(*growth.kept_keys, strict=True)
            self._keys = key_table(np.concatenate(data), np.concatenate(nbytes), None)
            self._saved.keys, self._saved.meta = self._keys, self.meta
            save_any(self._saved)
            self.sidecar = self._saved.sidecar
            growth.kept_keys = None

    def close(self) -> None:
        with self._lock:
            self._keys = None
            self._places = self._saved.places = NOWHERE
            self.growth.close()
