"""The one decorator of all kernels, and the only file that reads environment variables about compilation.

* `nogil`: kernels run beside the interpreter, so that threads overlap.
* `cache`: compiled once per node. The cache lies in a node-local directory (PARIO_NUMBA_CACHE, else one below the
  system's temporary directory): on a shared file system Numba's disk cache has open faults (numba issues 4807, 10128),
  and thousands of ranks would write it at once.
  Numba notices that a cached function is stale by the file that defines it, but not by those of the kernels that it
  inlines; so the directory's name says which state of all of them it holds.
* Once: a process that finds a kernel missing locks a file beside the cache, compiles, saves; whoever comes meanwhile
  sleeps until then and loads. The system takes a lock back from a process that dies.
* PARIO_BOUNDSCHECK=1 (tests): every index is checked.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numba
from numba.core import config as _numba_config
from numba.core import sigutils
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.types import unliteral  # type: ignore[attr-defined]

__all__ = ["c_function", "cache_directory", "cache_is_usable", "entry", "inner", "kernel", "warm_up"]

_BOUNDSCHECK = os.environ.get("PARIO_BOUNDSCHECK", "") == "1"

#: Seconds after which a process compiles for itself, whatever the one with the lock is doing: the slowest kernel takes
#: some seconds.
_PATIENCE_S = 120.0
#: Seconds between two looks at a lock, growing from the first to the second.
_PAUSES_S = (0.002, 0.05)


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
    return _cached(numba.njit(**{"nogil": True, "boundscheck": _BOUNDSCHECK, **options})(function), function)


def inner(function: Callable[..., Any]) -> Any:
    """A kernel that only kernels call: no wrappers for Python and C, and no variants for numbers known when it is
    compiled (LLVM sees these when it inlines). A third less time to compile.
    """
    dispatcher = kernel(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    template = dispatcher.get_call_template

    def plain(args: Any, kws: Any) -> Any:
        return template(tuple(map(unliteral, args)), {name: unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = plain
    return dispatcher


def entry(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile now, for one signature, and return what Python can call without Numba's look at the arguments' types: a
    tenth of a microsecond instead of a third. The interpreter's lock stays held. Cached like the kernels.
    """
    dispatcher = _cached(numba.njit(boundscheck=_BOUNDSCHECK)(function), function)
    dispatcher.compile(signature)
    call: Callable[..., Any] = dispatcher.overloads[dispatcher.signatures[0]].entry_point
    _ENTRIES.append(dispatcher)
    return call


def c_function(function: Callable[..., Any], signature: Any) -> int:
    """Compile now, and return the address of a function that C may call with the interpreter's lock held. Cached."""
    made = CFunc(function, sigutils.normalize_signature(signature), {}, {"boundscheck": _BOUNDSCHECK})
    _cached(made, function).compile()
    _ENTRIES.append(made)
    assert made.address is not None  # compiled
    address: int = made.address
    return address


def warm_up() -> None:
    """Let Numba load its own parts now: some 0.3 s, which the first kernel that is called costs otherwise."""
    _nothing()


#: What owns the code behind the entries.
_ENTRIES: list[Any] = []


def _cached(made: Any, function: Callable[..., Any]) -> Any:
    if _CACHED:
        made._cache = _OnceCache(function)
    return made


class _OnceCache(FunctionCache):
    """Numba's cache of one function, which lets one process per node compile it.

    Numba calls load, compiles if that brings None, and calls save. In between this process holds the function's lock.
    A function that calls others compiles them meanwhile; nobody waits in a circle, since no kernels call each other.
    Made on first use: it asks the file system a few things, and a process uses few of the kernels that it imports.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._made = False
        self._lock_path = os.path.join(_DIRECTORY, f"{function.__module__}.{function.__qualname__}.lock")
        self._held = -1

    def _make(self) -> None:
        if not self._made:
            # Numba asks its configuration for the directory while it makes the cache, and only then: other users'
            # functions keep whatever place they have.
            before = _numba_config.CACHE_DIR
            _numba_config.CACHE_DIR = _DIRECTORY
            try:
                super().__init__(self._function)
            finally:
                _numba_config.CACHE_DIR = before
            self._made = True

    @property
    def cache_path(self) -> str:
        self._make()
        return str(super().cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        self._make()
        found = super().load_overload(sig, target_context)
        if found is None and self._held < 0:
            self._held = _locked(self._lock_path)
            found = super().load_overload(sig, target_context)  # somebody may have been quicker
            if found is not None:
                self._release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        finally:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)


def _locked(path: str) -> int:
    """An open file that holds the lock; -1 where files cannot be locked, or the lock is not to be had."""
    pause, longest = _PAUSES_S
    end = time.monotonic() + _PATIENCE_S
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(pause)
                pause = min(2 * pause, longest)
                continue
        except OSError:  # a file system without locks
            pass
        os.close(fd)
        return -1


@kernel
def _nothing():  # type: ignore[no-untyped-def]
    return 0
