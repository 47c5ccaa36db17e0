"""What happens to a decoded picture on its way into the batch: crop, resize, flip, jitter, normalise, dtype, layout.

The options are checked here, and one kernel does the work (kernels/picture.py). What it draws for a record depends on
the seed, the epoch and the record's id alone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pario.decode.base import Draw
from pario.errors import OptionError
from pario.kernels import picture as kernel

_CROPS = {None: kernel.WHOLE, "center": kernel.CENTER, "random": kernel.RANDOM}
_KINDS = {"uint8": kernel.U8, "float32": kernel.F32, "float16": kernel.F16}
_NO_ROWS = np.empty(0, np.uint8), np.empty(0, np.float32), np.empty(0, np.uint16)
_BITS = (np.uint8, np.float32, np.uint16)
_GREY = (0.299, 0.587, 0.114)


class Scratch(threading.local):
    """The memory that a thread decodes into, and keeps for its next picture."""

    #: Bytes of a larger picture are not kept.
    most = 64 << 20

    def __init__(self) -> None:
        self.picture = np.empty(0, np.uint8)
        self.floats = np.empty(0, np.float32)
        self.numbers = np.empty(0, np.int64)
        self.window = np.empty(5)
        self.jitter = np.empty(4, np.float32)

    def keep(self, picture: np.ndarray) -> np.ndarray:
        """u8[n], the pixels of a picture u8[h, w, c]. The largest one's memory takes the next ones."""
        pixels = np.ascontiguousarray(picture).reshape(-1)
        if self.most >= len(pixels) > len(self.picture) and pixels.flags.writeable:
            self.picture = pixels
        return pixels

    def make_room(self, floats: int, numbers: int) -> None:
        if len(self.floats) < floats:
            self.floats = np.empty(floats, np.float32)
        if len(self.numbers) < numbers:
            self.numbers = np.empty(numbers, np.int64)


#: each thread's own
scratch = Scratch()


class Augment:
    """The options of `Image` that change a decoded picture; see there. Raises OptionError.

    options : by name
    color : of the picture, as in `Image`; planar: rows are CHW
    size : (h, w) of the rows, or None: of record 0
    """

    def __init__(self, options: Mapping[str, Any], color: str, planar: bool, size: tuple[int, int] | None) -> None:
        names = ("crop", "scale", "ratio", "central", "flip", "jitter", "mean", "std", "dtype")
        crop, scale, ratio, central, flip, jitter, mean, std, dtype = (options[name] for name in names)
        self.crop, self.planar = crop, planar
        if crop not in _CROPS:
            raise OptionError(f'crop must be None, "center" or "random", got {crop!r}')
        if crop and size is None:
            raise OptionError(f"crop={crop!r} needs size=, the size of the batch's images")
        least, most = _pair(scale, "scale")
        if most > 1:
            raise OptionError(f"scale must be shares of the image's area, at most 1, got {scale!r}")
        narrow, wide = _pair(ratio, "ratio")
        if not _is_number(central) or not 0 < central <= 1:
            raise OptionError(f"central must be a share of the sides, above 0 and at most 1, got {central!r}")
        if crop == "center" and size:
            narrow = size[1] / size[0]
        #: see kernels.picture.draw_picture
        self.chance = np.zeros(10)
        self.chance[:4] = least, most, math.log(narrow), math.log(wide)
        self.chance[4] = _share(0.5 if flip is True else flip, "flip")
        self.chance[5:9] = _jitters(jitter, color)
        self.chance[9] = central
        self.jitters = bool(self.chance[5:9].any())

        counts = mean is not None or std is not None
        #: of the rows
        self.result = _row_dtype(dtype, counts)
        self.kind = _KINDS[self.result.name]
        channels = 1 if color == "GRAY" else 3
        means, stds = _per_channel(mean, 0.0, "mean", channels), _per_channel(std, 1.0, "std", channels)
        if (abs(means) > 1).any() or (stds <= 0).any():
            raise OptionError(
                f"mean and std count in units of 1, where white is 1, and std is above 0; got mean={mean!r}, "
                f"std={std!r}",
                hint="Divide by 255 what counts in levels of 0 to 255.",
            )
        grey = _GREY[::-1] if color == "BGR" else _GREY
        #: see kernels.picture.picture_row
        factors, summands = 1 / (255 * stds), -means / stds
        if self.kind == kernel.U8:
            factors, summands = np.ones(3), np.zeros(3)
        self.colors = np.concatenate([factors, summands, grey]).astype(np.float32)

    def draw(self, draw: Draw, record: int, size: tuple[int, int]) -> None:
        """Choose the window and the jitter of a record whose picture is (h, w): in this thread's memory."""
        kernel.draw_picture(draw.key, record, size, _CROPS[self.crop], self.chance, scratch.window, scratch.jitter)

    def least(self, size: tuple[int, int], row: tuple[int, int]) -> tuple[int, int]:
        """(h, w) of the smallest scaled picture whose window has no fewer pixels than the row, (h, w)."""
        window = scratch.window
        return math.ceil(row[0] * size[0] / window[2]), math.ceil(row[1] * size[1] / window[3])

    def shrink(self, size: tuple[int, int], scaled: tuple[int, int]) -> None:
        """The window of a picture (h, w) becomes that of the same picture, scaled."""
        window = scratch.window
        window[0:4:2] *= scaled[0] / size[0]
        window[1:4:2] *= scaled[1] / size[1]

    def memory(self) -> np.ndarray:
        """u8[n]: memory for the next picture."""
        return scratch.picture

    def write(self, picture: np.ndarray, row: np.ndarray, size: tuple[int, int]) -> None:
        """Write the window in `scratch` of a picture u8[h, w, c] into a row of the batch, (h, w) pixels large."""
        mine = scratch
        pixels = mine.keep(picture)
        height, width, _ = shape = picture.shape
        mine.make_room(kernel.work_floats(height, width, *size, self.jitters), kernel.work_numbers(*size))
        rows = list(_NO_ROWS)
        rows[self.kind] = row.reshape(-1).view(_BITS[self.kind])
        kernel.picture_row(
            pixels, shape, mine.window, size, mine.jitter, self.colors, self.kind, self.planar, mine.floats,
            mine.numbers, tuple(rows),
        )  # fmt: skip


