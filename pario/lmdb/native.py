"""The compiled functions as Python calls them: loaded from the node's disk at the first call of each.

Where they are not on disk yet, they are run as plain Python until another process has compiled them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

from numba import types

from pario.kernels.jit import c_function, entry, is_cached, tell_cache_problem
from pario.lmdb import plain
from pario.lmdb.batches import after_values, collect, fill, find_many
from pario.lmdb.capi import intp, uintp
from pario.lmdb.compiling import Compiling
from pario.lmdb.engine import count_dups, find, get, get_method, is_newest, look, move, skip
from pario.lmdb.objects import any_object, give, method, take

__all__ = ["are_compiled", "compile_all", "compile_now", "compiled_get", "later", "native"]


def _get(txn_at, handle_at, key):  # type: ignore[no-untyped-def]
    return give(get(txn_at, handle_at, take(key)))


def _move(cursor_at, op):  # type: ignore[no-untyped-def]
    return give(move(cursor_at, op))


def _find(cursor_at, op, key, value):  # type: ignore[no-untyped-def]
    return give(find(cursor_at, op, take(key), take(value)))


def _look(cursor_at, what):  # type: ignore[no-untyped-def]
    return give(look(cursor_at, what))


def _count(cursor_at):  # type: ignore[no-untyped-def]
    return give(count_dups(cursor_at))


def _collect(cursor_at, op, started, most, most_bytes, what):  # type: ignore[no-untyped-def]
    return give(collect(cursor_at, op, started, most, most_bytes, what))


def _skip(cursor_at, op, steps):  # type: ignore[no-untyped-def]
    return give(skip(cursor_at, op, steps))


def _is_newest(store_at):  # type: ignore[no-untyped-def]
    return give(is_newest(store_at))


def _find_many(cursor_at, keys, what, jobs_at):  # type: ignore[no-untyped-def]
    return give(find_many(cursor_at, take(keys), what, jobs_at))


def _after_values(store_at, jobs_at, status, failure_at):  # type: ignore[no-untyped-def]
    return give(after_values(store_at, jobs_at, status, failure_at))


class _Function(NamedTuple):
    """store : the store's address from the first argument"""

    call: Callable[..., Any]
    signature: Any
    store: Callable[[int], int] = plain.store_of_cursor


def _itself(store_at: int) -> int:
    return store_at


_FUNCTIONS = {
    "get": _Function(_get, any_object(intp, intp, any_object), plain.store_of_txn),
    "move": _Function(_move, any_object(intp, intp)),
    "find": _Function(_find, any_object(intp, intp, any_object, any_object)),
    "look": _Function(_look, any_object(intp, intp)),
    "count": _Function(_count, any_object(intp)),
    "collect": _Function(_collect, any_object(intp, intp, intp, intp, intp, intp)),
    "skip": _Function(_skip, any_object(intp, intp, intp)),
    "is_newest": _Function(_is_newest, any_object(intp), _itself),
    "find_many": _Function(_find_many, any_object(intp, any_object, intp, intp)),
    "after_values": _Function(_after_values, any_object(intp, intp, intp, intp), _itself),
}
_METHOD = uintp(uintp, uintp, intp, uintp)
#: `batches.fill`, which other threads call without the interpreter's lock.
_FILL = _Function(fill, (intp, types.int64[:, ::1], types.int64[::1]), _itself)

#: A build of Python without the interpreter's lock: one call at a time.
_one_at_a_time = threading.Lock() if not getattr(sys, "_is_gil_enabled", lambda: True)() else None


@cache
def native(name: str) -> Callable[..., Any]:
    """One of the functions above, compiled or loaded from the node's disk when it is first requested."""
    tell_cache_problem()
    call = entry(_FUNCTIONS[name].call, _FUNCTIONS[name].signature)
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


def later(name: str, names: dict[str, Any], as_name: str) -> Callable[..., Any]:
    """A stand-in for a compiled function in `names`, the globals of a module. It runs as plain Python until all
    functions are compiled, and then replaces itself by the compiled one.
    """
    function = _FILL if name == "fill" else _FUNCTIONS[name]

    def first(*arguments: Any) -> Any:
        if not are_compiled():
            with plain.LOCK:
                if not _compiling.done:
                    return plain.run(function.call, function.store(arguments[0]), arguments)
        names[as_name] = compiled = fill if name == "fill" else native(name)
        return compiled(*arguments)

    return first


def are_compiled() -> bool:
    """Whether all functions are compiled, so that calls go to them from now on."""
    return _compiling.done or _compiling.look(_all_cached)


def compile_now() -> None:
    """From now on each function is compiled, or loaded, at its first call: for measurements, and for tests."""
    with plain.LOCK:
        _compiling.done = True


def _all_cached() -> bool:
    return (
        all(is_cached(one.call, one.signature) for one in _FUNCTIONS.values())
        and is_cached(get_method, _METHOD)
        and is_cached(fill.py_func, _FILL.signature)
    )


def compile_all() -> None:
    """Compile all functions, and save them on the node's disk."""
    for name in _FUNCTIONS:
        native(name)
    c_function(get_method, _METHOD)
    fill.compile(_FILL.signature)


_compiling = Compiling()
