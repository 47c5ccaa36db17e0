"""Pages, nodes and sub-pages of any LMDB data file, for kernels that search and walk a tree: loads, checks, searches.

A page (or a sub-page, which has the same shape) starts at byte `o` of `buf`. `check_page` checks every bound of a page
once, after reading it; the other functions rely on that. If `check_page` finds a fault, the caller passes the page to
format/page.py, which raises the error.

`g` is an i64 array that describes the file; FILE names its first words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from pario.kernels.jit import ARRAY, emitted, inner

#: The words of `g` that describe a file: bytes, except `big` (byte order of the file: 1 = big-endian).
FILE = (
    "page_size", "header", "base", "limit", "version", "word", "big", "sum_size", "last_pgno", "txnid", "file_bytes",
)  # fmt: skip
PAGE_SIZE, HEADER, BASE, LIMIT, VERSION, WORD, BIG, SUM_SIZE, LAST_PGNO, TXNID, FILE_BYTES = range(len(FILE))

#: Comparison of keys: byte by byte from the front, or from the end.
FORWARD, BACKWARD = 0, 1

#: Rules for the pages of a tree, as bits: comparison of its keys, and of the duplicates in its sub-pages; whether keys
#: may have duplicates (and then only short values besides), or are themselves the duplicates of one key.
KEYS_BACKWARD, KEYS_INTEGERS, DUPS_BACKWARD, DUPS_INTEGERS, HAS_DUPS, ARE_DUPS = 1, 2, 4, 8, 16, 32

#: Results of `check_page`: a bound that does not hold, gaps between nodes (LMDB leaves none) or overlapping nodes,
#: items out of order; and the latter two in the sub-page of an item.
SOUND, BOUNDS, ROOM, ORDER, DUP_ROOM, DUP_ORDER = range(6)
_IN_DUPS = DUP_ROOM - ROOM

# As in format/layout.py, which kernels do not import.
_BRANCH, _LEAF, _DIRTY, _LEAF2, _SUBP = 0x01, 0x02, 0x10, 0x20, 0x40
_BIGDATA, _SUBDATA, _DUPDATA = 0x01, 0x02, 0x04
_FIRST_PAGE = 2
#: This many neighbouring items of a leaf count as one or two cache lines.
_NEAR = 4


def loader(bits: int, kind: Any) -> Any:
    """load(buf, at): the bytes at buf[at], which this machine stores lowest first, as `kind`, of 64 bits. Unchecked."""

    @emitted(kind, ARRAY, types.intp)
    def load(builder, buf, at):  # type: ignore[no-untyped-def]
        pointer = builder.bitcast(cgutils.pointer_add(builder, buf, at), ir.IntType(bits).as_pointer())
        number = builder.load(pointer, align=1)
        return builder.zext(number, ir.IntType(64)) if bits < 64 else number

    return load


# Numba's own indexing tests the sign of every index, which prevents LLVM from joining bytes into one load: a search was
# twice as slow. Like memcpy these loads check nothing; their offsets have passed `check_page`.
_load8, _load16, _load32, _load64 = (loader(bits, types.int64) for bits in (8, 16, 32, 64))


@emitted(types.uint64, types.int64)
def first_byte_first(builder, x):  # type: ignore[no-untyped-def]
    """u64 that sorts like the eight bytes loaded as `x` on this machine (little-endian, like all of Numba's)."""
    return builder.bswap(x)


def hint_at(builder, buf, at):  # type: ignore[no-untyped-def]
    """Emit what `prefetch` does."""
    pointer = cgutils.pointer_add(builder, buf, at)
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), (byte, flag, flag, flag))
    hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(hint, (builder.bitcast(pointer, byte), flag(0), flag(3), flag(1)))


@emitted(types.void, ARRAY, types.intp)
def prefetch(builder, buf, at):  # type: ignore[no-untyped-def]
    """Prefetch the cache line at buf[at]. Only a hint: any index is allowed."""
    hint_at(builder, buf, at)


@inner
def _swap16(x):  # type: ignore[no-untyped-def]
    return (x & 0xFF) << 8 | x >> 8


