"""LZ4 blocks, fast and high compression, with dictionaries: bytes that a value may refer to."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pario.codec.base import Codec, address_of, as_bytes
from pario.codec.library import Contexts, Library, find_package, open_library
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import CONTEXT, EXTRA, FUNCTION, HELPER, HOW, KIND, LZ4, LZ4_STREAM, MOST_INT, NUMBER, THIRD

_package = functools.partial(find_package, "lz4")

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
        self._library = _library()
        if self._library is None and _package() is None:
            raise OptionError(f"codec {self.name} needs the package lz4, which is not installed", hint=_PIP)
        self._near = np.frombuffer(self.dictionary[-_WINDOW:], np.uint8).copy()
        self._streams = self._new_streams(self._library) if self._library else None

    def _new_streams(self, library: Library) -> Contexts:
        create = library.function(f"LZ4_createStream{self._kind}", ctypes.c_void_p)
        return Contexts(lambda: create() or 0, library.function(f"LZ4_freeStream{self._kind}", ctypes.c_int, _WORD))

    @contextmanager
    def decoding(self) -> Iterator[np.ndarray]:
        how = np.zeros(HOW, np.int64)
        if self._library is not None:
            how[KIND], how[FUNCTION] = LZ4, self._library.address("LZ4_decompress_safe_usingDict")
            how[EXTRA], how[NUMBER] = address_of(self._near), len(self._near)
        yield how

    @contextmanager
    def encoding(self) -> Iterator[np.ndarray]:
        how = np.zeros(HOW, np.int64)
        library = self._library
        if library is None or self._streams is None or (self.dictionary and not _has(library, self._attach)):
            yield how  # liblz4 before 1.10 does not export what lends one dictionary to several streams
            return
        with self._streams.lent() as stream:
            how[KIND], how[CONTEXT], how[NUMBER] = LZ4_STREAM, stream, self.level or 0
            how[THIRD] = library.address(f"LZ4_resetStream{self._kind}_fast")
            how[FUNCTION] = library.address(f"LZ4_compress_{self._kind or 'fast'}_continue")
            if self.dictionary:
                how[HELPER], how[EXTRA] = library.address(self._attach), self._digested(library)
            yield how

    def _digested(self, library: Library) -> int:
        """A stream that has seen the dictionary; others borrow what it knows."""
        if "_digest" not in self.__dict__:
            assert self._streams is not None
            made = self._streams.take()
            if self._kind:
                library.function("LZ4_resetStreamHC_fast", None, _WORD, ctypes.c_int)(made, self.level)
            load = library.function(f"LZ4_loadDict{self._kind}", ctypes.c_int, _WORD, _WORD, ctypes.c_int)
            load(made, address_of(self._near), len(self._near))
            if self.__dict__.setdefault("_digest", made) != made:  # two threads made one
                self._streams.give(made)
        return int(self.__dict__["_digest"])

    def __del__(self) -> None:
        if self.__dict__.get("_digest") and self._streams is not None:
            self._streams.give(self.__dict__["_digest"])

    def encode(self, value: Any) -> bytes:
        data = as_bytes(value)
        if len(data) > self.most:
            raise OptionError(f"LZ4 packs at most {self.most:,} bytes, got {len(data):,}")
        return self._packed_by_package(data) if self._library is None else self._packed(data, self._library)

    def _packed(self, data: np.ndarray, library: Library) -> bytes:
        number = ctypes.c_int
        out = np.empty(library.function("LZ4_compressBound", number, number)(len(data)), np.uint8)
        with self.encoding() as how:
            if not how[KIND]:
                return self._packed_by_package(data)
            ctypes.CFUNCTYPE(None, _WORD, number)(int(how[THIRD]))(int(how[CONTEXT]), int(how[NUMBER]))
            if how[EXTRA]:
                ctypes.CFUNCTYPE(None, _WORD, _WORD)(int(how[HELPER]))(int(how[CONTEXT]), int(how[EXTRA]))
            call = ctypes.CFUNCTYPE(number, _WORD, _WORD, _WORD, number, number, number)(int(how[FUNCTION]))
            got = call(int(how[CONTEXT]), address_of(data), address_of(out), len(data), len(out), 1)
        return out[:got].tobytes()

    def _packed_by_package(self, data: np.ndarray) -> bytes:
        package = _package()
        if package is None:
            raise OptionError(f"packing with codec {self.name} needs the package lz4", hint=_PIP)
        options: dict[str, Any] = {"mode": "high_compression", "compression": self.level} if self._kind else {}
        if self.dictionary:
            options["dict"] = self._near.tobytes()
        return package.compress(data.tobytes(), store_size=False, **options)  # type: ignore[no-any-return]

    def decoded(self, packed: bytes, nbytes: int) -> Any:
        options = {"dict": self._near.tobytes()} if self.dictionary else {}
        return _package().decompress(packed, uncompressed_size=nbytes, **options)


class Lz4hc(Lz4):
    """LZ4 with a longer search: `level` 1 to 12, 9 by default. It decodes as LZ4 does."""

    name = "lz4hc"
    levels = (1, 12)
    default_level = 9
    _kind, _attach = "HC", "LZ4_attach_HC_dictionary"


_WORD = ctypes.c_void_p


def _has(library: Library, name: str) -> bool:
    try:
        return bool(library.address(name))
    except AttributeError:
        return False


@functools.cache
def _library() -> Library | None:
    """liblz4: the one inside of the package lz4 (1.10 in lz4 4.4), else another package's, the system's."""
    return open_library(
        ("lz4.block._block", "lz4._version", "blosc2/lib/libblosc2.so", "liblz4.so.1"), _FUNCTIONS, _version, (1, 9, 0)
    )


def _version(library: Library) -> tuple[int, int, int]:
    number: int = library.function("LZ4_versionNumber", ctypes.c_int)()
    return number // 10000, number // 100 % 100, number % 100
