"""Caffe's `Datum`: pixels, floats or an encoded image, and a label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pario.decode import base
from pario.decode import image as images
from pario.decode.base import ArraySpec, Decoder, Draw, Failures, Verbatim, columns, extent, flat, past_caches
from pario.errors import DecodeError, OptionError
from pario.kernels import datum as kernel
from pario.kernels.convert import MEAN_CHANNEL, MEAN_ONE, MEAN_PIXEL, crop_f32, crop_u8, draw_window, hwc_to_chw
from pario.records import Records
from pario.text import varint

_I64 = np.dtype(np.int64)
_U8 = np.dtype(np.uint8)
_F32 = np.dtype(np.float32)

_ANY = "Raw() takes any bytes, a function decodes any format"
_BROKEN = {
    kernel.OUTSIDE: "the record lies outside the bytes that were read",
    kernel.TRUNCATED: "the record ends inside this field",
    kernel.BAD_VARINT: "a number of more than ten bytes",
    kernel.BAD_TAG: "no valid field number or wire type",
    kernel.BAD_LENGTH: "a length that does not fit",
    kernel.BAD_GROUP: "a group that does not open and close as it should",
}


@dataclass(frozen=True)
class DatumSpec:
    """The field in which record 0 keeps its values ("data", "float_data" or "encoded"), and their shape."""

    source: str
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class _Message:
    """The result of the kernel `parse`."""

    status: int
    at: int
    channels: int
    height: int
    width: int
    label: int
    data_at: int
    data_nbytes: int
    floats: int
    encoded: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    @property
    def source(self) -> str:
        return "encoded" if self.encoded else "data" if self.data_nbytes or not self.floats else "float_data"


class Datum(Decoder):
    """{"data": u8 or f32[b, c, h, w] (or [b, h, w, c]), "label": i64[b]} from Caffe's protobuf records.

    Plain pixels are copied in their stored order (channels first, blue first if Caffe's tools wrote them).
    `float_data`, `mean`, `scale` or dtype="float32" produce float32 rows, (x - mean) * scale. Encoded images are
    decoded first.

    Parameters
    ----------
    crop : int or (h, w), optional
        Take a window of this size; records may then differ in height and width.
    crop_mode : "center" or "random"
    mirror : False or "random"
        Flip each record left to right with probability 1/2.
    mean : number, array [c], or array [c, h, w], optional
        Subtracted before scaling; [c, h, w] is the size of the records, before the crop.
    scale : float, optional
    dtype : "uint8" or "float32", optional
        Of "data"; by default it follows from the other options and record 0.
    color : "BGR", "RGB" or "GRAY"
        Of encoded images; has no effect on plain pixels.
    layout : "CHW" or "HWC"
        Of "data". "HWC" copies each batch once more: records and kernels have channels first.

    Random choices depend only on the seed, the epoch and the record id.
    """

    def __init__(
        self,
        crop: int | tuple[int, int] | None = None,
        *,
        crop_mode: Literal["center", "random"] = "center",
        mirror: Literal[False, "random"] = False,
        mean: Any = None,
        scale: float | None = None,
        dtype: Any = None,
        color: Literal["BGR", "RGB", "GRAY"] = "BGR",
        layout: Literal["CHW", "HWC"] = "CHW",
    ) -> None:
        self.crop = None if crop is None else images.size_of(crop, "crop")
        if crop_mode not in ("center", "random"):
            raise OptionError(f'crop_mode must be "center" or "random", got {crop_mode!r}')
        self.crop_mode = crop_mode
        if mirror not in (False, "random"):
            raise OptionError(f'mirror must be False or "random" (what Caffe calls mirror: true), got {mirror!r}')
        self.mirror = mirror
        self.mean = None if mean is None else np.asarray(mean, np.float32, order="C")
        if self.mean is not None and self.mean.ndim == 3 and self.mean.shape[1:] == (1, 1):
            self.mean = self.mean.reshape(-1)
        if self.mean is not None and (self.mean.ndim not in (0, 1, 3) or not np.isfinite(self.mean).all()):
            raise OptionError(f"mean must be a number, [c] or [c, h, w] of finite values, got shape {self.mean.shape}")
        self.scale = None if scale is None else float(scale)
        self.dtype = None if dtype is None else np.dtype(dtype)
        if self.dtype not in (None, _U8, _F32):
            raise OptionError(f'dtype must be "uint8" or "float32", got {dtype!r}')
        if self.dtype == _U8 and (mean is not None or scale is not None):
            raise OptionError('mean and scale need dtype="float32"')
        if color not in images.COLORS:
            raise OptionError(f"color must be one of {', '.join(images.COLORS)}, got {color!r}")
        self.color = color
        if layout not in images.LAYOUTS:
            raise OptionError(f'layout must be "CHW" or "HWC", got {layout!r}')
        self.layout = layout
        self._spec: DatumSpec | None = None

    @property
    def spec(self) -> DatumSpec | None:  # type: ignore[override]
        """The result of `learn`; None before."""
        return self._spec

    @spec.setter
    def spec(self, spec: DatumSpec | None) -> None:
        if spec is not None:
            self._settle(spec)
        self._spec = spec

    @property
    def parallel(self) -> bool:  # type: ignore[override]
        """Encoded images are decoded by several threads; anything else by one kernel call for a batch or several."""
        return self._spec is not None and self._spec.source == "encoded"

    def _settle(self, spec: DatumSpec) -> None:
        """Compute what every batch needs and depends on the options and the spec alone."""
        floats = spec.source == "float_data"
        touched = self.mean is not None or self.scale is not None
        if floats and self.dtype == _U8:
            raise OptionError('records with float_data cannot become dtype="uint8"')
        height, width = self.crop or (spec.height, spec.width)
        if height > spec.height or width > spec.width:
            raise OptionError(f"crop={self.crop} is larger than the records, {spec.height} x {spec.width}")
        kind, fixed = MEAN_ONE, self.crop is None
        if self.mean is not None and self.mean.ndim:
            kind = MEAN_CHANNEL if self.mean.ndim == 1 else MEAN_PIXEL
            shape = (spec.channels, spec.height, spec.width)[: self.mean.ndim]
            if self.mean.shape != shape:
                raise OptionError(
                    f"mean has shape {extent(self.mean.shape)}, the records have {spec.channels} channels of "
                    f"{spec.height} x {spec.width}"
                )
            fixed = fixed or kind == MEAN_PIXEL
        random = self.crop_mode == "random" and self.crop is not None
        self._plain = not (touched or self.crop or self.mirror)
        self._dtype = _F32 if floats or touched or self.dtype == _F32 else _U8
        self._as_bytes = self._dtype == _U8
        self._row = (spec.channels, height, width)
        self._drawn = random or bool(self.mirror)
        self._geometry = np.array(
            [
                spec.channels,
                *((spec.height, spec.width) if fixed else (-1, -1)),
                height,
                width,
                random,
                bool(self.mirror),
                kind,
                self._plain,
            ],
            np.int64,
        )
        self._head = np.frombuffer(_head(spec), np.uint8)
        self._mean = np.zeros(1, np.float32) if self.mean is None else self.mean.reshape(-1)
        self._scale = np.float32(1 if self.scale is None else self.scale)

    def learn(self, record: np.ndarray) -> DatumSpec:
        message = _parse(record, 0, len(record))
        if message.status != kernel.OK:
            why = f"at byte {message.at}: {_BROKEN[message.status]}"
            raise self._refused(record, why, "not a Caffe Datum", _ANY)
        source = message.source
        if source == "encoded":
            picture = record[message.data_at : message.data_at + message.data_nbytes]
            try:
                height, width, channels = images.decode(picture, self.color).shape
            except images.BadImage as error:
                raise DecodeError(f"the first record is an encoded Datum whose image is broken: {error}") from error
            spec = DatumSpec(source, channels, height, width)
        else:
            reason = _mismatch(message)
            if reason:
                raise self._refused(record, reason, "not a Caffe Datum", _ANY)
            spec = DatumSpec(source, *message.shape)
        self.spec = spec
        return spec

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        self._learnt()
        n, (channels, *size) = len(records), self._row
        row = (channels, *size) if self.layout == "CHW" else (*size, channels)
        return {"data": ((n, *row), self._dtype), "label": ((n,), _I64)}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        self._learnt()
        if self.layout == "CHW":
            return self._decode(records, out, draw)
        planes = np.empty((len(records), *self._row), self._dtype)
        failures = self._decode(records, {**out, "data": planes}, draw)
        out["data"][...] = planes.transpose(0, 2, 3, 1)
        return failures

    def _decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        spec = self._learnt()
        if spec.source == "encoded":
            return self._decode_images(records, out, draw)
        data, starts, nbytes, failed = columns(records)
        ids = np.array(records.ids, np.int64) if self._drawn else starts
        rows, labels = out["data"], out["label"]
        common = data, starts, nbytes, ids, draw.key, self._geometry
        if self._as_bytes:
            n = kernel.datum_u8(*common, flat(rows), labels, failed, past_caches(rows))
        elif spec.source == "data":
            n = kernel.datum_f32(*common, self._mean, self._scale, flat(rows, np.float32), labels, failed)
        else:
            n = kernel.datum_floats(*common, self._mean, self._scale, flat(rows, np.float32), labels, failed)
        return [(int(i), self._why(_parse(data, int(starts[i]), int(nbytes[i])), int(starts[i]))) for i in failed[:n]]

    def verbatim(self) -> Verbatim | None:
        spec = self._learnt()
        if spec.source != "data" or not self._plain or not self._as_bytes or self.layout != "CHW":
            return None
        return Verbatim("data", len(self._head))

    @property
    def copies(self) -> bool:  # type: ignore[override]
        return self.verbatim() is not None and type(self).decode is Datum.decode

    def decode_rest(self, records: Records, out: dict[str, np.ndarray]) -> list[int]:
        data, starts, nbytes, failed = columns(records)
        n = kernel.datum_rest(data, starts, nbytes, self._head, out["label"], failed)
        rows: list[int] = failed[:n].tolist()
        return rows

    def _decode_images(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        failures: Failures = []
        channels, height, width = self._row
        fixed, chance = self._geometry[1] >= 0, self._geometry[5:7].tolist()
        # Large arrays come from the kernel and go back to it: keeping one saves every image its page faults.
        picture: np.ndarray = np.empty((0, 0, channels), np.uint8)
        planes: np.ndarray = picture
        for i in range(len(records)):
            start, nbytes = int(records.starts[i]), int(records.nbytes[i])
            message = _parse(records.data, start, nbytes)
            if message.status != kernel.OK or not message.encoded:
                failures.append((i, self._why(message, start)))
                continue
            try:
                file = records.data[message.data_at : message.data_at + message.data_nbytes]
                picture = images.decode(file, self.color, picture)
            except images.BadImage as error:
                failures.append((i, f"encoded Datum: {error}"))
                continue
            h, w, _ = picture.shape
            if (fixed and (h, w) != tuple(self._geometry[1:3])) or h < height or w < width:
                failures.append((i, self._size(channels, h, w)))
                continue
            out["label"][i] = message.label
            pixels = np.ascontiguousarray(picture).reshape(-1)
            if self._as_bytes and self._plain:
                hwc_to_chw(pixels, channels, flat(out["data"][i]))
                continue
            if planes.size != pixels.size:
                planes = np.empty(pixels.size, np.uint8)
            hwc_to_chw(pixels, channels, planes)
            top, left, flip = draw_window(draw.key, int(records.ids[i]), h, w, height, width, *chance)
            window = top, left, height, width, flip
            if self._as_bytes:
                crop_u8(planes, 0, (channels, h, w), flat(out["data"][i]), 0, window, False)
            else:
                kind = int(self._geometry[7])
                row = flat(out["data"][i], np.float32)
                crop_f32(planes, 0, (channels, h, w), row, 0, window, self._mean, kind, self._scale)
        return failures

    def _why(self, message: _Message, start: int) -> str:
        if message.status != kernel.OK:
            return f"not a Caffe Datum: at byte {message.at - start}: {_BROKEN[message.status]}"
        spec = self._learnt()
        if message.source != spec.source:
            return f"the values are in {message.source!r}, those of the first record in {spec.source!r}"
        return _mismatch(message) or self._size(*message.shape)

    def _size(self, channels: int, height: int, width: int) -> str:
        spec = self._learnt()
        got = f"got {channels} x {height} x {width}"
        if self.crop and self._geometry[1] < 0:
            return f"expected {spec.channels} channels of at least {self.crop[0]} x {self.crop[1]}, {got}"
        return (
            f"expected {spec.channels} x {spec.height} x {spec.width} (channels x height x width), {got}"
            + ("" if self.crop else "; crop=(h, w) takes records of different sizes")
        )


def _head(spec: DatumSpec) -> bytes:
    """The bytes before the first pixel, as protobuf's own writers order them: fields by ascending number."""
    shape = spec.channels, spec.height, spec.width
    fields = *enumerate(shape, 1), (4, math.prod(shape))
    return b"".join(bytes([field << 3 | (2 if field == 4 else 0)]) + varint(value) for field, value in fields)


def _parse(data: np.ndarray, start: int, nbytes: int) -> _Message:
    return _Message(*kernel.parse(base.read_only(data), start, nbytes))


def _mismatch(message: _Message) -> str:
    """The inconsistency within one parsed message; "" if there is none."""
    if min(message.shape) <= 0:
        named = ", ".join(f"{name} {k}" for name, k in zip(("channels", "height", "width"), message.shape, strict=True))
        return f"no valid shape ({named})"
    want = message.channels * message.height * message.width
    got = message.floats if message.source == "float_data" else message.data_nbytes
    if want != got:
        return (
            f"{message.channels} x {message.height} x {message.width} (channels x height x width) are {want} values, "
            f"{'float_data' if message.source == 'float_data' else 'data'} holds {got}"
        )
    return ""
