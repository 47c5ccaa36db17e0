"""The Loader on LMDBs as training code writes them (lmdb_users.py): one line of decoder each, every record once.

The oracle is py-lmdb with the standard library's json, pickle, gzip and zlib. The records that the decoder cannot read
are those that describe the others (`length`, `__keys__`, ...).
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from lmdb_users import USERS, comparable

import pario
from pario.decode import Decoder, Json, Pickle, preset


def unzipped(value: bytes) -> Any:
    return json.loads(zlib.decompress(value))


def ungzipped(value: bytes) -> Any:
    return json.loads(gzip.decompress(value))


#: convention -> (decoder, (names of fields; None: the whole value), oracle, keys of the records that describe others)
CASES: dict[str, tuple[Callable[[], Decoder], tuple[Any, ...] | None, Callable[[bytes], Any], set[bytes]]] = {
    "ASE-LMDB": (
        lambda: preset("ase", fields={"numbers": "int64"}),
        ("numbers",),
        unzipped,
        {b"nextid", b"deleted_ids", b"metadata"},
    ),
    "ATOM3D": (
        lambda: preset("atom3d"),
        None,
        ungzipped,
        {b"num_examples", b"serialization_format", b"id_to_idx"},
    ),
    "OC20": (lambda: preset("oc20", allow=[], fields=["pos", "sid"]), ("pos", "sid"), pickle.loads, {b"length"}),
    "TAPE": (lambda: preset("tape", allow=[]), ("primary", "id"), pickle.loads, {b"num_examples"}),
    "Uni-Mol": (lambda: preset("unimol", allow=[], fields=None), None, pickle.loads, set()),
    "Uni-Mol+": (lambda: preset("unimol+", allow=[]), None, lambda v: pickle.loads(gzip.decompress(v)), set()),
    "tensorpack": (lambda: preset("tensorpack", allow=[]), (0, 1), pickle.loads, {b"__keys__"}),
    "MeanFlow": (
        lambda: Pickle("all", allow=[]),
        ("moments", "moments_flip", "label"),
        pickle.loads,
        {b"num_samples", b"created_at"},
    ),
    "prefixes": (lambda: Json(["chains"], ragged="list"), ("chains",), json.loads, set()),
}


@pytest.mark.parametrize("name", CASES)
def test_every_record_once_and_right(name: str, tmp_path: Path) -> None:
    make, fields, oracle, meta = CASES[name]
    written = Path(USERS[name][0](tmp_path / "set", random.Random(3)))
    path = written / "data.0002.lmdb" if name == "OC20" else written
    with lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as env, env.begin() as txn:
        truth = [(bytes(key), bytes(value)) for key, value in txn.cursor()]
    if name == "prefixes":  # one kind of record of several: those begin in key order after two that are named
        truth = [(key, value) for key, value in truth if key.startswith(b"structure_data:")]
        with lmdb.open(str(tmp_path / "only"), map_size=1 << 24) as env, env.begin(write=True) as txn:
            for key, value in truth:
                txn.put(key, value)
        path = tmp_path / "only"
    seen = {}
    with pario.Loader(path, 7, make(), shuffle="global", seed=1, on_error="skip", save_index=False) as loader:
        for batch in loader:
            assert len({len(array) for array in batch.values()} | {len(batch.ids)}) == 1
            for k, i in enumerate(batch.ids.tolist()):
                names = ["data", "label"] if fields == (0, 1) else fields or ["data"]
                assert i not in seen
                seen[i] = [batch[one][k] for one in names]
        assert loader.skipped <= len(meta)  # fewer if the Loader itself leaves them out
    assert {truth[i][0] for i in seen} == {key for key, _ in truth} - meta
    for i, got in seen.items():
        value = oracle(truth[i][1])
        right = [value] if fields is None else [value[one] for one in fields]
        for mine, theirs in zip(got, right, strict=True):
            if isinstance(mine, (np.ndarray, np.generic)):
                np.testing.assert_array_equal(mine, np.asarray(theirs, mine.dtype))
                assert mine.shape == np.shape(theirs)
            else:
                assert comparable(mine) == comparable(theirs)
