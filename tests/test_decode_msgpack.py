"""MessagePack: the msgpack package writes, msgpack-numpy's form is written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, MsgPack
from pario.decode import msgpack as module
from pario.errors import DecodeError, OptionError


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(module, "_msgpack", lambda: None)
    with pytest.raises(OptionError, match=r'msgpack, which is not installed. pip install "\.\[msgpack\]"'):
        MsgPack()


def run(decoder, *values):
    records = made(list(values))
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


def test_documents() -> None:
    msgpack = pytest.importorskip("msgpack")
    documents = [{"a": 1, 5: [b"\xff", "x", None]}, [1], "text"]
    out, failures = run(MsgPack(), *map(msgpack.packb, documents))
    assert (out["data"].tolist(), failures) == (documents, [])
    out, failures = run(MsgPack("all"), msgpack.packb([b"\xff\xd8", 3]))
    assert (out["data"].tolist(), out["label"].tolist()) == ([b"\xff\xd8"], [3])
    old = msgpack.packb({"a": b"\xff"}, use_bin_type=False)
    with pytest.raises(DecodeError, match="raw=True returns bytes"):
        run(MsgPack(), old)
    out, _ = run(MsgPack(["a"], raw=True), old)
    assert out["a"].tolist() == [b"\xff"]


def packed(array):
    return {
        b"nd": True,
        b"type": array.dtype.descr if array.dtype.names else array.dtype.str,
        b"kind": b"V" if array.dtype.names else b"",
        b"shape": array.shape,
        b"data": array.tobytes(),
    }


@pytest.mark.parametrize("raw", [False, True])
def test_arrays_of_msgpack_numpy(raw) -> None:
    msgpack = pytest.importorskip("msgpack")
    x = np.arange(6, dtype=">f4").reshape(2, 3)
    record = np.array([(1, 2.5)], [("a", "<i4"), ("b", "<f8")])
    scalar = {b"nd": False, b"type": "<f8", b"data": np.float64(2.5).tobytes()}
    z = {b"complex": True, b"data": "(1+2j)"}
    value = msgpack.packb({"x": packed(x), "r": packed(record), "s": scalar, "z": z, "e": packed(np.zeros((0, 2)))})
    out, failures = run(MsgPack("all", raw=raw), value)
    assert failures == []
    np.testing.assert_array_equal(out["x"], [x])
    np.testing.assert_array_equal(out["r"], [record])
    assert (out["s"].tolist(), out["z"].tolist(), out["e"].shape) == ([2.5], [1 + 2j], (1, 0, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {b"kind": b"O"},
        {b"type": "O"},
        {b"type": "|V0"},
        {b"shape": [10**12]},
        {b"shape": [-1]},
        {b"data": "text"},
        {b"data": b"123"},
        {b"kind": b"V", b"type": [["a", "O"]]},
        {b"type": 3},
    ],
    ids=str,
)
def test_hostile_arrays(changes) -> None:
    msgpack = pytest.importorskip("msgpack")
    with pytest.raises(DecodeError, match="cannot decode this record"):
        run(MsgPack("all"), msgpack.packb({"x": {**packed(np.zeros(2)), **changes}}))


def test_hostile_bytes() -> None:
    pytest.importorskip("msgpack")
    lengths = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff")
    for bad in (b"\x91" * 200_000, *lengths, b"\xc1", b""):
        with pytest.raises(DecodeError):
            run(MsgPack(), bad)
