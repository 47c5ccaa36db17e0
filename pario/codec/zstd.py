"""Zstandard, with levels and trained dictionaries.

Frames without magic number, content size, checksum and dictionary id: the header of a packed value says all of this, or
the reserved entry does. Of a record of 100 packed bytes that is 5 to 12 %.

(Decoding 3 KB records of JSON, level 3, one thread / two: see docs/packing.md, which benchmarks/codecs.py writes.)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec, address_of, as_bytes
from pario.codec.library import Contexts, Library, decimal_version, find_package, open_library, required
from pario.errors import OptionError, how_to_install
from pario.kernels.coded import EXTRA, FUNCTION, KIND, ZSTD

_package = functools.partial(find_package, "zstandard")

#: zstd.h: ZSTD_c_compressionLevel, ZSTD_c_contentSizeFlag, ZSTD_c_checksumFlag, ZSTD_c_dictIDFlag, ZSTD_c_format
_LEVEL, _SIZE_FLAG, _SUM_FLAG, _ID_FLAG, _FORMAT = 100, 200, 201, 202, 10
#: ZSTD_d_format, ZSTD_f_zstd1_magicless
_DECODED_FORMAT, _MAGICLESS = 1000, 1
_FUNCTIONS = (
    "ZSTD_versionNumber", "ZSTD_isError", "ZSTD_compressBound", "ZSTD_createDCtx", "ZSTD_freeDCtx",
    "ZSTD_DCtx_setParameter", "ZSTD_decompress_usingDDict", "ZSTD_createDDict", "ZSTD_freeDDict", "ZSTD_createCCtx",
    "ZSTD_freeCCtx", "ZSTD_CCtx_setParameter", "ZSTD_CCtx_refCDict", "ZSTD_createCDict", "ZSTD_freeCDict",
    "ZSTD_compress2",
)  # fmt: skip
_PIP = how_to_install("zstd")


class Zstd(Codec):
    """Zstandard: `level` -7 to 22, 3 by default; dictionaries of `train`."""

    name = "zstd"
    levels = (-7, 22)
    default_level = 3
    takes_dictionary = True

    def __init__(self, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> None:
        super().__init__(level, dictionary, **options)
        self._use(required(_library(), self.name, "zstandard", _PIP))

    def _use(self, library: Library) -> None:
        """Contexts and digested dictionaries, in the C library. Raises OptionError."""
        self._library = library
        word, size = ctypes.c_void_p, ctypes.c_size_t
        self._decode, self._compress = library.address("ZSTD_decompress_usingDDict"), library.address("ZSTD_compress2")
        self._call = library.function("ZSTD_compress2", size, word, word, size, word, size)
        self._bound = library.function("ZSTD_compressBound", size, size)
        self._is_error = library.function("ZSTD_isError", ctypes.c_uint, size)
        self._free_decoder = library.function("ZSTD_freeDDict", size, word)
        self._free_encoder = library.function("ZSTD_freeCDict", size, word)
        self._digests: dict[str, int] = {}
        self._decoders = Contexts(self._new_decoder, library.function("ZSTD_freeDCtx", size, word))
        self._encoders = Contexts(self._new_encoder, library.function("ZSTD_freeCCtx", size, word))
        if self.dictionary:
            self._digests["decode"] = self._digested("ZSTD_createDDict")

    def _new_decoder(self) -> int:
        return self._new("D", ((_DECODED_FORMAT, _MAGICLESS),))

    def _new_encoder(self) -> int:
        wanted = ((_LEVEL, self.level or 0), (_SIZE_FLAG, 0), (_SUM_FLAG, 0), (_ID_FLAG, 0), (_FORMAT, _MAGICLESS))
        made, word = self._new("C", wanted), ctypes.c_void_p
        if made and self.dictionary:
            if "encode" not in self._digests:  # made when first needed, since level 19 digests a long time
                digest = self._digested("ZSTD_createCDict", self.level or 0)
                if self._digests.setdefault("encode", digest) != digest:  # two threads made one
                    self._free_encoder(digest)
            lend = self._library.function("ZSTD_CCtx_refCDict", ctypes.c_size_t, word, word)
            self._checked(lend(made, self._digests["encode"]))
        return made

    def _new(self, kind: str, parameters: Sequence[tuple[int, int]]) -> int:
        """A context, "C" for packing or "D"; 0 if there is no memory."""
        word, number = ctypes.c_void_p, ctypes.c_int
        made: int = self._library.function(f"ZSTD_create{kind}Ctx", word)() or 0
        turn = self._library.function(f"ZSTD_{kind}Ctx_setParameter", ctypes.c_size_t, word, number, number)
        for parameter, value in parameters if made else ():
            self._checked(turn(made, parameter, value))
        return made

    def _digested(self, create: str, *level: int) -> int:
        """The dictionary as the library keeps it. Raises OptionError."""
        kinds = ctypes.c_char_p, ctypes.c_size_t, *[ctypes.c_int] * len(level)
        made: int = self._library.function(create, ctypes.c_void_p, *kinds)(
            self.dictionary, len(self.dictionary), *level
        )
        if not made:
            raise OptionError(f"the library zstd cannot use this dictionary of {len(self.dictionary):,} bytes")
        return made

    def _checked(self, result: int) -> None:
        if self._is_error(result):
            raise OptionError(f"the library {self._library.path} refuses a parameter that pario needs")

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        digest = self._digests.get("decode", 0)
        return self._calling({KIND: ZSTD, FUNCTION: self._decode, EXTRA: digest}, self._decoders)

    def encoding(self) -> AbstractContextManager[np.ndarray]:
        return self._calling({KIND: ZSTD, FUNCTION: self._compress}, self._encoders)

    def encode(self, value: Any) -> bytes:
        data = as_bytes(value)
        with self._encoders.lent() as context:
            out = np.empty(self._bound(len(data)), np.uint8)
            got = self._call(context, address_of(out), len(out), address_of(data), len(data))
        if self._is_error(got):
            raise OptionError(f"the library zstd cannot pack a value of {len(data):,} bytes")
        return out[:got].tobytes()

    def __del__(self) -> None:
        digests = self.__dict__.get("_digests", {})
        if "decode" in digests:
            self._free_decoder(digests["decode"])
        if "encode" in digests:
            self._free_encoder(digests["encode"])


def train(samples: Sequence[bytes], nbytes: int = 32 << 10, level: int = 3) -> bytes:
    """A dictionary of at most `nbytes` bytes for values like these; b"" if they are too few or too alike to train one.

    The usual advice is 100 times as many bytes of samples as the dictionary has.
    """
    package = _package()
    if package is None:
        raise OptionError("training a dictionary needs the package zstandard, which is not installed", hint=_PIP)
    kept = [bytes(sample) for sample in samples if len(sample) >= 8]
    if len(kept) < 8 or sum(map(len, kept)) < 2 * nbytes:
        nbytes = sum(map(len, kept)) // 10  # a dictionary as large as its samples says nothing about other values
        if len(kept) < 8 or nbytes < 256:
            return b""
    try:
        trained: bytes = package.train_dictionary(nbytes, kept, level=level).as_bytes()
    except package.ZstdError:
        return b""
    return trained


@functools.cache
def _library() -> Library | None:
    """libzstd: the one inside of zstandard's wheel (1.5.7 in zstandard 0.25), else another package's, the system's."""
    found = open_library(
        ("zstandard._cffi", "zstandard.backend_c", "blosc2/lib/libblosc2.so", "libzstd.so.1"), _FUNCTIONS,
        functools.partial(decimal_version, name="ZSTD_versionNumber"), (1, 4, 5),
    )  # fmt: skip
    if found is None:
        return None
    try:  # the numbers of the parameters above are no promise of the library's
        trial = Zstd.__new__(Zstd)
        Codec.__init__(trial)
        trial._use(found)
        packed = trial.encode(bytes(1000))
    except (OptionError, MemoryError):
        return None
    return found if packed[:1] == b"\0" and len(packed) < 20 else None
