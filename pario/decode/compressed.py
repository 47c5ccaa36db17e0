"""Decoders around another one: each record is decompressed first, with a limit to what comes out."""

from __future__ import annotations

import copy
import functools
import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, describe
from pario.decode.function import as_decoder
from pario.errors import DecodeError, OptionError
from pario.records import Records

__all__ = ["Compressed", "Gzip", "Zlib", "Zstd"]

_MOST = 256 << 20
#: Bytes to decompress before the inner decoder gets them.
_UNIT = 4 << 20
#: The least that is decompressed at once where the size is unknown.
_PIECE = 1 << 20

_OBJECT = np.dtype(object)


class _Broken(Exception):
    """Why a record cannot be decompressed; never leaves this file."""


class Compressed(Decoder):
    """Base of decoders that decompress each record and give it to another decoder.

    decoder : Decoder, function or None
        Of what is inside.
    most_bytes : int
        A record that decompresses to more is bad: a few bytes may hold gigabytes of zeros.
    """

    parallel = True
    #: what a message calls it
    kind = ""

    def __init__(self, decoder: Decoder | Callable[..., Any] | None = None, *, most_bytes: int = _MOST) -> None:
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, (int, np.integer)) or most_bytes < 1:
            raise OptionError(f"most_bytes must be a number of bytes above 0, got {most_bytes!r}")
        self.inner = as_decoder(decoder)
        self.most_bytes = int(most_bytes)

    def __copy__(self) -> Compressed:
        mine = type(self).__new__(type(self))
        mine.__dict__.update(self.__dict__, inner=copy.copy(self.inner))  # what the inner one learns is not shared
        return mine

    def __repr__(self) -> str:
        most = "" if self.most_bytes == _MOST else f", most_bytes={self.most_bytes}"
        return f"{type(self).__name__}({self.inner!r}{most})"

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return self.inner.spec

    @spec.setter
    def spec(self, spec: Any) -> None:
        self.inner.spec = spec

    @abstractmethod
    def unpack(self, record: bytes) -> bytes:
        """The content. Raises _Broken, or what the library raises."""

    def _unpacked(self, record: np.ndarray) -> bytes:
        try:
            return self.unpack(record.tobytes())
        except _Broken:
            raise
        except Exception as error:
            raise _Broken(f"{type(error).__name__}: {error}") from error

    def learn(self, record: np.ndarray) -> Any:
        return self.learn_at(record, 0, Draw())

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> Any:
        try:
            inside = self._unpacked(record)
        except _Broken as error:
            begins, advice = describe(record)
            mine = f".{type(self).__name__}("
            raise DecodeError(
                f"not {self.kind} data: {error}; {begins}",
                hint=f"{advice[0].upper()}{advice[1:]}" if advice and mine not in advice else None,
            ) from error
        try:
            return self.inner.learn_at(np.frombuffer(inside, np.uint8), number, draw)
        except DecodeError as error:
            error.what = f"inside of the {self.kind} data: {error.what}"
            raise error.at() from None

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        if not self.inner.by_rows:  # the sizes are unknown until the records are unpacked
            return {"data": ((len(records),), _OBJECT)}
        return self.inner.shapes(records)

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        failures: Failures = []
        first, waiting, held = 0, list[bytes](), 0
        for i in range(len(records)):
            try:
                inside = self._unpacked(records[i])
            except _Broken as error:
                failures.append((i, f"not {self.kind} data: {error}"))
                failures += self._inside(records, first, waiting, out, draw)
                first, waiting, held = i + 1, [], 0
                continue
            waiting.append(inside)
            held += len(inside)
            if held >= _UNIT:
                failures += self._inside(records, first, waiting, out, draw)
                first, waiting, held = i + 1, [], 0
        failures += self._inside(records, first, waiting, out, draw)
        return sorted(failures)

    def _inside(
        self, records: Records, first: int, values: list[bytes], out: dict[str, np.ndarray], draw: Draw
    ) -> Failures:
        """Decode the rows from `first` on, whose content is `values`."""
        if not values:
            return []
        part = slice(first, first + len(values))
        if not self.inner.by_rows:
            for row, value in enumerate(values, first):
                out["data"][row] = value
            return []
        inner = joined(np.array(records.ids[part]), values)
        found = self.inner.decode(inner, {name: array[part] for name, array in out.items()}, draw)
        return [(first + row, f"inside of the {self.kind} data: {why}") for row, why in found]

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.inner.by_rows:
            return self.inner.finish(arrays)
        values = list(arrays["data"])
        records = joined(np.arange(len(values)), values)
        whole = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.inner.shapes(records).items()}
        self.inner.decode(records, whole, Draw())  # bytes and offsets: nothing can fail
        return self.inner.finish(whole)


