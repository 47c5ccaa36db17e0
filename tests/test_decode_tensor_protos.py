"""Caffe2's TensorProtos: records written by hand, and the same declared for Google's protobuf library."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from caffe2_message import NUMBER, tensor_protos
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from made_records import arrays, made

from pario.decode import Draw, Image, TensorProtos
from pario.errors import DecodeError, OptionError

RNG = np.random.default_rng(5)


def run(decoder, *values):
    records = made(list(values))
    decoder.learn(records[0])
    out = arrays(decoder, records)
    failures = decoder.decode(records, out, Draw())
    return out if failures else decoder.finish(out), failures


#: kind -> (dtype, values)
TENSORS = {
    "FLOAT": ("f4", RNG.standard_normal(6).astype("f4")),
    "DOUBLE": ("f8", RNG.standard_normal(6)),
    "INT32": ("i4", np.array([0, -1, 127, 128, 2**31 - 1, -(2**31)])),
    "INT64": ("i8", np.array([0, -1, 2**40, 2**63 - 1, -(2**63), 300])),
    "UINT8": ("u1", np.array([0, 1, 127, 128, 254, 255])),
    "BYTE": ("u1", np.array([0, 1, 127, 128, 254, 255])),
    "FLOAT16": ("f2", RNG.standard_normal(6).astype("f2")),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", TENSORS)
def test_every_type_of_numbers(kind, packed) -> None:
    dtype, values = TENSORS[kind]
    written = values.view("u2") if kind == "FLOAT16" else values
    record = tensor_protos((kind, (2, 3), written.tolist()), ("INT32", (1,), [7]), packed=packed)
    out, failures = run(TensorProtos(), record, record)
    assert failures == []
    assert out["data"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(out["data"], [values.astype(dtype).reshape(2, 3)] * 2)
    assert out["label"].tolist() == [7, 7]


def test_what_protobuf_writes() -> None:
    """The messages as caffe2.proto declares them."""
    file = descriptor_pb2.FileDescriptorProto(name="c2.proto", package="c2", syntax="proto2")
    tensor = file.message_type.add(name="TensorProto")
    kinds = ((1, "INT64", "dims"), (2, "INT32", "data_type"), (3, "FLOAT", "float_data"), (4, "INT32", "int32_data"))
    for number, kind, name in (*kinds, (7, "STRING", "name")):
        repeated = number in (1, 3, 4)
        field = tensor.field.add(name=name, number=number, label=3 if repeated else 1)
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind}")
        field.options.packed = number in (3, 4)
    both = file.message_type.add(name="TensorProtos")
    both.field.add(name="protos", number=1, label=3, type=11, type_name=".c2.TensorProto")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("c2.TensorProtos"))()
    x = RNG.standard_normal((3, 4, 4)).astype("f4")
    message.protos.add(dims=x.shape, data_type=NUMBER["FLOAT"], float_data=x.ravel().tolist(), name="picture")
    message.protos.add(data_type=NUMBER["INT32"], int32_data=[-5])
    out, failures = run(TensorProtos(), message.SerializeToString())
    assert failures == []
    np.testing.assert_array_equal(out["data"], [x])
    assert out["label"].tolist() == [-5]


def test_images_are_decoded() -> None:
    pictures = RNG.integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
    files = [cv2.imencode(".png", p)[1].tobytes() for p in pictures]
    records = [tensor_protos(("STRING", (1,), [f]), ("INT32", (1,), [i])) for i, f in enumerate(files)]
    for decoder in (TensorProtos(image=Image(color="BGR")), TensorProtos(image=Image((6, 5), color="BGR"))):
        out, failures = run(decoder, *records)
        assert failures == []
        np.testing.assert_array_equal(out["data"], pictures)
    small = cv2.imencode(".png", pictures[0][:3])[1].tobytes()
    _, failures = run(TensorProtos(), *records, tensor_protos(("STRING", (1,), [small]), ("INT32", (1,), [0])))
    assert "'data' is uint8[3, 5, 3], that of record 0 is uint8[6, 5, 3]" in failures[0][1]
    _, failures = run(TensorProtos(), *records, tensor_protos(("STRING", (1,), [b"?"]), ("INT32", (1,), [0])))
    assert failures[0][1].startswith("the image in it: not an image")


def test_names_of_the_tensors() -> None:
    record = tensor_protos(*[("INT32", (2,), [i, i]) for i in range(3)])
    assert sorted(run(TensorProtos(["a"]), record)[0]) == ["1", "2", "a"]
    other = tensor_protos(*[("INT32", (3,), [5, 6, 7])] * 3)
    out, _ = run(TensorProtos(ragged={name: "flat" for name in ("data", "label", "2")}), record, other)
    assert out["data"].tolist() == [0, 0, 5, 6, 7]
    assert out["offsets"].tolist() == [0, 2, 5]
    for wrong in ("data", ["a", "a"], [3]):
        with pytest.raises(OptionError, match="names must be"):
            TensorProtos(wrong)
    with pytest.raises(OptionError, match="image must be a decoder"):
        TensorProtos(image=len)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (b"", "no tensor in it"),
        (tensor_protos(("FLOAT", (3,), [1, 2])), r"a FLOAT tensor of shape \[3\] with 2 values"),
        (tensor_protos(("FLOAT", (1 << 50,), [1])), "a tensor of shape"),
        (tensor_protos(("INT32", (1,), [2**40])), "numbers of 1099511627776"),
        (tensor_protos(("INT32", (1,), [1]))[:-1], "needs"),
        (b"\x0a\x02\x10\x63", "a tensor of data_type 99, which is unknown"),
        (b"\x0a\x04\x10\x02\x22", "field 1 at byte 2 of 5 needs 4 bytes"),
        (b"\x0a\x05\x10\x02\x22\x01\xff", "numbers that end early"),
        (b"\x0a\x10\x10\x02\x22\x0c" + b"\xff" * 11 + b"\x01", "more than ten bytes"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "needs 9,223,372,036,854,775,807 bytes"),
        (b"\x0b", "no valid wire type at byte 1 of 1"),
        (b"\x02\x00", "no valid field number"),
        (b"\xff" * 11, "a number that does not end"),
        (b"\x0a\x00" * 100, "more than 64 tensors"),
        (b'{"a": 1}', r"perhaps JSON. Use pario.decode.Json\(\)"),
    ],
)
def test_broken_records(record, why) -> None:
    with pytest.raises(DecodeError, match=why):
        run(TensorProtos(), record)
