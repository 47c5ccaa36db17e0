"""Arrays of a saved index, read in parts. The oracle is the array in memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pario.errors import SnapshotError
from pario.locate.stored import PIECE_BYTES, StoredArray, read_stored, write_stored


def stored(path: Path, **arrays: np.ndarray) -> dict[str, StoredArray]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    write_stored(fd, {"who": "me"}, arrays)
    os.close(fd)
    raw = open(path, "rb")  # noqa: SIM115  stays open, as that of a table of keys
    said, found = read_stored(raw)
    assert said["who"] == "me"
    return found


@pytest.mark.parametrize("n", [0, 7, 500, 8191, 8192, 8193, 40_001, PIECE_BYTES, 2 * PIECE_BYTES + 1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_any_slice(tmp_path: Path, dtype: type, n: int) -> None:
    rng = np.random.default_rng(n)
    array = rng.integers(0, 255, n).astype(dtype) * (1 if dtype is np.uint8 else 1 << 50)
    both = stored(tmp_path / "x.index", before=np.arange(n, dtype=np.uint8), x=array, after=np.arange(9))
    found = both["x"]
    assert (found.n, found.dtype) == (n, array.dtype)
    for low, high in rng.integers(0, n + 1, (30, 2)).tolist():
        np.testing.assert_array_equal(found[low:high], array[low:high])
        assert found[low:high].dtype == array.dtype
    np.testing.assert_array_equal(found[:], array)
    np.testing.assert_array_equal(both["after"][3:], np.arange(3, 9))
    np.testing.assert_array_equal(both["before"][:], np.arange(n, dtype=np.uint8))


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    stored(path, x=np.random.default_rng(0).integers(0, 256, 101).astype(np.uint8))
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        noisy = bytearray(whole)
        noisy[bit // 8] ^= 1 << bit % 8
        path.write_bytes(noisy)
        with open(path, "rb") as raw:
            if bit // 8 < len(whole) - 101:
                with pytest.raises((ValueError, LookupError, TypeError)):
                    read_stored(raw)
                continue
            found = read_stored(raw)[1]["x"]
            with pytest.raises(SnapshotError, match=f"piece 0 of x .*{path}"):
                found[3:4]


def test_only_the_pieces_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.index"
    found = stored(path, x=np.arange(40_000))["x"]
    os.truncate(path, 300_000)
    assert found[8192:8200].tolist() == list(range(8192, 8200))
    assert found[8193:8195].tolist() == [8193, 8194]  # known by now
    with pytest.raises(SnapshotError, match=r"piece 4 of x .* damaged"):
        found[39_000:]
