"""Numba's disk cache of one function, in a directory that only this user can write (private.py).

Numba's own cache opens index and data files by path and unpickles what it finds. Here one file holds one compiled
signature. It is read through the descriptor that was checked, and unpickled only if it belongs to this user and is
complete (a full disk or a crash may have truncated it). Without a safe directory, or on a full disk, functions are
compiled and stay in memory.

One process per node compiles: Numba calls `load_overload`, compiles if that returns None, and calls `save_overload`. In
between the process holds the function's lock; other processes sleep until then and load the result. The system releases
the lock of a process that dies. A function that calls others compiles them meanwhile; processes cannot wait in a
circle, because no two kernels call each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from llvmlite.binding import parse_bitcode
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.environment import Environment, _rebuild_env, lookup_environment
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from pario.kernels.private import PrivateDirectory

#: Seconds after which a process compiles for itself, whatever the lock's owner does: the slowest kernel takes a few
#: seconds.
_PATIENCE_S = 120.0
#: Seconds between two attempts to get a lock, growing from the first value to the second.
_PAUSES_S = (0.002, 0.05)
_DIGEST_BYTES = 32


class KernelCache(FunctionCache):
    """The compiled signatures of `function` in `folder`."""

    #: Seconds for which this process has compiled so far, or waited for another one that did.
    spent_s = 0.0

    def __init__(self, function: Callable[..., Any], folder: PrivateDirectory) -> None:
        self._py_func = function
        self._folder = folder
        self._base = f"{function.__module__}.{function.__qualname__}".translate({ord(c): None for c in "<>/"})
        self._held = -1

    @property
    def cache_path(self) -> str:
        return self._folder.path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # All that compiled code needs of Numba. Numba would also prepare for compiling (`refresh`), which imports its
        # implementations and scipy.linalg: 0.3 s; the compiler does so by itself where nothing is found.
        rtsys.initialize(target_context)
        key = self._key(sig, target_context.codegen())
        found = self._read(key)
        if found is None and self._held < 0:
            self._began = time.perf_counter() - KernelCache.spent_s  # what it calls is compiled and counted meanwhile
            self._held = _locked(self._folder, f"{self._base}.lock")
            found = self._read(key)  # another process may have been quicker
            if found is not None:
                self._release()
                KernelCache.spent_s = time.perf_counter() - self._began
        if found is None:
            return None
        codegen = SimpleNamespace(unserialize_library=partial(_library, target_context.codegen()))
        needs = {name: getattr(target_context, name) for name in ("typing_context", "get_executable")}
        made = CompileResult._rebuild(SimpleNamespace(**needs, codegen=lambda: codegen), *found)
        return made._replace(target_context=target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            if not data.library.has_dynamic_globals and all(lifted.can_cache for lifted in data.lifted):
                library, *rest = data._reduce()
                module = data.library._get_module_for_linking()
                symbols = [its.name for its in (*module.functions, *module.global_variables) if not its.is_declaration]
                self._write(self._key(sig, data.codegen), ((library, symbols), *rest))
        finally:
            self._release()
            KernelCache.spent_s = time.perf_counter() - self._began

    def holds(self, sig: Any, codegen: Any) -> bool:
        """Whether this signature is compiled: nothing is loaded."""
        key = self._key(sig, codegen)
        return key is not None and self._pickled(key) is not None

    def flush(self) -> None:
        """Deletes nothing: a changed function has another key."""

    def _key(self, sig: Any, codegen: Any) -> Any:
        """Everything that the compiled code depends on, except the functions that it calls (jit.cache_directory)."""
        source = _file_digest(self._py_func.__code__.co_filename)
        return (self._index_key(sig, codegen), source) if source else None

    def _name(self, key: Any) -> str:
        return f"{self._base}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def _read(self, key: Any) -> Any:
        pickled = None if key is None else self._pickled(key)
        if pickled is None:
            return None
        of, compiled = _Unpickler(io.BytesIO(pickled)).load()
        return compiled if of == key else None

    def _pickled(self, key: Any) -> bytes | None:
        try:
            contents = self._folder.read(self._name(key))
        except OSError:
            return None
        digest, pickled = contents[:_DIGEST_BYTES], contents[_DIGEST_BYTES:]
        return pickled if hashlib.sha256(pickled).digest() == digest else None

    def _write(self, key: Any, compiled: Any) -> None:
        if key is None:
            return
        pickled = dumps((key, compiled))
        with contextlib.suppress(OSError):
            self._folder.write(self._name(key), hashlib.sha256(pickled).digest() + pickled)

    def _release(self) -> None:
        held, self._held = self._held, -1
        if held >= 0:
            # A child that was forked meanwhile has the descriptor, too, so closing ours would not unlock.
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)
            os.close(held)


def _library(codegen: Any, kept: Any) -> Any:
    """In place of Numba's `unserialize_library`: the bitcode, which only functions that are compiled later inline, is
    parsed when one asks for it, by the method that stands in for the library's own. (That and to list its symbols took
    40 of 52 ms for the eleven kernels of a start.)"""
    (name, _, (machine_code, bitcode)), symbols = kept
    library = codegen.create_library(name)
    library.enable_object_caching()
    library._set_compiled_object(machine_code)
    library._finalize_final_module()
    codegen._engine._defined_symbols.update(symbols)
    library._get_module_for_linking = cache(lambda: parse_bitcode(bitcode))
    return library


class _Unpickler(pickle.Unpickler):
    """Makes the environments (constants and globals) of what a kernel inlines without an import of their modules:
    code without objects uses the constants alone, and the modules are half of Numba."""

    def find_class(self, module: str, name: str) -> Any:
        return _environment if name == _rebuild_env.__name__ else super().find_class(module, name)


def _environment(module: str, constants: list[Any], name: str) -> Environment:
    if module in sys.modules:
        return _rebuild_env(module, constants, name)
    found = lookup_environment(name)
    if found is None:
        found = Environment({"__name__": module})
        found.consts[:] = constants
        found.env_name = name
        Environment._memo[name] = found
    return found


@cache
def _file_digest(path: str) -> str:
    """Digest of a source file; "" for functions without one (python -c), which are not cached."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def _locked(folder: PrivateDirectory, name: str) -> int:
    """Descriptor of the locked file; -1 if files cannot be locked, or if the lock is not available in time."""
    pause, longest = _PAUSES_S
    end = time.monotonic() + _PATIENCE_S
    try:
        fd = folder.open_file(name)
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
