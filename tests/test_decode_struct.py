"""Fixed binary layouts: the standard library's struct writes them."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Struct
from pario.errors import DecodeError, OptionError
from pario.records import Records


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


def wide(name: str, kind: object, count: int) -> tuple[str, object, tuple[int, ...]]:
    return (name, kind, (count,))


PAIR = [("x", ">i4"), ("y", "u1")]
LAYOUTS = {
    "a label before": np.dtype([("label", "<u4"), wide("x", "u1", 3072)]),
    "between and behind": np.dtype([wide("x", "f4", 64), ("a", ">u2"), ("b", "u1"), wide("y", "u1", 256), ("c", "f8")]),
    "foreign and wide": np.dtype([wide("x", ">u2", 300), ("a", ">f4"), wide("z", ">c8", 40), wide("u", ">U3", 50)]),
    "nested": np.dtype([wide("x", PAIR, 100), ("a", PAIR), wide("b", [("n", PAIR), ("m", ">f2")], 3)]),
    "just below": np.dtype([wide("x", "u1", 255), wide("y", ">u2", 127), wide("z", "u1", 0)]),
    "nothing but wide": np.dtype([wide("x", "u1", 256)]),
    "gaps, overlaps, any order": np.dtype({
        "names": ["b", "x", "a", "y"], "formats": [">u4", (">u2", (200,)), "u1", ("u1", (300,))],
        "offsets": [500, 7, 501, 100], "itemsize": 520,
    }),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_what_numpy_reads(layout: str) -> None:
    """Also in arrays that lie close together, of which no byte beside them changes; and where records are bad."""
    dtype, n = LAYOUTS[layout], 6
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 100, (n, dtype.itemsize), np.uint8).view(dtype).reshape(n)
    # Of bytes below 100 each number is one that equals itself; a text needs characters.
    if "u" in dtype.names:
        stored["u"] = "\u00e4b"
    bad = [1, 5]
    decoder = Struct(dtype, skip=3, tail=True)
    records = made([b"skp" + (b"" if i in bad else row.tobytes() + b"tail") for i, row in enumerate(stored)])
    memory, out, at = np.full(1 << 16, 0x5A, np.uint8), {}, 13
    untouched = np.ones(len(memory), bool)
    for name, (shape, kind) in decoder.shapes(records).items():
        out[name] = np.ndarray(shape, kind, memory, at)
        untouched[at : at + out[name].nbytes] = False
        at += out[name].nbytes + 1
    failures = decoder.decode(records, out, Draw())
    assert failures == [(i, f"expected at least {3 + dtype.itemsize} bytes, got 3") for i in bad]
    good = [i for i in range(n) if i not in bad]
    assert (memory[untouched] == 0x5A).all()
    for name, array in out.items():
        assert array.dtype.names is not None or array.dtype.isnative
        assert array[good].tolist() == stored[name][good].tolist(), name


def test_wide_fields_go_past_the_caches_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [struct.pack("<I", i) + bytes([i]) * 5000 for i in range(20)]
    for cache in (1, 1 << 40):
        monkeypatch.setattr("pario.machine.last_cache_bytes", lambda cache=cache: cache)
        out, failures = run(Struct({"label": "<u4", "x": ("u1", (5000,))}), values)
        assert failures == []
        assert out["label"].tolist() == [*range(20)]
        assert (out["x"] == np.arange(20)[:, None]).all()


def test_wide_fields_are_not_written_where_an_array_has_gaps() -> None:
    decoder = Struct({"x": ("u1", (512,))})
    with pytest.raises(ValueError, match="C-contiguous"):
        decoder.decode(made([bytes(512)] * 2), {"x": np.zeros((2, 1024), np.uint8)[:, ::2]}, Draw())


def test_records_outside_the_bytes_that_were_read() -> None:
    data = np.arange(1024, dtype=np.uint16).view(np.uint8)
    starts = np.array([-1, 0, len(data) - 599, len(data) - 600, 1 << 62, -(1 << 62)])
    records = Records(np.arange(6), data, starts, np.full(6, 600))
    decoder = Struct({"label": "<u2", "x": ("u1", (598,))})
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    assert failures == [(i, "lies outside the bytes that were read") for i in (0, 2, 4, 5)]
    assert out["label"][[1, 3]].tolist() == [0, 724]
    assert out["x"][3].tolist() == data[-598:].tolist()
    assert (out["x"][[0, 2, 4, 5]] == 0x5A).all()


def test_no_copy_of_the_batch_is_made() -> None:
    """Wide fields go to their arrays at once: of a batch of 8 MB less than one record is allocated besides."""
    decoder = Struct({"label": ">u4", "x": (">u2", (1 << 18,))})
    records = made([bytes(decoder.dtype.itemsize)] * 16)
    out = arrays(decoder, records)
    decoder.decode(records, out, Draw())  # compiles
    tracemalloc.start()
    assert decoder.decode(records, out, Draw()) == []
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < decoder.dtype.itemsize


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
