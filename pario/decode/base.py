"""The contract of all decoders, each record's source of randomness, and descriptions of records of the wrong kind.

Order of calls: one process shows record 0 to `learn`, and the decoders of the other processes get its `spec`. Then, for
each batch, `shapes` returns the arrays that are needed, and `decode` writes row i of each array for record i. If
records share one shape, several threads may decode slices of a batch at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pario import machine
from pario.errors import DecodeError
from pario.records import Records

__all__ = ["ArraySpec", "Decoder", "Draw", "Failures", "Verbatim", "describe", "extent", "past_caches", "shown"]

#: shape with the first axis, dtype
ArraySpec = tuple[tuple[int, ...], np.dtype]

#: (row, reason) of the records that could not be decoded
Failures = list[tuple[int, str]]

_U64 = (1 << 64) - 1

#: Batches of a rank in use at the same time: the one that is written, the one that the script has, the one before it.
_BATCHES = 3


def _mix(x: int) -> int:
    """Splitmix64's finaliser; the same arithmetic stands in kernels/convert.py."""
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Draw:
    """The source of randomness of one epoch.

    A record's random numbers depend on (seed, epoch, record id) alone: they are the same on any rank, in any thread, in
    a batch of any size.
    """

    seed: int = 0
    epoch: int = 0
    #: seed and epoch as one int64, for kernels
    key: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        mixed = _mix(_mix(self.seed & _U64) ^ (self.epoch & _U64))
        object.__setattr__(self, "key", mixed - (1 << 64) if mixed >> 63 else mixed)

    def rng(self, record: int) -> np.random.Generator:
        """A generator for this record, for augmentation in Python."""
        return np.random.default_rng([self.seed & _U64, self.epoch & _U64, record])


@dataclass(frozen=True)
class Verbatim:
    """The layout of records that need no decoding: `head` bytes, then row i of array `name`, then a few more bytes.

    Without rows (`Decoder.by_rows` is False) array `name` consists of the values, one after the other."""

    name: str
    head: int


class Decoder(ABC):
    """Turns records into named arrays whose first axis is the record.

    Decoders can be pickled, and hold no state except their options and what they have learnt.
    """

    #: True: several threads decode a batch record by record. False: one call decodes the batch.
    parallel: bool = False

    #: True: decoding moves bytes and changes none, so that memory is what it waits for. Of a decoder that has learnt.
    copies: bool = False

    #: True: row i of every array belongs to record i alone, so slices of a batch can be decoded separately.
    by_rows: bool = True

    #: The result of `learn`, small and picklable; None before. Assign the spec of another process to skip `learn`.
    spec: Any = None

    @abstractmethod
    def learn(self, record: np.ndarray) -> Any:
        """Examine one record u8[k]; keep and return the properties that all others must share with it.

        Raises DecodeError if this decoder cannot decode the record, OptionError if options do not fit it.
        """

    @abstractmethod
    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        """The arrays that these records need. Do not change the returned dict."""

    @abstractmethod
    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        """Write row i of the arrays in `out` (C-contiguous, as `shapes` asked) for record i.

        Returns the rows that failed; their content is undefined. Never raises for bad data.
        """

    def verbatim(self) -> Verbatim | None:
        """The layout in which most records can be read straight into their rows; None if there is none."""
        return None

    def decode_rest(self, records: Records, out: dict[str, np.ndarray]) -> list[int]:
        """Finish records whose rows were read straight into place: `records` holds the bytes before and behind each row
        (without rows only the sizes of the values).

        Returns the rows of records that do not have the layout of `verbatim`, or might not: they go through `decode`.
        """
        raise NotImplementedError

    def _learnt(self) -> Any:
        if self.spec is None:
            raise DecodeError(f"{self!r} has not seen a record yet", hint="Call learn(record), or assign spec, first")
        return self.spec

    def _repr(self, **options: tuple[Any, Any]) -> str:
        """Class name with the options that differ from their default: name = (value, default)."""
        said = (f"{name}={shown(value)}" for name, (value, default) in options.items() if value is not default)
        return f"{type(self).__name__}({', '.join(said)})"


def shown(value: Any) -> str:
    """A value in a repr: an array by dtype and shape, unless it has only a few numbers."""
    if isinstance(value, np.ndarray):
        return str(value.tolist()) if value.size <= 4 else extent(value.shape, value.dtype)
    if isinstance(value, np.dtype):
        return repr(str(value))
    return repr(value)


def extent(shape: tuple[int, ...], dtype: np.dtype | None = None) -> str:
    """"uint8[3, 32, 32]"."""
    return f"{'' if dtype is None else dtype}{list(shape)}"


#: beginning -> (kind, decoder or advice)
_IMAGE = "use pario.decode.Image()"
_MAGICS = (
    (b"\xff\xd8\xff", "a JPEG", _IMAGE),
    (b"\x89PNG\r\n\x1a\n", "a PNG", _IMAGE),
    (b"GIF8", "a GIF", _IMAGE),
    (b"II*\0", "a TIFF", _IMAGE),
    (b"MM\0*", "a TIFF", _IMAGE),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000", _IMAGE),
    (b"\xff\x0a", "a JPEG XL", "give a function as decoder"),
    (b"\x93NUMPY", "a .npy array", "give a function as decoder: lambda b: numpy.load(io.BytesIO(b))"),
    (b"PK\x03\x04", "a zip (perhaps .npz)", "give a function as decoder: numpy.load(io.BytesIO(b)) reads .npz"),
    (b"\x1f\x8b", "gzip data", "give a function as decoder that calls gzip.decompress(b)"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "give a function as decoder"),
    (b"\x04\x22\x4d\x18", "an lz4 frame", "give a function as decoder"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "give a function as decoder"),
)
_PICKLE = "give a function as decoder that calls pickle.loads(b), if you trust who wrote it: unpickling runs code"


def past_caches(rows: np.ndarray) -> bool:
    """Whether the rows of a batch are to be written past the processor's caches, because these do not hold as many
    batches as are in use."""
    cache = machine.last_cache_bytes()
    return cache is not None and _BATCHES * rows.nbytes > cache


def describe(record: np.ndarray) -> tuple[str, str]:
    """("it begins with 89 50 4e 47, a PNG", advice) of a record u8[k]; the advice is "" for unknown kinds."""
    head = record[:16].tobytes()
    if not head:
        return "it is empty", ""
    kind, advice = "", ""
    for magic, name, what in _MAGICS:
        if head.startswith(magic):
            kind, advice = name, what
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        kind, advice = "a WebP", _IMAGE
    elif head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        kind, advice = "an AVIF", _IMAGE
    elif head[0] == 0x80 and len(head) > 1 and 2 <= head[1] <= 5:
        kind, advice = "a pickle", _PICKLE
    elif head[0] == 0x78 and len(head) > 1 and head[1] in (0x01, 0x5E, 0x9C, 0xDA):
        kind, advice = "zlib data", "give a function as decoder that calls zlib.decompress(b)"
    elif not kind and head.lstrip()[:1] in (b"{", b"["):
        kind, advice = "perhaps JSON", "give a function as decoder that calls json.loads(b)"
    begins = f"it begins with {head[:4].hex(' ')}"
    return (f"{begins}, {kind}" if kind else begins), advice
