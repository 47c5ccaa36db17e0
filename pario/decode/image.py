"""Image files in records: simplejpeg decodes JPEG, OpenCV every other format and all resizing. Both release the GIL."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, describe
from pario.errors import DecodeError, OptionError
from pario.records import Records

__all__ = ["COLORS", "BadImage", "Image", "decode", "size_of"]

#: name -> channels
COLORS = {"RGB": 3, "BGR": 3, "GRAY": 1}

LAYOUTS = ("HWC", "CHW")
RESIZES = ("auto", "area", "linear", "cubic", "nearest")

_INSTALL = 'pip install "pario[image]"'
_U8 = np.dtype(np.uint8)
_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

#: An image that says that it has more pixels is refused before memory is allocated for it.
MOST_PIXELS = 1 << 28
#: Deflate, PNG's compression, makes bytes at most this many times smaller.
_DEFLATE = 1032


class BadImage(Exception):
    """Bytes that no installed codec can decode; never leaves the decoders."""


@functools.cache
def _simplejpeg() -> Any:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


@functools.cache
def _cv2() -> Any:
    try:
        import cv2
    except ImportError:
        return None
    return cv2


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
) -> np.ndarray:
    """u8[h, w, c] of an image file u8[k], in `out` if its shape fits and the codec can use it, else in new memory.

    A JPEG that is at least twice as large as `least` (h, w) may come out scaled down, never below `least`.
    If the shape differs, the content of `out` is undefined.
    """
    if len(record) == 0:
        raise BadImage("the record is empty")
    if record[:3].tobytes() == _JPEG and _simplejpeg() is not None:
        image = _decode_jpeg(record, color, out, least, strict)
        if image is not None:
            return image
    return _decode_any(record, color, strict)


def _decode_jpeg(
    record: np.ndarray, color: str, out: np.ndarray | None, least: tuple[int, int], strict: bool
) -> np.ndarray | None:
    """None for a JPEG that simplejpeg cannot bring into this color space."""
    codec = _simplejpeg()
    # Scaling by 1/2 or less is faster than decoding fully; 7/8 and the like are slower than decoding and resizing.
    smaller = {"min_height": least[0], "min_width": least[1], "min_factor": 2 if least[0] else 1}
    try:
        height, width, space, _ = codec.decode_jpeg_header(record, **smaller, strict=strict)
        _check_size("JPEG", height, width)
        if space in ("CMYK", "YCCK") and _cv2() is not None:
            return None
        if out is not None and out.shape != (height, width, COLORS[color]):
            out = None
        image = codec.decode_jpeg(record, color, **smaller, strict=strict, buffer=out)
    except (ValueError, MemoryError) as error:
        raise BadImage(f"JPEG: {error}") from error
    return image


def _check_size(kind: str, height: int, width: int) -> None:
    if height * width > MOST_PIXELS:
        raise BadImage(f"{kind}: {height} x {width} pixels are more than {MOST_PIXELS:,}")


def _check_png(record: np.ndarray) -> None:
    """Raise BadImage for sizes that cannot be true: OpenCV allocates, and fills, whatever a PNG says."""
    width, height = (int.from_bytes(record[at : at + 4].tobytes(), "big") for at in (16, 20))
    _check_size("PNG", height, width)
    if height * width // 8 > _DEFLATE * len(record) + 4096:
        raise BadImage(f"PNG: {len(record)} bytes cannot hold {height} x {width} pixels")
    at = 8
    while at + 8 <= len(record):  # chunks: length, name, content, checksum
        nbytes = int.from_bytes(record[at : at + 4].tobytes(), "big")
        if nbytes > len(record):
            raise BadImage(f"PNG: a part of {nbytes:,} bytes at byte {at} of {len(record):,}")
        at += 12 + nbytes


def _decode_any(record: np.ndarray, color: str, strict: bool) -> np.ndarray:
    cv2 = _cv2()
    begins, _ = describe(record)
    if cv2 is None:
        raise BadImage(f"{begins}; only JPEG can be decoded without OpenCV: {_INSTALL}")
    if strict and record[:3].tobytes() == _JPEG and b"\xff\xd9" not in record[-1024:].tobytes():
        # OpenCV 4 silently fills the rest of a truncated image with grey.
        raise BadImage("JPEG: the end of the image is missing")
    if record[:8].tobytes() == _PNG:
        _check_png(record)
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

    Alpha is dropped, 16-bit images become 8-bit, orientation tags are ignored. OpenCV uses its own threads for
    resizing: call cv2.setNumThreads(0) if the ranks fill the node.

    Parameters
    ----------
    size : int or (h, w), optional
        Resize to this, ignoring the aspect ratio; without it all images must have the size of record 0. JPEGs of more
        than twice the size are scaled down during decoding.
    layout : "HWC" or "CHW"
    color : "RGB", "BGR" or "GRAY"
    resize : "auto", "area", "linear", "cubic" or "nearest"
        "auto" is "area" (averaging) below half the size, else "linear".
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
        layout: Literal["HWC", "CHW"] = "HWC",
        color: Literal["RGB", "BGR", "GRAY"] = "RGB",
        resize: Literal["auto", "area", "linear", "cubic", "nearest"] = "auto",
        label: Any = None,
        strict: bool = True,
    ) -> None:
        if _simplejpeg() is None and _cv2() is None:
            raise OptionError("Image() needs simplejpeg or OpenCV, and neither is installed", hint=_INSTALL)
        self.size = None if size is None else size_of(size, "size")
        if self.size and _cv2() is None:
            raise OptionError("Image(size=...) needs OpenCV, which is not installed", hint=_INSTALL)
        for name, value, known in (("layout", layout, LAYOUTS), ("color", color, COLORS), ("resize", resize, RESIZES)):
            if value not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.layout, self.color, self.resize, self.strict = layout, color, resize, bool(strict)
        self.label = None if label is None else np.asarray(label, order="C")
        if self.label is not None:
            if self.label.ndim == 0 or self.label.dtype.kind not in "biuf":
                raise OptionError(f"label must be an array of numbers, one per record id, got {label!r}")
            if self.label.ndim == 1 and self.label.dtype.kind in "iu":
                self.label = self.label.astype(np.int64)
        #: (h, w) of all images of a batch
        self.spec: tuple[int, int] | None = self.size

    def __repr__(self) -> str:
        return self._repr(
            size=(self.size, None),
            layout=(self.layout if self.layout != "HWC" else None, None),
            color=(self.color if self.color != "RGB" else None, None),
            resize=(self.resize if self.resize != "auto" else None, None),
            label=(self.label, None),
            strict=(self.strict, True),
        )

    def learn(self, record: np.ndarray) -> tuple[int, int]:
        try:
            image = decode(record, self.color, strict=self.strict)
        except BadImage as error:
            _, advice = describe(record)
            hint = None if "Image()" in advice or not advice else advice[0].upper() + advice[1:]
            raise DecodeError(f"not an image: {error}", hint=hint) from error
        self.spec = self.size or (image.shape[0], image.shape[1])
        return self.spec

    def _row(self) -> tuple[int, int, int]:
        height, width = self._learnt()
        channels = COLORS[self.color]
        return (height, width, channels) if self.layout == "HWC" else (channels, height, width)

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        n = len(records)
        arrays: dict[str, ArraySpec] = {"data": ((n, *self._row()), _U8)}
        if self.label is not None:
            arrays["label"] = ((n, *self.label.shape[1:]), self.label.dtype)
        return arrays

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        failures: Failures = []
        height, width = self._learnt()
        # One array for all images: large ones come from the kernel, page fault by page fault, and go back to it.
        planar = self.layout == "CHW" and COLORS[self.color] > 1
        scratch = np.empty((height, width, COLORS[self.color]), _U8) if planar else None
        for i in range(len(records)):
            try:
                self._decode_one(records[i], out["data"][i], scratch)
                if self.label is not None:
                    record = int(records.ids[i])
                    if record >= len(self.label):
                        raise BadImage(f"label has {len(self.label)} entries, none for this record")
                    out["label"][i] = self.label[record]
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
        least = size if self.size else (0, 0)
        image = decode(record, self.color, target, least=least, strict=self.strict)
        if image.shape != target.shape:
            if not self.size:
                raise BadImage(
                    f"expected an image of {height} x {width} (height x width), as record 0 is, got "
                    f"{image.shape[0]} x {image.shape[1]}; pass size=(h, w)"
                )
            _resize(image, size, self.resize, target)
            image = target
        if scratch is not None:
            from pario.kernels.convert import hwc_to_chw

            hwc_to_chw(np.ascontiguousarray(image).reshape(-1), channels, row.reshape(-1))
        elif not np.may_share_memory(image, row):
            np.copyto(row.reshape(image.shape), image)
