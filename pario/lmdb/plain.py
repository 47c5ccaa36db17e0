"""Runs the compiled functions as plain Python until they are compiled (compiling.py).

Nothing is written twice. The bytecode of the same functions runs with other globals: what they call is interpreted too,
addresses become memoryviews, and what they call of C (capi.py) is called by ctypes. Python's objects are themselves
here, not addresses; those that C would make by an address and a size are copied from there.

Compiled functions hold the interpreter's lock except while they read, and count on it. Here `LOCK` has that part:

* One call at a time, and none beside a compiled one: native.py changes from these to those with `LOCK` held.
* A destructor or a handler of signals may call again in the middle of a call. It gets a cache of pages of its own.
* An exception (an interrupt, say) may leave the cache of pages half changed: it is emptied.
* A fork waits for the end of a call.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from pario.kernels.nodes import PAGE_SIZE
from pario.lmdb import abi

__all__ = ["LOCK", "busy", "run"]

LOCK = threading.RLock()
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)

#: Pages of the cache of a call within a call: more than one descent needs.
_FEW_PAGES = 128

#: How many calls are being executed: more than one if a destructor or a handler of signals calls.
_depth = 0
#: Memory that lives until the outermost call ends, in place of the stack.
_scratch: list[Any] = []


def busy() -> bool:
    """Whether the thread that holds LOCK is in the middle of a call."""
    return _depth > 0


def run(function: Any, store_at: int, arguments: tuple[Any, ...]) -> Any:
    """Call a compiled function as plain Python, with LOCK held. store_at : of its store, 0 for a closed one"""
    global _depth
    g = as_words(store_at, abi.STORE_WORDS) if store_at else None
    with _cache_of_its_own(g) if _depth and g else contextlib.nullcontext():
        _depth += 1
        try:
            return interpreted(function)(*arguments)
        except BaseException:
            if g:
                _forget_pages(g)
            raise
        finally:
            _depth -= 1
            if not _depth:
                _scratch.clear()


def store_of_txn(txn_at: int) -> int:
    return as_words(txn_at, abi.TXN_WORDS)[abi.STORE] if txn_at else 0


def store_of_cursor(cursor_at: int) -> int:
    return store_of_txn(as_words(cursor_at, abi.CURSOR_WORDS)[abi.C_TXN])


# -- the same bytecode, other globals ----------------------------------------------------------------------------------

_functions: dict[Any, FunctionType] = {}
_globals: dict[int, dict[str, Any]] = {}


def interpreted(function: Any) -> FunctionType:
    """A compiled function, or one that is to be compiled, as a Python function that calls others like it."""
    source = getattr(function, "py_func", function)
    made = _functions.get(source)
    if made is None:
        made = FunctionType(source.__code__, _other_globals(source.__globals__), source.__name__)
        _functions[source] = made
    return made


def _other_globals(names: dict[str, Any]) -> dict[str, Any]:
    found = _globals.get(id(names))
    if found is None:
        found = _globals[id(names)] = dict(names)
        for name, value in names.items():
            if name in _INSTEAD:
                found[name] = _INSTEAD[name]
            elif isinstance(value, Dispatcher):
                found[name] = interpreted(value)
    return found


# -- memory ------------------------------------------------------------------------------------------------------------


@lru_cache(256)
def as_words(address: int, n: int) -> Any:
    """The n words at an address, as Python's numbers."""
    if n == 0:
        return memoryview(array("q"))
    return memoryview((ctypes.c_int64 * n).from_address(address)).cast("B").cast("q")


@lru_cache(256)
def _as_bytes(address: int, n: int) -> Any:
    return memoryview((ctypes.c_uint8 * n).from_address(address)).cast("B")


def _add_at(address: int, n: int) -> int:
    """Not in one step: an addition of another process may be lost, and a value then stays in memory for longer."""
    word = as_words(address, 1)
    before: int = word[0]
    word[0] = before + n
    return before


def _scratch_memory() -> int:
    _scratch.append(memory := (ctypes.c_int64 * 32)())
    return ctypes.addressof(memory)


def _copy_bytes(out: Any, out_at: int, src: Any, src_at: int, nbytes: int) -> None:
    out[out_at : out_at + nbytes] = memoryview(src)[src_at : src_at + nbytes]


def _loader(code: str) -> Callable[[Any, int], int]:
    unpack = struct.Struct(code).unpack_from

    def load(buf: Any, at: int) -> int:
        number: int = unpack(buf, at)[0]
        return number

    return load


def _first_byte_first(x: int) -> int:
    return int.from_bytes(x.to_bytes(8, "little", signed=True), "big")


def _forget_pages(g: Any) -> None:
    as_words(g[abi.TABLE], g[abi.MASK] + 1)[:] = array("q", bytes(8 * (g[abi.MASK] + 1)))
    as_words(g[abi.PAGE_OF], g[abi.SLOTS])[:] = array("q", [-1]) * g[abi.SLOTS]


