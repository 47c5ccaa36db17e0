"""What compiled functions call of C: the system's reads, and the interpreter's functions for objects and its lock."""

from __future__ import annotations

import sys

import numpy as np
from llvmlite import ir
from numba import carray, types

from pario.kernels.calls import as_bytes, pointer_to
from pario.kernels.jit import emitted, inner
from pario.kernels.nodes import PAGE_SIZE
from pario.lmdb.abi import CURSOR_WORDS, POOL, SLOTS

#: Linux: a read that would wait fails; POSIX_FADV_WILLNEED.
RWF_NOWAIT, WILLNEED = 8, 3

intp, uintp, intc = types.intp, types.uintp, types.intc
preadv = types.ExternalFunction("preadv", intp(intc, uintp, intc, types.int64))
fadvise = types.ExternalFunction("posix_fadvise", intc(intc, types.int64, types.int64, intc))
memcmp = types.ExternalFunction("memcmp", intc(uintp, uintp, uintp))
save_thread = types.ExternalFunction("PyEval_SaveThread", uintp())
take_lock = types.ExternalFunction("PyGILState_Ensure", intc())
give_lock = types.ExternalFunction("PyGILState_Release", types.void(intc))
restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(uintp))
decref = types.ExternalFunction("Py_DecRef", types.void(uintp))
is_true = types.ExternalFunction("PyObject_IsTrue", intc(uintp))
clear = types.ExternalFunction("PyErr_Clear", types.void())
bytes_size = types.ExternalFunction("PyBytes_Size", intp(uintp))
bytes_start = types.ExternalFunction("PyBytes_AsString", uintp(uintp))
bytes_new = types.ExternalFunction("PyBytes_FromStringAndSize", uintp(uintp, intp))
bytearray_new = types.ExternalFunction("PyByteArray_FromStringAndSize", uintp(uintp, intp))
bool_new = types.ExternalFunction("PyBool_FromLong", uintp(types.long_))
int_new = types.ExternalFunction("PyLong_FromSsize_t", uintp(intp))
list_new = types.ExternalFunction("PyList_New", uintp(intp))
list_append = types.ExternalFunction("PyList_Append", intc(uintp, uintp))
list_size = types.ExternalFunction("PyList_Size", intp(uintp))
list_item = types.ExternalFunction("PyList_GetItem", uintp(uintp, intp))
tuple_new = types.ExternalFunction("PyTuple_New", uintp(intp))
tuple_size = types.ExternalFunction("PyTuple_Size", intp(uintp))
int_of = types.ExternalFunction("PyLong_AsSsize_t", intp(uintp))
none_new = types.ExternalFunction("Py_BuildValue", uintp(uintp))
tuple_set = types.ExternalFunction("PyTuple_SetItem", intc(uintp, intp, uintp))
if sys.version_info >= (3, 11):
    vectorcall = types.ExternalFunction("PyObject_Vectorcall", uintp(uintp, uintp, uintp, uintp))
else:
    # In 3.10 it is a function of the header files only, and LLVM ends a process that asks for it. The header calls this
    # one for objects without a vectorcall, with the same arguments; no release of 3.10 will change it any more.
    _thread_state = types.ExternalFunction("PyThreadState_Get", uintp())
    _make_call = types.ExternalFunction("_PyObject_MakeTpCall", uintp(uintp, uintp, uintp, intp, uintp))

    @inner
    def vectorcall(function, arguments_at, n, names):  # type: ignore[no-untyped-def]
        return _make_call(_thread_state(), function, arguments_at, intp(n), names)


SCRATCH_WORDS = CURSOR_WORDS


@emitted(types.intp)
def scratch_memory(builder):  # type: ignore[no-untyped-def]
    """Address of memory for SCRATCH_WORDS on the stack of the function that asks."""
    with builder.goto_entry_block():  # `cgutils.alloca_once` would fill it with zeros at each call
        memory = builder.alloca(ir.ArrayType(ir.IntType(64), SCRATCH_WORDS))
    return builder.ptrtoint(memory, ir.IntType(64))


@inner
def as_words(address, n):  # type: ignore[no-untyped-def]
    return carray(pointer_to(address), (n,), np.int64)


@inner
def pages_of(g):  # type: ignore[no-untyped-def]
    return as_bytes(g[POOL], g[SLOTS] * g[PAGE_SIZE])
