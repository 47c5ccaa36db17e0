"""Users' own kernels, against the same function in Python."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from made_records import arrays, made

import pario.decode
from pario.decode import Draw, Kernel
from pario.errors import DecodeError, OptionError

OUTPUTS = {"pixels": ("float32", (2, 3)), "label": "int64", "drawn": "float64"}


@pario.decode.kernel(OUTPUTS, debug=True)
def everything(value, pixels, label, drawn, id, seed):
    if value[0] == 255:
        raise ValueError("a label of 255")
    if value[0] == 254:
        return 7
    label[0] = value[0] + 1000 * id
    for i in range(6):
        pixels[i // 3, i % 3] = value[1 + i] / 2
    np.random.seed(seed % 2**32)  # noqa: NPY002 - Numba's
    drawn[0] = np.random.random()  # noqa: NPY002
    return 0


VALUES = [bytes([k, *range(k, k + 6)]) for k in range(5)]


def test_records_bad_records_and_seeds() -> None:
    """In one test, because each kernel takes a second to compile."""
    values = [VALUES[0], b"\xff" * 7, VALUES[1], b"", VALUES[2][:4], b"\xfe" * 7, VALUES[3]]
    records = made(values, ids=[5, 6, 7, 8, 9, 10, 11])
    everything.learn(records[0])
    out = arrays(everything, records)
    failures = everything.decode(records, out, Draw(1, 2))
    assert [row for row, _ in failures] == [1, 3, 4, 5]
    assert "ValueError: a label of 255" in failures[0][1]
    assert "IndexError" in failures[1][1]  # debug=True
    assert "IndexError" in failures[2][1]
    assert failures[3][1] == "everything returned 7"
    for row in (0, 2, 6):
        value = values[row]
        assert out["label"][row] == value[0] + 1000 * records.ids[row]
        np.testing.assert_array_equal(out["pixels"][row].reshape(-1), np.frombuffer(value[1:], "u1") / np.float32(2))
    assert out["label"].dtype == np.int64
    assert out["drawn"].shape == (7,)

    alone = made(values[6:], ids=[11])
    again = arrays(everything, alone)
    assert everything.decode(alone, again, Draw(1, 2)) == []
    assert again["drawn"][0] == out["drawn"][6]
    everything.decode(alone, again, Draw(1, 3))
    assert again["drawn"][0] != out["drawn"][6]
    assert len(set(out["drawn"][[0, 2, 6]])) == 3

    assert pickle.loads(pickle.dumps(everything)) is everything
    with pytest.raises(DecodeError, match="cannot decode this record: ValueError: a label of 255"):
        everything.learn(records[1])


@pytest.mark.full
def test_a_kernel_without_a_return_and_one_output_of_any_name() -> None:
    def half(value, row):
        row[:] = value[:4]

    decoder = Kernel(half, {"data": ("uint8", (4,))})
    records = made([b"abcd", b"efgh"])
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == []
    assert out["data"].tobytes() == b"abcdefgh"
    assert repr(decoder).endswith("half, {'data': ('|u1', (4,))})")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda value: 0,
        lambda value, label: 0,
        lambda value, label, pixels: 0,
        lambda value, pixels, label, seed, id: 0,
        lambda value, pixels, label, rng: 0,
        lambda value, pixels, label=None: 0,
        lambda value, *rows: 0,
    ],
)
def test_signatures(wrong) -> None:
    with pytest.raises(OptionError, match=r"must take the record and one array per output: .*\(value, pixels, label\)"):
        Kernel(wrong, {"pixels": ("u1", (3,)), "label": "i8"})


@pytest.mark.parametrize("outputs", [{}, None, {"x": "float17"}, {"x": ">u2"}, {"x": "object"}, {"x": "f2"}, {1: "f4"}])
def test_outputs(outputs) -> None:
    with pytest.raises(OptionError, match="output"):
        Kernel(lambda value, x: 0, outputs)


def test_what_numba_cannot_compile_is_said() -> None:
    def strings(value, row):
        row[0] = len(bytes(value).decode("utf-16"))

    def writes(value, row):
        value[0] = 1

    def floats(value, row):
        return 0.5

    record = np.frombuffer(b"ab", np.uint8)
    for wrong, why in ((strings, "Numba cannot compile"), (writes, "Numba cannot compile"), (floats, "must return")):
        with pytest.raises(OptionError, match=why):
            Kernel(wrong, {"data": "i8"}).learn(record)
    with pytest.raises(OptionError, match="plain function"):
        Kernel(len, {"data": "i8"})