def joined(ids: np.ndarray, values: list[bytes]) -> Records:
    """Records of these values, in memory of their own."""
    nbytes = np.array([len(value) for value in values], np.int64)
    starts = np.cumsum(nbytes) - nbytes
    data = np.frombuffer(values[0] if len(values) == 1 else b"".join(values), np.uint8)
    return Records(ids, data, starts, nbytes)


class Zlib(Compressed):
    """Records compressed with zlib, of another decoder: Zlib(Json()).

    Parameters
    ----------
    decoder : Decoder, function or None
        Of what is inside; None: the bytes, as Raw() returns them.
    most_bytes : int
        A record that decompresses to more is bad: a few bytes may hold gigabytes of zeros.
    """

    kind = "zlib"
    _window = zlib.MAX_WBITS

    def unpack(self, record: bytes) -> bytes:
        pieces: list[bytes] = []
        left, rest = self.most_bytes, record
        while True:
            stream = zlib.decompressobj(self._window)
            inside = stream.decompress(rest, left + 1)
            left -= len(inside)
            if left < 0:
                raise _too_much(self.most_bytes)
            if not stream.eof:
                raise _Broken("the end is missing")
            pieces.append(inside)
            rest = stream.unused_data
            if not rest:
                return inside if len(pieces) == 1 else b"".join(pieces)
            if self._window == zlib.MAX_WBITS:
                raise _Broken(f"{len(rest)} bytes follow the end")


class Gzip(Zlib):
    """Records compressed with gzip, of another decoder: Gzip(Json()). Several gzip streams in one record are one.

    Parameters
    ----------
    decoder : Decoder, function or None
        Of what is inside; None: the bytes, as Raw() returns them.
    most_bytes : int
        A record that decompresses to more is bad: a few bytes may hold gigabytes of zeros.
    """

    kind = "gzip"
    _window = zlib.MAX_WBITS | 16


class Zstd(Compressed):
    """Records compressed with Zstandard, of another decoder: Zstd(Json()). Needs `pip install "pario[zstd]"`.

    Parameters
    ----------
    decoder : Decoder, function or None
        Of what is inside; None: the bytes, as Raw() returns them.
    most_bytes : int
        A record that decompresses to more is bad: a few bytes may hold gigabytes of zeros.
    """

    kind = "zstd"

    def __init__(self, decoder: Decoder | Callable[..., Any] | None = None, *, most_bytes: int = _MOST) -> None:
        super().__init__(decoder, most_bytes=most_bytes)
        if _zstandard() is None:
            raise OptionError(
                "Zstd() needs the package zstandard, which is not installed", hint='pip install "pario[zstd]"'
            )

    def unpack(self, record: bytes) -> bytes:
        library = _zstandard()
        # A decompressor belongs to one thread; making one costs little beside a record.
        engine = library.ZstdDecompressor(max_window_size=1 << 27)
        size = library.frame_content_size(record)
        if size > self.most_bytes:
            raise _too_much(self.most_bytes)
        if size >= 0:
            inside: bytes = engine.decompress(record, allow_extra_data=False)
            return inside
        room = min(self.most_bytes, max(_PIECE, 16 * len(record)))
        while True:  # without a size in the frame
            try:
                inside = engine.decompress(record, max_output_size=room, allow_extra_data=False)
                return inside
            except library.ZstdError as error:
                if room == self.most_bytes:
                    raise _Broken(f"{error}; or it decompresses to more than most_bytes={room:,}") from error
                room = min(self.most_bytes, 16 * room)


def _too_much(most: int) -> _Broken:
    return _Broken(f"it decompresses to more than {most:,} bytes; most_bytes= is the limit")


@functools.cache
def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard
