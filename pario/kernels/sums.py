"""Checksums of records: XXH3 with 64 bits and seed 0, as the xxHash specification says (github.com/Cyan4973/xxHash,
doc/xxhash_spec.md), of values that lie in one piece, or with their middle in a row of a batch.

The 512-bit accumulator of long values is one LLVM vector, so that it stays in registers whatever the processor's are.
(197 KB values in the second cache: 60 GB/s of one core with AVX-512; the lanes one by one in Numba: 9 GB/s.)
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pario.kernels.jit import ARRAY, emitted, inner, kernel
from pario.kernels.nodes import first_byte_first, loader
from pario.kernels.pack import copy_bytes

#: The secret of the specification.
_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_STRIPE, _PER_BLOCK = 64, 16
#: where the secret is read for scrambling, for the last stripe and for the merge
_SCRAMBLE_AT, _LAST_AT, _MERGE_AT = 128, 121, 11
#: Values up to this size have formulas of their own.
_SHORT = 240
#: bytes of memory that `sum_pieces` uses
SCRATCH = _SHORT

_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_P64_3, _P64_4, _P64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MIX_1, _MIX_2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_BEGIN = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)

_LANE = ir.IntType(64)
_LANES = ir.VectorType(_LANE, 8)


def _lanes(number: int) -> ir.Constant:
    return ir.Constant(_LANES, [number] * 8)


def _loaded(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(address, _LANES.as_pointer()), align=1)


def _accumulated(builder: ir.IRBuilder, sums: ir.Value, stripe: ir.Value, secret: ir.Value) -> ir.Value:
    """The accumulator after one more stripe of 64 bytes."""
    value = _loaded(builder, stripe)
    keyed = builder.xor(value, _loaded(builder, secret))
    low, high = builder.and_(keyed, _lanes(0xFFFFFFFF)), builder.lshr(keyed, _lanes(32))
    swap = ir.Constant(ir.VectorType(ir.IntType(32), 8), [1, 0, 3, 2, 5, 4, 7, 6])
    swapped = builder.shuffle_vector(value, ir.Constant(_LANES, ir.Undefined), swap)
    return builder.add(builder.add(sums, swapped), builder.mul(low, high))


def _scrambled(builder: ir.IRBuilder, sums: ir.Value, secret: ir.Value) -> ir.Value:
    """The accumulator after a whole block."""
    sums = builder.xor(sums, builder.lshr(sums, _lanes(47)))
    return builder.mul(builder.xor(sums, _loaded(builder, secret)), _lanes(_P32_1))


@emitted(types.void, ARRAY, ARRAY, types.intp, types.intp, ARRAY, types.intp)
def _add_stripes(builder, lanes, src, at, count, secret, secret_at):  # type: ignore[no-untyped-def]
    """lanes u64[8] after `count` stripes from src[at] on; the secret moves on by 8 bytes per stripe. Unchecked."""
    begin, key = cgutils.pointer_add(builder, src, at), cgutils.pointer_add(builder, secret, secret_at)
    kept = builder.bitcast(lanes, _LANES.as_pointer())
    held = cgutils.alloca_once_value(builder, builder.load(kept, align=8))
    with cgutils.for_range(builder, count) as loop:
        stripe = cgutils.pointer_add(builder, begin, builder.mul(loop.index, ir.Constant(count.type, _STRIPE)))
        part = cgutils.pointer_add(builder, key, builder.mul(loop.index, ir.Constant(count.type, 8)))
        builder.store(_accumulated(builder, builder.load(held), stripe, part), held)
    builder.store(builder.load(held), kept, align=8)


def _ahead(builder: ir.IRBuilder, pointer: ir.Value, nbytes: int) -> ir.Value:
    return cgutils.pointer_add(builder, pointer, _LANE(nbytes))


@emitted(types.void, ARRAY, ARRAY, types.intp, types.intp, ARRAY)
def _add_blocks(builder, lanes, src, at, count, secret):  # type: ignore[no-untyped-def]
    """lanes u64[8] after `count` whole blocks from src[at] on, each scrambled at its end. Unchecked."""
    begin = cgutils.pointer_add(builder, src, at)
    kept = builder.bitcast(lanes, _LANES.as_pointer())
    held = cgutils.alloca_once_value(builder, builder.load(kept, align=8))
    size = ir.Constant(count.type, _STRIPE * _PER_BLOCK)
    with cgutils.for_range(builder, count) as loop:
        block = cgutils.pointer_add(builder, begin, builder.mul(loop.index, size))
        sums = builder.load(held)
        for k in range(_PER_BLOCK):
            sums = _accumulated(builder, sums, _ahead(builder, block, _STRIPE * k), _ahead(builder, secret, 8 * k))
        builder.store(_scrambled(builder, sums, _ahead(builder, secret, _SCRAMBLE_AT)), held)
    builder.store(builder.load(held), kept, align=8)


@emitted(types.void, ARRAY, ARRAY)
def _scramble(builder, lanes, secret):  # type: ignore[no-untyped-def]
    """lanes u64[8] after the last stripe of a block. Unchecked."""
    kept = builder.bitcast(lanes, _LANES.as_pointer())
    sums = _scrambled(builder, builder.load(kept, align=8), _ahead(builder, secret, _SCRAMBLE_AT))
    builder.store(sums, kept, align=8)


@emitted(types.uint64, types.uint64, types.uint64)
def _fold(builder, x, y):  # type: ignore[no-untyped-def]
    """The two halves of the 128-bit product, xored."""
    wide = ir.IntType(128)
    product = builder.mul(builder.zext(x, wide), builder.zext(y, wide))
    high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _LANE)
    return builder.xor(builder.trunc(product, _LANE), high)


_read8, _read32, _read64 = (loader(bits, types.uint64) for bits in (8, 32, 64))


@inner
def _rotated(x, bits):  # type: ignore[no-untyped-def]
    return x << np.uint64(bits) | x >> np.uint64(64 - bits)


@inner
def _avalanche(h):  # type: ignore[no-untyped-def]
    h = (h ^ h >> np.uint64(37)) * np.uint64(_MIX_1)
    return h ^ h >> np.uint64(32)


@inner
def _avalanche_64(h):  # type: ignore[no-untyped-def]
    """Of XXH64, for the shortest values."""
    h = (h ^ h >> np.uint64(33)) * np.uint64(_P64_2)
    h = (h ^ h >> np.uint64(29)) * np.uint64(_P64_3)
    return h ^ h >> np.uint64(32)


@inner
def _mixed(buf, at, secret_at):  # type: ignore[no-untyped-def]
    """Of 16 bytes."""
    return _fold(_read64(buf, at) ^ _read64(_SECRET, secret_at), _read64(buf, at + 8) ^ _read64(_SECRET, secret_at + 8))


@inner
def _sum_tiny(buf, at, n):  # type: ignore[no-untyped-def]
    """Of a value of n bytes, 16 at the most."""
    size, s = np.uint64(n), _SECRET
    if n > 8:
        low = _read64(buf, at) ^ _read64(s, 24) ^ _read64(s, 32)
        high = _read64(buf, at + n - 8) ^ _read64(s, 40) ^ _read64(s, 48)
        return _avalanche(size + first_byte_first(low) + high + _fold(low, high))
    if n > 3:
        h = _read32(buf, at + n - 4) + (_read32(buf, at) << np.uint64(32))
        h ^= _read64(s, 8) ^ _read64(s, 16)
        h = (h ^ _rotated(h, 49) ^ _rotated(h, 24)) * np.uint64(_MIX_2)
        h = (h ^ ((h >> np.uint64(35)) + size)) * np.uint64(_MIX_2)
        return h ^ h >> np.uint64(28)
    if n > 0:
        h = _read8(buf, at) << np.uint64(16) | _read8(buf, at + (n >> 1)) << np.uint64(24)
        h |= _read8(buf, at + n - 1) | size << np.uint64(8)
        return _avalanche_64(h ^ _read32(s, 0) ^ _read32(s, 4))
    return _avalanche_64(_read64(s, 56) ^ _read64(s, 64))


@inner
def _sum_short(buf, at, n):  # type: ignore[no-untyped-def]
    """Of a value of n bytes, _SHORT at the most."""
    if n <= 16:
        return _sum_tiny(buf, at, n)
    h, end = np.uint64(n) * np.uint64(_P64_1), at + n
    if n <= 128:
        for k in range((n - 1) >> 5, -1, -1):
            h += _mixed(buf, at + 16 * k, 32 * k) + _mixed(buf, end - 16 * (k + 1), 32 * k + 16)
        return _avalanche(h)
    for k in range(8):
        h += _mixed(buf, at + 16 * k, 16 * k)
    h = _avalanche(h)
    for k in range(8, n >> 4):
        h += _mixed(buf, at + 16 * k, 16 * (k - 8) + 3)
    return _avalanche(h + _mixed(buf, end - 16, 136 - 17))


@inner
def _gather(out, edges, head_at, head, rows, row_at, row, begin, n):  # type: ignore[no-untyped-def]
    """out[:n] = bytes [begin, begin + n) of a value in three pieces; the third follows the first in `edges`."""
    at, stop = begin, begin + n
    if at < head:
        size = min(head, stop) - at
        copy_bytes(out, 0, edges, head_at + at, size)
        at += size
    if at < stop and at < head + row:
        size = min(head + row, stop) - at
        copy_bytes(out, at - begin, rows, row_at + at - head, size)
        at += size
    if at < stop:
        copy_bytes(out, at - begin, edges, head_at + at - row, stop - at)


@inner
def sum_pieces(edges, head_at, head, rows, row_at, row, tail, lanes, scratch):  # type: ignore[no-untyped-def]
    """Of the value edges[head_at :][: head] + rows[row_at :][: row] + the `tail` bytes of `edges` that follow.

    lanes : u64[8], scratch : u8[SCRATCH], for use here. The caller has checked the bounds.
    """
    n = head + row + tail
    if n <= _SHORT:
        if n == row:
            return _sum_short(rows, row_at, n)
        _gather(scratch, edges, head_at, head, rows, row_at, row, 0, n)
        return _sum_short(scratch, 0, n)
    for i in range(8):
        lanes[i] = _BEGIN[i]
    k, stripes = 0, (n - 1) // _STRIPE
    while k < stripes:
        begin, turn = _STRIPE * k, k % _PER_BLOCK
        at = row_at + begin - head
        run = min((head + row - begin) // _STRIPE, stripes - k) if begin >= head else 0
        if run >= _PER_BLOCK and turn == 0:
            blocks = run // _PER_BLOCK
            _add_blocks(lanes, rows, at, blocks, _SECRET)
            k += blocks * _PER_BLOCK
            continue
        if run > 0:
            run = min(run, _PER_BLOCK - turn)
            _add_stripes(lanes, rows, at, run, _SECRET, 8 * turn)
        else:
            run = 1
            _gather(scratch, edges, head_at, head, rows, row_at, row, begin, _STRIPE)
            _add_stripes(lanes, scratch, 0, 1, _SECRET, 8 * turn)
        k += run
        if k % _PER_BLOCK == 0:
            _scramble(lanes, _SECRET)
    if tail == 0 and row >= _STRIPE:
        _add_stripes(lanes, rows, row_at + row - _STRIPE, 1, _SECRET, _LAST_AT)
    else:
        _gather(scratch, edges, head_at, head, rows, row_at, row, n - _STRIPE, _STRIPE)
        _add_stripes(lanes, scratch, 0, 1, _SECRET, _LAST_AT)
    h = np.uint64(n) * np.uint64(_P64_1)
    for i in range(4):
        at = _MERGE_AT + 16 * i
        h += _fold(lanes[2 * i] ^ _read64(_SECRET, at), lanes[2 * i + 1] ^ _read64(_SECRET, at + 8))
    return _avalanche(h)


@kernel
def sum_values(data, starts, nbytes, out):  # type: ignore[no-untyped-def]
    """out u64[n] = the checksums of the values data[starts[i] : starts[i] + nbytes[i]]. Returns the first that lies
    outside data u8[k], or -1."""
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    for i in range(len(starts)):
        at, size = starts[i], nbytes[i]
        if size < 0 or at < 0 or at > len(data) - size:
            return i
        out[i] = sum_pieces(data, at, 0, data, at, size, 0, lanes, scratch)
    return -1


@kernel
def check_sums(data, starts, nbytes, ids, sums, found, bad):  # type: ignore[no-untyped-def]
    """Compare values with their records' checksums; returns how many differ, and writes their rows to bad i64[n] and
    what they have to found u64[n]. A value outside of data u8[k] differs, with 0.

    starts, nbytes, ids : i64[n]; sums : u64[m], by record id: others differ
    """
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    n = 0
    for i in range(len(starts)):
        at, size, mine = starts[i], nbytes[i], np.uint64(0)
        inside = size >= 0 and at >= 0 and at <= len(data) - size and 0 <= ids[i] < len(sums)
        if inside:
            mine = sum_pieces(data, at, 0, data, at, size, 0, lanes, scratch)
        if not inside or mine != sums[ids[i]]:
            bad[n], found[n] = i, mine
            n += 1
    return n
