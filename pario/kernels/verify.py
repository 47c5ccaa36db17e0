"""Does a record's value lie where the index promised? What stands before it in the file must say so."""

from __future__ import annotations

import numpy as np

from pario.kernels.jit import inner, kernel

__all__ = ["check_nodes", "check_runs"]

_P_LEAF = 0x02
_P_OVERFLOW = 0x04
_P_LEAF2 = 0x20



@kernel
def check_runs(data, starts, offsets, nbytes, page_size, header_bytes):  # type: ignore[no-untyped-def]
    """Index of the first record whose page header is wrong, or -1.

    data : u8[k], native little-endian 64-bit LMDB pages; record i's value begins at `starts[i]` in it and at
    `offsets[i]` in the file. Values inside leaf pages have no header of their own and are passed over: a value begins
    exactly `header_bytes` after a page boundary on an overflow run, or as the first item of a LEAF2 page (other leaves
    have their pointer array there). The header must hold its own page number and, on an overflow run, the flag
    P_OVERFLOW alone and enough pages for the value. A stale or misdirected write, and most pages that a writer has
    reused since, fail this.
    """
    flags_at = header_bytes - 6
    pages_at = header_bytes - 4
    for i in range(len(starts)):
        first = offsets[i] - header_bytes
        if first % page_size:
            continue
        at = starts[i] - header_bytes
        pgno = 0
        for k in range(8):
            pgno |= int(data[at + k]) << (8 * k)
        flags = int(data[at + flags_at]) | int(data[at + flags_at + 1]) << 8
        pages = 0
        for k in range(4):
            pages |= int(data[at + pages_at + k]) << (8 * k)
        if pgno != first // page_size:
            return i
        if flags & _P_LEAF2:
            continue
        if flags != _P_OVERFLOW or pages * page_size < header_bytes + nbytes[i]:
            return i
    return -1


@inner
def _u16(data, at):  # type: ignore[no-untyped-def]
    return int(data[at]) | int(data[at + 1]) << 8


@kernel
def check_nodes(data, starts, offsets, nbytes, page_size, header_bytes, base, even):  # type: ignore[no-untyped-def]
    """Index of the first value inside a leaf page that no node of this page holds, or -1; for trees without duplicates.

    As for `check_runs`; each such value's page is in `data` from its beginning to the value's end at least.
    base: what a node's pointer counts from; even: a value begins at an even place (format 3).
    The page must have its own number and the flag P_LEAF alone, and one of its nodes a value of this length at this
    place.
    """
    node, page = -1, np.int64(-1)
    for i in range(len(starts)):
        place = (offsets[i] - 1) % page_size + 1  # an empty value may lie at the page's very end
        if place == header_bytes:
            continue
        at = starts[i] - place
        if offsets[i] - place != page:
            node, page = -1, offsets[i] - place
            pgno = 0
            for k in range(8):
                pgno |= int(data[at + k]) << (8 * k)
            if pgno != page // page_size or _u16(data, at + header_bytes - 6) != _P_LEAF:
                return i
        nodes = (_u16(data, at + header_bytes - 4) - (header_bytes - base)) >> 1
        found = False
        for _ in range(nodes):
            node = node + 1 if node + 1 < nodes else 0  # neighbours in key order are the likely ones
            pointer_at = header_bytes + 2 * node
            if pointer_at + 2 > place:
                continue
            start = base + _u16(data, at + pointer_at)
            if start + 8 > place:
                continue
            key = _u16(data, at + start + 6)
            if start + 8 + key + (key & 1 if even else 0) != place or _u16(data, at + start + 4) != 0:
                continue
            found = (_u16(data, at + start) | _u16(data, at + start + 2) << 16) == nbytes[i]
            break
        if not found:
            return i
    return -1
