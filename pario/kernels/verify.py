"""Does a record's overflow run begin with the page header that the index promised?"""

from __future__ import annotations

from pario.kernels.jit import kernel

__all__ = ["check_runs"]

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
