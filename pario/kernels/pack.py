"""Copies spans of bytes to rows of an array or to one packed buffer.

A slice copy in Numba is a byte loop (3 GB/s); LLVM's memcpy, through an intrinsic, runs at the speed of memory. It
checks nothing, so every caller compares its spans with the arrays' sizes first.

Stores that bypass the processor's caches ("non-temporal") save that memory is read before it is overwritten, and leave
the caches to others. They pay where what is written would not stay in the caches anyway: decode/base.py decides.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pario.kernels.fence import full_fence
from pario.kernels.jit import ARRAY, emitted, kernel
from pario.kernels.nodes import hint_at


@emitted(types.void, ARRAY, types.intp, ARRAY, types.intp, types.intp)
def copy_bytes(builder, out, out_at, src, src_at, nbytes):  # type: ignore[no-untyped-def]
    """out[out_at : out_at + nbytes] = src[src_at : src_at + nbytes], counted in bytes whatever the dtypes.

    C-contiguous arrays that do not overlap. Unchecked.
    """
    to, at = cgutils.pointer_add(builder, out, out_at), cgutils.pointer_add(builder, src, src_at)
    cgutils.raw_memcpy(builder, to, at, nbytes, 1)


#: Bytes of the next record that are prefetched, at most: by then the processor has seen where this goes.
_FORESEEN, _LINE = 4096, 64
#: What one step of `stream_bytes` moves: _LANES vectors of _VECTOR bytes, to addresses that are multiples of _VECTOR.
_VECTOR, _LANES = 32, 4


@emitted(types.void, ARRAY, types.intp, ARRAY, types.intp, types.intp)
def stream_bytes(builder, out, out_at, src, src_at, n):  # type: ignore[no-untyped-def]
    """The same past the caches. Others see the bytes only after `settle`. (Intel, Optimization Reference Manual, 8.4.1)

    (197 KB records at random out of 200 MB into three batches of 64 in turn, two cores, one process / two: copy_bytes
    7.9 GB/s / 2 x 2.3 to 4.2, this 15.4 / 2 x 3.6 to 9.2; and when each batch is read once, 6.5 to 7.6 against 8.9 to
    9.3. Batches that fit the caches: 10 to 13 against 9 to 11.)
    """
    to, at = cgutils.pointer_add(builder, out, out_at), cgutils.pointer_add(builder, src, src_at)
    number = n.type
    step = ir.Constant(number, _VECTOR * _LANES)
    # Up to the first address that is a multiple of a vector, or all of it if that is farther.
    begin = builder.neg(builder.ptrtoint(to, number))
    begin = builder.and_(begin, ir.Constant(number, _VECTOR - 1))
    begin = builder.select(builder.icmp_signed("<", begin, n), begin, n)
    cgutils.raw_memcpy(builder, to, at, begin, 1)
    steps = builder.udiv(builder.sub(n, begin), step)
    vector = ir.VectorType(ir.IntType(64), _VECTOR // 8)
    bypass = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    with cgutils.for_range(builder, steps) as loop:
        here = builder.add(begin, builder.mul(loop.index, step))
        values = []
        for k in range(_LANES):
            lane = builder.add(here, ir.Constant(number, k * _VECTOR))
            source = builder.bitcast(cgutils.pointer_add(builder, at, lane), vector.as_pointer())
            values.append((lane, builder.load(source, align=1)))
        for lane, value in values:
            target = builder.bitcast(cgutils.pointer_add(builder, to, lane), vector.as_pointer())
            builder.store(value, target, align=_VECTOR).set_metadata("nontemporal", bypass)
    done = builder.add(begin, builder.mul(steps, step))
    target, source = cgutils.pointer_add(builder, to, done), cgutils.pointer_add(builder, at, done)
    cgutils.raw_memcpy(builder, target, source, builder.sub(n, done), 1)


@kernel
def move_bytes(out, out_at, src, src_at, nbytes, streams):  # type: ignore[no-untyped-def]
    """`stream_bytes` or `copy_bytes`."""
    if streams:
        stream_bytes(out, out_at, src, src_at, nbytes)
    else:
        copy_bytes(out, out_at, src, src_at, nbytes)


@kernel
def settle(streams):  # type: ignore[no-untyped-def]
    """What `stream_bytes` wrote comes before whatever this thread writes from here on."""
    if streams:
        full_fence()


@emitted(types.void, ARRAY, types.intp, types.intp, types.intp)
def foresee(builder, data, at, nbytes, then):  # type: ignore[no-untyped-def]
    """Prefetch the next record, data[at : at + nbytes], and where the one after it begins: no processor foresees where.

    (256 Datums of 3 KB at random out of 165 MB: 155 us; without this 224, without the second part 176. As memory that
    is used only once, which leaves it out of most caches, with two ranks: 617 us a batch in place of 503. Not a kernel
    of its own, of whose arrays Numba would count the references: 50 ns a record.)
    """
    number = at.type
    most = ir.Constant(number, _FORESEEN)
    size = builder.select(builder.icmp_signed("<", nbytes, most), nbytes, most)
    with cgutils.for_range_slice(builder, number(0), size, number(_LINE), inc=True) as (k, _):
        hint_at(builder, data, builder.add(at, k))
    hint_at(builder, data, then)


@kernel
def pack_rows(data, starts, nbytes, out, row_nbytes, failed, streams):  # type: ignore[no-untyped-def]
    """Row i of out u8[n * row_nbytes] = record i, for records of exactly row_nbytes bytes that lie inside data.

    streams : past the caches
    Leaves the rows of other records unchanged, writes their numbers to failed i64[n], and returns how many.
    """
    n = 0
    for i in range(len(starts)):
        at = starts[i]
        if i + 1 < len(starts):
            foresee(data, starts[i + 1], nbytes[i + 1], starts[min(i + 2, len(starts) - 1)])
        if nbytes[i] == row_nbytes and at >= 0 and at <= len(data) - row_nbytes:
            move_bytes(out, i * row_nbytes, data, at, row_nbytes, streams)
        else:
            failed[n] = i
            n += 1
    settle(streams)
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
