"""Copies spans of bytes to rows of an array or to one packed buffer.

A slice copy in Numba is a byte loop (3 GB/s); LLVM's memcpy, through an intrinsic, runs at the speed of memory. It
checks nothing, so every caller compares its spans with the arrays' sizes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pario.kernels.jit import kernel

__all__ = ["copy_bytes", "copy_ranges", "pack_rows", "pack_spans"]


def _copy_bytes(typing_context, out, out_at, src, src_at, nbytes):  # type: ignore[no-untyped-def]
    """out[out_at : out_at + nbytes] = src[src_at : src_at + nbytes], counted in bytes whatever the dtypes.

    C-contiguous arrays that do not overlap. Unchecked.
    """
    if not (isinstance(out, types.Array) and isinstance(src, types.Array)):
        return None

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        def address(which: int) -> ir.Value:
            array = context.make_array(signature.args[which])(context, builder, arguments[which])
            return cgutils.pointer_add(builder, array.data, arguments[which + 1])

        cgutils.raw_memcpy(builder, address(0), address(2), arguments[4], 1)
        return context.get_dummy_value()

    return types.void(out, types.intp, src, types.intp, types.intp), generate


#: copy_bytes(out, out_at, src, src_at, nbytes)
copy_bytes: Any = intrinsic(_copy_bytes)


@kernel
def pack_rows(data, starts, nbytes, out, row_nbytes, failed):  # type: ignore[no-untyped-def]
    """Row i of out u8[n * row_nbytes] = record i, for records of exactly row_nbytes bytes that lie inside data.

    Leaves the rows of other records unchanged, writes their numbers to failed i64[n], and returns how many.
    """
    n = 0
    for i in range(len(starts)):
        at = starts[i]
        if nbytes[i] == row_nbytes and at >= 0 and at <= len(data) - row_nbytes:
            copy_bytes(out, i * row_nbytes, data, at, row_nbytes)
        else:
            failed[n] = i
            n += 1
    return n


@kernel
def pack_spans(data, starts, nbytes, out, offsets, failed):  # type: ignore[no-untyped-def]
    """out u8[...] = the records one after the other, record i at offsets[i] : offsets[i + 1]; offsets i64[n + 1].

    Records outside data, or without room in out, get length 0; writes their numbers to failed i64[n] and returns how
    many.
    """
    n = 0
    to = np.int64(0)
    offsets[0] = 0
    for i in range(len(starts)):
        at, size = starts[i], nbytes[i]
        if size >= 0 and size <= len(out) - to and at >= 0 and at <= len(data) - size:
            copy_bytes(out, to, data, at, size)
            to += size
        else:
            failed[n] = i
            n += 1
        offsets[i + 1] = to
    return n


@kernel
def copy_ranges(data, offsets, nbytes, out, starts, wanted):  # type: ignore[no-untyped-def]
    """out[starts[i] : starts[i] + nbytes[i]] = data[offsets[i] : offsets[i] + nbytes[i]] for each i with wanted[i].

    data, out : u8; offsets, nbytes, starts : i64[n]; wanted : bool[n], becomes False where a range is outside its array
    """
    for i in range(len(offsets)):
        if wanted[i]:
            at, size, to = offsets[i], nbytes[i], starts[i]
            if size >= 0 and at >= 0 and at <= len(data) - size and to >= 0 and to <= len(out) - size:
                copy_bytes(out, to, data, at, size)
            else:
                wanted[i] = False
