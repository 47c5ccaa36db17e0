"""A file none of whose bytes is in the page cache, where the folder for temporary files allows that."""

from __future__ import annotations

import os

from benchmarks.cache import Unavailable, drop_file
from pario.fetch.posix import PosixFetcher
from pario.machine import is_rotating

__all__ = ["cached", "why_not_cold"]


def cached(path: str) -> float:
    """The part of the file that is in the page cache."""
    store = PosixFetcher(path)
    try:
        return store.cached_share(0, store.nbytes) or 0.0
    finally:
        store.close()


def why_not_cold(path: str) -> str:
    """Drop the file from the page cache. Returns why that is not possible here, or nothing."""
    if is_rotating(os.stat(path).st_dev) is None:
        return "the folder for temporary files is on no disk"
    try:
        drop_file(path)
        if cached(path) > 0.1:
            return "the pages of files in the folder for temporary files stay in memory"
        drop_file(path)
    except Unavailable as e:
        return str(e)
    return ""
