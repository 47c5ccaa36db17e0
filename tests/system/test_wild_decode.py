"""Published LMDBs through the Loader and its decoders; the oracle is py-lmdb with pickle, json and OpenCV."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import cv2
import lmdb
import numpy as np
import pytest
from shared_data import files, need

import pario
from pario.decode import Image, Pickle, preset

PICTURES = files("wild", "*lq.lmdb_data.mdb") + files("wild", "*gt.lmdb_data.mdb")
MOLECULES = files("wild", "drorlab*")
#: data sets whose pickles are of plain data and NumPy arrays; the others need torch or pymatgen
PLAIN = [path for name in ("alexandria", "carolina", "nomad", "oqmd") for path in files("wild", f"*_{name}*devset*")]


def records(path: Path, folder: Path) -> tuple[Path, list[tuple[bytes, bytes]]]:
    """A copy, so that no index is saved beside the published file, and its content."""
    need(path)
    mine = folder / "data.mdb"
    shutil.copyfile(path, mine)
    with lmdb.open(os.fspath(mine), subdir=False, readonly=True, lock=False) as env, env.begin() as txn:
        return mine, [(bytes(key), bytes(value)) for key, value in txn.cursor()]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name or "none")
def test_pictures(path: Path, tmp_path: Path) -> None:
    mine, truth = records(path, tmp_path)
    for i, (_, value) in enumerate(truth):
        right = cv2.imdecode(np.frombuffer(value, np.uint8), cv2.IMREAD_COLOR)
        with pario.Loader(mine, 8, Image(right.shape[:2], color="BGR")) as loader:
            (batch,) = list(loader)
        assert batch.ids.tolist() == list(range(len(truth)))
        np.testing.assert_array_equal(batch["data"][i], right)


@pytest.mark.parametrize("path", MOLECULES, ids=lambda path: path.name or "none")
def test_molecules(path: Path, tmp_path: Path) -> None:
    mine, truth = records(path, tmp_path)
    with pario.Loader(mine, 2, preset("atom3d"), shuffle="global", on_error="skip") as loader:
        seen = {i: value for batch in loader for i, value in zip(batch.ids.tolist(), batch["data"], strict=True)}
    assert len(truth) - len(seen) == 3  # which describe the others
    for i, value in seen.items():
        assert value == json.loads(gzip.decompress(truth[i][1]))


def same(mine: object, theirs: object) -> None:
    assert type(mine) is type(theirs)
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs)  # type: ignore[call-overload]
        for name in theirs:
            same(mine[name], theirs[name])  # type: ignore[index]
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)  # type: ignore[arg-type]
        for a, b in zip(mine, theirs, strict=True):  # type: ignore[call-overload]
            same(a, b)
    elif isinstance(theirs, np.ndarray):
        assert mine.dtype == theirs.dtype  # type: ignore[attr-defined]
        np.testing.assert_array_equal(mine, theirs)
    else:
        assert mine == theirs or mine != mine


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name or "none")
def test_pickles_without_running_code(path: Path, tmp_path: Path) -> None:
    mine, truth = records(path, tmp_path)
    with pario.Loader(mine, 16, Pickle(allow=[]), shuffle="global") as loader:
        seen = {i: value for batch in loader for i, value in zip(batch.ids.tolist(), batch["data"], strict=True)}
    assert len(seen) == len(truth)
    for i, value in seen.items():
        same(value, pickle.loads(truth[i][1]))
