"""Image files in records: simplejpeg decodes JPEG, OpenCV the other formats. Both release the GIL.

OpenCV resizes whole images; what else happens to them is augment.py's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pario.codec.library import find_package
from pario.decode.base import ArraySpec, Decoder, Draw, Failures, describe, same
from pario.decode.measured import JPEG, BadImage, check
from pario.errors import DecodeError, OptionError, how_to_install
from pario.records import Records

if TYPE_CHECKING:
    from pario.decode.augment import Augment

#: name -> channels
COLORS = {"RGB": 3, "BGR": 3, "GRAY": 1}

LAYOUTS = ("HWC", "CHW")
RESIZES = ("auto", "area", "linear", "cubic", "nearest")

_INSTALL = how_to_install("image")
_U8 = np.dtype(np.uint8)


_simplejpeg = functools.partial(find_package, "simplejpeg")
_cv2 = functools.partial(find_package, "cv2")


def size_of(value: Any, name: str) -> tuple[int, int]:
    """(h, w) from an int or a pair."""
    pair = (value, value) if isinstance(value, (int, np.integer)) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or any(
        isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1 for k in pair
    ):
        raise OptionError(f"{name} must be a size or (height, width) in pixels, got {value!r}")
    return int(pair[0]), int(pair[1])


def decode(
    record: np.ndarray,
    color: str,
    out: np.ndarray | None = None,
    *,
    least: tuple[int, int] = (0, 0),
    strict: bool = True,
    fast: bool = False,
) -> np.ndarray:
    """u8[h, w, c] of an image file u8[k], in `out` if its shape fits and the codec can use it, else in new memory.

    A JPEG that is at least twice as large as `least` (h, w) may come out scaled down, never below `least`.
    out : u8[h, w, c], or memory u8[n] for as many pixels. If the image does not fit, its content is undefined.
    fast : JPEG's faster, less exact transform
    """
    if len(record) == 0:
        raise BadImage("the record is empty")
    if record[:3].tobytes() != JPEG or _simplejpeg() is None:
        check(record)
        return _decode_any(record, color, strict)
    image = _decode_jpeg(record, color, out, _how(least, strict), fast)
    return _decode_any(record, color, strict) if image is None else image


def _is_dear(record: np.ndarray, pixels: int) -> bool:
    """Whether a JPEG of `pixels` may cost much, with as many scans as its bytes can be: others are not measured, which
    takes 8 us."""
    return bool(pixels >> 22 or len(record) * pixels >> 32)


@functools.lru_cache
def _how(least: tuple[int, int], strict: bool) -> dict[str, Any]:
    """simplejpeg's options for a JPEG that may come out scaled down to `least`; (0, 0): it may not. Not to be changed.
    """
    # Scaling by 1/2 or less is faster than decoding fully; 7/8 and the like are slower than decoding and resizing.
    return {"min_height": least[0], "min_width": least[1], "min_factor": 2 if least[0] else 1, "strict": strict}


def _not_expected(record: np.ndarray, out: np.ndarray) -> bool:
    return False


def _expected(color: str, strict: bool, fast: bool) -> Callable[[np.ndarray, np.ndarray], bool]:
    """f(record, out): whether the record is a JPEG of the shape of `out`, u8[h, w, c], and is there now. Its header is
    not read beforehand. (`decode` and what calls it took 25 us beside the 305 of a picture of 256 x 256.)"""
    codec = _simplejpeg()
    if codec is None:
        return _not_expected

    def decode(record: np.ndarray, out: np.ndarray) -> bool:
        height, width, _ = shape = out.shape
        if _is_dear(record, height * width):
            return False
        try:  # another format and what is larger than `out` are refused; what is smaller lies at its beginning
            # in their order: color, fast transform, fast upsampling, least height, width and factor, memory, strict
            return bool(codec.decode_jpeg(record, color, fast, False, 0, 0, 1, out, strict).shape == shape)
        except (ValueError, MemoryError):
            return False

    return decode


def _decode_jpeg(
    record: np.ndarray, color: str, out: np.ndarray | None, how: dict[str, Any], fast: bool
) -> np.ndarray | None:
    """None for a JPEG that simplejpeg cannot bring into this color space."""
    codec = _simplejpeg()
    try:
        height, width, space, _ = codec.decode_jpeg_header(record, **how)
        if _is_dear(record, height * width * (64 if how["min_height"] else 1)):  # they may be those of an eighth
            check(record)
        if space in ("CMYK", "YCCK") and _cv2() is not None:
            return None
        shape = height, width, COLORS[color]
        if out is not None and out.shape != shape:
            nbytes = height * width * COLORS[color]
            out = out[:nbytes].reshape(shape) if out.ndim == 1 and len(out) >= nbytes else None
        image: np.ndarray = codec.decode_jpeg(record, color, **how, buffer=out, fastdct=fast)
    except (ValueError, MemoryError) as error:
        raise BadImage(f"JPEG: {error}") from error
    return image if out is None else out


def _size_of_jpeg(record: np.ndarray, strict: bool) -> tuple[int, int] | None:
    """(h, w) in a JPEG's header; None if the record is none that simplejpeg can read."""
    if record[:3].tobytes() != JPEG or _simplejpeg() is None:
        return None
    try:
        height, width, _, _ = _simplejpeg().decode_jpeg_header(record, strict=strict)
    except ValueError as error:
        raise BadImage(f"JPEG: {error}") from error
    return height, width


