"""Random lists through every decoder that makes columns of them, against plain Python."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from caffe2_message import tensor_protos
from made_records import arrays, made
from rows_fuzz import (
    ENCODERS,
    Arrays,
    Set,
    good_arrays,
    numbers_of,
    padding,
    random_arrays,
    random_set,
    same,
    truth,
    unbatched,
)

import pario
from pario.decode import Decoder, Draw, Function, Json, MsgPack, Npy, Npz, Pickle, TensorProtos, Text
from pario.errors import DecodeError, OptionError

pytestmark = pytest.mark.hostile


def decoder_of(form: str, one: Set) -> Decoder:
    fields: Any = ["x", "n"] if one.dtype is None else {"x": one.dtype, "n": None}
    options: dict[str, Any] = {"ragged": one.mode and {"x": one.mode}, "pad_value": one.pad}
    if form == "function":
        return Function(json.loads, **options)
    if form == "pickle":
        return Pickle(fields, allow=[], **options)
    return (MsgPack if form == "msgpack" else Json)(fields, **options)


def encoded(form: str, one: Set) -> list[bytes]:
    if form == "function":
        one.dtype = None
    encode = ENCODERS["json" if form == "function" else form]
    return [encode(value) for value in one.values]


def by_hand(decoder: Decoder, values: list[bytes]) -> tuple[dict[str, np.ndarray], list[int]]:
    """(arrays, rows that failed)"""
    records = made(values)
    for k in range(len(values)):
        if k and not decoder.is_open:
            break
        try:
            decoder.learn(records[k])
        except DecodeError:
            if not k:
                raise
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    assert all("'x'" in why or "'data'" in why for _, why in failures)
    bad = [row for row, _ in failures]
    return decoder.finish(decoder.picked(out, np.setdiff1d(np.arange(len(values)), bad))), bad


def check(
    form: str, seed: int, batch: Callable[[Decoder, list[bytes]], tuple[dict[str, np.ndarray], list[int]]]
) -> None:
    one = random_set(seed)
    if form == "msgpack" and any(isinstance(n, int) and not -(2**63) <= n < 2**64 for n in numbers_of(one.values)):
        return  # MessagePack has no such numbers
    values, decoder = encoded(form, one), decoder_of(form, one)
    expected, where = truth(one), (form, seed, one)
    try:
        got, bad = batch(decoder, values)
    except (DecodeError, OptionError) as error:
        if expected.good is not None or "'x'" not in str(error):
            raise AssertionError(where) from error
        return
    assert expected.good is not None, where
    assert bad == [row for row, good in enumerate(expected.good) if not good], (where, expected)
    kept = [value for value, good in zip(one.values, expected.good, strict=True) if good]
    returned = unbatched(got, "x", len(kept))
    assert all(same(mine, value, expected.kind) for mine, value in zip(returned, kept, strict=True)), (where, got)
    assert got["n"].tolist() == [1] * len(kept)
    if "x_lengths" in got:
        filled = padding(got, "x")
        assert ((filled == got["x"].dtype.type(one.pad)) | np.isnan(filled)).all(), (where, got)


FORMS = ("json", "function", "pickle", "msgpack")
FEW = [100, pytest.param(1000, marks=pytest.mark.full)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("many", FEW)
def test_random_lists(form: str, many: int) -> None:
    for seed in range(many):
        check(form, seed, by_hand)


def by_loader(folder: Path) -> Callable[[Decoder, list[bytes]], tuple[dict[str, np.ndarray], list[int]]]:
    """The same by a Loader over an LMDB."""

    def read(decoder: Decoder, values: list[bytes]) -> tuple[dict[str, np.ndarray], list[int]]:
        path = folder / f"{len(list(folder.iterdir()))}.lmdb"
        with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
            for k, value in enumerate(values):
                txn.put(b"%02d" % k, value)
        n = len(values)
        with pario.Loader(path, n, decoder, comm="self", save_index=False):
            pass  # what is wrong with record 0 is an error, not a record to skip
        with pario.Loader(path, n, decoder, comm="self", save_index=False, on_error="skip") as loader:
            (batch,) = loader
            arrays = {name: np.array(array) for name, array in batch.items()}
            return arrays, np.setdiff1d(np.arange(n), batch.ids).tolist()

    return read


@pytest.mark.parametrize("many", [4, pytest.param(60, marks=pytest.mark.full)])
def test_random_lists_in_a_loader(many: int, tmp_path: Path) -> None:
    for seed in range(many):
        check("json", seed, by_loader(tmp_path))


# -- arrays ----------------------------------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, data=array)
    return file.getvalue()


#: form -> (dtypes, most axes, an array -> its record, ragged -> decoder)
OF_ARRAYS: dict[str, Any] = {
    "npy": (("u1", "f4", "f8", "i8"), 3, npy, lambda mode: Npy(ragged=mode)),
    "npz": (("u1", "f4", "f8", "i8"), 3, npz, lambda mode: Npz(ragged=mode)),
    "pickle": (("f4", "f8", "i8"), 3, pickle.dumps, lambda mode: Pickle("all", allow=[], ragged=mode)),
    "function": (("f4", "f8", "i8"), 3, pickle.dumps, lambda mode: Function(pickle.loads, ragged=mode)),
    "text": (("u2",), 1, np.ndarray.tobytes, lambda mode: Text(dtype="u2", ragged=mode or "flat")),
    "caffe2": (
        ("f4",),
        3,
        lambda array: tensor_protos(("FLOAT", array.shape, array.ravel().tolist())),
        lambda mode: TensorProtos(ragged=mode and {"data": mode}),
    ),
}


def check_arrays(form: str, seed: int, batch: Any) -> None:
    dtypes, axes, encode, decoder_for = OF_ARRAYS[form]
    one: Arrays = random_arrays(seed, dtypes, axes)
    decoder, values = decoder_for(one.mode), [encode(array) for array in one.values]
    if form == "pickle":
        values = [pickle.dumps({"data": array}) for array in one.values]
    if form == "text" and one.mode is None:
        one.mode = "flat"
    good, where = good_arrays(one), (form, seed, one)
    if form == "caffe2" and one.mode is None and one.values[0].shape == (1,):
        one.values = [value[0] if value.shape == (1,) else value for value in one.values]  # a number per record
    got, bad = batch(decoder, values)
    assert bad == [row for row, fits in enumerate(good) if not fits], where
    kept = [array for array, fits in zip(one.values, good, strict=True) if fits]
    beside = {name if name == "data" else f"data_{name}": array for name, array in got.items()}
    if one.mode == "list":
        assert all(array.dtype == one.values[0].dtype for array in got["data"])
    else:
        assert got["data"].dtype == one.values[0].dtype
    for mine, array in zip(unbatched(beside, "data", len(kept)), kept, strict=True):
        assert mine == array.tolist() or (not array.size and numbers_of(mine) == []), where


@pytest.mark.parametrize("form", OF_ARRAYS)
@pytest.mark.parametrize("many", FEW)
def test_random_arrays(form: str, many: int) -> None:
    for seed in range(many):
        check_arrays(form, seed, by_hand)


@pytest.mark.parametrize("many", [4, pytest.param(60, marks=pytest.mark.full)])
def test_random_arrays_in_a_loader(many: int, tmp_path: Path) -> None:
    for seed in range(many):
        check_arrays("npy", seed, by_loader(tmp_path))