@inner
def _swap32(x):  # type: ignore[no-untyped-def]
    return _swap16(x & 0xFFFF) << 16 | _swap16(x >> 16)


@inner
def u16(buf, i, big):  # type: ignore[no-untyped-def]
    x = _load16(buf, i)
    return _swap16(x) if big else x


@inner
def u32(buf, i, big):  # type: ignore[no-untyped-def]
    x = _load32(buf, i)
    return _swap32(x) if big else x


@inner
def word(buf, i, g):  # type: ignore[no-untyped-def]
    """A page number, txnid or counter. Unsigned on disk: values with the highest of 64 bits are negative here."""
    big = g[BIG]
    if g[WORD] == 4:
        return u32(buf, i, big)
    if big:
        return u32(buf, i, big) << 32 | u32(buf, i + 4, big)
    return _load64(buf, i)


@inner
def _after(txnid, snapshot):  # type: ignore[no-untyped-def]
    return txnid < 0 or txnid > snapshot


@inner
def count(buf, o, g):  # type: ignore[no-untyped-def]
    """Items of the page at o."""
    return (u16(buf, o + g[HEADER] - 4, g[BIG]) - (g[HEADER] - g[BASE])) >> 1


@inner
def node_at(buf, o, i, g):  # type: ignore[no-untyped-def]
    """Start of node i in buf."""
    return o + g[BASE] + u16(buf, o + g[HEADER] + 2 * i, g[BIG])


@inner
def child(buf, o, i, g):  # type: ignore[no-untyped-def]
    """Page number of child i of a branch page."""
    at = node_at(buf, o, i, g)
    low = u32(buf, at, g[BIG])
    return low | u16(buf, at + 4, g[BIG]) << 32 if g[WORD] == 8 else low


@inner
def key_span(buf, o, i, g):  # type: ignore[no-untyped-def]
    """(start in buf, bytes) of the key of item i."""
    h = o + g[HEADER]
    if u16(buf, h - 6, g[BIG]) & _LEAF2:
        pad = u16(buf, h - 8, g[BIG])
        return h + i * pad, pad
    at = node_at(buf, o, i, g)
    return at + 8, u16(buf, at + 6, g[BIG])


@inner
def compare(a, ai, an, b, bi, bn, way):  # type: ignore[no-untyped-def]
    """< 0, 0 or > 0 as a[ai : ai + an] is less than, equal to or greater than b[bi : bi + bn]."""
    common = min(an, bn)
    if way == FORWARD:
        j = 0
        while j + 8 <= common:
            x, y = _load64(a, ai + j), _load64(b, bi + j)
            if x != y:
                return 1 if first_byte_first(x) > first_byte_first(y) else -1
            j += 8
        while j < common:
            s, t = _load8(a, ai + j), _load8(b, bi + j)
            if s != t:
                return s - t
            j += 1
    else:
        for j in range(1, common + 1):
            s, t = _load8(a, ai + an - j), _load8(b, bi + bn - j)
            if s != t:
                return s - t
    return an - bn


@inner
def search_branch(buf, o, key, way, g):  # type: ignore[no-untyped-def]
    """The child that a key belongs to: the last of slots 1 ... whose key is <= it, else slot 0."""
    low, high = 1, count(buf, o, g)
    while low < high:
        middle = (low + high) >> 1
        start, nbytes = key_span(buf, o, middle, g)
        if compare(buf, start, nbytes, key, 0, len(key), way) <= 0:
            low = middle + 1
        else:
            high = middle
    return low - 1


@inner
def search_leaf(buf, o, key, way, g):  # type: ignore[no-untyped-def]
    """(the first item that is >= key, whether it is equal)

    Each comparison waits for a cache line of a leaf, which is rarely in the processor's cache; meanwhile both possible
    next items are prefetched. (Prefetching the first three levels at once is no better.)
    """
    n = count(buf, o, g)
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if high - low > _NEAR:
            prefetch(buf, key_span(buf, o, (low + middle) >> 1, g)[0] - 8)
            prefetch(buf, key_span(buf, o, (middle + 1 + high) >> 1, g)[0] - 8)
        start, nbytes = key_span(buf, o, middle, g)
        order = compare(buf, start, nbytes, key, 0, len(key), way)
        if order == 0:
            return middle, True
        if order < 0:
            low = middle + 1
        else:
            high = middle
    return low, False


