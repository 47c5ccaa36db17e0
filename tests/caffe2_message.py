"""Caffe2's TensorProtos, written by hand after caffe2.proto: the oracle of the decoder's tests."""

from __future__ import annotations

import struct
from typing import Any

NUMBER = {"FLOAT": 1, "INT32": 2, "BYTE": 3, "STRING": 4, "UINT8": 6, "INT64": 10, "FLOAT16": 12, "DOUBLE": 13}


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def chunk(field: int, body: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(body)) + body


def tensor(kind: str, dims: tuple[int, ...], values: Any, *, packed: bool = True) -> bytes:
    body = b"".join(varint(1 << 3) + varint(k) for k in dims) + varint(2 << 3) + varint(NUMBER[kind])
    if kind == "FLOAT":
        parts = [struct.pack("<f", x) for x in values]
        return body + (chunk(3, b"".join(parts)) if packed else b"".join(varint(3 << 3 | 5) + p for p in parts))
    if kind == "DOUBLE":
        parts = [struct.pack("<d", x) for x in values]
        return body + (chunk(9, b"".join(parts)) if packed else b"".join(varint(9 << 3 | 1) + p for p in parts))
    if kind == "BYTE":
        return body + chunk(5, bytes(values))
    if kind == "STRING":
        return body + b"".join(chunk(6, value) for value in values)
    field = 10 if kind == "INT64" else 4
    parts = [varint(x) for x in values]
    return body + (chunk(field, b"".join(parts)) if packed else b"".join(varint(field << 3) + p for p in parts))


def tensor_protos(*tensors: tuple[str, tuple[int, ...], Any], packed: bool = True) -> bytes:
    return b"".join(chunk(1, tensor(*one, packed=packed)) for one in tensors)
