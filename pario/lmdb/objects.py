"""Python's objects on the way into compiled functions and out, and compiled functions as methods of its classes."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import NativeValue, box, intrinsic, models, register_model, unbox

from pario.lmdb.abi import OBJECT_BYTES


class ObjectType(types.Opaque):  # type: ignore[misc]
    """Any Python object, as it is: PyObject *."""

    def __init__(self) -> None:
        super().__init__(name="pario.PyObject")


any_object = ObjectType()

register_model(ObjectType)(models.OpaqueModel)


@unbox(ObjectType)
def _unbox_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return NativeValue(thing)


@box(ObjectType)
def _box_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return thing


def _address_of(typing_context, thing):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.uintp(thing), generate


def _object_at(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return any_object(types.uintp), generate


take: Any = intrinsic(_address_of)
give: Any = intrinsic(_object_at)


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METH_FASTCALL, _METH_KEYWORDS = 0x80, 0x02

#: Descriptions that CPython refers to for good.
_METHODS: list[_Method] = []


def method(kind: type, name: str, doc: str, address: int) -> Any:
    """A method of `kind`, made of a compiled function in CPython's calling convention METH_FASTCALL | METH_KEYWORDS."""
    held = _Method(name.encode(), address, _METH_FASTCALL | _METH_KEYWORDS, doc.encode())
    _METHODS.append(held)
    make = ctypes.pythonapi.PyDescr_NewMethod
    make.restype, make.argtypes = ctypes.py_object, (ctypes.py_object, ctypes.POINTER(_Method))
    return make(kind, ctypes.byref(held))


def slot_of(thing: Any, i: int) -> int:
    """Address of the object in the i-th slot of an object, as compiled functions find it."""
    return ctypes.c_ssize_t.from_address(id(thing) + OBJECT_BYTES + i * ctypes.sizeof(ctypes.c_void_p)).value
