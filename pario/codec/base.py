"""The contract of all codecs.

A codec packs and unpacks single values. The functions of its C library do the work, called without the interpreter
(library.py, kernels/coded.py). Python's own packages (lzma, and zlib where there is no libdeflate) do it record by
record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from pario.codec.library import Contexts
from pario.errors import DecodeError, OptionError
from pario.kernels.coded import CONTEXT, HOW, KIND, MOST, PYTHON, WRONG, decode_values
from pario.records import Records

#: (row, reason) of the records that could not be decoded
Failures = list[tuple[int, str]]

_NOT = "the codec cannot decode it"


class Codec(ABC):
    """Packs values one by one. Threads may share a codec; it can be pickled.

    level : int or None
        None: the codec's default; a codec without levels takes None only.
    dictionary : bytes
        What was trained for these values; b"": none. Without it, nothing that was packed with it can be unpacked.
    options : further ones, by name
    """

    #: in the table of names
    name: str
    #: (least, most) level, and the one that None means; None: there are no levels
    levels: tuple[int, int] | None = None
    default_level: int | None = None
    #: True: a dictionary can be given
    takes_dictionary = False
    #: the largest value that it packs; larger ones are stored raw
    most = MOST

    def __init__(self, level: int | None = None, dictionary: bytes | None = None, **options: Any) -> None:
        if level is not None and (
            self.levels is None or isinstance(level, bool) or not self.levels[0] <= level <= self.levels[1]
        ):
            has = f"levels {self.levels[0]} to {self.levels[1]}" if self.levels else "no levels"
            raise OptionError(f"codec {self.name} has {has}, got level {level!r}")
        if dictionary and not self.takes_dictionary:
            raise OptionError(f"codec {self.name} takes no dictionary")
        if options:
            raise OptionError(f"codec {self.name} has no option {', '.join(map(repr, options))}")
        self.level = self.default_level if level is None else level
        self.dictionary = dictionary or b""
        self.options: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Name, level and options, for JSON; the dictionary is not in it."""
        said: dict[str, Any] = {"name": self.name}
        if self.level is not None:
            said["level"] = self.level
        if self.options:
            said["options"] = self.options
        return said

    def __str__(self) -> str:
        """ "zstd:19"; what `parse` reads."""
        more = "".join(f",{name}={value}" for name, value in self.options.items())
        return self.name + (f":{self.level}" if self.level is not None else "") + more

    def __repr__(self) -> str:
        return f"<codec {self}{f', dictionary of {len(self.dictionary):,} bytes' if self.dictionary else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.options), (self.level, self.dictionary)

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """The packed bytes of a value of at most `most` bytes. value : anything with the buffer interface"""

    def decoded(self, packed: bytes, nbytes: int) -> Any:
        """The value of `nbytes` bytes, where no C function decodes it. Raises any exception for other bytes."""
        raise NotImplementedError

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        """How the C function is called: i64[HOW] for kernels/coded.py, of one thread until the end."""
        return self._calling({KIND: PYTHON})

    def encoding(self) -> AbstractContextManager[np.ndarray]:
        """The same for packing."""
        return self._calling({KIND: PYTHON})

    @contextmanager
    def _calling(self, words: Mapping[int, int], contexts: Contexts | None = None) -> Iterator[np.ndarray]:
        """i64[HOW] with these words, and a context that is lent until the end; the codec lives as long."""
        how = np.zeros(HOW, np.int64)
        how[list(words)] = list(words.values())
        with nullcontext(0) if contexts is None else contexts.lent() as how[CONTEXT]:
            yield how

    def decode_into(self, packed: Any, out: np.ndarray) -> None:
        """Write the value to `out` u8[its size], and nothing outside of it. Raises DecodeError for bad bytes."""
        data = np.frombuffer(packed, np.uint8)
        size = np.array([len(out)], np.int64)
        records = Records(_ZERO, data, _ZERO, np.array([len(data)], np.int64))
        failed = self.decode_many(records, out, _ZERO, size)
        if failed:
            what = f"{len(data):,} bytes are no value of {len(out):,} bytes packed by {self}"
            raise DecodeError(f"{what}: {failed[0][1]}")

    def decode_many(self, records: Records, out: np.ndarray, starts: np.ndarray, nbytes: np.ndarray) -> Failures:
        """Write the value of record i to out[starts[i] : starts[i] + nbytes[i]], its size, and nothing elsewhere.

        Without the GIL for nearly all of the work where the codec has a C library. Never raises for bad data: returns
        the rows that failed; their content is undefined.

        out : u8[...], contiguous; starts, nbytes : i64[n], bytes
        """
        codes = np.empty(len(records), np.int64)
        starts, nbytes = longs(starts), longs(nbytes)
        with self.decoding() as how:
            if how[KIND] != PYTHON:
                failed = decode_values(
                    how, address_of(records.data), records.data.nbytes, longs(records.starts), longs(records.nbytes),
                    address_of(out, written=True), out.nbytes, starts, nbytes, codes,
                )  # fmt: skip
                return [(int(i), WRONG[codes[i]]) for i in np.flatnonzero(codes)] if failed else []
        return self.decode_by_package(records, out, starts, nbytes)

    def decode_by_package(self, records: Records, out: np.ndarray, starts: np.ndarray, nbytes: np.ndarray) -> Failures:
        """`decode_many` with the Python package, one value after the other."""
        failures: Failures = []
        address_of(out, written=True)
        for i in range(len(records)):
            first, size = int(starts[i]), int(nbytes[i])
            if not 0 <= first <= len(out) - size or size < 0:
                failures.append((i, "it does not lie inside of the memory that it should go to"))
                continue
            try:
                value = np.frombuffer(self.decoded(records[i].tobytes(), size), np.uint8)
            except Exception as error:  # whatever the library raises for damaged bytes
                failures.append((i, f"{_NOT}: {error}"))
                continue
            if len(value) != size:
                failures.append((i, f"{_NOT}: it gives {len(value):,} bytes instead of {size:,}"))
                continue
            out[first : first + size] = value
        return failures


_ZERO = np.zeros(1, np.int64)


def address_of(data: np.ndarray, *, written: bool = False) -> int:
    """The address of an array's memory. Raises OptionError if its bytes do not lie side by side, or cannot be written
    although they are to be."""
    if not data.flags.c_contiguous or (written and not data.flags.writeable):
        kind = "contiguous and writable" if written else "contiguous"
        raise OptionError(f"codecs need {kind} memory, got an array {data.dtype}{list(data.shape)}")
    address: int = data.__array_interface__["data"][0]
    return address


def as_bytes(value: Any) -> np.ndarray:
    """u8[n] of anything with the buffer interface, without a copy."""
    return value.reshape(-1).view(np.uint8) if hasattr(value, "reshape") else np.frombuffer(value, np.uint8)


def longs(numbers: np.ndarray) -> np.ndarray:
    """i64[n] that kernels take: contiguous and writable, so that they are compiled for one type."""
    made = np.ascontiguousarray(numbers, np.int64)
    return made if made.flags.writeable else made.copy()
