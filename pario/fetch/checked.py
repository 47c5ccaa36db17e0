"""The checks of bytes before their use, on every way of reading: the snapshot first, then the headers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pario.errors import CorruptedError
from pario.fetch.base import Fetcher
from pario.fetch.snapshot import check_snapshot, file_words
from pario.format.meta import Snapshot
from pario.kernels.verify import BAD_NODE, BAD_PAGE, check_values
from pario.records import Records

#: of `in_copy`: check all
NONE_SEEN = np.empty(0, np.uint8)

#: what `check_values` finds -> in words
_FAULTS = {
    BAD_PAGE: "the page header before this record's value is not that of its pages",
    BAD_NODE: "no node of the leaf page holds this record's value",
}


class Checked:
    """Checks the bytes of records after reading. Any thread.

    The snapshot comes first: if a writer overtook us, wrong headers are the writer's work and not damage.

    fetcher : has the file open
    path, snapshot : of the data file
    nodes : check that a node of the leaf page holds each value inside it; this reads the page from its beginning.
        False where this job took the places from these nodes
    dups : keys of the database may have several values
    """

    def __init__(
        self, fetcher: Callable[[], Fetcher], path: str, snapshot: Snapshot, *, nodes: bool, dups: bool
    ) -> None:
        self.nodes = nodes
        self._fetcher = fetcher
        self._path = path
        self._snapshot = snapshot
        self._dups = dups
        self._words = np.array(file_words(snapshot), np.int64)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """What `spans` depends on."""
        return self._snapshot.page_size, self._snapshot.header, self.nodes

    def snapshot(self) -> None:
        """Raises SnapshotError if a writer may have overwritten pages of the snapshot."""
        fetcher = self._fetcher()
        if fetcher.staged:
            fetcher.look()
        else:
            check_snapshot(fetcher, self._snapshot)

    def spans(self, offsets: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(begins i64[m], lengths i64[m]) of the bytes that `records` needs for its checks of these values."""
        begins = offsets - self._snapshot.header
        if self.nodes:
            # From the beginning of the page, where its header and the places of its nodes stand.
            begins = self._page_begins(offsets)
        return begins, nbytes + (offsets - begins)

    def records(self, records: Records, offsets: np.ndarray) -> None:
        """Check that these are the right records. Their memory holds the bytes that `spans` gives; the values begin at
        `offsets` (i64[m]) in the file.

        Raises SnapshotError, and CorruptedError for the first record that is not what the index says.
        """
        self.snapshot()
        self.in_copy(records, offsets)

    def in_copy(self, records: Records, offsets: np.ndarray, seen: np.ndarray = NONE_SEEN) -> None:
        """As `records`, of a copy that was compared with the snapshot when it was made: no look at the file, which need
        not be open. seen : u8[...], a bit per id: those that passed before, and that pass now"""
        ids, nbytes, trust = records.ids, records.nbytes, (self.nodes, self._dups)
        bad, fault = check_values(records.data, records.starts, offsets, nbytes, ids, *trust, self._words, seen)
        if bad < 0:
            return
        begin = int(self._page_begins(offsets[bad]))
        raise CorruptedError(
            _FAULTS[fault],
            path=self._path,
            page=begin // self._snapshot.page_size,
            offset=begin,
            record=int(ids[bad]),
            hint="The file is damaged, or was rewritten since its index was made: delete the .pario.index beside "
            "it and try again; `python -m pario data verify` looks at every record.",
        )

    def _page_begins(self, offsets: np.ndarray) -> np.ndarray:
        # An empty value may lie at a page's very end. Page sizes are powers of two; a division takes ten times as long.
        return (offsets - 1) & -self._snapshot.page_size
