"""The contract of all decoders, and each record's source of randomness.

Order of calls: one process shows record 0 to `learn`, and the decoders of the other processes get its `spec`. Then, for
each batch, `shapes` returns the arrays that are needed, and `decode` writes row i of each array for record i. If
records share one shape, several threads may decode slices of a batch at once. `finish` sees the arrays of a whole batch
once, when all its rows are written.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from reprlib import recursive_repr
from typing import Any

import numpy as np

from pario import machine
from pario.decode.registry import describe
from pario.errors import DecodeError
from pario.records import Records

__all__ = [
    "Around", "ArraySpec", "Decoder", "Draw", "Failures", "Parts", "Verbatim", "columns", "describe", "extent",
    "flat", "past_caches", "read_only", "same", "shown",
]  # fmt: skip

#: shape with the first axis, dtype
ArraySpec = tuple[tuple[int, ...], np.dtype]

#: (row, reason) of the records that could not be decoded
Failures = list[tuple[int, str]]

#: records of some rows of a batch, and these rows of its arrays
Parts = list[tuple[Records, dict[str, np.ndarray]]]

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
    """The source of randomness of one epoch, and of the keys of its records.

    A record's random numbers depend on (seed, epoch, record id) alone: they are the same on any rank, in any thread, in
    a batch of any size.

    keys : keys(ids) -> the keys of these records; from any thread
    """

    seed: int = 0
    epoch: int = 0
    keys: Callable[[np.ndarray], list[bytes]] | None = field(repr=False, compare=False, default=None)
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

    #: True: several threads decode a batch record by record. False: one call decodes the batch, or several of them.
    parallel: bool = False

    #: True: decoding moves bytes and changes none, so that memory is what it waits for. Of a decoder that has learnt.
    copies: bool = False

    #: True: row i of every array belongs to record i alone, so slices of a batch can be decoded separately.
    by_rows: bool = True

    #: Bytes between a cache line and the beginning of its arrays.
    lead: int = 0

    #: Records of one row, which follow each other: more than 1 only of samples of several records (fields.py).
    records_per_row: int = 1

    #: The result of `learn`, small and picklable; None before. Assign the spec of another process to skip `learn`.
    spec: Any = None

    @abstractmethod
    def learn(self, record: np.ndarray) -> Any:
        """Examine one record u8[k]; keep and return the properties that all others must share with it.

        Raises DecodeError if this decoder cannot decode the record, OptionError if options do not fit it.
        """

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> Any:
        """`learn`, for decoders that use a record's id, its key or random numbers. number : the record's id"""
        return self.learn(record)

    def learn_from(self, records: Records, draw: Draw) -> Any:
        """`learn`, from the records of one row."""
        return self.learn_at(records[0], int(records.ids[0]), draw)

    @property
    def is_open(self) -> bool:
        """Whether what was learnt leaves something to further records, which `learn` is shown until it does not."""
        return False

    def settle(self, seen: int) -> None:  # noqa: B027  most learn all from one record
        """Called where no further records are shown, after `seen`. Raises OptionError if they say too little."""

    @abstractmethod
    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        """The arrays that these records need; dtype object for rows of any size. Do not change the returned dict."""

    @abstractmethod
    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        """Write row i of the arrays in `out` (C-contiguous, as `shapes` asked) for record i.

        Returns the rows that failed; their content is undefined. Never raises for bad data.
        """

    def blank(self, arrays: dict[str, np.ndarray], row: int) -> None:
        """Write what a sample has that lacks this optional field (fields.py): 0, and None into arrays of objects."""
        for array in arrays.values():
            array[row] = None if array.dtype == object else 0

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays that the user gets, from those of a whole batch, without the rows that failed."""
        return arrays

    def row_ids(self, ids: np.ndarray) -> np.ndarray:
        """i64[b]: the ids that the user gets for rows whose first records are these."""
        return ids

    def picked(self, arrays: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a batch with these records alone. rows : i64[k], each a row of the batch, in any order"""
        if not self.by_rows:
            raise DecodeError(f"{self!r} cannot leave records out of a batch")
        return {name: array[rows] for name, array in arrays.items()}

    @property
    def users(self) -> Decoder:
        """The decoder that the user gave, where this one does something for it before (packed.py)."""
        return self

    def pieces(self, records: Records, threads: int) -> int:
        """Into how many parts a batch of these records is cut for this many threads, if `parallel`: several for each of
        several threads, because records differ in cost."""
        return min(len(records) // self.records_per_row, 4 * threads if threads > 1 else 1)

    def parts(self, records: Records, arrays: dict[str, np.ndarray], cuts: list[int]) -> Parts:
        """The parts of a batch between these rows (ascending, the first and the last edge among them), to be decoded
        one by one."""
        width = self.records_per_row
        return [
            (records.part(a * width, b * width), {name: array[a:b] for name, array in arrays.items()})
            for a, b in pairwise(cuts)
        ]

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

    def _refused(self, record: np.ndarray, why: str, what: str = "", hint: str | None = None) -> DecodeError:
        """The error about a record u8[k] that this decoder cannot read, with the advice that its first bytes give,
        unless it is to use this decoder. what : stands before the reason; hint : where there is no advice"""
        begins, advice = describe(record)
        advice = "" if f".{type(self).__name__}(" in advice else advice
        return DecodeError(f"{what or f'{self!r} cannot decode this record'}: {why}; {begins}", hint=advice or hint)

    @recursive_repr()
    def __repr__(self) -> str:
        given = self.arguments().items()
        said = (f"{name}={shown(value)}" for name, (value, default) in given if not same(value, default))
        return f"{type(self).__name__}({', '.join(said)})"

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        """What the constructor was given, and is kept by its name: name -> (value, default)."""
        named = (p for p in inspect.signature(type(self)).parameters.values() if p.kind is not p.VAR_KEYWORD)
        return {p.name: (getattr(self, p.name, p.default), p.default) for p in named}


class Around(Decoder):
    """Base of decoders around another one, `inner`, which alone learns something."""

    inner: Decoder

    @property
    def spec(self) -> Any:  # type: ignore[override]
        return self.inner.spec

    @spec.setter
    def spec(self, spec: Any) -> None:
        self.inner.spec = spec

    @property
    def is_open(self) -> bool:
        return self.inner.is_open

    def settle(self, seen: int) -> None:
        self.inner.settle(seen)

    def blank(self, arrays: dict[str, np.ndarray], row: int) -> None:
        self.inner.blank(arrays, row)

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.inner.finish(arrays)


def same(value: Any, default: Any) -> bool:
    """Whether an option has its default value."""
    plain = type(value) is type(default) and isinstance(default, (str, int, float, tuple))
    return value is default or (plain and bool(value == default))


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


def past_caches(rows: np.ndarray) -> bool:
    """Whether the rows of a batch are to be written past the processor's caches, because these do not hold as many
    batches as are in use, and what they are copied from."""
    return rows.nbytes > cached_bytes()


def cached_bytes() -> int:
    """Of a batch, at most, so that the processor's caches hold those in use, and what they are copied from; where their
    size is unknown, a great many."""
    return (machine.last_cache_bytes() or sys.maxsize) // (2 * _BATCHES)


def read_only(data: np.ndarray) -> np.ndarray:
    """The same memory, which nobody writes to by what this returns."""
    if data.flags.writeable:
        data = data.view()
        data.flags.writeable = False
    return data


def columns(records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(data, starts, nbytes, failed): read-only u8[...], then contiguous i64[n]; `failed` is uninitialised.

    Tables in a window may be strided fields of a structured array; copying them costs less than a microsecond.
    """
    data = read_only(records.data)
    starts = np.array(records.starts, np.int64)
    return data, starts, np.array(records.nbytes, np.int64), np.empty(len(starts), np.int64)


def flat(array: np.ndarray, dtype: type = np.uint8) -> np.ndarray:
    """The same memory as a 1-D array of `dtype`; the array must be C-contiguous."""
    if not array.flags.c_contiguous:
        raise ValueError("decoders write into C-contiguous arrays only")
    # reshape(-1) of contiguous memory never copies.
    return array.reshape(-1).view(dtype)
