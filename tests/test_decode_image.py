"""Images, against Pillow's and OpenCV's own reading."""

from __future__ import annotations

import re

import cv2
import numpy as np
import pytest
from made_records import arrays, made

from pario.decode import Draw, Image, measured
from pario.decode import image as module
from pario.errors import DecodeError, OptionError

RNG = np.random.default_rng(5)


def picture(height: int = 40, width: int = 60) -> np.ndarray:
    """Smooth, so that lossy codecs stay close; red first."""
    return cv2.resize(RNG.integers(0, 256, (5, 6, 3), dtype=np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)


def file_of(rgb: np.ndarray, kind: str = ".png", *options: int) -> bytes:
    return cv2.imencode(kind, np.ascontiguousarray(rgb[..., ::-1]), list(options))[1].tobytes()


def run(decoder: Image, values: list[bytes], learn: bool = True):
    records = made(values)
    if learn:
        decoder.learn(records[0])
    out = arrays(decoder, records)
    return out["data"], decoder.decode(records, out, Draw())


@pytest.mark.parametrize("kind", [".png", ".bmp", ".webp", ".jpg", ".tiff"])
def test_kinds(kind: str) -> None:
    rgb = picture()
    options = {".webp": (cv2.IMWRITE_WEBP_QUALITY, 101), ".jpg": (cv2.IMWRITE_JPEG_QUALITY, 98)}
    got, failures = run(Image(), [file_of(rgb, kind, *options.get(kind, ()))] * 2)
    assert failures == []
    assert got.shape == (2, 40, 60, 3)
    if kind == ".jpg":
        assert np.abs(got[1].astype(int) - rgb).mean() < 3
    else:
        np.testing.assert_array_equal(got[1], rgb)


@pytest.mark.parametrize("kind", [".png", ".jpg"])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_layouts_and_colors(kind: str, layout: str) -> None:
    value = file_of(picture(), kind)
    rgb, _ = run(Image(), [value])
    for color, right in (("RGB", rgb), ("BGR", rgb[..., ::-1])):
        got, failures = run(Image(layout=layout, color=color), [value])
        assert failures == []
        np.testing.assert_array_equal(got, right if layout == "HWC" else right.transpose(0, 3, 1, 2))
    grey, failures = run(Image(layout=layout, color="GRAY"), [value])
    assert failures == []
    assert grey.shape == ((1, 40, 60, 1) if layout == "HWC" else (1, 1, 40, 60))
    assert np.abs(grey.reshape(40, 60) - rgb[0] @ [0.299, 0.587, 0.114]).max() < 3


def test_without_simplejpeg_opencv_reads_jpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    value = file_of(picture(), ".jpg")
    fast, _ = run(Image(), [value])
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    slow, failures = run(Image(), [value, value[: len(value) // 2]])
    assert np.abs(fast[0].astype(int) - slow[0]).max() <= 2
    assert [row for row, _ in failures] == [1]


def test_without_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cv2", lambda: None)
    _, failures = run(Image(), [file_of(picture(), ".jpg"), file_of(picture())])
    assert [row for row, _ in failures] == [1]
    assert 'pip install ".[image]"' in failures[0][1]
    with pytest.raises(OptionError, match="needs OpenCV"):
        Image(size=3)
    monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    with pytest.raises(OptionError, match=r'pip install "\.\[image\]"'):
        Image()


def test_size_resizes_every_kind() -> None:
    sizes = ((40, 60), (20, 30), (19, 200), (160, 240), (300, 301))
    values = [file_of(rgb, kind) for rgb in (picture(*size) for size in sizes) for kind in (".png", ".jpg")]
    got, failures = run(Image((20, 30)), values)
    assert failures == []
    for i, size in enumerate(sizes):
        # JPEG halved while decoding, PNG averaged: the same picture but for the codec's loss.
        assert np.abs(got[2 * i].astype(int).mean((0, 1)) - got[2 * i + 1].mean((0, 1))).max() < 8, size
    exact = picture(20, 30)
    got, _ = run(Image((20, 30)), [file_of(exact)])
    np.testing.assert_array_equal(got[0], exact)
    big = picture(80, 90)
    for how in ("area", "linear", "cubic", "nearest"):
        got, _ = run(Image((20, 30), resize=how, layout="CHW"), [file_of(big)])
        right = cv2.resize(big, (30, 20), interpolation=getattr(cv2, f"INTER_{how.upper()}"))
        np.testing.assert_array_equal(got[0], right.transpose(2, 0, 1))


def test_size_needs_no_record() -> None:
    decoder = Image(size=8)
    assert decoder.shapes(made([])) == {"data": ((0, 8, 8, 3), np.dtype("u1"))}


def test_unequal_sizes_without_size() -> None:
    sizes = (40, 60, ".png"), (40, 61, ".png"), (10, 10, ".jpg"), (90, 90, ".jpg")
    values = [file_of(picture(height, width), kind) for height, width, kind in sizes]
    _, failures = run(Image(), values)
    assert [row for row, _ in failures] == [1, 2, 3]
    assert failures[0][1] == (
        "expected an image of 40 x 60 (height x width), as record 0 is, got 40 x 61; pass size=(h, w)"
    )
    assert "got 10 x 10" in failures[1][1]
    assert "got 90 x 90" in failures[2][1]


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_the_header_of_an_expected_jpeg_is_not_read_apart(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    files = [file_of(picture(*size), ".jpg") for size in ((40, 60), (40, 60), (30, 50), (60, 80), (40, 60))]
    codec, read = module._simplejpeg(), []

    class Counting:
        def __getattr__(self, name: str):
            read.append(name)
            return getattr(codec, name)

    decoder = Image(layout=layout)
    decoder.learn(np.frombuffer(files[0], np.uint8))
    monkeypatch.setattr(module, "_simplejpeg", Counting)
    got, failures = run(decoder, files, learn=False)
    assert [row for row, _ in failures] == [2, 3]
    assert all("expected an image of 40 x 60" in why for _, why in failures)
    for row in (0, 1, 4):
        right = cv2.cvtColor(cv2.imdecode(np.frombuffer(files[row], np.uint8), 1), cv2.COLOR_BGR2RGB)
        found = got[row] if layout == "HWC" else got[row].transpose(1, 2, 0)
        assert np.abs(found.astype(int) - right).mean() < 1
    assert read.count("decode_jpeg_header") == 2  # of those that have another size


def test_grey_alpha_and_deep_files_become_what_was_asked() -> None:
    rgb = picture()
    alpha = np.dstack([rgb[..., ::-1], np.full((40, 60), 9, np.uint8)])
    values = [
        file_of(rgb),
        cv2.imencode(".png", alpha)[1].tobytes(),
        cv2.imencode(".png", rgb[..., ::-1].astype(np.uint16) * 257)[1].tobytes(),
        cv2.imencode(".png", rgb[..., 0])[1].tobytes(),
    ]
    got, failures = run(Image(), values)
    assert failures == []
    np.testing.assert_array_equal(got[:3], np.stack([rgb] * 3))
    np.testing.assert_array_equal(got[3], np.repeat(rgb[..., :1], 3, axis=2))


def test_orientation_tags_are_ignored_by_both_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    exif = b"\xff\xe1\x00\x22Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    plain = file_of(picture(), ".jpg")
    turned = plain[:2] + exif + plain[2:]
    for _ in range(2):
        got, failures = run(Image(), [plain, turned])
        assert failures == []
        np.testing.assert_array_equal(got[0], got[1])
        monkeypatch.setattr(module, "_simplejpeg", lambda: None)


def test_damage_fails_alone_unless_allowed() -> None:
    jpeg, png = file_of(picture(), ".jpg"), file_of(picture())
    values = [jpeg, jpeg[:-200], png[:-30], b"", b"\xff\xd8\xff", b"hello", jpeg]
    got, failures = run(Image(), values)
    assert [row for row, _ in failures] == [1, 2, 3, 4, 5]
    assert "JPEG" in failures[0][1]
    assert "it begins with 68 65 6c 6c" in failures[4][1]
    np.testing.assert_array_equal(got[0], got[6])
    _, failures = run(Image(strict=False), values)
    assert [row for row, _ in failures] == [2, 3, 4, 5]


def test_labels() -> None:
    value = file_of(picture(4, 4))
    records = made([value] * 4, ids=[2, 0, 9, 3])
    decoder = Image(label=np.array([7, 8, 9], np.uint8))
    decoder.learn(records[0])
    out = arrays(decoder, records)
    assert out["label"].dtype == np.int64
    failures = decoder.decode(records, out, Draw())
    assert failures == [(row, "label has 3 entries, none for this record") for row in (2, 3)]
    assert out["label"][:2].tolist() == [9, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"size": 0},
        {"size": "big"},
        {"layout": "WHC"},
        {"color": "rgb"},
        {"resize": "best"},
        {"label": ["a"]},
        {"label": 3},
    ],
)
def test_impossible_options(options: dict) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} must be"):
        Image(**options)


def test_learn_says_what_the_record_is_instead() -> None:
    with pytest.raises(DecodeError, match=r"not an image: no JPEG, PNG, .* file; .*a pickle.*decode.Pickle"):
        Image().learn(np.frombuffer(b"\x80\x04\x95" + bytes(20), np.uint8))


def test_rows_that_jpeg_is_decoded_into_begin_beyond_a_multiple_of_32_bytes() -> None:
    assert [Image().lead, Image(color="GRAY", layout="CHW").lead] == [16, 16]
    assert [Image(layout="CHW").lead, Image(8, flip=True).lead] == [0, 0], "others write these"


def test_repr() -> None:
    assert repr(Image()) == "Image()"
    assert repr(Image(4, layout="CHW", label=np.zeros(9))) == "Image(size=(4, 4), layout='CHW', label=float64[9])"


def test_a_jpeg_is_never_scaled_below_the_size_that_is_wanted() -> None:
    """Stripes of 4 pixels are still there at half the size, and gone at an eighth."""
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, np.arange(256) % 8 < 4] = 255
    got, failures = run(Image(128), [cv2.imencode(".jpg", stripes)[1].tobytes()])
    assert not failures
    assert got[0].shape == (128, 128, 3)
    assert got[0].std() > 80


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ((1 << 20, 1 << 20), r"PNG: 1048576 x 1048576 pixels are more than 22,\d+,\d+, the most for 82 bytes"),
        ((4000, 4000), r"PNG: \d+ bytes cannot hold 4000 x 4000 pixels"),
    ],
)
def test_a_png_that_says_it_is_huge_costs_nothing(size, why) -> None:
    file = bytearray(cv2.imencode(".png", np.zeros((5, 5, 3), np.uint8))[1].tobytes())
    file[16:24] = size[1].to_bytes(4, "big") + size[0].to_bytes(4, "big")
    with pytest.raises(DecodeError, match=why):
        Image().learn(np.frombuffer(bytes(file), np.uint8))


