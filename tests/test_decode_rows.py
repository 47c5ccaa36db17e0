"""Columns of numbers, of unequal sizes, and of objects."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import lmdb
import numpy as np
import pytest
from made_records import arrays, made

import pario
from pario.decode import Draw, Function, Json, Text
from pario.decode import rows as rows_module
from pario.errors import DecodeError, OptionError

SIZES = [3, 0, 5, 1]


def row(value: bytes):
    n = value[0]
    return {"x": np.arange(n, dtype="f4"), "pos": np.full((n, 2), n), "n": n}


def batch(decoder, values):
    records = made(values)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


VALUES = [bytes([n]) for n in SIZES]


def test_flat() -> None:
    out, failures = batch(Function(row, ragged="flat"), VALUES)
    assert failures == []
    assert sorted(out) == ["n", "pos", "pos_offsets", "x", "x_offsets"]
    assert out["n"].tolist() == SIZES
    assert out["x_offsets"].tolist() == out["pos_offsets"].tolist() == [0, 3, 3, 8, 9]
    assert out["x"].dtype == np.float32
    assert out["x"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert out["pos"].tolist() == [[3, 3]] * 3 + [[5, 5]] * 5 + [[1, 1]]


def test_flat_data_has_offsets_as_raw_has() -> None:
    out, _ = batch(Text(dtype="<u2"), [b"\1\0\2\0", b"", b"\3\0"])
    raw, _ = batch(pario.decode.Raw(), [b"\1\0\2\0", b"", b"\3\0"])
    assert out["data"].tolist() == [1, 2, 3]
    assert (out["offsets"] * 2).tolist() == raw["offsets"].tolist()


def test_pad() -> None:
    out, failures = batch(Function(row, ragged={"x": "pad", "pos": "pad"}, pad_value=-1, pad_multiple=4), VALUES)
    assert failures == []
    assert out["x_lengths"].tolist() == SIZES
    assert out["pos_lengths"].tolist() == [[n, 2] for n in SIZES]
    assert out["x"].shape == (4, 8)
    assert out["pos"].shape == (4, 8, 2)  # the multiple is for the first axis
    for i, n in enumerate(SIZES):
        assert out["x"][i].tolist() == [*range(n), *[-1] * (8 - n)]
        assert (out["pos"][i, :n] == n).all()
        assert (out["pos"][i, n:] == -1).all()


def test_pad_of_several_axes_pads_each() -> None:
    out, failures = batch(Function(lambda b: np.ones((b[0], 4 - b[0])), ragged="pad"), [b"\1", b"\3", b"\2"])
    assert failures == []
    assert out["data"].shape == (3, 3, 3)
    assert out["lengths"].tolist() == [[1, 3], [3, 1], [2, 2]]
    assert out["data"].sum(axis=(1, 2)).tolist() == [3, 3, 4]


def test_a_record_that_would_make_padding_explode(monkeypatch) -> None:
    monkeypatch.setattr(rows_module, "_MOST_PADDED", 10_000)
    values = [bytes([1])] * 30 + [bytes([200])] + [bytes([1])] * 30
    with pytest.raises(DecodeError, match=r"row 30 of this batch is so much longer .* would take 48,800 bytes"):
        batch(Function(lambda b: {"x": np.arange(b[0], dtype="f4")}, ragged="pad"), values)
    batch(Function(lambda b: {"x": np.arange(b[0], dtype="f4")}, ragged="pad"), values[25:35])


def test_list() -> None:
    out, failures = batch(Function(row, ragged="list"), VALUES)
    assert failures == []
    assert out["x"].dtype == object
    assert [a.tolist() for a in out["x"]] == [list(range(n)) for n in SIZES]
    assert [a.shape for a in out["pos"]] == [(n, 2) for n in SIZES]
    assert out["n"].dtype == np.int64  # a number per record needs no list


@pytest.mark.parametrize("how", ["flat", "pad", "list", "object"])
def test_nothing_at_all(how) -> None:
    decoder = Function(row, ragged=how)
    decoder.learn(made(VALUES)[0])
    out = decoder.finish(arrays(decoder, made([])))
    assert len(out["x"]) == 0
    if how == "flat":
        assert (out["pos"].shape, out["pos"].dtype) == ((0, 2), np.int64)
        assert out["x_offsets"].tolist() == [0]
    if how == "pad":
        assert out["pos"].shape == (0, 0, 2)
        assert out["pos_lengths"].shape == (0, 2)


def test_unequal_rows_say_what_takes_them() -> None:
    _, failures = batch(Function(row), VALUES)
    assert [i for i, _ in failures] == [1, 2, 3]
    assert failures[0][1].endswith('ragged="list", "flat" or "pad" takes arrays of different sizes')
    _, failures = batch(Function(lambda b: np.zeros((2, b[0])), ragged="flat"), VALUES)
    assert "that of record 0 is float64[2, 3]; too different to be one array" in failures[0][1]
    _, failures = batch(Function(lambda b: [1.5] if b[0] == 5 else [1], ragged="flat"), VALUES)
    assert [i for i, _ in failures] == [2]


def test_lists_of_unequal_lists_as_they_are() -> None:
    def f(b):
        return {"x": [[1], [2, 3]], "y": 1}

    with pytest.raises(DecodeError, match=r'ragged=\{"x": "object"\} takes it as it is'):
        Function(f).learn(made([b"a"])[0])
    out, _ = batch(Function(f, ragged={"x": "object"}), [b"a"])
    assert out["x"].tolist() == [[[1], [2, 3]]]


def test_what_is_no_option() -> None:
    for wrong in ("ragged", {"x": "padded"}, 3):
        with pytest.raises(OptionError, match="flat, pad, list, object"):
            Function(row, ragged=wrong)
    for wrong in (0, True, 1.5):
        with pytest.raises(OptionError, match="pad_multiple must be an integer"):
            Function(row, pad_multiple=wrong)
    with pytest.raises(OptionError, match="pad_value must be a number"):
        Function(row, pad_value="x")
    with pytest.raises(OptionError, match="'x' needs the name 'x_offsets', which the records use"):
        Function(lambda b: {"x": [1], "x_offsets": 1}, ragged="flat").learn(made([b"a"])[0])
    for make in (lambda **given: Function(len, **given), Json, Text):
        with pytest.raises(TypeError, match=r"(Function|Json|Text)\.__init__\(\) got an unexpected .* 'raged'"):
            make(raged="flat")
    said = "Function(len, parallel=False, ragged='pad', pad_value=-1, pad_multiple=8)"
    assert repr(Function(len, parallel=False, ragged="pad", pad_value=-1, pad_multiple=8)) == said


def test_rows_do_not_stay_in_the_readers_memory() -> None:
    records = made([b"abc"])
    for how in ("list", "object"):
        decoder = Function(lambda b: {"x": b}, view=True, ragged=how)
        decoder.learn(records[0])
        out = arrays(decoder, records)
        decoder.decode(records, out, Draw())
        assert not np.may_share_memory(out["x"][0], records.data)
        assert out["x"][0].tobytes() == b"abc"


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_through_the_loader(tmp_path, shuffle, on_error) -> None:
    n = 50
    with lmdb.open(str(tmp_path), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(n):
            txn.put(b"%04d" % i, b'{"a": [%s], "s": "%d"' % (b",".join([b"1"] * (i % 5)), i) + b"}" * (i != 33))
    decoder = Json({"a": "int32", "s": None}, ragged={"a": "flat"})
    seen = {}
    with pario.Loader(tmp_path, 8, decoder, shuffle=shuffle, on_error=on_error) as loader:
        error = None
        try:
            for got in loader:
                cuts = got["offsets" if "a" not in got else "a_offsets"]
                assert len(cuts) == len(got.ids) + 1
                for k, i in enumerate(got.ids.tolist()):
                    seen[i] = (got["a"][cuts[k] : cuts[k + 1]].tolist(), got["s"][k])
        except DecodeError as caught:
            error = caught
        assert (error is not None) == (on_error == "raise")
        assert error is None or (error.record, error.key) == (33, b"0033")
        assert loader.skipped == (on_error == "skip")
    assert all(seen[i] == ([1] * (i % 5), str(i)) for i in seen)
    if on_error == "skip":
        assert sorted(seen) == [i for i in range(n) if i != 33]


def test_keys_through_the_loader(tmp_path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(40):
            txn.put(b"k%04d" % i, b"v%04d" % i)

    def f(value, key, id, rng):
        return {"value": value, "key": key, "id": id, "draw": rng.random()}

    draws = []
    for size in (7, 16):
        with pario.Loader(tmp_path, size, f, shuffle="global", seed=4) as loader:
            drawn = {}
            for got in loader:
                assert [v[1:] for v in got["value"]] == [k[1:] for k in got["key"]]
                assert got["id"].tolist() == got.ids.tolist() == [int(k[1:]) for k in got["key"]]
                drawn |= dict(zip(got["id"].tolist(), got["draw"].tolist(), strict=True))
        draws.append(drawn)
    assert len(draws[0]) == 40
    assert draws[0] == draws[1]
    assert draws[0][9] == np.random.default_rng([4, 0, 9]).random()


# -- lists without elements, integers that floats do not hold, numbers that do not fit ---------------------------------


def written(path, documents):
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        for i, document in enumerate(documents):
            txn.put(b"%06d" % i, json.dumps(document).encode())
    return str(path)


BOXES = [[], [], [[1, 2, 3, 4]], [], [[5, 6, 7, 8], [9, 10, 11, 2**53 + 1]]]


@pytest.mark.parametrize("how", ["flat", "pad", "list"])
@pytest.mark.parametrize("wrap", [lambda one: one, pario.decode.Gzip, None], ids=["plain", "gzip", "fields"])
def test_images_without_boxes_stay_in_the_training(tmp_path, how, wrap) -> None:
    path = written(tmp_path / "a.lmdb", [{"b": boxes} for boxes in BOXES])
    decoder = Json(["b"], ragged=how)
    given = {"decoder": decoder} if wrap else {"fields": {"s": ("%06d", decoder)}}
    if wrap is pario.decode.Gzip:
        with lmdb.open(path, subdir=False, lock=False) as env, env.begin(write=True) as txn:
            for key, value in list(txn.cursor()):
                txn.put(key, gzip.compress(value))
        given = {"decoder": wrap(decoder)}
    with pario.Loader(path, 5, comm="self", on_error="skip", **given) as loader:
        (batch,) = loader
    name = "b" if wrap else "s.b"
    assert batch.skipped == 0
    if how == "flat":
        offsets = batch[f"{name}_offsets"].tolist()
        found = [batch[name][a:b].tolist() for a, b in pairwise(offsets)]
    elif how == "pad":
        found = [row[:n].tolist() for row, (n, _) in zip(batch[name], batch[f"{name}_lengths"].tolist(), strict=True)]
    else:
        assert {row.dtype for row in batch[name]} == {np.dtype(np.int64)}
        assert [row.shape for row in batch[name]] == [(len(boxes), 4) for boxes in BOXES]
        found = [row.tolist() for row in batch[name]]
    assert found == BOXES


def test_a_batch_of_empty_lists_has_the_shape_of_the_others() -> None:
    for how, shape in (("flat", (0, 2)), ("pad", (2, 0, 2))):
        decoder = Json(["x"], ragged=how)
        decoder.learn(made([b'{"x": [[1, 2]]}'])[0])
        out = arrays(decoder, made([b'{"x": []}'] * 2))
        assert decoder.decode(made([b'{"x": []}'] * 2), out, Draw()) == []
        assert decoder.finish(out)["x"].shape == shape


def test_one_late_record_says_what_a_column_is(tmp_path) -> None:
    documents = [{"x": [], "y": []} for _ in range(3000)]
    documents[2990:] = [{"x": [[7, 8]], "y": ["text"]}] * 10
    path = written(tmp_path / "a.lmdb", documents)
    with pario.Loader(path, 3000, Json(["x", "y"], ragged="flat"), comm="self") as loader:
        (batch,) = loader
    assert (batch["x"].dtype, batch["x"].tolist()) == (np.int64, [[7, 8]] * 10)
    assert batch["y"].tolist() == [document["y"] for document in documents]


def test_a_list_of_strings_is_no_empty_list() -> None:
    decoder = Json(["x"], ragged="flat")
    decoder.learn(made([b'{"x": [1]}'])[0])
    records = made([b'{"x": ["a"]}', b'{"x": [18446744073709551616]}', b'{"x": null}', b'{"x": []}'])
    assert [i for i, _ in decoder.decode(records, arrays(decoder, records), Draw())] == [0, 1, 2]


@pytest.mark.parametrize(
    ("documents", "fields", "why"),
    [
        ([0.5, 2**53 + 1], ["x"], "'x' holds 9007199254740993, which float64 would round"),
        ([[0.5], [1, 2**53 + 1]], ["x"], "'x' holds 9007199254740993, which float64 would round"),
        ([[1.5], [0.5, -(2**53) - 1]], ["x"], "'x' holds -9007199254740993, which float64 would round"),
        ([1, 2**63], ["x"], "'x' holds 9223372036854775808 to 9223372036854775808, which does not fit int64"),
        ([1.0, 1e300], {"x": "f4"}, r"'x' holds 1e\+300, which does not fit float32"),
        ([1.0, -70000], {"x": "f2"}, "'x' holds -70000, which does not fit float16"),
    ],
)
def test_the_error_names_record_and_field(tmp_path, documents, fields, why) -> None:
    path = written(tmp_path / "a.lmdb", [{"x": document} for document in documents])
    with (
        pario.Loader(path, 2, Json(fields, ragged={"x": "list"}), comm="self") as loader,
        pytest.raises(DecodeError, match=rf"{why}.*record 1"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("pad_value", "dtype"),
    [
        (-100, "uint16"),
        (1.5, "int32"),
        (np.nan, "int64"),
        (1e300, "float32"),
        (256, "uint8"),
        (1j, "float32"),
        (2, "?"),
    ],
)
def test_a_pad_value_that_does_not_fit(tmp_path, pad_value, dtype) -> None:
    path = written(tmp_path / "a.lmdb", [{"x": []}, {"x": [1]}])
    for decoder in (
        Json({"x": dtype}, ragged="pad", pad_value=pad_value),
        Function(lambda _: {"x": np.zeros(1, dtype)}, ragged="pad", pad_value=pad_value),
    ):
        with pytest.raises(OptionError, match=rf"pad_value=.* is no {np.dtype(dtype)}, the dtype of 'x'"):
            pario.Loader(path, 2, decoder, comm="self", on_error="skip")
    with pytest.raises(OptionError, match="pad_value=-100 is no uint8, the dtype of 'data'"):
        pario.Loader(path, 2, Text(dtype="u1", ragged="pad", pad_value=-100), comm="self")
