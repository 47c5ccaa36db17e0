"""Blosc2 chunks: the bytes, or the bits, of numbers are regrouped, so that those that hardly change stand side by side;
then LZ4 or Zstandard packs them."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec, address_of
from pario.codec.library import Contexts, Library, find_package, open_library
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import BLOSC, BLOSC_HEAD, EXTRA, FUNCTION, KIND, MOST_INT

_package = functools.partial(find_package, "blosc2")

_PIP = how_to_install("codecs")
#: name -> Blosc2's filters, one after the other
_FILTERS = {
    "none": [], "shuffle": ["SHUFFLE"], "bitshuffle": ["BITSHUFFLE"], "bytedelta": ["SHUFFLE", "BYTEDELTA"],
}  # fmt: skip
#: Older ones lose the last bytes of a value that is no whole number of numbers; before 2.10 they lack the filter.
BYTEDELTA_SINCE = (3, 3, 2)
_INNER = {"lz4": "LZ4", "lz4hc": "LZ4HC", "zstd": "ZSTD"}


class _Settings(ctypes.Structure):
    """blosc2.h: blosc2_dparams, and room for what later versions add: 0 means the default everywhere."""

    _fields_ = (("threads", ctypes.c_int), ("zeros", ctypes.c_int * 31))


class Blosc2(Codec):
    """Blosc2: `level` 1 to 9, 5 by default.

    typesize : bytes of a number, 1 to 255
    filter : "shuffle" (bytes), "bitshuffle", "bytedelta" (shuffle, then differences of neighbouring bytes) or "none"
    codec : "zstd", "lz4" or "lz4hc"
    """

    name = "blosc2"
    levels = (1, 9)
    default_level = 5
    most = MOST_INT

    def __init__(
        self,
        level: int | None = None,
        dictionary: bytes | None = None,
        *,
        typesize: int = 4,
        filter: str = "shuffle",
        codec: str = "zstd",
        **options: Any,
    ) -> None:
        super().__init__(level, dictionary, **options)
        if isinstance(typesize, bool) or not isinstance(typesize, int) or not 1 <= typesize <= 255:
            raise OptionError(f"typesize of codec blosc2 is a number of bytes from 1 to 255, got {typesize!r}")
        for what, value, names in (("filter", filter, _FILTERS), ("codec", codec, _INNER)):
            if value not in names:
                raise OptionError(f"{what} of codec blosc2 is one of {', '.join(names)}, got {value!r}")
        self.options = {"typesize": typesize, "filter": filter, "codec": codec}
        library = _library()
        if library is None or _package() is None:  # one that cannot be imported has its library
            raise OptionError("codec blosc2 needs the package blosc2, which is absent or cannot be imported", hint=_PIP)
        if filter == "bytedelta" and library.version < BYTEDELTA_SINCE:
            needs, found = (".".join(map(str, version)) for version in (BYTEDELTA_SINCE, library.version))
            what = f"filter bytedelta of codec blosc2 needs C-Blosc2 {needs}, found {found} in {library.path}"
            raise OptionError(what, hint="Install the package blosc2 4.10.1 or later.")
        self._head = np.frombuffer(self.encode(bytes(range(64)) * 4 * typesize), np.uint8)[:BLOSC_HEAD].copy()
        self._library, word = library, ctypes.c_void_p
        new = library.function("blosc2_create_dctx", word, _Settings)
        self._contexts = Contexts(lambda: new(_Settings(1)), library.function("blosc2_free_ctx", None, word))

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        function = self._library.address("blosc2_decompress_ctx")
        return self._calling({KIND: BLOSC, FUNCTION: function, EXTRA: address_of(self._head)}, self._contexts)

    def encode(self, value: Any) -> bytes:
        package, said = _package(), self.options
        if not len(value):  # its chunk would have no block
            return b""
        names = (["NOFILTER"] * 6 + _FILTERS[said["filter"]])[-6:]
        return bytes(
            package.compress2(
                bytes(value), typesize=said["typesize"], clevel=self.level, nthreads=1,
                codec=getattr(package.Codec, _INNER[said["codec"]]),
                filters=[getattr(package.Filter, name) for name in names],
                filters_meta=[said["typesize"] if name == "BYTEDELTA" else 0 for name in names],
            )
        )  # fmt: skip


@functools.cache
def _library() -> Library | None:
    """libblosc2 of the package blosc2, and no other: a chunk may need what an older one does not know."""
    found = open_library(
        ("blosc2/lib/libblosc2.so", "blosc2.blosc2_ext"),
        ("blosc2_init", "blosc2_create_dctx", "blosc2_free_ctx", "blosc2_decompress_ctx", "blosc2_get_version_string"),
        _version,
        (2, 0, 0),
    )
    if found is not None:  # loaded for itself, it does not have what the package has registered: bytedelta
        found.function("blosc2_init", None)()
    return found


def _version(library: Library) -> tuple[int, int, int]:
    text: bytes = library.function("blosc2_get_version_string", ctypes.c_char_p)()
    numbers = [int(part) for part in text.decode().split(".")[:3] if part.isdigit()]
    return (*numbers, 0, 0, 0)[:3]  # type: ignore[return-value]
