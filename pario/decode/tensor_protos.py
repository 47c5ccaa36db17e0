"""Caffe2's `TensorProtos`: a list of tensors per record, the first one mostly an image and the second its label.

    TensorProtos  1 repeated TensorProto
    TensorProto   1 dims, 2 data_type, 3 float_data, 4 int32_data, 5 byte_data, 6 string_data, 9 double_data,
                  10 int64_data                     repeated numbers packed or one by one
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pario.decode.base import Decoder, Draw, Failures, extent
from pario.decode.rows import BadValue, Column, RowDecoder, RowOptions
from pario.errors import DecodeError, OptionError
from pario.records import Records
from pario.text import varint

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: data_type -> (its name, field with the values, dtype)
_TYPES = {
    1: ("FLOAT", 3, "<f4"),
    2: ("INT32", 4, "<i4"),
    3: ("BYTE", 5, "u1"),
    4: ("STRING", 6, ""),
    5: ("BOOL", 4, "?"),
    6: ("UINT8", 4, "u1"),
    7: ("INT8", 4, "i1"),
    8: ("UINT16", 4, "<u2"),
    9: ("INT16", 4, "<i2"),
    10: ("INT64", 10, "<i8"),
    12: ("FLOAT16", 4, "<f2"),
    13: ("DOUBLE", 9, "<f8"),
}
_MOST_TENSORS = 64


class TensorProtos(RowDecoder):
    """{"data": [b, ...], "label": [b, ...]} from Caffe2's records: one array per tensor.

    A tensor of one number becomes a scalar per record. A tensor of one string is decoded by `image`.

    Parameters
    ----------
    names : sequence of str
        Of the tensors, in their order; further ones are called "2", "3", ...
    image : Decoder or None
        Of tensors that hold an encoded image; None: Image(). Its array gets the tensor's name. If it is given, several
        threads decode.
    ragged : None, "flat", "pad", "list" or "object", or a dict of names with these
        How arrays whose sizes differ become one: see docs/decoders.md.
    pad_value, pad_multiple : number, int
        Of "pad": what fills the rest, and what the first axis is a multiple of.
    optional : names, optional
        Of what records may lack: beside x comes x_there, bool[b]; see docs/decoders.md.
    """

    def __init__(
        self, names: Sequence[str] = ("data", "label"), *, image: Decoder | None = None, **rows: Unpack[RowOptions]
    ) -> None:
        super().__init__(**rows)
        if isinstance(names, str) or len(set(names)) != len(names) or not all(isinstance(name, str) for name in names):
            raise OptionError(f"names must be different names of the tensors, got {names!r}")
        if image is not None and not isinstance(image, Decoder):
            raise OptionError(f"image must be a decoder of images, got {image!r}")
        self.names, self.image = tuple(names), image

    def __copy__(self) -> TensorProtos:
        mine = type(self).__new__(type(self))
        mine.__dict__.update(self.__dict__, image=copy.copy(self.image))  # what it learns is not shared
        return mine

    @property
    def parallel(self) -> bool:  # type: ignore[override]
        return self.image is not None

    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> dict[str, Any]:
        tensors = [_tensor(body) for body in _bodies(record.tobytes())]
        if not tensors:
            raise BadValue("no tensor in it")
        named = {}
        for i, tensor in enumerate(tensors):
            name = self.names[i] if i < len(self.names) else str(i)
            named[name] = self._picture(tensor, number, draw) if isinstance(tensor, list) else tensor
        return named

    def _column(self, name: str, item: Any) -> Column:
        named = isinstance(self.ragged, Mapping) and name in self.ragged
        return super()._column(name, item if named else _scalar(item))

    def _row(self, name: str, item: Any, column: Column) -> Any:
        return super()._row(name, item if column.shape else _scalar(item), column)

    def _picture(self, strings: list[bytes], number: int, draw: Draw) -> Any:
        if len(strings) != 1:
            return strings
        data = np.frombuffer(strings[0], np.uint8)
        image = self.image
        if image is None:
            from pario.decode.image import Image

            image = Image()
        if image.spec is None:  # a picture of any size: what all must share is the row's business
            image = copy.copy(image)
            try:
                image.learn_at(data, number, draw)
            except DecodeError as error:
                raise BadValue(f"the image in it: {error.what}") from error
        records = Records(np.array([number]), data, np.array([0]), np.array([len(data)]))
        out = {name: np.empty(shape, dtype) for name, (shape, dtype) in image.shapes(records).items()}
        failures: Failures = image.decode(records, out, draw)
        if failures:
            raise BadValue(f"the image in it: {failures[0][1]}")
        return next(iter(image.finish(out).values()))[0]


def outline(record: bytes) -> list[str]:
    """The tensors of a record in a few words each; [] if it is no TensorProtos."""
    try:
        tensors = [_tensor(body) for body in _bodies(record)]
    except BadValue:
        return []
    found = map(_scalar, tensors)
    return [f"{len(t)} strings" if isinstance(t, list) else extent(t.shape, t.dtype) for t in found]


def _bodies(record: bytes) -> list[bytes]:
    """The tensors of a record, each as the bytes of its message. Raises BadValue."""
    bodies = []
    for field, wire, value in fields_of(record):
        if field == 1 and wire == 2:
            bodies.append(value)
            if len(bodies) > _MOST_TENSORS:
                raise BadValue(f"more than {_MOST_TENSORS} tensors")
    return bodies


def _tensor(body: bytes) -> np.ndarray | list[bytes]:
    """The numbers, or what a STRING tensor holds. Raises BadValue."""
    dims: list[int] = []
    kind = 1  # protobuf leaves out the default, FLOAT
    parts: dict[int, list[bytes]] = {}
    for field, wire, value in fields_of(body):
        if field == 2 and wire == 0:
            kind = value
        elif field == 1:
            dims += _varints(value).tolist() if wire == 2 else [value]
        elif field in (3, 4, 5, 9, 10) or (field == 6 and wire == 2):
            parts.setdefault(field, []).append(varint(value) if wire == 0 else value)
    if kind not in _TYPES:
        raise BadValue(f"a tensor of data_type {kind}, which is unknown")
    name, field, dtype = _TYPES[kind]
    if name == "STRING":
        return parts.get(field, [])
    data = b"".join(parts.get(field, []))
    if any(not 0 <= k < 1 << 40 for k in dims) or len(dims) > 32:
        raise BadValue(f"a tensor of shape {dims}")
    values = _numbers(data, field, np.dtype(dtype), name)
    if values.size != math.prod(dims):
        raise BadValue(f"a {name} tensor of shape {dims} with {values.size} values")
    return values.reshape(dims)


def _scalar(item: Any) -> Any:
    """A tensor of one number as this number."""
    return item[0] if isinstance(item, np.ndarray) and item.shape == (1,) else item


def _numbers(data: bytes, field: int, dtype: np.dtype, name: str) -> np.ndarray:
    if field in (4, 10):
        numbers = _varints(data)
        if name == "FLOAT16":  # the bits of each, as a number
            return numbers.astype(np.uint16).view(dtype)
        limits = np.iinfo(np.int64 if dtype.kind == "b" else dtype)
        if numbers.size and (numbers.min() < limits.min or numbers.max() > limits.max):
            raise BadValue(f"numbers of {numbers.min()} to {numbers.max()} in a tensor of {name}")
        return numbers.astype(dtype)
    if len(data) % dtype.itemsize:
        raise BadValue(f"{len(data)} bytes are no whole number of {dtype}")
    return np.frombuffer(data, dtype)


def fields_of(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """(field, wire type, value) of a protobuf message: an int of a varint, bytes of all else. Raises BadValue."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        field, wire = tag >> 3, tag & 7
        if wire == 0:
            value: Any
            value, at = _varint(message, at)
            value = value - (1 << 64) if value >> 63 else value
        elif wire in (1, 2, 5):
            nbytes = 8 if wire == 1 else 4
            if wire == 2:
                nbytes, at = _varint(message, at)
            if nbytes > end - at:
                raise BadValue(f"no protobuf message: field {field} at byte {at} of {end} needs {nbytes:,} bytes")
            value = message[at : at + nbytes]
            at += nbytes
        else:
            raise BadValue(f"no protobuf message: no valid wire type at byte {at} of {end}")
        if not field:
            raise BadValue(f"no protobuf message: no valid field number at byte {at} of {end}")
        yield field, wire, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(number u64, offset of its end)."""
    number = shift = 0
    for byte in message[at : at + 10]:
        number |= (byte & 127) << shift
        at += 1
        shift += 7
        if byte < 128:
            return number & (1 << 64) - 1, at
    raise BadValue(f"no protobuf message: a number that does not end at byte {at} of {len(message)}")


def _varints(data: bytes) -> np.ndarray:
    """i64[n]: the numbers of packed varints. Raises BadValue."""
    octets = np.frombuffer(data, np.uint8)
    if not len(octets):
        return np.empty(0, np.int64)
    ends = np.flatnonzero(octets < 128)
    if not len(ends) or ends[-1] != len(octets) - 1:
        raise BadValue("numbers that end early")
    starts = np.concatenate([[0], ends[:-1] + 1])
    if int((ends - starts).max()) >= 10:
        raise BadValue("a number of more than ten bytes")
    shifts = (np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)) * 7
    parts = (octets & 127).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)
