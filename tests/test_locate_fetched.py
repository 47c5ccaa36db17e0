"""Pages that are in memory already."""

from __future__ import annotations

import numpy as np

from pario.locate.frontier import _SPARE_BYTES, Fetched, Spare
from pario.plan.coalesce import Reads
from pario.records import EXTENT


def test_what_is_there() -> None:
    snapshot = _Small()
    reads = Reads(
        np.array([(100, 50), (150, 50), (300, 100)], EXTENT), np.array([0, 50, 112]), np.empty(0, np.int64), 212
    )
    found = Fetched(np.zeros(212, np.uint8), reads, snapshot)  # type: ignore[arg-type]
    offsets, nbytes = np.array([100, 140, 99, 190, 200, 300, 370]), np.array([100, 20, 5, 11, 1, 80, 30])
    # The file ends at byte 380.
    assert found.places(offsets, nbytes).tolist() == [0, 40, -1, -1, -1, 112, -1]
    nothing = Fetched(np.zeros(0, np.uint8), Reads(reads.reads[:0], reads.starts[:0], reads.starts[:0], 0), snapshot)  # type: ignore[arg-type]
    assert nothing.places(offsets, nbytes).tolist() == [-1] * 7


def test_spare_pages() -> None:
    spare = Spare(_Small())  # type: ignore[arg-type]
    data = np.arange(256, dtype=np.uint8)
    spare.keep(np.array([7, 8, 20]), data, np.array([0, 64, 128]))
    assert spare.holds(np.array([7 * 64, 9 * 64, 20 * 64 + 63])).tolist() == [True, False, True]
    assert spare.get(7 * 64 + 10, 100).tolist() == list(range(10, 110))  # type: ignore[union-attr]
    assert spare.get(8 * 64 + 10, 100) is None
    for pgno in range(100, 100 + (_SPARE_BYTES // 64)):
        spare.keep(np.array([pgno]), data, np.array([0]))
    assert spare.get(7 * 64, 1) is None


class _Small:
    page_size, file_bytes = 64, 380
