"""Calls of C functions by their address, and memory by its address.

A function of a library that may be missing cannot be linked by its name. Its address is an argument of the kernel, so
that one compiled kernel, kept on disk, serves every library.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from pario.kernels.jit import emitted, inner

_WORD = ir.IntType(64)
_ARGUMENTS = 6


@emitted(types.int64, *[types.int64] * (1 + _ARGUMENTS))
def call_c(builder, function, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The 64 bits that the C function at this address returns for up to six integers and pointers. The rest is ignored:
    on 64-bit Linux the first six travel in registers. A function that returns an int leaves the upper half undefined.
    """
    kind = ir.FunctionType(_WORD, [_WORD] * _ARGUMENTS)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), (a, b, c, d, e, f))


@emitted(types.void, types.int64, types.int64, types.int64)
def copy_memory(builder, out, src, nbytes):  # type: ignore[no-untyped-def]
    """Memory that does not overlap. Unchecked."""
    to, of = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in (out, src))
    cgutils.raw_memcpy(builder, to, of, nbytes, 1)


@emitted(types.voidptr, types.int64)
def pointer_to(builder, address):  # type: ignore[no-untyped-def]
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


@inner
def as_bytes(address, n):  # type: ignore[no-untyped-def]
    """u8[n] at this address."""
    return carray(pointer_to(address), (n,), np.uint8)
