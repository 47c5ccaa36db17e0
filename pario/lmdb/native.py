"""The compiled functions as Python calls them: loaded from the node's disk at the first call of each.

Where they are not there yet, the first call compiles all of them. Other processes wait for those that they need
(kernels/cache.py).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from numba import types

from pario.kernels.jit import c_function, entry, is_cached, tell_cache_problem
from pario.lmdb.batches import after_values, collect, fill, find_many
from pario.lmdb.capi import intp, uintp
from pario.lmdb.engine import find, get, get_method, is_newest, look, move
from pario.lmdb.objects import any_object, method

#: name -> function and signature
_FUNCTIONS: dict[str, tuple[Callable[..., Any], Any]] = {
    "get": (get, any_object(intp, intp, any_object)),
    "move": (move, any_object(intp, intp)),
    "find": (find, any_object(intp, intp, any_object, any_object)),
    "look": (look, any_object(intp, intp)),
    "collect": (collect, any_object(intp, intp, intp, intp, intp, intp)),
    "is_newest": (is_newest, any_object(intp)),
    "find_many": (find_many, any_object(intp, any_object, intp, intp)),
    "after_values": (after_values, any_object(intp, intp, intp, intp)),
}
_METHOD = uintp(uintp, uintp, intp, uintp)
#: `batches.fill`, which other threads call without the interpreter's lock.
_FILL = intp, types.int64[:, ::1], types.int64[::1]

#: A build of Python without the interpreter's lock: one call at a time.
_one_at_a_time = threading.Lock() if not getattr(sys, "_is_gil_enabled", lambda: True)() else None


@cache
def native(name: str) -> Callable[..., Any]:
    """One of the functions above, compiled or loaded from the node's disk when it is first requested."""
    tell_cache_problem()
    call = entry(*_FUNCTIONS[name])
    if _one_at_a_time is None:
        return call
    lock = _one_at_a_time

    @wraps(call)
    def locked(*given: Any) -> Any:
        with lock:
            return call(*given)

    return locked


def compiled_get(kind: type, doc: str) -> Any:
    """`engine.get_method` as a method of `kind`; None where Python or its objects are not as that function expects."""
    if sys.implementation.name != "cpython" or _one_at_a_time is not None:
        return None
    return method(kind, "get", doc, c_function(get_method, _METHOD))


def later(name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A stand-in for a compiled function, _NAME in `names`, the globals of a module: its first call puts that in its
    place."""

    def first(*arguments: Any) -> Any:
        compile_now()
        names["_" + name] = compiled = fill if name == "fill" else native(name)
        return compiled(*arguments)

    return first


@cache
def compile_now() -> None:
    """Compile all functions, unless the node's disk has them."""
    if not is_cached(fill.py_func, _FILL):  # the last one of them
        logging.getLogger("pario").warning("pario.lmdb's kernels are compiled, once on this machine: some 20 s")
        for name in _FUNCTIONS:
            native(name)
        c_function(get_method, _METHOD)
        fill.compile(_FILL)
