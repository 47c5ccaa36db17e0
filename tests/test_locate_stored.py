"""Arrays of a side-car without HDF5. The oracle is h5py: what it wrote, its checksums included."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from pario.errors import SnapshotError
from pario.locate.stored import PIECE_BYTES, StoredArray

KINDS = {
    "pieces": {"chunks": (PIECE_BYTES // 8,), "fletcher32": True},
    "small pieces": {"chunks": (7,), "fletcher32": True},
    "in one": {},
}


def stored(path: Path, array: np.ndarray, **how: object) -> StoredArray:
    if "chunks" in how:
        how["chunks"] = (min(*how["chunks"], len(array)),)  # type: ignore[misc]
    with h5py.File(path, "w", libver="v110") as file:
        file.create_dataset("x", data=array, **how)
    raw = open(path, "rb")  # noqa: SIM115  stays open, as that of a table of keys
    with h5py.File(path, "r") as file:
        return StoredArray(file["x"], raw)


@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("n", [7, 500, 8191, 8192, 8193, 40_001])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_any_slice(tmp_path: Path, dtype: type, n: int, how: str) -> None:
    rng = np.random.default_rng(n)
    array = rng.integers(0, 255, n).astype(dtype) * (1 if dtype is np.uint8 else 1 << 50)
    found = stored(tmp_path / "x.h5", array, **KINDS[how])
    assert h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET) == 0
    np.testing.assert_array_equal(np.asarray(found), array)
    for low, high in rng.integers(0, n + 1, (30, 2)).tolist():
        np.testing.assert_array_equal(found[low:high], array[low:high])
        assert found[low:high].dtype == array.dtype


def test_nothing_in_it(tmp_path: Path) -> None:
    assert len(stored(tmp_path / "x.h5", np.empty(0, np.uint8))[:]) == 0


def test_each_flipped_bit_is_found(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 256, 101).astype(np.uint8)
    path = tmp_path / "x.h5"
    stored(path, array, chunks=(101,), fletcher32=True)
    whole = path.read_bytes()
    at = whole.index(array.tobytes())
    for bit in range(8 * (101 + 4)):
        noisy = bytearray(whole)
        noisy[at + bit // 8] ^= 1 << bit % 8
        path.write_bytes(noisy)
        with open(path, "rb") as raw, h5py.File(path, "r") as file:
            found = StoredArray(file["x"], raw)
            with pytest.raises(SnapshotError, match=f"piece 0 of /x .*{path}"):
                found[3:4]


def test_a_file_that_is_cut_later(tmp_path: Path) -> None:
    found = stored(tmp_path / "x.h5", np.arange(40_000), **KINDS["in one"])
    os.truncate(tmp_path / "x.h5", 100_000)
    assert found[:10].tolist() == list(range(10))
    with pytest.raises(SnapshotError, match="damaged"):
        found[20_000:]


@pytest.mark.parametrize(
    ("array", "how"),
    [
        (np.arange(100), {"chunks": (10,)}),
        (np.arange(100), {"chunks": (10,), "fletcher32": True, "compression": "gzip"}),
        (np.arange(20_000), {"chunks": (10_000,), "fletcher32": True}),
        (np.arange(100.0), {}),
        (np.arange(100).astype(">i8"), {}),
        (np.zeros((10, 10), np.int64), {}),
        (np.arange(100), {"external": [("elsewhere", 0, 800)]}),
    ],
)
def test_other_layouts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: np.ndarray, how: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)  # where HDF5 would put what is elsewhere
    with pytest.raises(ValueError, match=r"/x|unpack"):
        stored(tmp_path / "x.h5", array, **how)
