"""One suite over all decoders: what the loader may rely on."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import pytest
from datum_message import datum, encoded
from made_records import arrays, made, rows

import pario.decode
from pario.decode import (
    Datum,
    Decoder,
    Draw,
    Function,
    Gzip,
    Image,
    Json,
    MsgPack,
    Npy,
    Npz,
    Pickle,
    Raw,
    Struct,
    TensorProtos,
    Text,
    Zlib,
    Zstd,
)
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


@pario.decode.kernel({"sum": "int64", "first": ("float32", (2,))})
def summed(value, sum, first):
    if len(value) < 2:
        return 1
    sum[0] = value.sum()
    for k in range(2):
        first[k] = 2 * value[k]
    return 0


def described(record: bytes, key: bytes, id: int) -> dict[str, Any]:
    if not record:
        raise ValueError("nothing in it")
    return {"id": id, "key": key, "text": str(record[0]), "numbers": np.arange(record[0] % 5)}


def npy(array: np.ndarray, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz(compressed: bool = False, **named: Any) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, **named)
    return file.getvalue()


def objects(items: list[Any]) -> np.ndarray:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def tensors(image: np.ndarray, label: int) -> bytes:
    """Caffe2's bytes, by protobuf's own rules."""
    from caffe2_message import tensor_protos

    return tensor_protos(("FLOAT", image.shape, image.ravel().tolist()), ("INT32", (1,), [label]))


def installed(name: str) -> Any:
    return () if importlib.util.find_spec(name) else pytest.mark.skip(f"{name} is not installed")


@dataclass
class Case:
    make: Callable[[], Decoder]
    values: list[bytes]
    bad: bytes
    expected: dict[str, np.ndarray] | None = None


DATUMS = [datum(p, int(k)) for p, k in zip(PIXELS, LABELS, strict=True)]
PNGS = [png(p) for p in PICTURES]
TEXTS = [f"grün {k}" for k in LABELS]
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
    "datum last": Case(
        lambda: Datum(layout="HWC"), DATUMS, b"\x08", {"data": PIXELS.transpose(0, 2, 3, 1), "label": LABELS}
    ),
    "datum encoded last": Case(
        lambda: Datum(layout="HWC", crop=9),
        [encoded(p, int(k)) for p, k in zip(PNGS, LABELS, strict=True)],
        b"\x08",
        {"data": PIXELS[:, :, 1:10, :9].transpose(0, 2, 3, 1), "label": LABELS},
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
    "image random": Case(
        lambda: Image(7, crop="random", flip=True, jitter=(0.3, 0.3, 0.3, 0.1), mean=0.5, layout="CHW"), PNGS, b"no"
    ),
    "image of floats": Case(
        lambda: Image(dtype="float32", offset=b"?"),
        [b"?" + value for value in PNGS],
        PNGS[0],
        {"data": np.stack(PICTURES)[..., ::-1] * (np.float32(1) / np.float32(255))},
    ),
    "kernel": Case(
        lambda: summed,
        [p.tobytes() for p in PIXELS],
        b"",
        {"sum": PIXELS.sum((1, 2, 3)), "first": PIXELS.reshape(N, -1)[:, :2] * np.float32(2)},
    ),
    "function": Case(
        lambda: Function(add_one),
        [p.tobytes() for p in PIXELS],
        b"",
        {"data": PIXELS.reshape(N, -1) + 1.0, "label": np.full(N, 360)},
    ),
    "function rng": Case(lambda: Function(noisy, rng=True), [p.tobytes() for p in PIXELS], b""),
    "function asked": Case(lambda: Function(described, ragged="list"), [p.tobytes() for p in PIXELS], b""),
    "npy": Case(Npy, [npy(f) for f in FLOATS], npy(FLOATS[0])[:-1], {"data": FLOATS}),
    "npy fortran": Case(Npy, [npy(np.asfortranarray(f)) for f in FLOATS], npy(FLOATS[0][0]), {"data": FLOATS}),
    "npy list": Case(lambda: Npy(ragged="list"), [npy(np.arange(i % 4)) for i in range(N)], npy(np.zeros(3))),
    "npz": Case(
        Npz,
        [npz(i % 2 == 0, x=f, y=LABELS[i]) for i, f in enumerate(FLOATS)],
        npz(x=FLOATS[0]),
        {"x": FLOATS, "y": LABELS},
    ),
    "json": Case(Json, [b'{"a": [%d], "b": null}' % k for k in LABELS], b'{"a": ['),
    "json fields": Case(
        lambda: Json({"a.0": "int32", "b": None, "c": "float32"}, ragged="list"),
        [json.dumps({"a": [int(k)], "b": "x" * i, "c": [i] * (i % 3)}).encode() for i, k in enumerate(LABELS)],
        b'{"a": [3000000000], "b": "", "c": []}',
        {"a.0": LABELS, "b": objects(["x" * i for i in range(N)])},
    ),
    "text": Case(Text, [text.encode() for text in TEXTS], b"\xff", {"data": objects(TEXTS)}),
    "tokens": Case(
        lambda: Text(dtype=">u2"), [np.arange(i % 7, dtype=">u2").tobytes() for i in range(N)], b"odd"
    ),
    "struct": Case(
        lambda: Struct({"label": ">i8", "pixels": ("u1", (3, 12, 10))}),
        [int(k).to_bytes(8, "big", signed=True) + p.tobytes() for k, p in zip(LABELS, PIXELS, strict=True)],
        bytes(367),
        {"label": LABELS, "pixels": PIXELS},
    ),
    "struct with a tail": Case(
        lambda: Struct({"label": "<i4"}, skip=1, tail=True),
        [b"?" + int(k).to_bytes(4, "little", signed=True) + bytes(i) for i, k in enumerate(LABELS)],
        bytes(4),
        {"label": LABELS},
    ),
    "pickle": Case(
        lambda: Pickle("all", allow=[]),
        [pickle.dumps({"x": f, "y": int(k)}, 2 + len(str(k)) % 4) for f, k in zip(FLOATS, LABELS, strict=True)],
        pickle.dumps({"x": FLOATS[0], "y": Case}),
        {"x": FLOATS, "y": LABELS},
    ),
    "tensor protos": Case(
        TensorProtos,
        [tensors(f, int(k)) for f, k in zip(FLOATS, LABELS, strict=True)],
        b"\x0a\x7f",
        {"data": FLOATS, "label": LABELS},
    ),
    "zlib": Case(
        lambda: Zlib(Datum()),
        [zlib.compress(d) for d in DATUMS],
        zlib.compress(b"\x08"),
        {"data": PIXELS, "label": LABELS},
    ),
    "zlib broken": Case(
        lambda: Zlib(Raw("u1")), [zlib.compress(p.tobytes()) for p in PIXELS], zlib.compress(PIXELS[0].tobytes())[:-3]
    ),
    "gzip": Case(
        lambda: Gzip(Json(["a"])), [gzip.compress(b'{"a": %d}' % k) for k in LABELS], b"\x1f\x8b", {"a": LABELS}
    ),
    "gzip bytes": Case(Gzip, [gzip.compress(p.tobytes()[:i]) for i, p in enumerate(PIXELS)], b"\x1f\x8b\x08"),
}
if importlib.util.find_spec("msgpack"):
    import msgpack

    CASES["msgpack"] = Case(
        lambda: MsgPack("all"),
        [msgpack.packb([f.tolist(), int(k)]) for f, k in zip(FLOATS, LABELS, strict=True)],
        b"\x92\xdd\xff\xff\xff\xff",
        {"data": FLOATS, "label": LABELS},
    )
if importlib.util.find_spec("zstandard"):
    import zstandard

    CASES["zstd"] = Case(
        lambda: Zstd(Npy()),
        [zstandard.compress(npy(f)) for f in FLOATS],
        zstandard.compress(npy(FLOATS[0]))[:-1],
        {"data": FLOATS},
    )



def keys(ids: np.ndarray) -> list[bytes]:
    return [b"%08d" % i for i in ids]


DRAW = Draw(3, 1, keys)


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def learnt(case: Case) -> Decoder:
    decoder = case.make()
    decoder.learn_at(made(case.values[:1])[0], 0, DRAW)
    return decoder


def same(one: np.ndarray, other: np.ndarray, **words: str) -> None:
    """Equal dtypes and values, also where the rows are objects of unequal sizes."""
    assert one.dtype == other.dtype or words
    if one.dtype != object:
        np.testing.assert_array_equal(one, other, **words)
        return
    assert one.shape == other.shape
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)


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
        same(out[name], values, err_msg=name)


def test_no_record_and_one_record(case: Case) -> None:
    decoder = learnt(case)
    nothing, one, many = made([]), made(case.values[:1]), made(case.values)
    empty = decoded(decoder, nothing)
    alone, whole = decoded(decoder, one), decoded(decoder, many)
    for name in whole:
        assert empty[name].shape == (0, *whole[name].shape[1:])
        same(alone[name], whole[name][:1])


def test_row_slices_decode_to_the_same(case: Case) -> None:
    decoder = learnt(case)
    records = made(case.values, ids=list(range(100, 300))[: 2 * N : 2] if "label" not in repr(decoder) else None)
    whole = decoded(decoder, records)
    pieces = arrays(decoder, records)
    for start, stop in ((9, N), (0, 1), (1, 9)):
        part = {name: array[start:stop] for name, array in pieces.items()}
        assert decoder.decode(rows(records, start, stop), part, DRAW) == []
    for name in whole:
        same(pieces[name], whole[name])


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
        same(out[name][good], whole[name][good])


def test_only_the_given_rows_are_written(case: Case) -> None:
    decoder = learnt(case)
    values = list(case.values)
    values[6] = case.bad
    records = made(values)
    out = arrays(decoder, records)
    decoder.decode(rows(records, 3, 9), {name: array[3:9] for name, array in out.items()}, DRAW)
    for array in out.values():
        outside = np.concatenate([array[:3], array[9:]])
        if outside.dtype == object:
            assert (outside == 0x5A).all()
            continue
        assert (np.ascontiguousarray(outside).reshape(-1).view(np.uint8) == 0x5A).all()


def test_a_pickled_decoder_decodes_the_same(case: Case) -> None:
    decoder = learnt(case)
    again = pickle.loads(pickle.dumps(decoder))
    assert again.spec == decoder.spec
    assert repr(again) == repr(decoder)
    assert again.parallel == decoder.parallel
    ours, theirs = decoded(decoder, made(case.values)), decoded(again, made(case.values))
    for name in ours:
        same(ours[name], theirs[name])


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
        same(ours[name], theirs[name])
    assert strided.data.flags.writeable


def test_chance_follows_seed_epoch_and_record_id_only() -> None:
    for name in ("datum random", "datum encoded random", "function rng", "datum floats random"):
        case = CASES[name]
        decoder, many = learnt(case), made(case.values)
        whole = decoded(decoder, many)
        lone = decoded(decoder, made([case.values[8]], ids=[8]))
        first = next(iter(whole))
        np.testing.assert_array_equal(lone[first][0], whole[first][8])
        for other in (Draw(3, 2, keys), Draw(4, 1, keys)):
            out = arrays(decoder, many)
            assert decoder.decode(many, out, other) == []
            assert (out[first] != whole[first]).any()


def test_unlearnt_decoders_say_so() -> None:
    from pario.errors import DecodeError

    for decoder in (Datum(), Image(), Function(add_one), Raw("f4")):
        with pytest.raises(DecodeError, match=r"has not seen a record yet"):
            decoder.shapes(made([]))


def test_the_suite_covers_every_decoder() -> None:
    from pario.decode.registry import DECODERS

    missing = {"MsgPack": "msgpack", "Zstd": "zstandard"}
    mine = {type(case.make()).__name__ for case in CASES.values()}
    for entry in DECODERS:
        if importlib.util.find_spec(missing.get(entry.cls, "json")):
            assert entry.cls in mine, f"{entry.cls} is not in this suite"
            assert hasattr(pario.decode, entry.cls)


def finished(decoder: Decoder, records: Records) -> dict[str, np.ndarray]:
    return decoder.finish(decoded(decoder, records))


def test_a_finished_batch_of_any_size(case: Case) -> None:
    decoder = learnt(case)
    for values in ([], case.values[:1], case.values):
        for name, array in finished(decoder, made(values)).items():
            assert isinstance(array, np.ndarray), name
            assert len(array) >= len(values) or "flat" in repr(decoder) or name == "data"


HOSTILE = [
    b"",
    b"\0",
    b"\xff" * 64,
    b"\x93NUMPY\x01\0\xff\xff",
    b"\x93NUMPY\x03\0\xff\xff\xff\xff{",
    b"PK\x03\x04" + bytes(40),
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x91" * 100_000,
    b"\x80\x04" + b"(" * 1000 + b"t" * 1000 + b".",
    b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x78\x9c" + b"\xff" * 50,
    b"\x1f\x8b\x08" + bytes(20),
    b"\x28\xb5\x2f\xfd" + b"\xff" * 20,
    b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
]


def test_hostile_bytes_are_a_failure_or_a_value(case: Case) -> None:
    """Nothing but DecodeError comes out of learn, nothing at all out of decode."""
    from pario.errors import DecodeError

    decoder = learnt(case)
    first = case.values[0]
    hostile = [*HOSTILE, *(first[:k] for k in (1, len(first) // 3, len(first) - 1)), first + b"\0", first[::-1]]
    for number, bad in enumerate(hostile):
        said = ""
        try:
            case.make().learn_at(made([bad])[0], 0, DRAW)
        except DecodeError as error:
            said = str(error)
        assert len(said) < 3000, number
    records = made([first, *hostile, first], ids=[0] * (len(hostile) + 2))
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, DRAW)
    assert {0, len(hostile) + 1}.isdisjoint(row for row, _ in failures)
    assert all(0 < len(why) < 2000 for _, why in failures)
    for array in out.values():
        same(array[:1], array[-1:])


def test_flipped_bytes_never_raise(case: Case) -> None:
    rng = np.random.default_rng(11)
    decoder, value = learnt(case), case.values[1]
    values = []
    for _ in range(60):
        changed = bytearray(value)
        for at in rng.integers(0, max(len(value), 1), 1 + rng.integers(3)) if value else ():
            changed[min(int(at), 200) if rng.random() < 0.7 else int(at)] = rng.integers(256)
        values.append(bytes(changed))
    records = made(values)
    decoder.decode(records, arrays(decoder, records), DRAW)
