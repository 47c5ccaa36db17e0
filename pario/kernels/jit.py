"""The one decorator of all kernels, and the only file that reads environment variables about compilation.

* `nogil`: kernels run beside the interpreter, so that threads overlap.
* `cache`: kernels compile once per node. The cache is a node-local directory (PARIO_NUMBA_CACHE, else one below the
  system's temporary directory): on a shared file system Numba's disk cache has open bugs (numba issues 4807, 10128),
  and thousands of ranks would write it at once. cache.py and private.py say how it is written and protected. A cached
  function is stale if its own file changes (cache.py), and also if the kernels that it inlines change, so the
  directory's name contains a digest of all of them.
* PARIO_BOUNDSCHECK=1 (tests): kernels check every index.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from functools import wraps
from glob import glob
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.core.types import unliteral  # type: ignore[attr-defined]
from numba.extending import intrinsic

from pario.kernels.cache import KernelCache
from pario.kernels.private import PrivateDirectory

_log = logging.getLogger("pario")

_BOUNDSCHECK = os.environ.get("PARIO_BOUNDSCHECK", "") == "1"


def cache_directory() -> str:
    """The directory that holds the compiled kernels of this user on this node."""
    suffix = "-checked" if _BOUNDSCHECK else ""
    chosen = os.environ.get("PARIO_NUMBA_CACHE") or os.environ.get("NUMBA_CACHE_DIR")
    if not chosen:
        # By number, because users may have no name in passwd.
        chosen = os.path.join(_temporary(), f"pario-numba-{os.geteuid()}")
    return os.path.abspath(os.path.join(os.path.expanduser(chosen), _sources() + suffix))


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # not writable: `cache_problem` reports it
        return "/tmp"


def _sources() -> str:
    """16 hex digits that change with any compiled function and with the compiler."""
    stamps: list[object] = [sys.version, numba.__version__, llvmlite.__version__, np.__version__]
    here = os.path.dirname(__file__)
    for folder in (here, os.path.join(os.path.dirname(here), "lmdb")):
        with os.scandir(folder) as entries:
            stamps += sorted(
                (e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in entries if e.name.endswith(".py")
            )
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


_FOLDER = PrivateDirectory(cache_directory())


def cache_problem() -> str:
    """The reason why every process compiles the kernels; "" if they are cached."""
    return _FOLDER.problem()


def tell_cache_problem(rank: int = 0) -> None:
    """Log what is wrong with the cache, or that a machine's first run takes long: once, and in a job only on rank 0."""
    global _told
    told, _told = _told, True
    if told or rank:
        return
    if problem := cache_problem():
        _log.warning(
            "compiled kernels are not kept, so that every process compiles them again: %s. Set PARIO_NUMBA_CACHE to a "
            "directory on a local disk into which nobody but you can write.",
            problem,
        )
    elif len(glob(f"{_FOLDER.path}/*.nbc")) < _FIRST_RUN:
        _log.warning("pario's kernels are compiled, once on this machine: up to a minute")


#: With fewer signatures kept this is the machine's first run.
_FIRST_RUN = 10
_told = False


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile on first call, without the GIL, cached on this node's disk."""
    if function is None:
        return lambda f: kernel(f, **options)
    return _cached(numba.njit(**{"nogil": True, "boundscheck": _BOUNDSCHECK, **options})(function), function)


def inner(function: Callable[..., Any]) -> Any:
    """A kernel that only kernels call: without wrappers for Python and C, and without variants for constants (LLVM sees
    these when it inlines). This saves a third of the compile time.
    """
    dispatcher = kernel(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    template = dispatcher.get_call_template

    def plain(args: Any, kws: Any) -> Any:
        return template(tuple(map(unliteral, args)), {name: unliteral(kind) for name, kind in kws.items()})

    dispatcher.get_call_template = plain
    return dispatcher


#: Of `emitted`: any array.
ARRAY = numba.types.Array


def emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function for kernels, of what emits LLVM's instructions for it: emit(builder, *arguments) -> its value, which
    counts unless `result` is void.

    result, kinds : types of Numba, of the value and of each argument. ARRAY: `emit` gets the address of its first
        element
    """

    def made(emit: Callable[..., Any]) -> Any:
        @wraps(emit)  # whose parameters Numba looks at
        def typed(typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                values = [
                    context.make_array(kind)(context, builder, value).data if isinstance(kind, ARRAY) else value
                    for kind, value in zip(signature.args, arguments, strict=True)
                ]
                found = emit(builder, *values)
                return context.get_dummy_value() if result is numba.types.void else found

            taken = zip(kinds, given, strict=True)
            return result(*(its if kind is ARRAY else kind for kind, its in taken)), generate

        return intrinsic(typed)

    return made


def entry(function: Callable[..., Any], signature: Any) -> Callable[..., Any]:
    """Compile now, for one signature, and return a callable that skips Numba's type dispatch: a tenth of a microsecond
    per call instead of a third. The call holds the GIL. Cached like the kernels.
    """
    dispatcher = _cached(numba.njit(boundscheck=_BOUNDSCHECK)(function), function)
    dispatcher.compile(signature)
    call: Callable[..., Any] = dispatcher.overloads[dispatcher.signatures[0]].entry_point
    _ENTRIES.append(dispatcher)
    return call


def c_function(function: Callable[..., Any], signature: Any) -> int:
    """Compile now, and return the address of a function that C may call while it holds the GIL. Cached."""
    made = CFunc(function, sigutils.normalize_signature(signature), {}, {"boundscheck": _BOUNDSCHECK})
    _cached(made, function).compile()
    _ENTRIES.append(made)
    assert made.address is not None  # compiled
    address: int = made.address
    return address


def is_cached(function: Callable[..., Any], signature: Any) -> bool:
    """Whether `entry`, `c_function` or a kernel's `compile` would load this from the node's disk."""
    return KernelCache(function, _FOLDER).holds(signature, cpu_target.target_context.codegen())


def warm_up() -> None:
    """Let Numba prepare its run-time parts now: a few hundredths of a second, which the first kernel call would pay."""
    _nothing(np.empty(0))


def _nothing_yet() -> None:
    """In place of a search of every installed package for extensions of Numba before it looks for a kept kernel: the
    compiler does that, too."""


#: Owners of the code behind the entries.
_ENTRIES: list[Any] = []


def _cached(made: Any, function: Callable[..., Any]) -> Any:
    made._cache = KernelCache(function, _FOLDER)
    made._compilation_chain_init_hook = _nothing_yet
    return made


@kernel
def _nothing(array):  # type: ignore[no-untyped-def]
    return len(array)
