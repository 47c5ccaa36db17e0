"""Cropped, flipped, jittered and normalised images, against Pillow and NumPy."""

from __future__ import annotations

import io
import pickle
import threading

import numpy as np
import pytest
from made_records import arrays, made, rows
from PIL import Image as Pillow
from PIL import ImageEnhance

from pario.decode import Draw, Image
from pario.decode.augment import scratch
from pario.errors import OptionError

DRAW = Draw(3, 1)
MEAN, STD = np.array((0.485, 0.456, 0.406)), np.array((0.229, 0.224, 0.225))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth, with strong colors."""
    few = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return np.asarray(Pillow.fromarray(few).resize((width, height), Pillow.Resampling.BICUBIC))


def file_of(rgb: np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(rgb).save(file, kind, **options)
    return file.getvalue()


def run(decoder: Image, values: list[bytes], draw: Draw = DRAW, ids: list[int] | None = None) -> np.ndarray:
    records = made(values, ids=ids)
    decoder.learn(records[0])
    out = arrays(decoder, records)
    assert decoder.decode(records, out, draw) == []
    return out["data"]


def window(rgb: np.ndarray) -> tuple[Pillow.Image, bool]:
    """The window that this thread used last, cut out by Pillow, and whether it is flipped."""
    top, left, height, width, flip = (int(x) for x in scratch.window)
    return Pillow.fromarray(rgb).crop((left, top, left + width, top + height)), bool(flip)


def by_pillow(rgb: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    cut, flip = window(rgb)
    resized = np.asarray(cut.resize(size[::-1], Pillow.Resampling.BILINEAR))
    return resized[:, ::-1] if flip else resized


@pytest.mark.parametrize("size", [(31, 40), (60, 64), (150, 20)])
@pytest.mark.parametrize("options", [{"crop": "random", "flip": True}, {"crop": "center"}, {"flip": 1.0}])
def test_crop_resize_and_flip_are_pillows(size, options) -> None:
    """Within one level of 255: Pillow rounds twice."""
    rgb = picture(61, 83)
    decoder = Image(size, **options)
    for record in range(8):
        got = run(decoder, [file_of(rgb)], ids=[record])[0]
        assert np.abs(got.astype(int) - by_pillow(rgb, size)).max() <= 1


def test_an_image_of_the_right_size_stays_exact() -> None:
    rgb = picture(20, 30)
    np.testing.assert_array_equal(run(Image(dtype="uint8"), [file_of(rgb)])[0], rgb)
    flipped = run(Image(flip=1.0, layout="CHW"), [file_of(rgb)])[0]
    np.testing.assert_array_equal(flipped, rgb[:, ::-1].transpose(2, 0, 1))


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("color", ["RGB", "BGR", "GRAY"])
def test_normalised(layout: str, dtype: str, near: float, color: str) -> None:
    rgb = picture(20, 30)
    value = file_of(rgb)
    options = {"mean": MEAN, "std": STD} if color != "GRAY" else {"mean": 0.4, "std": 0.2}
    got = run(Image(dtype=dtype, layout=layout, color=color, **options), [value])[0]
    plain = run(Image(color=color), [value])[0] / 255
    right = (plain - options["mean"]) / options["std"]
    assert got.dtype == dtype
    got = got if layout == "HWC" else got.transpose(1, 2, 0)
    np.testing.assert_allclose(got, right, rtol=near, atol=near)


def test_float32_without_a_mean_is_0_to_1() -> None:
    rgb = picture(20, 30)
    got = run(Image(dtype="float32"), [file_of(rgb)])[0]
    np.testing.assert_allclose(got, rgb / 255, rtol=1e-6)


@pytest.mark.parametrize("part", ["brightness", "contrast", "saturation"])
def test_jitter_is_pillows(part: str) -> None:
    """Within two levels: Pillow rounds at each step."""
    rgb = picture(40, 40)
    enhance = {
        "brightness": ImageEnhance.Brightness, "contrast": ImageEnhance.Contrast, "saturation": ImageEnhance.Color,
    }[part]  # fmt: skip
    number = ("brightness", "contrast", "saturation").index(part)
    factors = set()
    for record in range(6):
        got = run(Image(jitter={part: 0.7}), [file_of(rgb)], ids=[record])[0]
        factor = float(scratch.jitter[number])
        factors.add(factor)
        right = np.asarray(enhance(Pillow.fromarray(rgb)).enhance(factor)).astype(int)
        assert np.abs(got - right).max() <= 2
    assert len(factors) == 6
    assert all(0.3 <= factor <= 1.7 for factor in factors)


def test_hue() -> None:
    """Grey and brightness stay; red turns to the other colors. Layouts and orders of the channels agree."""
    grey = np.repeat(picture(20, 30)[..., :1], 3, axis=2)
    got = run(Image(jitter=(0, 0, 0, 0.5)), [file_of(grey)])[0]
    assert np.abs(got.astype(int) - grey).max() <= 1
    red = np.full((4, 4, 3), (200, 100, 100), np.uint8)
    value = file_of(red)
    ways = [run(Image(jitter=(0, 0, 0, 0.5), **how), [value], ids=[9])[0] for how in ({}, {"color": "BGR"})]
    np.testing.assert_array_equal(ways[0], ways[1][..., ::-1])
    assert abs(scratch.jitter[3]) > 0.05
    assert np.abs(ways[0][0, 0].astype(int) - red[0, 0]).max() > 20
    assert abs(float(ways[0][0, 0] @ [0.299, 0.587, 0.114]) - float(red[0, 0] @ [0.299, 0.587, 0.114])) < 2
    jitter = (0.3, 0.3, 0.3, 0.5)
    planes, pixels = (run(Image(jitter=jitter, layout=name), [value], ids=[9])[0] for name in ("CHW", "HWC"))
    np.testing.assert_array_equal(planes.transpose(1, 2, 0), pixels)


def test_random_numbers_depend_on_seed_epoch_and_id_alone() -> None:
    values = [file_of(picture(40, 50, i)) for i in range(7)]
    decoder = Image(16, crop="random", flip=True, jitter=(0.4, 0.4, 0.4, 0.1), dtype="float16")
    whole = run(decoder, values)
    records = made(values)
    again = pickle.loads(pickle.dumps(decoder))
    out = arrays(again, records)

    def part(begin: int, end: int) -> None:
        assert again.decode(rows(records, begin, end), {"data": out["data"][begin:end]}, Draw(3, 1)) == []

    threads = [threading.Thread(target=part, args=cut) for cut in ((3, 7), (0, 1), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(out["data"], whole)
    assert not np.array_equal(run(decoder, values, Draw(4, 1)), whole)
    assert not np.array_equal(run(decoder, values, Draw(3, 2)), whole)
    assert not np.array_equal(run(decoder, values[:1] * 2)[0], run(decoder, values[:1] * 2)[1])


def test_scaled_and_fast_jpegs_stay_close() -> None:
    rgb = picture(400, 600)
    value = file_of(rgb, "JPEG", quality=95)
    exact = run(Image(50, crop="center"), [value])[0].astype(int)
    assert np.abs(exact - by_pillow(rgb, (50, 50))).mean() < 2
    for how in ({"scaled": True}, {"fast": True}, {"scaled": True, "fast": True}):
        got = run(Image(50, crop="center", **how), [value])[0]
        assert 0 < np.abs(got - exact).max() <= 6, how
    small = run(Image((380, 500), crop="center", central=1.0, scaled=True), [value])
    np.testing.assert_array_equal(small, run(Image((380, 500), crop="center", central=1.0), [value]))


def test_what_precedes_the_image() -> None:
    rgb = picture(20, 30)
    value = file_of(rgb)
    for offset, before in ((4, b"\0\1\2\3"), (b"head", b"head")):
        np.testing.assert_array_equal(run(Image(offset=offset), [before + value])[0], rgb)
    decoder = Image(offset=b"head")
    decoder.spec = (20, 30)
    records = made([b"head" + value, value, b"he", b""])
    failures = decoder.decode(records, arrays(decoder, records), Draw())
    assert [row for row, _ in failures] == [1, 2, 3]
    assert "not with b'head'" in failures[0][1]


def test_sizes_that_differ_need_a_size() -> None:
    values = [file_of(picture(20, 30)), file_of(picture(20, 31))]
    decoder = Image(flip=True)
    records = made(values)
    decoder.learn(records[0])
    failures = decoder.decode(records, arrays(decoder, records), Draw())
    assert [row for row, _ in failures] == [1]
    assert "as record 0 is, got 20 x 31; pass size=(h, w)" in failures[0][1]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"crop": "middle"}, "crop must be"),
        ({"crop": "random"}, "needs size="),
        ({"size": 8, "crop": "random", "scale": (0.5, 2)}, "scale must be"),
        ({"size": 8, "crop": "random", "scale": (0.5, 0.1)}, "scale must be"),
        ({"size": 8, "crop": "random", "ratio": "wide"}, "ratio must be"),
        ({"size": 8, "crop": "center", "central": 0}, "central must be"),
        ({"size": 8, "central": 0.5}, 'central= is for crop="center"'),
        ({"size": 8, "crop": "center", "scale": (0.5, 1)}, 'scale= is for crop="random"'),
        ({"flip": 2}, "flip must be"),
        ({"flip": "yes"}, "flip must be"),
        ({"jitter": {"color": 1}}, "jitter must be"),
        ({"jitter": (0, 0, 0, 0.7)}, "at most 0.5"),
        ({"jitter": (0, 0, 0.1), "color": "GRAY"}, "needs colors"),
        ({"mean": (123.7, 116.3, 103.5)}, "units of 1"),
        ({"std": 0}, "std is above 0"),
        ({"mean": (0.1, 0.2)}, "mean must be"),
        ({"mean": 0.5, "dtype": "uint8"}, 'mean and std need dtype="float32"'),
        ({"dtype": "int32"}, "dtype must be"),
        ({"dtype": "float32", "resize": "cubic"}, "how OpenCV resizes"),
        ({"offset": -1}, "offset must be"),
    ],
)
def test_impossible_options(options: dict, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Image(**options)


def test_repr() -> None:
    decoder = Image(8, crop="random", flip=True, mean=0.5, layout="CHW", scaled=True, offset=3)
    assert repr(decoder) == (
        "Image(size=(8, 8), crop='random', flip=True, mean=0.5, layout='CHW', scaled=True, offset=3)"
    )