def _decode_any(record: np.ndarray, color: str, strict: bool) -> np.ndarray:
    cv2 = _cv2()
    begins, _ = describe(record)
    if cv2 is None:
        raise BadImage(f"{begins}; only JPEG can be decoded without OpenCV: {_INSTALL}")
    if strict and record[:3].tobytes() == JPEG and b"\xff\xd9" not in record[-1024:].tobytes():
        # OpenCV 4 silently fills the rest of a truncated image with grey.
        raise BadImage("JPEG: the end of the image is missing")
    flags = cv2.IMREAD_GRAYSCALE if color == "GRAY" else cv2.IMREAD_COLOR
    try:
        # Orientation tags are ignored, as simplejpeg ignores them.
        image = cv2.imdecode(record, flags | cv2.IMREAD_IGNORE_ORIENTATION)
    except (cv2.error, MemoryError) as error:
        raise BadImage(f"{begins}; OpenCV: {getattr(error, 'err', None) or error}") from error
    if image is None:
        raise BadImage(f"no format that OpenCV can decode; {begins}, {len(record)} bytes")
    if color == "RGB":
        image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return image.reshape(image.shape[0], image.shape[1], COLORS[color])


def _resize(image: np.ndarray, size: tuple[int, int], how: str, out: np.ndarray) -> None:
    """out u8[h, w, c] = image resized to `size`, ignoring its aspect ratio."""
    cv2 = _cv2()
    if how == "auto":
        # Averaging matters below half the size; above it linear is as good and five times as fast.
        how = "area" if image.shape[0] >= 2 * size[0] and image.shape[1] >= 2 * size[1] else "linear"
    resized = cv2.resize(image, (size[1], size[0]), interpolation=getattr(cv2, f"INTER_{how.upper()}"))
    np.copyto(out, resized.reshape(out.shape))


