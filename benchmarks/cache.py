"""Measures, drops and fills one file's pages in the page cache, so that a run is cold or warm for certain."""

from __future__ import annotations

import os

from pario.bench.cache import Unavailable, cached_bytes, drop_file

__all__ = ["Unavailable", "cached_bytes", "drop_file", "warm_file"]


def warm_file(path: str) -> None:
    """Read the whole file into the page cache, and check that it stays there."""
    buffer = bytearray(8 << 20)
    size = os.path.getsize(path)
    for _ in range(3):  # other programs may evict pages again
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        held = cached_bytes(path)
        if held is None or held >= 0.999 * size:
            return
    raise Unavailable(f"only {held} of {size} bytes of {path} stay in the page cache: too little memory to be warm")
