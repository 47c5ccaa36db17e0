"""Pages, nodes and sub-pages of any LMDB data file, for kernels that search and walk a tree: loads, checks, searches.

A page (or a sub-page, which has the same shape) starts at byte `o` of `buf`. `check_page` looks at every bound of a
page once, when it has just been read; the other functions trust it. What `check_page` does not like, the caller shows
to format/page.py, which knows the words for it.

`g` is an i64 array that describes the file, its first words being those named in FILE.
"""

from __future__ import annotations

import numpy as np
from numba import types

from pario.kernels.jit import kernel

__all__ = [
    "BACKWARD", "BASE", "BIG", "FILE", "FILE_BYTES", "FORWARD", "HEADER", "LAST_PGNO", "LIMIT", "PAGE_SIZE",
    "SUM_SIZE", "TXNID", "VERSION", "WORD", "check_page", "check_run", "child", "compare", "count", "key_span",
    "node_at", "search_branch", "search_leaf", "u16", "u32", "word",
]  # fmt: skip

#: The words of `g` that describe a file: bytes, except `big` (byte order of the file: 1 = big-endian).
FILE = (
    "page_size", "header", "base", "limit", "version", "word", "big", "sum_size", "last_pgno", "txnid", "file_bytes",
)  # fmt: skip
PAGE_SIZE, HEADER, BASE, LIMIT, VERSION, WORD, BIG, SUM_SIZE, LAST_PGNO, TXNID, FILE_BYTES = range(len(FILE))

#: How keys compare: byte by byte from the front, or from the end.
FORWARD, BACKWARD = 0, 1

# Of format/layout.py, which kernels do not import.
_BRANCH, _LEAF, _DIRTY, _LEAF2, _SUBP = 0x01, 0x02, 0x10, 0x20, 0x40
_BIGDATA, _SUBDATA, _DUPDATA = 0x01, 0x02, 0x04
_FIRST_PAGE = 2

_memcmp = types.ExternalFunction("memcmp", types.intc(types.uintp, types.uintp, types.uintp))


@kernel
def u16(buf, i, big):  # type: ignore[no-untyped-def]
    if big:
        return np.int64(buf[i]) << 8 | np.int64(buf[i + 1])
    return np.int64(buf[i]) | np.int64(buf[i + 1]) << 8


@kernel
def u32(buf, i, big):  # type: ignore[no-untyped-def]
    if big:
        return u16(buf, i, big) << 16 | u16(buf, i + 2, big)
    return u16(buf, i, big) | u16(buf, i + 2, big) << 16


@kernel
def word(buf, i, g):  # type: ignore[no-untyped-def]
    """A page number, txnid or counter. Unsigned on disk: what has the highest of 64 bits is negative here."""
    big = g[BIG]
    if g[WORD] == 4:
        return u32(buf, i, big)
    if big:
        return u32(buf, i, big) << 32 | u32(buf, i + 4, big)
    return u32(buf, i, big) | u32(buf, i + 4, big) << 32


@kernel
def _after(txnid, snapshot):  # type: ignore[no-untyped-def]
    return txnid < 0 or txnid > snapshot


@kernel
def count(buf, o, g):  # type: ignore[no-untyped-def]
    """Items of the page at o."""
    return (u16(buf, o + g[HEADER] - 4, g[BIG]) - (g[HEADER] - g[BASE])) >> 1


@kernel
def node_at(buf, o, i, g):  # type: ignore[no-untyped-def]
    """Where node i starts in buf."""
    return o + g[BASE] + u16(buf, o + g[HEADER] + 2 * i, g[BIG])


@kernel
def child(buf, o, i, g):  # type: ignore[no-untyped-def]
    """Page number of child i of a branch page."""
    at = node_at(buf, o, i, g)
    low = u32(buf, at, g[BIG])
    return low | u16(buf, at + 4, g[BIG]) << 32 if g[WORD] == 8 else low


@kernel
def key_span(buf, o, i, g):  # type: ignore[no-untyped-def]
    """(start in buf, bytes) of the key of item i."""
    h = o + g[HEADER]
    if u16(buf, h - 6, g[BIG]) & _LEAF2:
        pad = u16(buf, h - 8, g[BIG])
        return h + i * pad, pad
    at = node_at(buf, o, i, g)
    return at + 8, u16(buf, at + 6, g[BIG])


@kernel
def compare(a, ai, an, b, bi, bn, way):  # type: ignore[no-untyped-def]
    """< 0, 0 or > 0 as a[ai : ai + an] is less than, equal to or greater than b[bi : bi + bn]."""
    common = min(an, bn)
    if way == FORWARD:
        order = np.int64(_memcmp(types.uintp(a.ctypes.data + ai), types.uintp(b.ctypes.data + bi), types.uintp(common)))
        if order != 0:
            return order
    else:
        for j in range(1, common + 1):
            x, y = np.int64(a[ai + an - j]), np.int64(b[bi + bn - j])
            if x != y:
                return x - y
    return np.int64(an - bn)


