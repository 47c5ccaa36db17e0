"""Checks that a record's value lies where the index says, by the header or node before it in the file."""

from __future__ import annotations

import numpy as np

from pario.kernels import nodes
from pario.kernels.jit import inner, kernel
from pario.kernels.nodes import BASE, BIG, HEADER, LIMIT, PAGE_SIZE, SUM_SIZE, TXNID, VERSION, WORD, u16, u32

#: what is wrong: the header of the value's page; none of the page's nodes holds this value
BAD_PAGE, BAD_NODE = 1, 2

# Of format/layout.py, which kernels do not import.
_LEAF, _OVERFLOW, _LEAF2 = 0x02, 0x04, 0x20
_DUPDATA = 0x04

#: Records by which pages are prefetched.
_AHEAD = 8


@inner
def _holds_item(data, o, n, at, nbytes, g):  # type: ignore[no-untyped-def]
    """Is data[at : at + nbytes] the key of one of the n items of the page or sub-page at o? In trees of duplicates and
    in sub-pages, keys are the values."""
    big, h = g[BIG], o + g[HEADER]
    if u16(data, h - 6, big) & _LEAF2:
        pad = u16(data, h - 8, big)
        return pad > 0 and nbytes == pad and at >= h and (at - h) % pad == 0 and (at - h) // pad < n
    for i in range(n):
        if h + 2 * i + 2 > at:
            return False
        start = o + g[BASE] + u16(data, h + 2 * i, big)
        if start + 8 == at:
            return u16(data, start + 6, big) == nbytes and u32(data, start, big) == 0 and u16(data, start + 4, big) == 0
    return False


@inner
def _node_before(data, o, n, at, g):  # type: ignore[no-untyped-def]
    """(number, start) of the node of the page at o that begins last before the header's length from `at`; -1: none.
    Nodes do not overlap: no other can hold what begins at `at`."""
    big, h, base = g[BIG], o + g[HEADER], o + g[BASE]
    number, best, most = np.int64(-1), np.int64(-1), at - 8 - base
    for i in range(n):
        pointer = u16(data, h + 2 * i, big)
        if best < pointer <= most:
            number, best = np.int64(i), pointer
    return number, base + best


@inner
def _guess(data, o, n, end, g):  # type: ignore[no-untyped-def]
    """Number of the node that ends at `end` in the page at o, if its n nodes are of one size and were written in key
    order, which is from the end of the page to its front."""
    limit = g[LIMIT]
    used = limit - g[BASE] - u16(data, o + g[HEADER] - 2, g[BIG])
    return (limit - end) * n // used if used > 0 else np.int64(-1)


@inner
def _is_value(data, start, at, nbytes, g):  # type: ignore[no-untyped-def]
    """Is data[at : at + nbytes] the value of the node at `start`, 8 bytes before `at` or more?"""
    big, k = g[BIG], u16(data, start + 6, g[BIG])
    value = start + 8 + k + (k & 1 if g[VERSION] == 3 else 0)
    return value == at and u32(data, start, big) == nbytes and u16(data, start + 4, big) == 0


@inner
def _holds_value(data, o, n, at, nbytes, dups, g):  # type: ignore[no-untyped-def]
    """Number of the node of the leaf page at o, of n nodes, that holds data[at : at + nbytes], or -1.

    Looks at nothing behind `at`: the page may end there in `data`.
    """
    big, h, even = g[BIG], o + g[HEADER], 1 if g[VERSION] == 3 else 0
    if n < 1 or h + 2 * n > at:
        return np.int64(-1)
    node, start = _node_before(data, o, n, at, g)
    if node < 0:
        return np.int64(-1)
    if _is_value(data, start, at, nbytes, g):
        return node
    if not dups:
        return np.int64(-1)
    size, flags, k = u32(data, start, big), u16(data, start + 4, big), u16(data, start + 6, big)
    if flags == 0 and size == 0 and start + 8 == at and k == nbytes:
        return node  # a leaf of a tree of duplicates
    value = start + 8 + k + (k & even)
    if flags == _DUPDATA and value + g[HEADER] <= at and at + nbytes <= value + size:
        items = nodes.count(data, value, g)
        if items > 0 and _holds_item(data, value, items, at, nbytes, g):
            return node
    return np.int64(-1)