class Image(Decoder):
    """{"data": u8[b, h, w, c]} (or [b, c, h, w]) from records that are image files; with "label" if labels are given.

    Alpha is dropped, 16-bit images become 8-bit, orientation tags are ignored.

        Image(224)                               resized to 224 x 224
        Image(224, crop="random", flip=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), layout="CHW")
                                                 what trainings on ImageNet do; f32[b, 3, 224, 224]

    What is random depends on the seed, the epoch and the record's id alone. With crop, flip, jitter, mean, std or
    dtype, one kernel writes each decoded image into the batch. It resizes with bilinear weights, which cover all pixels
    where an image shrinks, as Pillow's BILINEAR. Without them OpenCV resizes, and uses its own threads: call
    cv2.setNumThreads(0) if the ranks fill the node.

    Parameters
    ----------
    size : int or (h, w), optional
        Resize to this, ignoring the aspect ratio; without it all images must have the size of record 0.
    crop : None, "random" or "center"
        "random": a window of a random share of the area (`scale`) with a random ratio of width to height (`ratio`,
        uniform in its logarithm), at a random position. "center": the largest window in the middle that has the size's
        aspect ratio, its sides times `central`. The window is resized to `size`.
    scale, ratio : (least, most)
    central : float
        0.875 cuts 224 out of 256.
    flip : bool or float
        Mirror left to right, with this probability; True: 1/2.
    jitter : dict or numbers, optional
        How far brightness, contrast, saturation (factors from 1 - x to 1 + x) and hue (from -x to x parts of a circle)
        change, in this order. The hue turns in the plane of I and Q (NTSC).
    mean, std : number or one per channel, optional
        Arrays hold (x - mean) / std, where x is 0 for black and 1 for white.
    dtype : "uint8", "float32" or "float16", optional
        Of "data"; "float32" if mean or std are given.
    layout : "HWC" or "CHW"
    color : "RGB", "BGR" or "GRAY"
    resize : "auto", "area", "linear", "cubic" or "nearest"
        How OpenCV resizes. "auto" is "area" (averaging) below half the size, else "linear".
    scaled : bool, optional
        Decode JPEGs at a half or less of their size where the rows still need no more pixels. It is faster and changes
        the values a little. By default it is on where OpenCV resizes, and off where the kernel does.
    fast : bool
        Decode JPEGs with the faster, less exact transform.
    offset : int or bytes
        What precedes the image in a record: a number of bytes, or these bytes.
    label : array [n, ...], optional
        One label per record id; integers of shape [n] become i64.
    strict : bool
        Reject JPEGs that violate the format but still decode (truncated ones have a grey rest).
    """

    parallel = True

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        *,
        crop: Literal["random", "center"] | None = None,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        central: float = 0.875,
        flip: bool | float = False,
        jitter: Mapping[str, float] | Sequence[float] | None = None,
        mean: Any = None,
        std: Any = None,
        dtype: Any = None,
        layout: Literal["HWC", "CHW"] = "HWC",
        color: Literal["RGB", "BGR", "GRAY"] = "RGB",
        resize: Literal["auto", "area", "linear", "cubic", "nearest"] = "auto",
        scaled: bool | None = None,
        fast: bool = False,
        offset: int | bytes = 0,
        label: Any = None,
        strict: bool = True,
    ) -> None:
        if _simplejpeg() is None and _cv2() is None:
            raise OptionError("Image() needs simplejpeg or OpenCV, and neither is installed", hint=_INSTALL)
        self.size = None if size is None else size_of(size, "size")
        for name, value, known in (("layout", layout, LAYOUTS), ("color", color, COLORS), ("resize", resize, RESIZES)):
            if value not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.layout, self.color, self.resize, self.strict = layout, color, resize, bool(strict)
        self.fast = bool(fast)
        self.options = {
            "crop": crop, "scale": scale, "ratio": ratio, "central": central, "flip": flip, "jitter": jitter,
            "mean": mean, "std": std, "dtype": dtype,
        }  # fmt: skip
        for name, of in (("scale", "random"), ("ratio", "random"), ("central", "center")):
            if crop != of and not same(self.options[name], _PLAIN[name]):
                raise OptionError(f'{name}= is for crop="{of}", got crop={crop!r}')
        self.augment: Augment | None = None
        if not all(same(self.options[name], _PLAIN[name]) for name in _CHANGES):
            from pario.decode.augment import Augment

            if resize != "auto":
                raise OptionError("resize= says how OpenCV resizes; crop, flip, jitter, mean, std and dtype do without")
            self.augment = Augment(self.options, color, layout == "CHW", self.size)
        elif self.size and _cv2() is None:
            raise OptionError("Image(size=...) needs OpenCV, which is not installed", hint=_INSTALL)
        # libjpeg-turbo writes past the caches what begins at a multiple of 32 bytes: 216 us of decoding a picture of
        # 256 x 256 pixels, so 211, and the loop finds it in a cache.
        self.lead = 16 if self.augment is None and (layout == "HWC" or color == "GRAY") else 0
        self.scaled = self.size is not None and (self.augment is None if scaled is None else bool(scaled))
        self.offset = _offset(offset)
        self.label = None if label is None else np.asarray(label, order="C")
        if self.label is not None:
            if self.label.ndim == 0 or self.label.dtype.kind not in "biuf":
                raise OptionError(f"label must be an array of numbers, one per record id, got {label!r}")
            if self.label.ndim == 1 and self.label.dtype.kind in "iu":
                self.label = self.label.astype(np.int64)
        #: (h, w) of all images of a batch
        self.spec: tuple[int, int] | None = self.size

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        usual = self.size is not None and self.augment is None
        given = super().arguments()
        drawn = {name: (value, given[name][1]) for name, value in self.options.items()}
        offset, scaled = (self.offset or 0, 0), (None if self.scaled is usual else self.scaled, None)
        return {**given, **drawn, "offset": offset, "scaled": scaled}

    def learn(self, record: np.ndarray) -> tuple[int, int]:
        try:
            image = decode(self._file(record), self.color, strict=self.strict)
        except BadImage as error:
            _, advice = describe(record)
            raise DecodeError(f"not an image: {error}", hint=None if "Image()" in advice else advice or None) from error
        self.spec = self.size or (image.shape[0], image.shape[1])
        return self.spec

    def _file(self, record: np.ndarray) -> np.ndarray:
        """The record without what precedes the image."""
        if not self.offset:
            return record
        if isinstance(self.offset, int):
            return record[self.offset :]
        n = len(self.offset)
        if record[:n].tobytes() != self.offset:
            raise BadImage(f"the record begins with {record[:n].tobytes()!r:.60}, not with {self.offset!r:.60}")
        return record[n:]

    def _row(self) -> tuple[int, int, int]:
        height, width = self._learnt()
        channels = COLORS[self.color]
        return (height, width, channels) if self.layout == "HWC" else (channels, height, width)

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        n = len(records)
        arrays: dict[str, ArraySpec] = {"data": ((n, *self._row()), self.augment.result if self.augment else _U8)}
        if self.label is not None:
            arrays["label"] = ((n, *self.label.shape[1:]), self.label.dtype)
        return arrays

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        failures: Failures = []
        height, width = self._learnt()
        # One array for all images: large ones come from the kernel, page fault by page fault, and go back to it.
        planar = self.layout == "CHW" and COLORS[self.color] > 1 and self.augment is None
        scratch = np.empty((height, width, COLORS[self.color]), _U8) if planar else None
        rows = out["data"]
        expected: Callable[[np.ndarray, np.ndarray], bool] = _not_expected
        if self.augment is None and self.size is None:
            expected = _expected(self.color, self.strict, self.fast)
            if scratch is None:
                rows = rows.reshape(-1, height, width, COLORS[self.color])
        for i, number in enumerate(records.ids.tolist()):
            try:
                file = self._file(records[i])
                if self.augment is not None:
                    self._change_one(self.augment, file, rows[i], draw, number)
                elif scratch is not None and expected(file, scratch):
                    self._write(scratch, rows[i])
                elif scratch is not None or not expected(file, rows[i]):
                    self._decode_one(file, rows[i], scratch)
                if self.label is not None:
                    if number >= len(self.label):
                        raise BadImage(f"label has {len(self.label)} entries, none for this record")
                    out["label"][i] = self.label[number]
            except BadImage as error:
                failures.append((i, str(error)))
            except Exception as error:  # an unexpected error of a codec must not stop the other rows
                failures.append((i, f"{type(error).__name__}: {error}"))
        return failures

    def _decode_one(self, record: np.ndarray, row: np.ndarray, scratch: np.ndarray | None) -> None:
        height, width = size = self._learnt()
        channels = COLORS[self.color]
        # The rows of a grey image are the same in both layouts.
        target = row.reshape(height, width, channels) if scratch is None else scratch
        least = size if self.scaled else (0, 0)
        how: Any = {"least": least, "strict": self.strict, "fast": self.fast}
        image = decode(record, self.color, target, **how)
        if image.shape != target.shape:
            self._check_shape(image)
            _resize(image, size, self.resize, target)
            image = target
        if scratch is not None:
            self._write(image, row)
        elif image is not target:
            np.copyto(row.reshape(image.shape), image)

    def _write(self, image: np.ndarray, row: np.ndarray) -> None:
        """An image u8[h, w, c] into a row u8[c, h, w]."""
        from pario.kernels.convert import hwc_to_chw

        hwc_to_chw(np.ascontiguousarray(image).reshape(-1), COLORS[self.color], row.reshape(-1))

    def _change_one(self, augment: Augment, record: np.ndarray, row: np.ndarray, draw: Draw, number: int) -> None:
        """Write a record's image, cropped, flipped and so on, into its row."""
        size = self._learnt()
        least, whole = (0, 0), None
        if self.scaled:
            whole = _size_of_jpeg(record, self.strict)
            if whole is not None:
                augment.draw(draw, number, whole)
                least = augment.least(whole, size)
        image = decode(record, self.color, augment.memory(), least=least, strict=self.strict, fast=self.fast)
        height, width, _ = image.shape
        if whole is None:
            augment.draw(draw, number, (height, width))
        elif whole != (height, width):
            augment.shrink(whole, (height, width))
        if (height, width) != size:
            self._check_shape(image)
        augment.write(image, row, size)

    def _check_shape(self, image: np.ndarray) -> None:
        """Raise BadImage for an image of another size if nothing is resized."""
        if not self.size:
            height, width = self._learnt()
            raise BadImage(
                f"expected an image of {height} x {width} (height x width), as record 0 is, got "
                f"{image.shape[0]} x {image.shape[1]}; pass size=(h, w)"
            )


#: The options that change nothing.
_PLAIN: dict[str, Any] = {
    "crop": None, "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "central": 0.875, "flip": False, "jitter": None,
    "mean": None, "std": None, "dtype": None,
}  # fmt: skip
#: Of these, the ones that the kernel does something about.
_CHANGES = ("crop", "flip", "jitter", "mean", "std", "dtype")


def _offset(offset: Any) -> int | bytes:
    if isinstance(offset, (bytes, bytearray)):
        return bytes(offset)
    if isinstance(offset, bool) or not isinstance(offset, (int, np.integer)) or offset < 0:
        raise OptionError(f"offset must be a number of bytes, or the bytes before the image, got {offset!r}")
    return int(offset)
