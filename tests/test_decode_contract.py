"""One suite over all decoders: what the loader may rely on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import pytest
from datum_message import datum, encoded
from made_records import arrays, made, rows

from pario.decode import Datum, Decoder, Draw, Function, Image, Raw
from pario.records import Records

N = 23
RNG = np.random.default_rng(7)
PIXELS = RNG.integers(0, 256, (N, 3, 12, 10), dtype=np.uint8)
FLOATS = RNG.standard_normal((N, 2, 3, 4)).astype(np.float32)
LABELS = RNG.integers(-(2**31), 2**31, N)
PICTURES = [np.ascontiguousarray(p.transpose(1, 2, 0)) for p in PIXELS]


def png(picture: np.ndarray) -> bytes:
    """Lossless, blue first."""
    return cv2.imencode(".png", picture)[1].tobytes()


def add_one(record: bytes) -> tuple[np.ndarray, int]:
    if not record:
        raise ValueError("nothing in it")
    return np.frombuffer(record, np.uint8).astype(np.float64) + 1, len(record)


def noisy(record: bytes, rng: np.random.Generator) -> dict[str, Any]:
    return {"a": record[0] + rng.random(3), "b": True}


@dataclass
class Case:
    make: Callable[[], Decoder]
    values: list[bytes]
    bad: bytes
    expected: dict[str, np.ndarray] | None = None


DATUMS = [datum(p, int(k)) for p, k in zip(PIXELS, LABELS, strict=True)]
PNGS = [png(p) for p in PICTURES]
MEAN = RNG.random((3, 12, 10)).astype(np.float32)
CASES = {
    "raw": Case(
        lambda: Raw(dtype=">f4", shape=(2, 3, 4)),
        [f.astype(">f4").tobytes() for f in FLOATS],
        b"short",
        {"data": FLOATS},
    ),
    "raw learnt": Case(
        lambda: Raw("int16"), [p.tobytes() for p in PIXELS], b"", {"data": PIXELS.reshape(N, -1).view("i2")}
    ),
    "datum": Case(Datum, DATUMS, b"\x08", {"data": PIXELS, "label": LABELS}),
    "datum float": Case(
        lambda: Datum(dtype="float32"),
        DATUMS,
        b"",
        {"data": PIXELS.astype(np.float32), "label": LABELS},
    ),
    "datum mean": Case(
        lambda: Datum(mean=MEAN, scale=0.5),
        DATUMS,
        b"",
        {"data": (PIXELS - MEAN) * np.float32(0.5), "label": LABELS},
    ),
    "datum random": Case(
        lambda: Datum((7, 5), crop_mode="random", mirror="random"), [datum(p) for p in PIXELS], datum(PIXELS[0][:, :6])
    ),
    "datum float random": Case(
        lambda: Datum(7, crop_mode="random", mirror="random", mean=[1, 2, 3]), [datum(p) for p in PIXELS], b"\x0b"
    ),
    "datum floats": Case(Datum, [datum(f) for f in FLOATS], datum(PIXELS[0]), {"data": FLOATS}),
    "datum floats random": Case(
        lambda: Datum(2, crop_mode="random", mirror="random", scale=2), [datum(f, packed=True) for f in FLOATS], b""
    ),
    "datum encoded": Case(
        Datum,
        [encoded(p, int(k)) for p, k in zip(PNGS, LABELS, strict=True)],
        encoded(PNGS[0][:70], 0),
        {"data": PIXELS, "label": LABELS},
    ),
    "datum encoded random": Case(
        lambda: Datum(9, crop_mode="random", mirror="random", mean=3), [encoded(p, 1) for p in PNGS], datum(PIXELS[0])
    ),
    "image": Case(lambda: Image(color="BGR"), PNGS, PNGS[3][:90], {"data": np.stack(PICTURES)}),
    "image planar": Case(
        lambda: Image(layout="CHW", label=np.arange(N) * 2),
        PNGS,
        b"no image",
        {"data": PIXELS[:, ::-1], "label": np.arange(N) * 2},
    ),
    "image resized": Case(lambda: Image((5, 6), color="GRAY"), PNGS, b""),
    "function": Case(
        lambda: Function(add_one),
        [p.tobytes() for p in PIXELS],
        b"",
        {"data": PIXELS.reshape(N, -1) + 1.0, "label": np.full(N, 360)},
    ),
    "function rng": Case(lambda: Function(noisy, rng=True), [p.tobytes() for p in PIXELS], b""),
}

DRAW = Draw(seed=3, epoch=1)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def learnt(case: Case) -> Decoder:
    decoder = case.make()
    decoder.learn(made(case.values[:1])[0])
    return decoder


def decoded(decoder: Decoder, records: Records) -> dict[str, np.ndarray]:
    out = arrays(decoder, records)
    assert decoder.decode(records, out, DRAW) == []
    return out


def test_many_records_have_the_values_that_went_in(case: Case) -> None:
    decoder = learnt(case)
    out = decoded(decoder, made(case.values))
    for name, (shape, dtype) in decoder.shapes(made(case.values)).items():
        assert (out[name].shape, out[name].dtype) == (shape, dtype)
        assert shape[0] == N
    for name, values in (case.expected or {}).items():
        np.testing.assert_array_equal(out[name], values, err_msg=name)


def test_no_record_and_one_record(case: Case) -> None:
    decoder = learnt(case)
    nothing, one, many = made([]), made(case.values[:1]), made(case.values)
    empty = decoded(decoder, nothing)
    alone, whole = decoded(decoder, one), decoded(decoder, many)
    for name in whole:
        assert empty[name].shape == (0, *whole[name].shape[1:])
        np.testing.assert_array_equal(alone[name], whole[name][:1])


def test_row_slices_decode_to_the_same(case: Case) -> None:
    decoder = learnt(case)
    records = made(case.values, ids=list(range(100, 300))[: 2 * N : 2] if "label" not in repr(decoder) else None)
    whole = decoded(decoder, records)
    pieces = arrays(decoder, records)
    for start, stop in ((9, N), (0, 1), (1, 9)):
        part = {name: array[start:stop] for name, array in pieces.items()}
        assert decoder.decode(rows(records, start, stop), part, DRAW) == []
    for name in whole:
        np.testing.assert_array_equal(pieces[name], whole[name])


def test_a_bad_record_fails_alone(case: Case) -> None:
    decoder = learnt(case)
    whole = decoded(decoder, made(case.values))
    values = list(case.values)
    values[4] = values[11] = case.bad
    records = made(values)
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, DRAW)
    assert [row for row, _ in failures] == [4, 11]
    assert all(len(reason) > 10 for _, reason in failures)
    good = [i for i in range(N) if i not in (4, 11)]
    for name in whole:
        np.testing.assert_array_equal(out[name][good], whole[name][good])


def test_only_the_given_rows_are_written(case: Case) -> None:
    decoder = learnt(case)
    values = list(case.values)
    values[6] = case.bad
    records = made(values)
    out = arrays(decoder, records)
    decoder.decode(rows(records, 3, 9), {name: array[3:9] for name, array in out.items()}, DRAW)
    for array in out.values():
        outside = np.concatenate([array[:3], array[9:]])
        assert (np.ascontiguousarray(outside).reshape(-1).view(np.uint8) == 0x5A).all()


def test_a_pickled_decoder_decodes_the_same(case: Case) -> None:
    decoder = learnt(case)
    again = pickle.loads(pickle.dumps(decoder))
    assert again.spec == decoder.spec
    assert repr(again) == repr(decoder)
    assert again.parallel == decoder.parallel
    ours, theirs = decoded(decoder, made(case.values)), decoded(again, made(case.values))
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_spec_from_another_process_is_enough(case: Case) -> None:
    spec = pickle.loads(pickle.dumps(learnt(case).spec))
    decoder = case.make()
    decoder.spec = spec
    assert decoder.shapes(made(case.values)) == learnt(case).shapes(made(case.values))
    decoded(decoder, made(case.values))


def test_writable_and_strided_tables(case: Case) -> None:
    """Tables in a window are fields of a structured array; buffers of a test or a user may be writable."""
    decoder, plain = learnt(case), made(case.values)
    table = np.zeros(N, np.dtype([("id", "i8"), ("start", "i8"), ("nbytes", "i8")]))
    table["id"], table["start"], table["nbytes"] = plain.ids, plain.starts, plain.nbytes
    strided = Records(table["id"], plain.data.copy(), table["start"], table["nbytes"])
    assert not strided.starts.flags.c_contiguous
    ours, theirs = decoded(decoder, plain), decoded(decoder, strided)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert strided.data.flags.writeable


def test_chance_follows_seed_epoch_and_record_id_only() -> None:
    for name in ("datum random", "datum encoded random", "function rng", "datum floats random"):
        case = CASES[name]
        decoder, many = learnt(case), made(case.values)
        whole = decoded(decoder, many)
        lone = decoded(decoder, made([case.values[8]], ids=[8]))
        first = next(iter(whole))
        np.testing.assert_array_equal(lone[first][0], whole[first][8])
        for other in (Draw(3, 2), Draw(4, 1)):
            out = arrays(decoder, many)
            assert decoder.decode(many, out, other) == []
            assert (out[first] != whole[first]).any()


def test_unlearnt_decoders_say_so() -> None:
    from pario.errors import DecodeError

    for decoder in (Datum(), Image(), Function(add_one), Raw("f4")):
        with pytest.raises(DecodeError, match=r"has not seen a record yet"):
            decoder.shapes(made([]))
