"""The codes of a GIF's first image: how many clear the table, and how many say something."""

from __future__ import annotations

from pario.kernels.jit import kernel


@kernel
def gif_codes(file):  # type: ignore[no-untyped-def]
    """(codes that clear the table, other codes) of the first image of a GIF u8[n], up to its end or to damage."""
    n = file.shape[0]
    at = 13
    if n > 10 and file[10] & 0x80:
        at += 3 << (1 + (file[10] & 7))
    while at < n and file[at] == 0x21:  # an extension: its kind, then blocks up to an empty one
        at += 2
        while at < n and file[at] != 0:
            at += 1 + file[at]
        at += 1
    clears = 0
    others = 0
    if at + 9 >= n or file[at] != 0x2C:
        return clears, others
    flags = file[at + 9]
    at += 10
    if flags & 0x80:
        at += 3 << (1 + (flags & 7))
    if at >= n or file[at] < 1 or file[at] > 11:
        return clears, others
    clear = 1 << file[at]
    first = file[at] + 1
    at += 1
    width = first
    known = clear + 1
    bits = 0
    held = 0
    while at < n and file[at] != 0:
        stop = min(n, at + 1 + file[at])
        for k in range(at + 1, stop):
            bits |= file[k] << held
            held += 8
            while held >= width:
                code = bits & ((1 << width) - 1)
                bits >>= width
                held -= width
                if code == clear:
                    clears += 1
                    width = first
                    known = clear + 1
                elif code == clear + 1:
                    return clears, others
                else:
                    others += 1
                    known += 1
                    if known >= 1 << width and width < 12:
                        width += 1
        at = stop
    return clears, others