def _pair(value: Any, name: str) -> tuple[float, float]:
    """(least, most) above 0."""
    pair = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(pair) != 2 or not all(map(_is_number, pair)):
        raise OptionError(f"{name} must be two numbers, the least and the most, got {value!r}")
    if not 0 < pair[0] <= pair[1] < math.inf:
        raise OptionError(f"{name} must be two numbers above 0, the least first, got {value!r}")
    return float(pair[0]), float(pair[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _row_dtype(dtype: Any, counts: bool) -> np.dtype:
    """counts : mean or std are given"""
    try:
        made = np.dtype(("float32" if counts else "uint8") if dtype is None else dtype)
    except TypeError:
        made = np.dtype(object)
    if made.name not in _KINDS or not made.isnative:
        raise OptionError(f'dtype must be "uint8", "float32" or "float16", got {dtype!r}')
    if made == np.uint8 and counts:
        raise OptionError('mean and std need dtype="float32" or "float16"')
    return made


def _share(value: Any, name: str) -> float:
    if value is not False and (not _is_number(value) or not 0 <= value <= 1):
        raise OptionError(f"{name} must be True, False or a probability, got {value!r}")
    return float(value)


def _jitters(jitter: Any, color: str) -> list[float]:
    """Brightness, contrast, saturation, hue, of a dict or of the first numbers."""
    if jitter is None:
        return [0.0] * 4
    if isinstance(jitter, Mapping):
        given = dict(jitter)
    elif isinstance(jitter, Sequence) and not isinstance(jitter, str) and len(jitter) <= len(kernel.JITTER):
        given = dict(zip(kernel.JITTER, jitter, strict=False))
    else:
        given = {"": jitter}
    if not all(_is_number(x) and 0 <= x < math.inf for x in given.values()) or not given.keys() <= set(kernel.JITTER):
        names = ", ".join(kernel.JITTER)
        raise OptionError(f"jitter must be numbers from 0 on for {names}, as a dict or in this order, got {jitter!r}")
    if given.get("hue", 0) > 0.5:
        raise OptionError(f"jitter of the hue is a part of a circle, at most 0.5, got {given['hue']!r}")
    if color == "GRAY" and (given.get("saturation", 0) or given.get("hue", 0)):
        raise OptionError("jitter of saturation and hue needs colors")
    return [float(given.get(name, 0)) for name in kernel.JITTER]


def _per_channel(value: Any, default: float, name: str, channels: int) -> np.ndarray:
    """f64[3]; an image of one channel uses the first."""
    try:
        array = np.asarray(default if value is None else value, np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} must be a number or one per channel, got {value!r}") from error
    if array.size not in (1, channels) or not np.isfinite(array).all():
        raise OptionError(f"{name} must be a finite number, or {channels} of them, one per channel, got {value!r}")
    return np.broadcast_to(array, 3).copy()
