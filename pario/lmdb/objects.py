"""Python's objects on the way into compiled functions and out, and compiled functions as methods of its classes."""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typeconv import Conversion
from numba.extending import NativeValue, box, lower_cast, models, register_model, unbox

from pario.lmdb.abi import OBJECT_BYTES


class ObjectType(types.Opaque):  # type: ignore[misc]
    """Any Python object, as it is: PyObject *. Inside of compiled functions it is its address."""

    def __init__(self) -> None:
        super().__init__(name="pario.PyObject")

    def can_convert_to(self, typing_context: Any, other: Any) -> Any:
        return Conversion.safe if other == types.uintp else None

    can_convert_from = can_convert_to


any_object = ObjectType()

register_model(ObjectType)(models.OpaqueModel)


@unbox(ObjectType)
def _unbox_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return NativeValue(thing)


@box(ObjectType)
def _box_object(kind, thing, context):  # type: ignore[no-untyped-def]
    return thing


@lower_cast(ObjectType, types.Integer)
def _address_of(context, builder, kind, wanted, thing):  # type: ignore[no-untyped-def]
    return builder.ptrtoint(thing, ir.IntType(64))


@lower_cast(types.Integer, ObjectType)
def _object_at(context, builder, kind, wanted, address):  # type: ignore[no-untyped-def]
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


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
