"""C libraries of codecs: found in a package's extension module or on the system, checked, and asked for addresses.

Wheels of zstandard, lz4 and brotli hold their C library inside an extension module that exports its functions; the
system's library is the second choice. (Debian's and conda's packages use that one.)
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pario.errors import OptionError

#: name -> module: what may be loaded here can be read
_PACKAGES = {
    "blosc2": "blosc2",
    "brotli": "brotli",
    "cv2": "cv2",
    "lz4": "lz4.frame",
    "msgpack": "msgpack",
    "simplejpeg": "simplejpeg",
    "zstandard": "zstandard",
}


class Library:
    """A loaded C library.

    path : the file; version : (major, minor, patch); handle : ctypes' handle, whose calls release the GIL
    """

    def __init__(self, path: str, handle: Any, version: tuple[int, int, int]) -> None:
        self.path, self.handle, self.version = path, handle, version

    def address(self, name: str) -> int:
        """The address of a function. Raises AttributeError if the library does not export it."""
        return ctypes.cast(getattr(self.handle, name), ctypes.c_void_p).value or 0

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function to call from Python."""
        found = getattr(self.handle, name)
        found.restype, found.argtypes = result, list(arguments)
        return found


def open_library(
    candidates: Sequence[str],
    names: Sequence[str],
    version: Callable[[Library], tuple[int, int, int]],
    least: tuple[int, int, int],
) -> Library | None:
    """The first library that loads, exports all these functions and has at least this version; None if none does.

    candidates : "package.module" for an extension module, "libz.so.1" for a library, "package/lib/libz.so" for a file
        beside a package
    """
    for candidate in candidates:
        for path in _paths(candidate):
            try:
                # Local: the names inside do not meet those of other libraries of the process.
                library = Library(path, ctypes.CDLL(path), (0, 0, 0))
                for name in names:
                    library.address(name)
                library.version = version(library)
            except (OSError, AttributeError):
                continue
            if library.version >= least:
                return library
    return None


def required(found: Library | None, codec: str, package: str, hint: str) -> Library:
    """The library. Raises OptionError if there is none."""
    if found is None:
        raise OptionError(f"codec {codec} needs the package {package}, whose C library is not there", hint=hint)
    return found


def decimal_version(library: Library, name: str) -> tuple[int, int, int]:
    """Of a function that says 10507 for 1.5.7."""
    number: int = library.function(name, ctypes.c_int)()
    return number // 10000, number // 100 % 100, number % 100


def _paths(candidate: str) -> list[str]:
    if ".so" not in candidate:
        origin = _origin(candidate)
        return [origin] if origin else []
    if "/" in candidate:
        package, rest = candidate.split("/", 1)
        origin = _origin(package)
        return [os.path.join(os.path.dirname(origin), rest)] if origin else []
    # The environment's own library (conda) before the system's. ctypes.util.find_library would start a compiler.
    return [os.path.join(sys.prefix, "lib", candidate), candidate]


def _origin(module: str) -> str | None:
    """The file of a module; its package is imported for that."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a broken package is as good as none
        return None
    return spec.origin if spec else None


@functools.cache
def find_package(name: str) -> Any:
    """A Python package of the table above; None if it is not installed."""
    package = _PACKAGES[name]
    try:
        return importlib.import_module(package)
    except ImportError:
        return None


@functools.cache
def own_version() -> str:
    """pario's, as it is installed; "" if it is not. Reading it takes as long as copying some MB."""
    from importlib.metadata import PackageNotFoundError, version  # only here: most jobs write nothing

    try:
        return version("pario")
    except PackageNotFoundError:
        return ""


class Contexts:
    """Addresses of contexts of a library: each serves one thread at a time, and is used again.

    create : () -> address, 0 or None if there is no memory; free : address -> anything
    """

    def __init__(self, create: Callable[[], int | None], free: Callable[[int], Any]) -> None:
        self._create, self._free = create, free
        self._idle: list[int] = []  # append and pop are atomic

    def take(self) -> int:
        try:
            return self._idle.pop()
        except IndexError:
            made = self._create()
            if not made:
                raise MemoryError("no memory for a codec's context") from None
            return made

    def give(self, context: int) -> None:
        self._idle.append(context)

    @contextmanager
    def lent(self) -> Iterator[int]:
        context = self.take()
        try:
            yield context
        finally:
            self.give(context)

    def __del__(self) -> None:
        while self._idle:
            self._free(self._idle.pop())