@kernel
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


@kernel
def search_leaf(buf, o, key, way, g):  # type: ignore[no-untyped-def]
    """(the first item that is >= key, whether it is equal)"""
    n = count(buf, o, g)
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        start, nbytes = key_span(buf, o, middle, g)
        order = compare(buf, start, nbytes, key, 0, len(key), way)
        if order == 0:
            return middle, True
        if order < 0:
            low = middle + 1
        else:
            high = middle
    return low, False


@kernel
def check_run(buf, at, nbytes, g):  # type: ignore[no-untyped-def]
    """First page of the overflow run of a value of `nbytes` bytes whose place stands at buf[at]; -1 if impossible."""
    run = word(buf, at, g)
    need = (g[HEADER] - 1 + nbytes + g[SUM_SIZE]) // g[PAGE_SIZE] + 1
    if run < _FIRST_PAGE or run > g[LAST_PGNO] or run + need - 1 > g[LAST_PGNO]:
        return np.int64(-1)
    if g[VERSION] > 1:
        pages = word(buf, at + 2 * g[WORD], g)
        if 0 <= pages < need or (g[VERSION] == 3 and _after(word(buf, at + g[WORD], g), g[TXNID])):
            return np.int64(-1)
    return run


@kernel
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


@kernel
def _check_duplicates(buf, o, limit, g):  # type: ignore[no-untyped-def]
    """Is the sub-page at o, of `limit` bytes, sound?"""
    big, header, base = g[BIG], g[HEADER], g[BASE]
    if limit < header:
        return False
    flags = u16(buf, o + header - 6, big)
    if flags & ~(_DIRTY | _LEAF2) != _LEAF | _SUBP:
        return False
    n = _check_items(buf, o, limit, flags, 1, g)
    if n == 0:
        return False
    if flags & _LEAF2:
        return True
    upper = u16(buf, o + header - 2, big)
    for i in range(n):
        pointer = u16(buf, o + header + 2 * i, big)
        q = base + pointer
        if pointer < upper or pointer & 1 or q + 8 > limit:
            return False
        # A duplicate is all key: no data, no flags.
        if u32(buf, o + q, big) != 0 or u16(buf, o + q + 4, big) != 0 or q + 8 + u16(buf, o + q + 6, big) > limit:
            return False
    return True


@kernel
def check_page(buf, o, pgno, g):  # type: ignore[no-untyped-def]
    """Is the page at o, read from page `pgno`, a sound branch or leaf page? Looks at every bound of every item."""
    big, header, base, limit, version, wide = g[BIG], g[HEADER], g[BASE], g[LIMIT], g[VERSION], g[WORD]
    if word(buf, o, g) != pgno or (version == 3 and _after(word(buf, o + wide, g), g[TXNID])):
        return False
    flags = u16(buf, o + header - 6, big)
    if flags != _BRANCH and flags != _LEAF and flags != _LEAF | _LEAF2:
        return False
    n = _check_items(buf, o, limit, flags, 2 if flags == _BRANCH else 1, g)
    if n == 0:
        return False
    if flags & _LEAF2:
        return True
    upper = u16(buf, o + header - 2, big)
    even = 1 if version == 3 else 0
    db_nbytes = 8 + 5 * wide
    for i in range(n):
        pointer = u16(buf, o + header + 2 * i, big)
        q = base + pointer
        if pointer < upper or pointer & 1 or q + 8 > limit:
            return False
        k = u16(buf, o + q + 6, big)
        if q + 8 + k > limit:
            return False
        if flags == _BRANCH:
            pgno_below = child(buf, o, i, g)
            if pgno_below < _FIRST_PAGE or pgno_below > g[LAST_PGNO]:
                return False
            continue
        nbytes, node_flags = u32(buf, o + q, big), u16(buf, o + q + 4, big)
        data = q + 8 + k + (k & even)
        if node_flags == _BIGDATA:
            if data + (wide if version == 1 else 3 * wide) > limit or check_run(buf, o + data, nbytes, g) < 0:
                return False
        elif data + nbytes > limit:
            return False
        elif node_flags & _SUBDATA:
            if node_flags & ~(_SUBDATA | _DUPDATA) or nbytes != db_nbytes:
                return False
        elif node_flags == _DUPDATA:
            if not _check_duplicates(buf, o + data, nbytes, g):
                return False
        elif node_flags != 0:
            return False
    return True
