"""Parts of the reserved entry are deflated, and anybody may have written them: a few bytes can say that they are
terabytes."""

from __future__ import annotations

import zlib

__all__ = ["inflated"]


def inflated(part: bytes, most: int) -> bytes:
    """What the part inflates to. Raises ValueError if it is damaged, or if that is more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(part, most + 1)
    except zlib.error as e:
        raise ValueError(str(e)) from None
    if len(found) > most:
        raise ValueError(f"it inflates to more than {most:,} bytes")
    if not stream.eof:
        raise ValueError("it ends too early")
    return found
