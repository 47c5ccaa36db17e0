"""XXH3 in Numba against the xxhash package."""

from __future__ import annotations

import numpy as np
from xxhash import xxh3_64_intdigest

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
