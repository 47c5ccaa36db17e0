"""Raw records, against numpy; and that `pario.decode` stays light."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Raw
from pario.errors import DecodeError, OptionError

RNG = np.random.default_rng(2)


def test_any_size() -> None:
    values = [RNG.bytes(n) for n in (5, 0, 4000, 1, 0)]
    records, decoder = made(values), Raw()
    assert decoder.learn(records[0]) is None
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == []
    assert out["offsets"].tolist() == [0, 5, 5, 4005, 4006, 4006]
    assert out["data"].tobytes() == b"".join(values)


def test_any_size_of_no_record() -> None:
    out = arrays(Raw(), made([]))
    assert Raw().decode(made([]), out, Draw()) == []
    assert out["offsets"].tolist() == [0]
    assert out["data"].shape == (0,)


def test_any_size_outside_the_buffer() -> None:
    records = made([b"abc", b"defg", b"hi"])
    records.starts[1] = len(records.data) - 3
    out = {"data": np.zeros(9, np.uint8), "offsets": np.zeros(4, np.int64)}
    assert Raw().decode(records, out, Draw()) == [(1, "lies outside the bytes that were read")]
    assert out["offsets"].tolist() == [0, 3, 3, 5]
    assert out["data"].tobytes() == b"abchi\0\0\0\0"


@pytest.mark.parametrize("starts", [-1, -(2**63), 2**62, 2**63 - 1])
def test_fixed_size_outside_the_buffer(starts: int) -> None:
    records = made([b"abcd", b"efgh"])
    records.starts[0] = starts
    decoder = Raw("u1", 4)
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == [(0, "lies outside the bytes that were read")]
    assert out["data"][1].tobytes() == b"efgh"


def test_wrong_size_says_expected_and_got() -> None:
    decoder, records = Raw("float32", (2, 3)), made([bytes(24), bytes(23), bytes(48)])
    failures = decoder.decode(records, arrays(decoder, records), Draw())
    expected = "expected 24 bytes (float32[2, 3])"
    assert failures == [(1, f"{expected}, got 23"), (2, f"{expected}, got 48")]


@pytest.mark.parametrize(
    ("decoder", "nbytes", "shape"),
    [
        (Raw("float32"), 40, (10,)),
        (Raw(shape=-1), 7, (7,)),
        (Raw("u2", (3, -1)), 24, (3, 4)),
        (Raw("i8", ()), 8, ()),
        (Raw(np.dtype([("a", "u1"), ("b", "<f4")]), 2), 10, (2,)),
    ],
)
def test_shapes_learnt_from_record_0(decoder: Raw, nbytes: int, shape: tuple[int, ...]) -> None:
    value = RNG.bytes(nbytes)
    assert decoder.learn(np.frombuffer(value, np.uint8)) == shape
    records = made([value] * 3)
    out = arrays(decoder, records)
    assert decoder.decode(records, out, Draw()) == []
    assert out["data"].shape == (3, *shape)
    assert out["data"].tobytes() == value * 3


@pytest.mark.parametrize(
    ("decoder", "nbytes"), [(Raw("f4"), 7), (Raw("f4"), 0), (Raw("u1", 5), 10), (Raw("u2", (3, -1)), 20)]
)
def test_learn_refuses_other_sizes(decoder: Raw, nbytes: int) -> None:
    with pytest.raises(DecodeError, match=f"this one has {nbytes}"):
        decoder.learn(np.zeros(nbytes, np.uint8))


def test_an_empty_record_is_told_which_sizes_there_are() -> None:
    with pytest.raises(DecodeError, match=r"needs records of 1, 2, 3, \.\.\. bytes, this one has 0.*Text\(dtype="):
        Raw("u1").learn(np.zeros(0, np.uint8))


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": object},
        {"dtype": "S"},
        {"dtype": "floaty"},
        {"shape": (-1, -1)},
        {"shape": -2},
        {"shape": (0, 3)},
        {"shape": 1.5},
    ],
)
def test_impossible_options(options: dict) -> None:
    with pytest.raises(OptionError, match="must"):
        Raw(**options)


def test_repr() -> None:
    assert [repr(d) for d in (Raw(), Raw("f4"), Raw(shape=3), Raw(">i2", (2, -1)))] == [
        "Raw()",
        "Raw(dtype='float32')",
        "Raw(dtype='uint8', shape=(3,))",
        "Raw(dtype='>i2', shape=(2, -1))",
    ]


def test_importing_the_room_imports_no_codec_and_no_compiler() -> None:
    script = (
        "import sys, pario; pario.decode; pario.decode.Decoder; pario.decode.Function; pario.decode.Image;"
        "heavy = {'numba', 'cv2', 'simplejpeg', 'mpi4py'} & set(sys.modules); assert not heavy, heavy;"
        "assert set(pario.decode.__all__) == {n for n in dir(pario.decode)};"
        "[getattr(pario.decode, n) for n in pario.decode.__all__]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
