"""The one decorator of all kernels, and the only file that reads environment variables about compilation.

* `nogil`: kernels run beside the interpreter, so that threads overlap.
* `cache`: compiled once per node. The cache lies in a node-local directory (PARIO_NUMBA_CACHE, else one below the
  system's temporary directory): on a shared file system Numba's disk cache has open faults (numba issues 4807, 10128),
  and thousands of ranks would write it at once.
  Numba notices that a cached function is stale by the file that defines it, but not by those of the kernels that it
  inlines; so the directory's name says which state of all of them it holds.
* PARIO_BOUNDSCHECK=1 (tests): every index is checked.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numba
from numba.core import config as _numba_config

__all__ = ["cache_directory", "cache_is_usable", "entry", "kernel"]

_BOUNDSCHECK = os.environ.get("PARIO_BOUNDSCHECK", "") == "1"


def cache_directory() -> str:
    """The directory that holds the compiled kernels of this user on this node."""
    suffix = "-checked" if _BOUNDSCHECK else ""
    chosen = os.environ.get("PARIO_NUMBA_CACHE") or os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return os.path.join(chosen, _sources() + suffix)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = str(os.getuid())
    return os.path.join(tempfile.gettempdir(), f"pario-numba-{user}", _sources() + suffix)


def _sources() -> str:
    """16 hex digits that change with any compiled function."""
    stamps = []
    here = os.path.dirname(__file__)
    for folder in (here, os.path.join(os.path.dirname(here), "lmdb")):
        with os.scandir(folder) as entries:
            stamps += [(e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.name.endswith(".py")]
    stamps.sort()
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def _usable(path: str) -> bool:
    """Ours, private and writable: compiled code is loaded from there, so nobody else may put files into it."""
    above = os.path.dirname(path)
    try:
        for folder in (above, path):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        # A parent that is somebody else's (not ours and not the system's) could be swapped under us.
        mine = {os.getuid(), 0}
        return os.stat(path).st_uid == os.getuid() and os.stat(above).st_uid in mine and os.access(path, os.W_OK)
    except OSError:
        return False


_DIRECTORY = cache_directory()
_CACHED = _usable(_DIRECTORY)


def cache_is_usable() -> bool:
    """Compiled kernels are kept: the directory is this user's own and writable."""
    return _CACHED

def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile on first call, without the GIL, cached on this node's disk."""
    if function is None:
        return lambda f: kernel(f, **options)
    settings: dict[str, Any] = {"nogil": True, "boundscheck": _BOUNDSCHECK, "cache": _CACHED, **options}
    return _in_our_cache(lambda: numba.njit(**settings)(function))


def entry(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile now, for one signature, and return what Python can call without Numba's look at the arguments' types: a
    tenth of a microsecond instead of a third. The interpreter's lock stays held. Cached like the kernels.
    """
    settings: dict[str, Any] = {"boundscheck": _BOUNDSCHECK, "cache": _CACHED}
    dispatcher = _in_our_cache(lambda: numba.njit([signature], **settings)(function))
    call: Callable[..., Any] = dispatcher.overloads[dispatcher.signatures[0]].entry_point
    _ENTRIES.append(dispatcher)
    return call


#: What owns the code behind the entries.
_ENTRIES: list[Any] = []


def _in_our_cache(decorate: Callable[[], Any]) -> Any:
    # Numba asks its configuration for the directory while it decorates, and only then: other users' functions keep
    # whatever place they have.
    before = _numba_config.CACHE_DIR
    _numba_config.CACHE_DIR = _DIRECTORY
    try:
        return decorate()
    finally:
        _numba_config.CACHE_DIR = before
