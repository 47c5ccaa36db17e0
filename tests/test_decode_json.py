"""JSON records; ASE's own encoder is imitated by hand."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Json
from pario.errors import DecodeError, OptionError


def run(decoder, *documents):
    records = made([json.dumps(one).encode() if not isinstance(one, bytes) else one for one in documents])
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


def test_whole_values_of_any_kind() -> None:
    documents = [{"a": 1}, [1, "x"], None, "text", 3]
    out, failures = run(Json(), *documents)
    assert failures == []
    assert out["data"].tolist() == documents


def test_all_fields_of_record_0() -> None:
    out, failures = run(Json("all"), {"a": 1, "b": {"c": [1, 2]}, "s": "x"}, {"s": "y", "b": {"c": [3, 4]}, "a": 2})
    assert failures == []
    assert out["a"].tolist() == [1, 2]
    assert out["b.c"].tolist() == [[1, 2], [3, 4]]
    assert out["s"].tolist() == ["x", "y"]
    _, failures = run(Json("all"), {"a": 1}, {"a": 1, "b": 2})
    assert failures == [(1, "returned ['a', 'b'], for record 0 ['a']")]
    out, _ = run(Json("all"), [1.5, 2], [2.5, 3])
    assert (out["data"].tolist(), out["label"].tolist()) == ([1.5, 2.5], [2, 3])


def test_fields_by_path_and_dtype() -> None:
    document = {"a": {"b": [10, 20]}, "energy": 3, "tags": ["x"], "more": {}}
    out, failures = run(Json({"a.b.1": "u1", "energy": "f4", "tags": None}), document, document)
    assert failures == []
    assert (out["a.b.1"].dtype, out["a.b.1"].tolist()) == (np.uint8, [20, 20])
    assert (out["energy"].dtype, out["energy"].tolist()) == (np.float32, [3, 3])
    assert out["tags"].tolist() == [["x"], ["x"]]


@pytest.mark.parametrize(
    ("fields", "document", "why"),
    [
        ({"a": "u1"}, {"a": 256}, "'a' holds 256 to 256, which does not fit uint8"),
        ({"a": "u1"}, {"a": -1}, "'a' holds -1 to -1, which does not fit uint8"),
        ({"a": "i8"}, {"a": 1.5}, "'a' is float64[], which does not become int64"),
        (["a"], {"b": 1, "c": 2}, "no field 'a'; there is ['b', 'c']"),
        (["a.3"], {"a": [1]}, "no field 'a.3'; there is 1 elements"),
        (["a.b"], {"a": 1}, "no field 'a.b'; there is int"),
        (["a.__class__"], {"a": 1}, "no field 'a.__class__'; there is int"),
    ],
)
def test_fields_that_do_not_fit(fields, document, why) -> None:
    with pytest.raises(DecodeError) as caught:
        run(Json(fields), document)
    assert why in str(caught.value)


def test_what_is_no_json() -> None:
    with pytest.raises(DecodeError, match=r"nested too deeply"):
        run(Json(), b"[" * 200_000)
    with pytest.raises(DecodeError, match=r"UnicodeDecodeError.*gzip data. Use pario.decode.Gzip\("):
        run(Json(), b"\x1f\x8b\x08 ")
    with pytest.raises(DecodeError, match="ValueError"):
        run(Json(), b"9" * 10_000)
    for wrong in ({"a": "object"}, [], {"a": "V"}):
        with pytest.raises((OptionError, TypeError)):
            Json(wrong)
    with pytest.raises(OptionError, match='arrays must be None or "ase"'):
        Json(arrays="numpy")


def test_the_arrays_of_ase() -> None:
    document = {
        "x": {"__ndarray__": [[2, 2], "float32", [1, 2, 3, 4]]},
        "z": {"__ndarray__": [[2], "complex128", [1, 2, 3, 4]]},
        "c": {"__complex__": [1, 2]},
        "t": {"__datetime__": "2020-01-02T03:04:05"},
    }
    out, failures = run(Json("all", arrays="ase"), document)
    assert failures == []
    assert out["x"].dtype == np.float32
    assert out["x"].tolist() == [[[1, 2], [3, 4]]]
    assert out["z"].tolist() == [[1 + 2j, 3 + 4j]]
    assert out["c"].tolist() == [1 + 2j]
    assert out["t"].tolist() == [datetime.datetime(2020, 1, 2, 3, 4, 5)]
    arrays_ = ([[10**12], "float64", []], [[1], "O", [{}]], [[1], "object", [1]], [[-1], "f4", [1]], [[], "f4"], 3)
    for hostile in arrays_:
        with pytest.raises(DecodeError):
            run(Json(arrays="ase"), {"__ndarray__": hostile})