@inner
def _flags_of(data, o, page, g):  # type: ignore[no-untyped-def]
    """Flags of the page at o, or -1 if it is another page than this one or was written later than our snapshot."""
    if nodes.word(data, o, g) != page:
        return np.int64(-1)
    if g[VERSION] == 3:
        txnid = nodes.word(data, o + g[WORD], g)
        if txnid < 0 or txnid > g[TXNID]:
            return np.int64(-1)
    return np.int64(u16(data, o + g[HEADER] - 6, g[BIG]))


@kernel
def check_values(data, starts, offsets, nbytes, ids, leaves, dups, g, seen):  # type: ignore[no-untyped-def]
    """(index of the first record that is not where the index says, what is wrong), or (-1, 0).

    data : u8[k]; record i's value begins at `starts[i]` in it and at `offsets[i]` in the file
    leaves : check values inside leaf pages, too; `data` must contain each such value's page from its beginning to the
    value's end. Else skip them; `data` must contain the headers of overflow pages.
    dups : keys of the database may have several values
    g : of kernels/nodes.py
    seen : u8[...], a bit per id: records that need no check, and those that passed; of length 0: check all

    A value begins exactly one header after a page boundary only on overflow pages, or as the first item of a LEAF2 page
    (other leaves have their pointer array there). The page must have its own number, no later transaction than
    ours (format 3), and: the flag P_OVERFLOW alone and enough pages for the value; or P_LEAF alone and a node with a
    value of this length at this place; or items of this length, and one at this place. A stale or misdirected write,
    and most pages that a writer has reused, fail this check. Neighbouring records of one leaf page must be as far apart
    in it as their ids (i64[m]) are.
    """
    size, header, big = g[PAGE_SIZE], g[HEADER], g[BIG]
    shift = 0
    while 1 << shift < size:
        shift += 1
    # Of the record before, so that neighbours share the check of their page's header.
    last, last_o, flags, n = np.int64(-1), np.int64(-1), np.int64(-1), np.int64(0)
    node, first_id = np.int64(0), np.int64(0)
    for i in range(len(starts)):
        page = (offsets[i] - 1) >> shift  # an empty value may lie at the page's very end
        in_page = offsets[i] - (page << shift)
        byte, bit = ids[i] >> 3, np.uint8(1 << (ids[i] & 7))
        if byte < len(seen) and seen[byte] & bit:
            continue
        if in_page != header and not leaves:
            if byte < len(seen):
                seen[byte] |= bit
            continue
        o, at = starts[i] - in_page, starts[i]
        if o < 0 or in_page < header or nbytes[i] < 0 or at > len(data):
            return i, BAD_PAGE
        again = page == last and o == last_o
        if not again:
            flags, last, last_o = _flags_of(data, o, page, g), page, o
            n = nodes.count(data, o, g)
            if i + _AHEAD < len(starts):  # in random order each page is a wait for memory, or three
                there = starts[i + _AHEAD]
                begin = there - 1 - ((offsets[i + _AHEAD] - 1) & (size - 1))
                nodes.prefetch(data, begin)
                nodes.prefetch(data, begin + 64)
                nodes.prefetch(data, there - 16)
        if flags == _OVERFLOW:
            pages = u32(data, o + header - 4, big)
            if in_page != header or pages * size < header + nbytes[i] + g[SUM_SIZE]:
                return i, BAD_PAGE
        elif flags == _LEAF and leaves and in_page != header:
            likely = node + 1 if again else _guess(data, o, n, in_page + nbytes[i], g)
            # Not in a function of its own: the references that Numba counts for each call took four times as long.
            found = np.int64(-1)
            if 0 <= likely < n and o + header + 2 * n <= at:
                start = nodes.node_at(data, o, likely, g)
                if start + 8 <= at and _is_value(data, start, at, nbytes[i], g):
                    found = np.int64(likely)
            if found < 0:
                found = _holds_value(data, o, n, at, nbytes[i], dups, g)
            if found < 0 or (again and not dups and ids[i] - found != first_id):
                return i, BAD_NODE
            node, first_id = found, ids[i] - found
        elif flags == _LEAF | _LEAF2:
            if not dups or not _holds_item(data, o, n, at, nbytes[i], g):
                return i, BAD_NODE
        else:
            return i, BAD_PAGE
        if byte < len(seen):  # another thread may lose a bit of this byte: then its record is checked once more
            seen[byte] |= bit
    return -1, 0
