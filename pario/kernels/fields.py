"""Copies the fields of records with a fixed binary layout to arrays, in one pass over the records."""

from __future__ import annotations

from pario.kernels.jit import kernel
from pario.kernels.pack import copy_bytes, foresee, move_bytes, settle


@kernel
def pack_fields(data, starts, nbytes, record_nbytes, spans, out, places, failed):  # type: ignore[no-untyped-def]
    """Spans of each record to rows of arrays, for records of exactly record_nbytes bytes that lie inside data.

    spans : i64[k, 4], for each where it begins in a record, its bytes, where it begins in a row, and the row's bytes
    out : u8[n * the row's bytes], for the first spans
    places : i64[m, 2], for each of the last m spans the address of an array of its own, C-contiguous with n rows
        (unchecked), and whether it is written past the caches
    Leaves the rows of other records unchanged, writes their numbers to failed i64[n], and returns how many.
    """
    n, first = 0, len(spans) - len(places)
    for i in range(len(starts)):
        at = starts[i]
        if i + 1 < len(starts):
            foresee(data, starts[i + 1], nbytes[i + 1], starts[min(i + 2, len(starts) - 1)])
        if nbytes[i] == record_nbytes and at >= 0 and at <= len(data) - record_nbytes:
            for k in range(len(spans)):
                begin, size, column, row_nbytes = spans[k]
                to = i * row_nbytes + column
                if k < first:
                    copy_bytes(out, to, data, at + begin, size)
                else:
                    to += places[k - first, 0] - out.ctypes.data
                    move_bytes(out, to, data, at + begin, size, places[k - first, 1])
        else:
            failed[n] = i
            n += 1
    settle(True)
    return n
