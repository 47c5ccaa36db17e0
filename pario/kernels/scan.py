"""Many leaf pages of a native file (64-bit, little-endian, formats 1 to 3) -> extents of the values, and keys.

The kernel checks every bound before it reads. It stops at a page that it does not understand, and the caller's slow
path either reads that page or raises an error about it. So messages have one source.
"""

from __future__ import annotations

import numpy as np

from pario.kernels.jit import kernel

#: status: all pages done; the page needs the slow path; an output array is too small
DONE, ODD, FULL = 0, 1, 2
#: kind of the pages: leaves of a database without duplicates, with duplicates, or of the tree of one key's duplicates
MODE_PLAIN, MODE_DUPSORT, MODE_DUPS = 0, 1, 2
#: comparison of keys: byte by byte from the front, or from the end (also integers of equal width)
WAY_FORWARD, WAY_BACKWARD = 1, 2
#: the integers of geometry i64[11]
GEOMETRY = (
    "page_size", "header", "base", "limit", "version", "sum_size", "last_pgno", "txnid", "mode", "key_way", "dup_way",
)  # fmt: skip

# As in format/layout.py, which kernels do not import.
_LEAF, _DIRTY, _LEAF2, _SUBP = 0x02, 0x10, 0x20, 0x40
_BIGDATA, _DUPDATA = 0x01, 0x04
_FIRST_PAGE = 2


@kernel
def _u16(buf, i):  # type: ignore[no-untyped-def]
    return np.int64(buf[i]) | np.int64(buf[i + 1]) << 8


@kernel
def _u32(buf, i):  # type: ignore[no-untyped-def]
    return _u16(buf, i) | _u16(buf, i + 2) << 16


@kernel
def _u64(buf, i):  # type: ignore[no-untyped-def]
    return _u32(buf, i) | _u32(buf, i + 4) << 32


@kernel
def _after(txnid, snapshot):  # type: ignore[no-untyped-def]
    """Unsigned on disk: values with the highest bit are negative here."""
    return txnid < 0 or txnid > snapshot


@kernel
def _ascends(a, ai, an, b, bi, bn, way):  # type: ignore[no-untyped-def]
    """a[ai : ai + an] < b[bi : bi + bn], compared in this way."""
    common = min(an, bn)
    for j in range(common):
        if way == WAY_FORWARD:
            x, y = a[ai + j], b[bi + j]
        else:
            x, y = a[ai + an - 1 - j], b[bi + bn - 1 - j]
        if x != y:
            return x < y
    return an < bn


@kernel
def _items(buf, start, limit, file_at, pad, even, header, base, way, extents, records):  # type: ignore[no-untyped-def]
    """The duplicates in the page or sub-page at `start` with `limit` bytes: their keys are the values.

    pad : bytes of one LEAF2 item, 0 for a page of nodes; even : 1 where nodes keep even places
    Returns (status, number of records).
    """
    h = start + header
    lower, upper = _u16(buf, h - 4), _u16(buf, h - 2)
    n = (lower - (header - base)) >> 1
    if n < 1:
        return ODD, records
    if pad > 0:
        if header + n * pad > limit:
            return ODD, records
    elif lower > upper or upper > limit - base:
        return ODD, records
    if records + n > len(extents):
        return FULL, records
    before, before_n = 0, np.int64(0)
    for i in range(n):
        if pad > 0:
            key, k = header + i * pad, pad
        else:
            pointer = _u16(buf, h + 2 * i)
            q = base + pointer
            if pointer < upper or pointer & 1 or q + 8 > limit:
                return ODD, records
            k = _u16(buf, start + q + 6)
            key = q + 8
            # A duplicate consists of its key alone: no data, no flags.
            if _u32(buf, start + q) != 0 or _u16(buf, start + q + 4) != 0 or key + k + (k & even) > limit:
                return ODD, records
        if i and not _ascends(buf, start + before, before_n, buf, start + key, k, way):
            return ODD, records
        before, before_n = key, k
        extents[records + i, 0] = file_at + key
        extents[records + i, 1] = k
    return DONE, records + n


