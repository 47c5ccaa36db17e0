"""Decoders around another one: each record is decompressed first, with a limit to what comes out."""

from __future__ import annotations

import copy
import functools
import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.codec.library import find_package
from pario.decode.base import Around, ArraySpec, Decoder, Draw, Failures
from pario.decode.given import as_decoder
from pario.errors import DecodeError, OptionError, how_to_install
from pario.records import Records

_zstandard = functools.partial(find_package, "zstandard")

_MOST = 120 << 20
#: Bytes to decompress before the inner decoder gets them.
_UNIT = 4 << 20
#: The most bytes of a block of zstd.
_BLOCK = 128 << 10

_OBJECT = np.dtype(object)


class _Broken(Exception):
    """Why a record cannot be decompressed; never leaves this file."""


class Compressed(Around):
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
            raise self._refused(record, str(error), f"not {self.kind} data") from error
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
                waiting.append(self._unpacked(records[i]))
                held += len(waiting[-1])
            except _Broken as error:
                failures.append((i, f"not {self.kind} data: {error}"))
                held = _UNIT  # what waits comes before a gap
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
        inner = Records.of(np.array(records.ids[part]), values)
        found = self.inner.decode(inner, {name: array[part] for name, array in out.items()}, draw)
        return [(first + row, f"inside of the {self.kind} data: {why}") for row, why in found]

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self.inner.by_rows:
            return super().finish(arrays)
        values = list(arrays["data"])
        records = Records.of(np.arange(len(values)), values)
        whole = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.inner.shapes(records).items()}
        self.inner.decode(records, whole, Draw())  # bytes and offsets: nothing can fail
        return self.inner.finish(whole)


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
        left, at, step = self.most_bytes, 0, len(record)
        while at < len(record) or not pieces:
            stream = zlib.decompressobj(self._window)
            while not stream.eof:
                given = record[at : at + step]
                if not given:
                    raise _Broken("the end is missing")
                inside = stream.decompress(given, left + 1)
                left -= len(inside)
                if left < 0:
                    raise _too_much(self.most_bytes)
                pieces.append(inside)
                at += len(given) - len(stream.unused_data)
                step *= 2
            if self._window == zlib.MAX_WBITS and at < len(record):
                raise _Broken(f"{len(record) - at} bytes follow the end")
            while record[at : at + 1] == b"\0":  # padding, as gzip and Python allow it
                at += 1
            step = 512  # zlib copies what follows a stream: of thousands of short ones not the whole record each time
        return b"".join(pieces)


class Gzip(Zlib):
    """Records compressed with gzip, of another decoder: Gzip(Json()). Several gzip
    streams in one record are one; zeros behind a stream are padding.

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
    """Records compressed with Zstandard, of another decoder: Zstd(Json()). Needs `pip install ".[zstd]"`.

    Parameters
    ----------
    decoder : Decoder, function or None
        Of what is inside; None: the bytes, as Raw() returns them.
    most_bytes : int
        A record that decompresses to more is bad: a few bytes may hold gigabytes of zeros.

    Several frames in one record are one; skippable frames are skipped.
    """

    kind = "zstd"

    def __init__(self, decoder: Decoder | Callable[..., Any] | None = None, *, most_bytes: int = _MOST) -> None:
        super().__init__(decoder, most_bytes=most_bytes)
        if _zstandard() is None:
            raise OptionError("Zstd() needs the package zstandard, which is not installed", hint=how_to_install("zstd"))

    def unpack(self, record: bytes) -> bytes:
        library = _zstandard()
        # A decompressor belongs to one thread; making one costs little beside a record.
        engine = library.ZstdDecompressor(max_window_size=1 << 27)
        pieces: list[bytes] = []
        left, end = self.most_bytes, 0
        while end < len(record) or not pieces:
            begin, (end, most) = end, _frame(record, end)
            frame = record[begin:end]
            said = library.frame_content_size(frame) if most else 0
            if said > left:
                raise _too_much(self.most_bytes)
            if said > most or (most and not said):  # nobody gets memory for a size that a damaged header says
                raise _Broken(f"a frame says that it holds {said:,} bytes, and its blocks hold 1 to {most:,}")
            try:
                inside = engine.decompress(frame, max_output_size=min(most, left + 1)) if most else b""
            except library.ZstdError as error:
                more = "" if most <= left else f"; or it decompresses to more than most_bytes={self.most_bytes:,}"
                raise _Broken(f"{error}{more}") from error
            left -= len(inside)
            if left < 0:
                raise _too_much(self.most_bytes)
            pieces.append(inside)
        return b"".join(pieces)


def _frame(record: bytes, at: int) -> tuple[int, int]:
    """(end, the most bytes that it holds) of the zstd frame that begins there. A skippable one holds none.

    The library decodes one frame, and does not say where it ends: RFC 8878, 3.1.
    """
    magic = int.from_bytes(record[at : at + 4], "little")
    if magic >> 4 == 0x184D2A5:
        end, most = at + 8 + int.from_bytes(record[at + 4 : at + 8], "little"), 0
    elif magic == 0xFD2FB528:
        end, most, last = at + _zstandard().frame_header_size(record[at : at + 18]), 0, 0
        while not last:
            if len(record) < end + 3:
                raise _Broken("the end is missing")
            head = int.from_bytes(record[end : end + 3], "little")
            last, kind, nbytes = head & 1, head >> 1 & 3, head >> 3
            end += 3 + (1 if kind == 1 else nbytes)
            most += _BLOCK if kind > 1 else nbytes
        end += record[at + 4] & 4  # bytes of a checksum, and the flag for it
    else:
        raise _Broken(f"at byte {at} of {len(record)} no frame begins")
    if end > len(record):
        raise _Broken("the end is missing")
    return end, most


def _too_much(most: int) -> _Broken:
    return _Broken(f"it decompresses to more than {most:,} bytes; most_bytes= is the limit")
