"""LZ4 blocks, fast and high compression, with dictionaries: bytes that a value may refer to."""

from __future__ import annotations

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec, address_of, as_bytes
from pario.codec.library import Contexts, Library, decimal_version, open_library, required
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import EXTRA, FUNCTION, HELPER, KIND, LZ4, LZ4_STREAM, MOST_INT, NUMBER, THIRD

_PIP = how_to_install("codecs")
#: LZ4 looks back no further.
_WINDOW = 64 << 10
_FUNCTIONS = (
    "LZ4_versionNumber", "LZ4_compressBound", "LZ4_decompress_safe_usingDict",
    "LZ4_createStream", "LZ4_freeStream", "LZ4_resetStream_fast", "LZ4_loadDict", "LZ4_compress_fast_continue",
    "LZ4_createStreamHC", "LZ4_freeStreamHC", "LZ4_resetStreamHC_fast", "LZ4_loadDictHC", "LZ4_compress_HC_continue",
)  # fmt: skip


class Lz4(Codec):
    """LZ4 without levels."""

    name = "lz4"
    takes_dictionary = True
    most = MOST_INT
    _kind, _attach = "", "LZ4_attach_dictionary"

    def __init__(self, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> None:
        super().__init__(level, dictionary, **options)
        self._library = library = required(_library(), self.name, "lz4", _PIP)
        self._near = np.frombuffer(self.dictionary[-_WINDOW:], np.uint8).copy()
        free = library.function(f"LZ4_freeStream{self._kind}", ctypes.c_int, _WORD)
        self._streams = Contexts(library.function(f"LZ4_createStream{self._kind}", _WORD), free)

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        words = {KIND: LZ4, FUNCTION: self._library.address("LZ4_decompress_safe_usingDict")}
        return self._calling({**words, EXTRA: address_of(self._near), NUMBER: len(self._near)})

    def encoding(self) -> AbstractContextManager[np.ndarray]:
        library = self._library
        if self.dictionary and not hasattr(library.handle, self._attach):
            return super().encoding()  # liblz4 before 1.10 has no function that lends a dictionary to several streams
        words = {KIND: LZ4_STREAM, NUMBER: self.level or 0}
        words[THIRD] = library.address(f"LZ4_resetStream{self._kind}_fast")
        words[FUNCTION] = library.address(f"LZ4_compress_{self._kind or 'fast'}_continue")
        if self.dictionary:
            words |= {HELPER: library.address(self._attach), EXTRA: self._digested()}
        return self._calling(words, self._streams)

    def _digested(self) -> int:
        """A stream that has seen the dictionary; others borrow what it knows."""
        if "_digest" not in self.__dict__:
            made = self._streams.take()
            if self._kind:
                self._library.function("LZ4_resetStreamHC_fast", None, _WORD, ctypes.c_int)(made, self.level)
            self._load(made)
            if self.__dict__.setdefault("_digest", made) != made:  # two threads made one
                self._streams.give(made)
        return int(self.__dict__["_digest"])

    def _load(self, stream: int) -> None:
        """Let a stream see the dictionary."""
        load = self._library.function(f"LZ4_loadDict{self._kind}", ctypes.c_int, _WORD, _WORD, ctypes.c_int)
        load(stream, address_of(self._near), len(self._near))

    def __del__(self) -> None:
        if self.__dict__.get("_digest"):
            self._streams.give(self.__dict__["_digest"])

    def encode(self, value: Any) -> bytes:
        data, library, number = as_bytes(value), self._library, ctypes.c_int
        if len(data) > self.most:
            raise OptionError(f"LZ4 packs at most {self.most:,} bytes, got {len(data):,}")
        out = np.empty(library.function("LZ4_compressBound", number, number)(len(data)), np.uint8)
        name = f"LZ4_compress_{self._kind or 'fast'}_continue"
        call = library.function(name, number, _WORD, _WORD, _WORD, number, number, number)
        with self._streams.lent() as stream:
            library.function(f"LZ4_resetStream{self._kind}_fast", None, _WORD, number)(stream, self.level or 0)
            if self.dictionary:
                self._load(stream)
            got = call(stream, address_of(data), address_of(out), len(data), len(out), 1)
        return out[:got].tobytes()


class Lz4hc(Lz4):
    """LZ4 with a longer search: `level` 1 to 12, 9 by default. It decodes as LZ4 does."""

    name = "lz4hc"
    levels = (1, 12)
    default_level = 9
    _kind, _attach = "HC", "LZ4_attach_HC_dictionary"


_WORD = ctypes.c_void_p


@functools.cache
def _library() -> Library | None:
    """liblz4: the one inside of the package lz4 (1.10 in lz4 4.4), else another package's, the system's."""
    return open_library(
        ("lz4.block._block", "lz4._version", "blosc2/lib/libblosc2.so", "liblz4.so.1"), _FUNCTIONS,
        functools.partial(decimal_version, name="LZ4_versionNumber"), (1, 9, 0),
    )  # fmt: skip
