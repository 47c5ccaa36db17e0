"""Calls of C functions by their address, and memory by its address.

A function of a library that may be missing cannot be linked by its name. Its address is an argument of the kernel, so
that one compiled kernel, kept on disk, serves every library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from pario.kernels.jit import inner

_WORD = ir.IntType(64)
_ARGUMENTS = 6


def _call(typing_context, function, a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The 64 bits that the C function at this address returns for up to six integers and pointers. The rest is ignored:
    on 64-bit Linux the first six travel in registers. A function that returns an int leaves the upper half undefined.
    """

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(_WORD, [_WORD] * _ARGUMENTS)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * (1 + _ARGUMENTS)), generate


def _copy(typing_context, out, src, nbytes):  # type: ignore[no-untyped-def]
    """Memory that does not overlap. Unchecked."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        to, of = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, of, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _pointer_to(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


call_c: Any = intrinsic(_call)
copy_memory: Any = intrinsic(_copy)
pointer_to: Any = intrinsic(_pointer_to)


@inner
def as_bytes(address, n):  # type: ignore[no-untyped-def]
    """u8[n] at this address."""
    return carray(pointer_to(address), (n,), np.uint8)
