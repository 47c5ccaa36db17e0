"""XXH3 in Numba against the xxhash package: values in one piece, and values that were read in pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from pario.fetch.base import Compare, Form
from pario.fetch.posix import PosixFetcher
from pario.kernels.sums import check_sums, sum_values

DATA = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
#: every formula, its limits, and whole blocks more or less a byte
SIZES = [*range(0, 600), 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 5120, 5121, 65_536, 196_608, 200_001]


def digests(starts: np.ndarray, nbytes: np.ndarray) -> list[int]:
    return [xxh3_64_intdigest(DATA[at : at + n].tobytes()) for at, n in zip(starts, nbytes, strict=True)]


def test_every_size_at_any_address() -> None:
    nbytes = np.array(SIZES)
    starts = np.random.default_rng(1).integers(0, 90_000, len(SIZES))
    out = np.empty(len(SIZES), np.uint64)
    assert sum_values(DATA, starts, nbytes, out) == -1
    assert out.tolist() == digests(starts, nbytes)


def test_a_value_outside_of_its_memory() -> None:
    out = np.empty(2, np.uint64)
    for start, n in ((-1, 2), (0, -1), (299_999, 2), (300_001, 0), (5, (1 << 63) - 1)):
        assert sum_values(DATA, np.array([0, start]), np.array([5, n]), out) == 1
        args = DATA, np.array([start]), np.array([n]), np.array([0]), np.zeros(1, np.uint64)
        assert check_sums(*args, np.zeros(1, np.uint64), np.zeros(1, np.int64)) == 1


def test_what_differs_is_named() -> None:
    nbytes = np.array([1, 30, 0, 200, 5000])
    starts = np.arange(5) * 6000
    right = np.array(digests(starts, nbytes), np.uint64)
    sums = np.zeros(20, np.uint64)
    ids = np.array([19, 3, 7, 0, 12])
    sums[ids] = right
    found, bad = np.zeros(5, np.uint64), np.zeros(5, np.int64)
    assert check_sums(DATA, starts, nbytes, ids, sums, found, bad) == 0
    sums[3] ^= np.uint64(1)
    ids[4] = 20  # of no record
    assert check_sums(DATA, starts, nbytes, ids, sums, found, bad) == 2
    assert bad[:2].tolist() == [1, 4]
    assert found[0] == right[1]


@pytest.mark.parametrize(
    ("head", "row", "tail"),
    [(0, 3000, 0), (10, 3000, 9), (63, 1024, 64), (64, 2048, 1), (5, 196_608, 3), (1, 100, 2), (3, 230, 8)],
)
def test_values_that_are_read_in_pieces(head: int, row: int, tail: int, tmp_path: Path) -> None:
    """As `RowReader.read_split` leaves them: the middle in a row, what is beside it in an edge."""
    (tmp_path / "file").write_bytes(DATA.tobytes())
    lead, k = 16, 1 if row > 100_000 else 5
    begins = np.arange(k) * (lead + head + row + tail + 300) + 77
    nbytes = np.full(k, head + row + tail) - np.arange(k) % (tail + 1)
    ids = np.arange(k)[::-1].copy()
    sums = np.zeros(k, np.uint64)
    sums[ids] = digests(begins + lead, nbytes)
    fetcher = PosixFetcher(str(tmp_path / "file"))
    try:
        for wrong in range(-1, k):
            other = sums.copy()
            if wrong >= 0:
                other[ids[wrong]] ^= np.uint64(1 << 63)
            edges, out = np.zeros((k, lead + head + tail), np.uint8), np.zeros(k * row, np.uint8)
            compare = Compare(ids, other, np.zeros(k, np.bool_))
            done = fetcher.rows.read_split(begins, nbytes, Form(lead, head, row, tail), 4096, edges, out, compare)
            assert done is not None
            assert np.flatnonzero(compare.wrong).tolist() == ([] if wrong < 0 else [wrong])
    finally:
        fetcher.close()


def test_packed_values_in_long_reads(tmp_path: Path) -> None:
    """Values of any size, one after the other: reads end where the processor's cache is full."""
    (tmp_path / "file").write_bytes(DATA.tobytes())
    nbytes = np.array([1, 70_000, 0, 99_000, 5, 100_000])
    begins = np.cumsum(nbytes) - nbytes
    sums = np.array(digests(begins, nbytes), np.uint64)
    sums[4] += np.uint64(1)
    compare = Compare(np.arange(6), sums, np.zeros(6, np.bool_))
    fetcher = PosixFetcher(str(tmp_path / "file"))
    out = np.zeros(int(nbytes.sum()), np.uint8)
    fetcher.rows.read_split(begins, nbytes, Form(0, 0, -1, 0), 4096, np.zeros((6, 1), np.uint8), out, compare)
    fetcher.close()
    assert compare.wrong.tolist() == [False, False, False, False, True, False]
    assert np.array_equal(out, DATA[: len(out)])
