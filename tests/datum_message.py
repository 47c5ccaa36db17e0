"""Caffe's Datum, declared for Google's protobuf library: writes the records of the tests and judges the parser."""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELDS = (("channels", 1, "INT32"), ("height", 2, "INT32"), ("width", 3, "INT32"), ("data", 4, "BYTES"),
           ("label", 5, "INT32"), ("float_data", 6, "FLOAT"), ("encoded", 7, "BOOL"))  # fmt: skip


def _message(name: str, packed: bool) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="pario_test", syntax="proto2")
    message = file.message_type.add(name=name)
    for field, number, kind in _FIELDS:
        added = message.field.add(
            name=field,
            number=number,
            type=getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind}"),
            label=descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
            if field == "float_data"
            else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
        )
        if field == "float_data":
            added.options.packed = packed
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pario_test.{name}"))


Message = _message("Datum", packed=False)
PackedMessage = _message("PackedDatum", packed=True)


def datum(values: np.ndarray, label: int | None = 0, *, packed: bool = False) -> bytes:
    """A record of values [c, h, w]: u8 -> data, f32 -> float_data."""
    message = (PackedMessage if packed else Message)()
    message.channels, message.height, message.width = values.shape
    if values.dtype == np.uint8:
        message.data = values.tobytes()
    else:
        message.float_data.extend(values.reshape(-1).tolist())
    if label is not None:
        message.label = label
    return message.SerializeToString()


def encoded(image: bytes, label: int) -> bytes:
    """A record that holds an image file."""
    return Message(data=image, label=label, encoded=True).SerializeToString()