@kernel
def _leaf(buf, o, pgno, expected_pad, geometry, extents, key_data, key_nbytes, key_counts, records, keys, key_bytes):  # type: ignore[no-untyped-def]
    """One page. Returns (status, records, keys, key bytes)."""
    page_size, header, base, limit, version = geometry[0], geometry[1], geometry[2], geometry[3], geometry[4]
    sum_size, last_pgno, txnid, mode = geometry[5], geometry[6], geometry[7], geometry[8]
    odd = (ODD, records, keys, key_bytes)
    full = (FULL, records, keys, key_bytes)
    even = 1 if version == 3 else 0
    h = o + header
    if _u64(buf, o) != pgno or (version == 3 and _after(_u64(buf, o + 8), txnid)):
        return odd
    flags = _u16(buf, h - 6)
    if mode == MODE_DUPS:
        if flags != (_LEAF | _LEAF2 if expected_pad > 0 else _LEAF):
            return odd
        if expected_pad > 0 and _u16(buf, h - 8) != expected_pad:
            return odd
        status, records = _items(
            buf, o, limit, pgno * page_size, expected_pad, even, header, base, geometry[10], extents, records
        )
        return status, records, keys, key_bytes
    lower, upper = _u16(buf, h - 4), _u16(buf, h - 2)
    n = (lower - (header - base)) >> 1
    if flags != _LEAF or n < 1 or lower > upper or upper > limit - base:
        return odd
    for i in range(n):
        pointer = _u16(buf, h + 2 * i)
        q = base + pointer
        if pointer < upper or pointer & 1 or q + 8 > limit:
            return odd
        nbytes, node_flags, k = _u32(buf, o + q), _u16(buf, o + q + 4), _u16(buf, o + q + 6)
        key = q + 8
        data = key + k + (k & even)
        if data > limit or keys == len(key_nbytes) or key_bytes + k > len(key_data):
            return odd if data > limit else full
        if keys > 0:
            # The preceding key is the last that was written, across pages, too.
            before = np.int64(key_nbytes[keys - 1])
            if not _ascends(key_data, key_bytes - before, before, buf, o + key, k, geometry[9]):
                return odd
        for j in range(k):
            key_data[key_bytes + j] = buf[o + key + j]
        first = records
        if node_flags == 0:
            if data + nbytes > limit:
                return odd
            if records == len(extents):
                return full
            extents[records, 0] = pgno * page_size + data
            extents[records, 1] = nbytes
            records += 1
        elif node_flags == _BIGDATA:
            if data + (8 if version == 1 else 24) > limit:
                return odd
            if records == len(extents):
                return full
            run = _u64(buf, o + data)
            need = (header - 1 + nbytes + sum_size) // page_size + 1
            if run < _FIRST_PAGE or run > last_pgno or run + need - 1 > last_pgno:
                return odd
            if version > 1 and _u64(buf, o + data + 16) < need:
                return odd
            if version == 3 and _after(_u64(buf, o + data + 8), txnid):
                return odd
            extents[records, 0] = run * page_size + header
            extents[records, 1] = nbytes
            records += 1
        elif node_flags == _DUPDATA and mode == MODE_DUPSORT:
            if data + nbytes > limit or nbytes < header:
                return odd
            s = o + data
            sub_flags = _u16(buf, s + header - 6)
            if sub_flags & ~(_DIRTY | _LEAF2) != _LEAF | _SUBP:
                return odd
            pad = np.int64(0)
            if sub_flags & _LEAF2:
                pad = _u16(buf, s + header - 8)
                if pad == 0:
                    return odd
            status, records = _items(
                buf, s, nbytes, pgno * page_size + data, pad, even, header, base, geometry[10], extents, records
            )
            if status != DONE:
                return odd if status == ODD else full
        else:
            return odd  # a named database, a tree of duplicates, or damage
        key_nbytes[keys] = k
        if mode == MODE_DUPSORT:
            key_counts[keys] = records - first
        keys += 1
        key_bytes += k
    return DONE, records, keys, key_bytes


@kernel
def scan_leaves(buf, at, pgnos, pads, geometry, extents, key_data, key_nbytes, key_counts, page_records, state):  # type: ignore[no-untyped-def]
    """Scan leaf pages in key order, from page state[0] on; returns DONE, ODD or FULL.

    buf : u8[...], the pages; at : i64[m], where each starts; pgnos : i64[m], its number
    pads : i64[m], MODE_DUPS: bytes of a LEAF2 item, 0 for pages of nodes
    geometry : i64[11], see GEOMETRY
    extents : i64[cap, 2], offset in the data file and bytes of every value
    key_data : u8[cap], key_nbytes : u16[cap], the keys one after the other (none in MODE_DUPS)
    key_counts : i64[cap], MODE_DUPSORT: records of each key
    page_records : i64[m], records of each page
    state : i64[4], pages done, and records, keys and key bytes in the outputs; advanced by whole pages
    """
    while state[0] < len(at):
        p, records, keys, key_bytes = state[0], state[1], state[2], state[3]
        status, records, keys, key_bytes = _leaf(
            buf, at[p], pgnos[p], pads[p], geometry, extents, key_data, key_nbytes, key_counts, records, keys, key_bytes
        )
        if status != DONE:
            return status
        page_records[p] = records - state[1]
        state[0], state[1], state[2], state[3] = p + 1, records, keys, key_bytes
    return DONE
