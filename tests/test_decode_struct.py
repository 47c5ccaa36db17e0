"""Fixed binary layouts: the standard library's struct writes them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Struct
from pario.errors import DecodeError, OptionError


def run(decoder, values):
    records = made(values)
    out = arrays(decoder, records)
    return out, decoder.decode(records, out, Draw())


def test_label_and_pixels() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    values = [struct.pack(">Hf", i, i / 2) + p.tobytes() for i, p in enumerate(pixels)]
    decoder = Struct({"label": ">u2", "weight": ">f4", "pixels": ("u1", (3, 4, 4))})
    decoder.learn(np.frombuffer(values[0], np.uint8))
    out, failures = run(decoder, values)
    assert failures == []
    assert [out[name].dtype for name in ("label", "weight", "pixels")] == [np.uint16, np.float32, np.uint8]
    assert out["label"].tolist() == [0, 1, 2, 3, 4]
    assert out["weight"].tolist() == [0, 0.5, 1, 1.5, 2]
    np.testing.assert_array_equal(out["pixels"], pixels)
    assert repr(decoder) == "Struct({'label': '>u2', 'weight': '>f4', 'pixels': ('|u1', (3, 4, 4))})"


def test_a_structured_dtype_with_gaps() -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["<i2", "<f8"], "offsets": [0, 8], "itemsize": 16})
    out, failures = run(Struct(dtype), [struct.pack("<h6xd", i, -i) for i in range(3)])
    assert failures == []
    assert out["a"].tolist() == [0, 1, 2]
    assert out["b"].tolist() == [0, -1, -2]


def test_records_of_another_size() -> None:
    out, failures = run(Struct({"a": "u4"}), [b"\1\0\0\0", b"123", b"\2\0\0\0", b"12345", b""])
    assert failures == [(i, f"expected 4 bytes, got {n}") for i, n in ((1, 3), (3, 5), (4, 0))]
    assert out["a"][[0, 2]].tolist() == [1, 2]
    with pytest.raises(DecodeError, match=r"expected 4 bytes, got 12; .*Use pario.decode.Npy\(\)"):
        Struct({"a": "u4"}).learn(np.frombuffer(b"\x93NUMPY\1\0abcd", np.uint8))
    out, failures = run(Struct({"a": "u1"}, skip=2, tail=True), [b"xy\5", b"xy\6rest", b"xy"])
    assert out["a"][:2].tolist() == [5, 6]
    assert failures == [(2, "expected at least 3 bytes, got 2")]


@pytest.mark.parametrize("fields", [{}, "u1", {"a": "O"}, {"a": "no such"}, {"a": ("u1", (-1,))}, 3])
def test_what_is_no_layout(fields) -> None:
    with pytest.raises(OptionError, match="fields must be"):
        Struct(fields)


def test_skip_is_a_number() -> None:
    for wrong in (-1, True, 1.5):
        with pytest.raises(OptionError, match="skip must be"):
            Struct({"a": "u1"}, skip=wrong)