@inner
def check_run(buf, at, nbytes, g):  # type: ignore[no-untyped-def]
    """First page of the overflow run of a value of `nbytes` bytes, from its number at buf[at]; -1 if impossible."""
    run = word(buf, at, g)
    need = (g[HEADER] - 1 + nbytes + g[SUM_SIZE]) // g[PAGE_SIZE] + 1
    if run < _FIRST_PAGE or run > g[LAST_PGNO] or run + need - 1 > g[LAST_PGNO]:
        return np.int64(-1)
    if g[VERSION] > 1:
        pages = word(buf, at + 2 * g[WORD], g)
        if 0 <= pages < need or (g[VERSION] == 3 and _after(word(buf, at + g[WORD], g), g[TXNID])):
            return np.int64(-1)
    return run


@inner
def _check_items(buf, o, limit, flags, least, g):  # type: ignore[no-untyped-def]
    """Number of items of the page at o, or 0 if its header cannot be right."""
    big, header, base = g[BIG], g[HEADER], g[BASE]
    h = o + header
    lower, upper = u16(buf, h - 4, big), u16(buf, h - 2, big)
    n = (lower - (header - base)) >> 1
    if n < least:
        return np.int64(0)
    if flags & _LEAF2:
        pad = u16(buf, h - 8, big)
        if pad == 0 or header + n * pad > limit:
            return np.int64(0)
    elif lower > upper or upper > limit - base:
        return np.int64(0)
    return n


@inner
def _ascend(buf, a, an, b, bn, rules, g):  # type: ignore[no-untyped-def]
    """True if buf[a : a + an] < buf[b : b + bn]."""
    if rules & KEYS_INTEGERS:
        if an != bn:
            return False
        # LMDB compares duplicates of other widths as if they had four bytes.
        if rules & ARE_DUPS and an != 4 and an != g[WORD]:
            return True
    return compare(buf, a, an, buf, b, bn, rules & KEYS_BACKWARD) < 0


@inner
def _check_fixed(buf, o, n, limit, rules, g):  # type: ignore[no-untyped-def]
    """SOUND, ROOM or ORDER: the n items of the LEAF2 page at o, which lie inside it."""
    h = o + g[HEADER]
    pad = u16(buf, h - 8, g[BIG])
    # `mp_upper` has no meaning here, but LMDB updates it as if each item had a pointer; it may go below zero.
    if (limit - g[BASE] - n * (pad - 2)) & 0xFFFF != u16(buf, h - 2, g[BIG]):
        return ROOM
    for i in range(1, n):
        if not _ascend(buf, h + (i - 1) * pad, pad, h + i * pad, pad, rules, g):
            return ORDER
    return SOUND


@inner
def _check_duplicates(buf, o, limit, rules, g):  # type: ignore[no-untyped-def]
    """SOUND, BOUNDS, ROOM or ORDER: the sub-page at o, of `limit` bytes."""
    big, header, base = g[BIG], g[HEADER], g[BASE]
    if limit < header:
        return BOUNDS
    flags = u16(buf, o + header - 6, big)
    if flags & ~(_DIRTY | _LEAF2) != _LEAF | _SUBP:
        return BOUNDS
    n = _check_items(buf, o, limit, flags, 1, g)
    if n == 0:
        return BOUNDS
    if flags & _LEAF2:
        return _check_fixed(buf, o, n, limit, rules, g)
    upper = u16(buf, o + header - 2, big)
    held = 0
    before, before_nbytes = o, 0
    for i in range(n):
        pointer = u16(buf, o + header + 2 * i, big)
        q = base + pointer
        if pointer < upper or pointer & 1 or q + 8 > limit:
            return BOUNDS
        k = u16(buf, o + q + 6, big)
        # A duplicate consists of its key alone: no data, no flags.
        if u32(buf, o + q, big) != 0 or u16(buf, o + q + 4, big) != 0 or q + 8 + k > limit:
            return BOUNDS
        if i > 0 and not _ascend(buf, before, before_nbytes, o + q + 8, k, rules, g):
            return ORDER
        before, before_nbytes = o + q + 8, k
        held += 8 + k + (k & 1)
    return SOUND if held == limit - base - upper else ROOM