def test_a_png_with_a_part_of_gigabytes_costs_nothing() -> None:
    file = bytearray(cv2.imencode(".png", np.zeros((5, 5, 3), np.uint8))[1].tobytes())
    file[33] = 0x60  # the first byte of the length of the compressed pixels
    with pytest.raises(DecodeError, match=r"PNG: a part of 1,610,\d+,\d+ bytes at byte 33 of \d+"):
        Image().learn(np.frombuffer(bytes(file), np.uint8))


def test_the_smallest_png_of_many_pixels_is_read() -> None:
    """Nothing compresses better than this one."""
    file = cv2.imencode(".png", np.zeros((3000, 3000), np.uint8), [cv2.IMWRITE_PNG_BILEVEL, 1])[1].tobytes()
    assert Image(color="GRAY").learn(np.frombuffer(file, np.uint8)) == (3000, 3000)


def test_a_jpeg_that_says_it_is_huge_costs_nothing() -> None:
    file = bytearray(cv2.imencode(".jpg", np.zeros((16, 16), np.uint8))[1].tobytes())
    at = file.index(b"\xff\xc0") + 5
    file[at : at + 4] = b"\xff\xdc\xff\xdc"
    with pytest.raises(DecodeError, match="JPEG: 65500 x 65500 pixels are more than"):
        Image().learn(np.frombuffer(bytes(file), np.uint8))


@pytest.mark.parametrize(
    "kind",
    [".png", ".jpg", ".bmp", ".webp", ".tiff", ".gif", ".jp2", ".ppm", ".pgm", "lossless", "progressive", "alpha"],
)
def test_headers_say_the_size(kind: str) -> None:
    """Files that OpenCV has written."""
    extension, options = {
        "lossless": (".webp", (cv2.IMWRITE_WEBP_QUALITY, 101)),
        "progressive": (".jpg", (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)),
        "alpha": (".webp", (cv2.IMWRITE_WEBP_QUALITY, 50)),
    }.get(kind, (kind, ()))
    pixels = picture(70, 91)
    if kind == "alpha":
        pixels = np.dstack([pixels, pixels[..., :1]])
    file = cv2.imencode(extension, pixels[..., 0] if kind == ".pgm" else pixels, list(options))[1].tobytes()
    measure = next(measure for begin, _, measure in measured._KINDS if re.match(begin, file))
    assert measure(file)[:2] == (70, 91)
    assert Image().learn(np.frombuffer(file, np.uint8)) == (70, 91)
