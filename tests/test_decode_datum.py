"""The Datum decoder, against Google's protobuf and numpy."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from datum_message import Message, datum, encoded
from google.protobuf.message import DecodeError as ProtobufError
from made_records import arrays, made

from pario.decode import Datum, Draw
from pario.errors import DecodeError, OptionError

RNG = np.random.default_rng(11)
SHAPE = (3, 5, 7)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def learnt(first: bytes, **options) -> Datum:
    decoder = Datum(**options)
    decoder.learn(np.frombuffer(first, np.uint8))
    return decoder


def run(decoder: Datum, values: list[bytes]):
    records = made(values)
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw(5, 6))
    return out["data"], out["label"], failures


# --- the parser ------------------------------------------------------------------------------------------------------


def judged(value: bytes) -> tuple[np.ndarray, int] | None:
    """What a record of SHAPE holds, in the opinion of protobuf; None for all others."""
    try:
        message = Message.FromString(value)
    except ProtobufError:
        return None
    shape = (message.channels, message.height, message.width)
    if message.encoded or shape != SHAPE or len(message.data) != 3 * 5 * 7:
        return None
    return np.frombuffer(message.data, np.uint8).reshape(SHAPE), message.label


def assert_as_protobuf(values: list[bytes]) -> int:
    """Decode between guard rows, and compare every row; returns how many records were good."""
    decoder = learnt(datum(u8(*SHAPE)))
    records, n = made(values), len(values)
    data = np.full((n + 2, *SHAPE), 0xA5, np.uint8)
    label = np.full(n + 2, -77, np.int64)
    failures = dict(decoder.decode(records, {"data": data[1:-1], "label": label[1:-1]}, Draw()))
    assert (data[[0, -1]] == 0xA5).all()
    assert (label[[0, -1]] == -77).all()
    for i, value in enumerate(values):
        right = judged(value)
        assert (right is None) == (i in failures), (value.hex(), failures.get(i), right)
        if right is None:
            assert (data[i + 1] == 0xA5).all(), "a row of a failed record was written"
            assert label[i + 1] == -77
        else:
            np.testing.assert_array_equal(data[i + 1], right[0])
            assert label[i + 1] == right[1]
    return n - len(failures)


def test_fields_in_any_order_twice_unknown_and_of_the_wrong_type() -> None:
    pixels = u8(*SHAPE).tobytes()
    c, h, w, data = b"\x08\x03", b"\x10\x05", b"\x18\x07", b"\x22\x69" + pixels
    good = [
        data + w + h + c,
        c + h + w + data + b"\x28\x09",
        c + h + w + b"\x22\x02ab" + data,  # the last one counts
        b"\x08\x63" + c + h + w + data,
        c + h + w + data + b"\x78\x01" + b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x7a\x03abc",  # field 15
        c + h + w + data + b"\x7b\x08\x01\x13\x14\x7c",  # groups 15 { 2 { } }
        c + h + w + data + b"\x25" + bytes(4),  # field 4 with 4 bytes
        c + h + w + data + b"\x0a\x01x",  # field 1 with a length
        c + h + w + data + b"\x28" + b"\xff" * 9 + b"\x01",  # label -1
        c + h + w + data + b"\x28\x80\x80\x80\x80\x18",  # label beyond 32 bits: the low ones count
        c + h + w + data + b"\x28" + b"\xff" * 9 + b"\x7f",  # beyond 64 bits
        c + h + w + b"\x22\xe9\x80\x80\x00" + pixels,  # a length in four bytes
        c + h + w + data + b"\x38\x00",  # not encoded
        b"\x88\x80\x00\x03" + h + w + data,  # field 1 in three bytes
        c + h + w + data + b"\x35" + bytes(4),  # a float as well
        b"\x08\x83\x80\x80\x80\x10" + h + w + data,  # channels beyond 32 bits
    ]
    assert assert_as_protobuf(good) == len(good)


def test_damage_is_a_failure_each_time() -> None:
    pixels = u8(*SHAPE).tobytes()
    head = b"\x08\x03\x10\x05\x18\x07"
    whole = head + b"\x22\x69" + pixels
    bad = [
        b"",
        head,
        whole[:-1],
        head + b"\x22\x69",
        head + b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + pixels,  # a length of 2**64 - 1
        head + b"\x22\xff\xff\xff\xff\x07" + pixels,
        head + b"\x22" + b"\x80" * 10 + b"\x01" + pixels,  # 11 bytes of varint
        whole + b"\x28" + b"\xff" * 10 + b"\x01",
        whole + b"\x28",
        head + b"\x22\xe9\x80\x80\x80\x80\x00" + pixels,  # a length in six bytes
        whole + b"\x00\x00",  # field 0
        whole + b"\x0e",  # wire type 6
        whole + b"\x0f",
        whole + b"\x7b",  # a group without end
        whole + b"\x7c",  # an end without group
        whole + b"\x7b\x84\x01",  # the end of another group
        whole + b"\x32\x03abc",  # packed floats of 3 bytes
        whole + b"\x79" + bytes(7),
        whole + b"\x7d" + bytes(3),
        whole + b"\x38\x01",  # encoded
        b"\x08\x00" + whole[2:],
        b"\x08\xfd\xff\xff\xff\xff\xff\xff\xff\xff\x01" + whole[2:],  # channels -3
        b"\x08\x80\x80\x04\x10\x80\x80\x04\x18\x80\x80\x04\x22\x00",  # 2**48 values, none there
        b"\x08\xff\xff\xff\xff\x07\x10\xff\xff\xff\xff\x07\x18\xff\xff\xff\xff\x07" + b"\x22\x01x",  # overflows 64 bits
        b"\x08\x07\x10\x05\x18\x03\x22\x69" + pixels,
        whole + b"\x80" * 5 + b"\x01",  # a key of more than 32 bits
    ]
    assert assert_as_protobuf(bad) == 0


def test_mutated_records_are_read_as_protobuf_reads_them() -> None:
    values = []
    for _ in range(6000):
        value = bytearray(datum(u8(*SHAPE), int(RNG.integers(-9, 9))))
        # Mostly the fields before the pixels, and the label behind them.
        for _ in range(RNG.integers(1, 4)):
            where = RNG.random()
            at = int(RNG.integers(0, len(value) if where < 0.3 else min(8, len(value))))
            if where > 0.7:
                at = len(value) - 1 - at
            what = RNG.random()
            if what < 0.5:
                value[at] = RNG.integers(0, 256)
            elif what < 0.7:
                value[at:at] = RNG.bytes(RNG.integers(1, 4))
            elif what < 0.9:
                del value[at : at + RNG.integers(1, 4)]
            else:
                del value[at:]
            if not value:
                break
        values.append(bytes(value))
    good = assert_as_protobuf(values)
    assert 300 < good < 5700, "the mutations reach both kinds"


def test_mutated_float_records_are_read_as_protobuf_reads_them() -> None:
    """Copied as they are, and through the scratch row of a crop."""
    shape = (2, 3, 2)
    values = []
    for i in range(3000):
        value = bytearray(datum(RNG.standard_normal(shape).astype(np.float32), i, packed=bool(i % 2)))
        for _ in range(RNG.integers(0, 3)):
            at = int(RNG.integers(0, len(value)))
            if RNG.random() < 0.6:
                value[at] = RNG.choice([0x35, 0x32, 0x3D, 0x0D, 4, 8, int(RNG.integers(0, 256))])
            else:
                value[at : at + 1] = RNG.bytes(RNG.integers(0, 4))
        values.append(bytes(value))
    first = datum(np.zeros(shape, np.float32))
    (plain, _, failures), (scaled, _, same) = run(learnt(first), values), run(learnt(first, mirror="random"), values)
    assert failures == same
    bad = dict(failures)
    for i, value in enumerate(values):
        try:
            message = Message.FromString(value)
        except ProtobufError:
            assert i in bad
            continue
        right = (
            (message.channels, message.height, message.width) == shape
            and not (message.encoded or message.data)
            and len(message.float_data) == 12
        )
        assert right == (i not in bad), (value.hex(), bad.get(i))
        if right:
            floats = np.float32(message.float_data).reshape(shape)
            np.testing.assert_array_equal(plain[i], floats)
            assert any(np.array_equal(scaled[i], side, equal_nan=True) for side in (floats, floats[..., ::-1]))
    assert 300 < len(bad) < 2700


def test_random_bytes_never_crash() -> None:
    values = [RNG.bytes(RNG.integers(0, 60)) for _ in range(4000)]
    # Small numbers make valid keys more often.
    likely = np.array([1, 3, 5, 7, 8, 11, 12, 16, 24, 34, 53, 50, 56, 128], np.uint8)
    values += [RNG.choice(likely, 30).tobytes() for _ in range(4000)]
    assert assert_as_protobuf(values) == 0


def test_records_outside_the_buffer_are_failures() -> None:
    values = [datum(u8(*SHAPE), i) for i in range(6)]
    decoder, records = learnt(values[0]), made(values)
    size = len(records.data)
    records.starts[1] = -1
    records.starts[2] = size - 3
    records.nbytes[3] = -5
    records.nbytes[4] = 2**62
    records.starts[5] = 2**63 - 1
    failures = decoder.decode(records, arrays(decoder, records), Draw())
    assert [row for row, _ in failures] == [1, 2, 3, 4, 5]
    assert "outside" in failures[0][1]


def test_rows_that_are_in_place_already() -> None:
    """Where the pixels were read straight into their row, the rest of each record says whether it is one of this kind,
    and its label; all others are left to `decode`."""
    decoder = learnt(datum(u8(*SHAPE), 3))
    verbatim = decoder.verbatim()
    assert verbatim is not None
    row = 3 * 5 * 7
    whole = [datum(u8(*SHAPE), label) for label in (5, -7, None)]
    good = [*whole, whole[0] + b"\x38\x00", whole[0] + b"\x28\x06"]
    bad = [
        whole[0] + b"\x38\x01",  # encoded
        whole[0] + b"\x28",  # cut off
        whole[0] + b"\x7a\x00",  # an unknown field: for the parser
        b"\x08\x01" + whole[0][2:],  # another shape
    ]
    values = good + bad
    assert [judged(value) is not None for value in values] == [True] * 5 + [False, False, True, False]
    rest = made([value[: verbatim.head] + value[verbatim.head + row :] for value in values])
    label = np.full(len(values), -77, np.int64)
    assert decoder.decode_rest(rest, {"label": label}) == [5, 6, 7, 8]
    assert label[:5].tolist() == [judged(value)[1] for value in good] == [5, -7, 0, 5, 6]


def test_labels_of_32_bits_and_none() -> None:
    labels = [0, 1, -1, 127, 128, 2**31 - 1, -(2**31), None]
    _, got, failures = run(learnt(datum(u8(*SHAPE))), [datum(u8(*SHAPE), k) for k in labels])
    assert failures == []
    assert got.tolist() == [k or 0 for k in labels]


@pytest.mark.parametrize("packed", [False, True])
def test_float_data(packed: bool) -> None:
    values = RNG.standard_normal((9, 4, 3, 2)).astype(np.float32)
    values[2, 0, 0, 0] = np.nan
    got, label, failures = run(learnt(datum(values[0])), [datum(v, i, packed=packed) for i, v in enumerate(values)])
    assert failures == []
    np.testing.assert_array_equal(got, values)
    assert label.tolist() == list(range(9))


def test_float_data_in_pieces() -> None:
    values = RNG.standard_normal((1, 2, 4)).astype("<f4")
    bits = values.reshape(-1)
    head = b"\x08\x01\x10\x02\x18\x04"
    single = [b"\x35" + b.tobytes() for b in bits]
    pieces = [
        head + b"\x32\x0c" + bits[:3].tobytes() + single[3] + single[4] + b"\x32\x0c" + bits[5:].tobytes(),
        b"".join(single[:5]) + head + b"\x28\x05" + b"".join(single[5:]),
        b"".join(single[:7]) + b"\x7d" + b"\x35" * 4 + single[7] + head,
        head + b"\x32\x00" + b"\x7b\x35" + bytes(4) + b"\x7c" + b"".join(single),  # one inside a group is unknown
    ]
    got, _, failures = run(learnt(datum(values[None, 0])), pieces)
    assert failures == []
    np.testing.assert_array_equal(got, np.broadcast_to(values, got.shape))
    for piece in pieces:
        np.testing.assert_array_equal(np.float32(Message.FromString(piece).float_data), bits)
    broken = [head + b"".join(single[:7]), head + b"".join(single) + b"\x35abc"]
    _, _, failures = run(learnt(datum(values[None, 0])), broken)
    assert [row for row, _ in failures] == [0, 1]
    assert "8 values, float_data holds 7" in failures[0][1]


# --- crop, mirror, mean, scale ---------------------------------------------------------------------------------------


def test_center_crop_mean_and_scale() -> None:
    pixels = u8(4, 3, 9, 12)
    mean = RNG.random((3, 9, 12)).astype(np.float32)
    values = [datum(p) for p in pixels]
    inside = np.s_[:, :, 2:7, 3:9]
    got, _, failures = run(learnt(values[0], crop=(5, 6)), values)
    assert failures == []
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, pixels[inside])
    got, _, _ = run(learnt(values[0], crop=(5, 6), mean=mean), values)
    np.testing.assert_array_equal(got, (pixels - mean)[inside])
    got, _, _ = run(learnt(values[0], crop=5, mean=(3, 4, 5), scale=1 / 128), values)
    channel = np.float32([3, 4, 5])[:, None, None]
    np.testing.assert_array_equal(got, (pixels - channel)[:, :, 2:7, 3:8] * np.float32(1 / 128))
    got, _, _ = run(learnt(values[0], mean=100.5), values)
    np.testing.assert_array_equal(got, pixels - np.float32(100.5))
    got, _, _ = run(learnt(values[0], mean=np.float32([[[3]], [[4]], [[5]]])), values)
    np.testing.assert_array_equal(got, pixels - channel)


@pytest.mark.parametrize("kind", ["u8", "f32", "floats", "encoded"])
def test_random_windows_are_windows_and_uniform(kind: str) -> None:
    height, width, crop = 6, 9, (4, 5)
    # Every value is its own place, so that a window tells where it lies.
    place = np.arange(height * width, dtype=np.uint8).reshape(1, height, width)
    mean = np.arange(height * width, dtype=np.float32).reshape(1, height, width) * 2
    options: dict = {"crop": crop, "crop_mode": "random", "mirror": "random"}
    if kind == "floats":
        value = datum(place.astype(np.float32))
    elif kind == "encoded":
        value = encoded(cv2.imencode(".png", place[0])[1].tobytes(), 0)
        options["color"] = "GRAY"
    else:
        value = datum(place)
    n = 1800
    if kind != "u8":
        options["mean"] = mean
    got, _, failures = run(learnt(value, **options), [value] * n)
    assert failures == []
    counts = np.zeros((3, 5, 2), int)
    for row in got[:, 0].astype(np.int64):
        row = row if kind == "u8" else -row
        flip = row[0, 1] < row[0, 0]
        window = row[:, ::-1] if flip else row
        top, left = divmod(int(window[0, 0]), width)
        np.testing.assert_array_equal(window, place[0, top : top + 4, left : left + 5])
        counts[top, left, int(flip)] += 1
    # 30 cells, 60 expected in each; chi-square with 29 degrees of freedom is below 70 in all but 3 of 100,000 cases.
    assert ((counts - n / 30) ** 2 / (n / 30)).sum() < 70


def test_mirror_without_crop_and_crop_of_everything() -> None:
    pixels = u8(200, 2, 3, 35)
    values = [datum(p) for p in pixels]
    got, _, _ = run(learnt(values[0], mirror="random"), values)
    flipped = (got != pixels).any(axis=(1, 2, 3))
    assert 60 < flipped.sum() < 140
    np.testing.assert_array_equal(got[flipped], pixels[flipped][..., ::-1])
    floats, _, _ = run(learnt(values[0], mirror="random", dtype="float32", crop=(3, 35), crop_mode="random"), values)
    np.testing.assert_array_equal(floats, got)


def test_crop_takes_records_of_different_sizes() -> None:
    pixels = [u8(1, 8, 9), u8(1, 4, 4), u8(1, 20, 5), u8(1, 3, 9), u8(2, 8, 8), u8(1, 9, 3)]
    values = [datum(p) for p in pixels]
    got, _, failures = run(learnt(values[0], crop=4), values)
    assert [row for row, _ in failures] == [3, 4, 5]
    assert failures[0][1] == "expected 1 channels of at least 4 x 4, got 1 x 3 x 9"
    np.testing.assert_array_equal(got[0], pixels[0][:, 2:6, 2:6])
    np.testing.assert_array_equal(got[1], pixels[1])
    np.testing.assert_array_equal(got[2], pixels[2][:, 8:12, 0:4])
    _, _, failures = run(learnt(values[0]), values)
    assert failures[0][1].startswith("expected 1 x 8 x 9 (channels x height x width), got 1 x 4 x 4; crop=(h, w)")


# --- encoded ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 5), (6, 9), (5, 5)], ids=["narrower", "lower", "both"])
def test_an_encoded_picture_that_is_smaller_than_the_window(size: tuple[int, int]) -> None:
    pictures = [RNG.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in ((9, 9), size, (7, 6))]
    values = [encoded(cv2.imencode(".png", picture)[1].tobytes(), 0) for picture in pictures]
    got, _, failures = run(learnt(values[0], crop=(7, 6)), values)
    assert [row for row, _ in failures] == [1]
    planes = [picture.transpose(2, 0, 1) for picture in pictures]
    np.testing.assert_array_equal(got[0], planes[0][:, 1:8, 1:7])
    np.testing.assert_array_equal(got[-1], planes[2])


def test_encoded_colors_and_sizes() -> None:
    picture = u8(6, 8, 3)
    png = cv2.imencode(".png", picture)[1].tobytes()
    for color, right in (
        ("BGR", picture),
        ("RGB", picture[..., ::-1]),
        ("GRAY", cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_GRAYSCALE)[..., None]),
    ):
        decoder = learnt(encoded(png, 4), color=color)
        assert decoder.parallel
        got, label, failures = run(decoder, [encoded(png, 4)])
        assert failures == []
        np.testing.assert_array_equal(got[0], right.transpose(2, 0, 1))
        assert label.tolist() == [4]
    small = cv2.imencode(".png", picture[:4])[1].tobytes()
    _, _, failures = run(learnt(encoded(png, 4)), [encoded(small, 0), datum(u8(3, 6, 8))])
    assert failures[0][1].startswith("expected 3 x 6 x 8 (channels x height x width), got 3 x 4 x 8")
    assert failures[1][1] == "the values are in 'data', those of the first record in 'encoded'"


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(50), r"89 50 4e 47, a PNG.*Use pario.decode.Image\(\)"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF\0", r"a JPEG.*Use pario.decode.Image\(\)"),
        (b"\x80\x04\x95\x10", r"a pickle.*Use pario.decode.Pickle\("),
        (b"{\"a\": 1}", "perhaps JSON"),
        (b"", "it is empty"),
        (b"\x08\x03\x10\x05\x18\x07\x22\x02ab", r"3 x 5 x 7 .* are 105 values, data holds 2"),
        (b"\x28\x01", r"no valid shape \(channels 0, height 0, width 0\)"),
        (b"\x08\x03\x22\x7f", "at byte 2: a length that does not fit"),
    ],
)
def test_learn_says_what_the_record_is_instead(record: bytes, says: str) -> None:
    with pytest.raises(DecodeError, match=says) as raised:
        Datum().learn(np.frombuffer(record, np.uint8))
    assert str(raised.value).startswith("not a Caffe Datum: ")


def test_a_broken_image_inside() -> None:
    with pytest.raises(DecodeError, match="encoded Datum whose image is broken"):
        Datum().learn(np.frombuffer(encoded(b"\x89PNG...", 0), np.uint8))


@pytest.mark.parametrize(
    "options",
    [
        {"crop": 0},
        {"crop": (1, 2, 3)},
        {"crop": True},
        {"crop_mode": "left"},
        {"mirror": True},
        {"mean": np.zeros((2, 2))},
        {"mean": float("nan")},
        {"dtype": "int32"},
        {"dtype": "uint8", "mean": 1},
        {"color": "CMYK"},
    ],
)
def test_impossible_options(options: dict) -> None:
    with pytest.raises(OptionError):
        Datum(**options)


def test_options_that_do_not_fit_the_records() -> None:
    value = np.frombuffer(datum(u8(3, 5, 7)), np.uint8)
    for options in ({"crop": 6}, {"mean": [1, 2]}, {"mean": np.zeros((3, 7, 5))}):
        with pytest.raises(OptionError, match=r"5 x 7"):
            Datum(**options).learn(value)
    with pytest.raises(OptionError, match="float_data"):
        Datum(dtype="uint8").learn(np.frombuffer(datum(np.zeros((1, 1, 1), np.float32)), np.uint8))


def test_repr() -> None:
    assert repr(Datum()) == "Datum()"
    assert repr(Datum(4, crop_mode="random", mean=[1, 2, 3], dtype="float32")) == (
        "Datum(crop=(4, 4), crop_mode='random', mean=[1.0, 2.0, 3.0], dtype='float32')"
    )
    assert repr(Datum(mean=np.zeros((3, 9, 9)))) == "Datum(mean=float32[3, 9, 9])"


@pytest.mark.parametrize(
    ("options", "copies"), [({}, True), ({"dtype": "float32"}, False), ({"mirror": "random"}, False)]
)
def test_a_plain_datum_is_copied(options: dict, copies: bool) -> None:
    class Changed(Datum):
        def decode(self, records, out, draw):  # type: ignore[no-untyped-def]
            return super().decode(records, out, draw)

    assert learnt(datum(u8(*SHAPE)), **options).copies == copies
    changed = Changed(**options)
    changed.learn(np.frombuffer(datum(u8(*SHAPE)), np.uint8))
    assert not changed.copies