@inner
def check_page(buf, o, pgno, rules, g):  # type: ignore[no-untyped-def]
    """SOUND if the page at o, read from page `pgno`, is a valid branch or leaf page; else the fault plus 256 x the
    item. Checks every bound of every item, the order of keys, and gaps between nodes.
    """
    big, header, base, limit, version, wide = g[BIG], g[HEADER], g[BASE], g[LIMIT], g[VERSION], g[WORD]
    if word(buf, o, g) != pgno or (version == 3 and _after(word(buf, o + wide, g), g[TXNID])):
        return BOUNDS
    flags = u16(buf, o + header - 6, big)
    if flags != _BRANCH and flags != _LEAF and flags != _LEAF | _LEAF2:
        return BOUNDS
    n = _check_items(buf, o, limit, flags, 2 if flags == _BRANCH else 1, g)
    if n == 0:
        return BOUNDS
    if flags & _LEAF2:
        return _check_fixed(buf, o, n, limit, rules, g)
    upper = u16(buf, o + header - 2, big)
    even = 1 if version == 3 else 0
    run_nbytes = wide if version == 1 else 3 * wide
    db_nbytes = 8 + 5 * wide
    # The first key of a branch page has no meaning.
    first = 1 if flags == _BRANCH else 0
    dup_rules = ((rules >> 2) & (KEYS_BACKWARD | KEYS_INTEGERS)) | ARE_DUPS
    held = 0
    before, before_nbytes = o, 0
    for i in range(n):
        pointer = u16(buf, o + header + 2 * i, big)
        q = base + pointer
        if pointer < upper or pointer & 1 or q + 8 > limit:
            return BOUNDS
        k = u16(buf, o + q + 6, big)
        if q + 8 + k > limit:
            return BOUNDS
        if i > first and not _ascend(buf, before, before_nbytes, o + q + 8, k, rules, g):
            return ORDER + 256 * i
        before, before_nbytes = o + q + 8, k
        if flags == _BRANCH:
            # No other key is empty.
            if k == 0 and i == first:
                return ORDER + 256 * i
            pgno_below = child(buf, o, i, g)
            if pgno_below < _FIRST_PAGE or pgno_below > g[LAST_PGNO]:
                return BOUNDS
            held += 8 + k + (k & 1)
            continue
        nbytes, node_flags = u32(buf, o + q, big), u16(buf, o + q + 4, big)
        data = q + 8 + k + (k & even)
        here = run_nbytes if node_flags == _BIGDATA else nbytes
        if data + here > limit:
            return BOUNDS
        held = (held + data - q + here + 1) & ~1
        if node_flags == 0:
            if rules & ARE_DUPS and nbytes != 0:
                return BOUNDS
        elif rules & ARE_DUPS:
            return BOUNDS
        elif node_flags == _BIGDATA:
            if rules & HAS_DUPS or check_run(buf, o + data, nbytes, g) < 0:
                return BOUNDS
        elif node_flags & _SUBDATA:
            if node_flags & ~(_SUBDATA | _DUPDATA) or nbytes != db_nbytes:
                return BOUNDS
            if rules & HAS_DUPS and not node_flags & _DUPDATA:
                return BOUNDS
        elif node_flags == _DUPDATA:
            found = _check_duplicates(buf, o + data, nbytes, dup_rules, g)
            if found != SOUND:
                return found if found == BOUNDS else found + _IN_DUPS + 256 * i
        else:
            return BOUNDS
    return SOUND if held == limit - base - upper else ROOM