@contextlib.contextmanager
def _cache_of_its_own(g: Any) -> Iterator[None]:
    # A handler of signals ends before the call that it interrupted goes on, and nobody else calls meanwhile.
    fields = slice(abi.POOL, abi.ERROR + abi.ERROR_WORDS)
    saved = array("q", g[fields])
    pool = np.empty(_FEW_PAGES * g[PAGE_SIZE], np.uint8)
    table, page_of = np.zeros(2 * _FEW_PAGES, np.int64), np.full(_FEW_PAGES, -1, np.int64)
    lives = np.zeros(_FEW_PAGES, np.uint8)
    g[abi.POOL], g[abi.SLOTS], g[abi.HAND] = pool.ctypes.data, _FEW_PAGES, 0
    g[abi.TABLE], g[abi.MASK] = table.ctypes.data, len(table) - 1
    g[abi.PAGE_OF], g[abi.LIVES] = page_of.ctypes.data, lives.ctypes.data
    try:
        yield
    finally:
        g[fields] = saved


# -- C -----------------------------------------------------------------------------------------------------------------


def _system(name: str, result: Any, *kinds: Any, lets_others_run: bool = True) -> Any:
    library = ctypes.CDLL if lets_others_run else ctypes.PyDLL
    function = library(None, use_errno=True)[name]
    function.restype, function.argtypes = result, kinds
    return function


_int, _size, _offset = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_int64

#: Of a bytes object before its bytes. (The last of its basic size is the NUL behind them.)
_BYTES_AT = bytes.__basicsize__ - 1


def _new_bytes(address: int, nbytes: int) -> bytes:
    """As PyBytes_FromStringAndSize: with address 0 the caller fills it."""
    made: bytes = _bytes_from(address or None, nbytes)
    return made


_bytes_from = ctypes.pythonapi["PyBytes_FromStringAndSize"]
_bytes_from.restype, _bytes_from.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t)


def _error(g: Any) -> bytearray:
    return bytearray(g[abi.ERROR : abi.ERROR + abi.ERROR_WORDS])


def _plain_error(code: int) -> bytearray:
    return bytearray(array("q", [code, *[0] * (abi.ERROR_WORDS - 1)]))


def _none_is_null(key: Any, value: Any) -> bool:
    return isinstance(key, int) or isinstance(value, int)


class _Numpy:
    """numpy, whose i64 are Python's numbers: these do not overflow, and compare with those out of memoryviews."""

    int64 = int

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


#: What functions find under these names in place of what is compiled.
_INSTEAD: dict[str, Any] = {
    "np": _Numpy(),
    "types": SimpleNamespace(int64=int),
    **dict.fromkeys(("intp", "uintp", "intc"), int),
    # kernels/nodes.py, kernels/pack.py
    **{f"_load{bits}": _loader(code) for bits, code in ((8, "<B"), (16, "<H"), (32, "<I"), (64, "<q"))},
    "_first_byte_first": _first_byte_first,
    "prefetch": lambda buf, at: None,
    "copy_bytes": _copy_bytes,
    "full_fence": lambda: None,  # the interpreter's lock is one
    # capi.py
    "as_words": as_words,
    "as_bytes": _as_bytes,
    "scratch_memory": _scratch_memory,
    "add_at": _add_at,
    "usleep": lambda microseconds: time.sleep(microseconds * 1e-6),
    "preadv": _system("preadv", _size, _int, ctypes.c_void_p, _int, _offset),
    # Those that never wait keep the interpreter's lock, as where they are compiled.
    "preadv2": _system("preadv2", _size, _int, ctypes.c_void_p, _int, _offset, _int, lets_others_run=False),
    "pread": _system("pread", _size, _int, ctypes.c_void_p, ctypes.c_size_t, _offset),
    "fadvise": _system("posix_fadvise", _int, _int, _offset, _offset, _int),
    "memcmp": _system("memcmp", _int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, lets_others_run=False),
    "_errno": ctypes.get_errno,
    "save_thread": lambda: 0,
    "restore_thread": lambda thread: None,
    "incref": lambda thing: None,
    "decref": lambda thing: None,
    "clear": lambda: None,
    "bytes_size": lambda thing: bytes.__len__(thing) if isinstance(thing, bytes) else -1,
    "bytes_start": lambda thing: id(thing) + _BYTES_AT,
    "bytes_new": _new_bytes,
    "bool_new": bool,
    "int_new": int,
    "list_new": lambda n: [None] * n,
    "list_append": lambda things, thing: things.append(thing) or 0,
    "list_size": len,
    "list_item": lambda things, i: things[i],
    # objects.py, pages.py, values.py
    "take": lambda thing: thing,
    "give": lambda thing: thing,
    "error": _error,
    "plain_error": _plain_error,
    "_pair": lambda g, key, value: 0 if _none_is_null(key, value) else (key, value),
}
