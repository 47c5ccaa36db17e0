"""What may stand in a tree that is saved, besides dicts, lists, tuples and plain values: arrays, by the names of their
types, and parts of them. What is an array, and of what type, `Leaves` decides: the one here knows NumPy, those of
pario/adapters know the tensors of a framework.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pario.errors import CorruptedError, OptionError
from pario.text import DAMAGED, read_json

#: A rectangular part of an array: (offset of its first element per axis, shape)
Box = tuple[tuple[int, ...], tuple[int, ...]]

#: Bytes of what `Leaves.held` calls a page: long enough that a loop over them costs little.
PAGE = 16 << 10
#: Types without a NumPy dtype of their own, by the name that frameworks and ml_dtypes use -> bytes of an element.
FOREIGN = {
    **{"bfloat16": 2, "complex32": 4, "bcomplex32": 4},
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"), 1),
    **dict.fromkeys(("float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float4_e2m1fn_x2", "int4", "uint4", "int2", "uint2", "int1", "uint1"), 1),
}
#: NumPy marks dtypes that another package has registered.
_REGISTERED = 2
#: What a dtype of a manifest may look like: NumPy's `dtype.str`, never an object.
_PLAIN = re.compile(r"[<>|][biufcSUMmV]\d{1,9}(\[\d{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_FIELDS = "fields:"


# -- types, by name ----------------------------------------------------------------------------------------------------


def dtype_name(dtype: np.dtype[Any]) -> str:
    """As manifests name it: NumPy's `dtype.str`, a name of FOREIGN, or "fields:" and the fields as JSON."""
    if dtype.hasobject:
        raise OptionError(
            f"an array of dtype {dtype} holds Python objects, which cannot be saved", hint="Save numbers or text"
        )
    registered = dtype.isbuiltin == _REGISTERED
    if registered and dtype.name in FOREIGN:
        return dtype.name
    if dtype.fields is not None or dtype.subdtype is not None:
        with suppress(ValueError):  # fields in another order than in memory have no description
            descr = np.lib.format.dtype_to_descr(dtype)
            if np.lib.format.descr_to_dtype(descr) == dtype:
                return _FIELDS + json.dumps(descr)
        registered = True  # or one of its fields is
    if registered or dtype.kind not in "biufcSUMmV":
        raise OptionError(f"an array of dtype {dtype} cannot be saved: nothing says how to read it back")
    return dtype.str


@lru_cache(maxsize=1024)
def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype in which arrays with that name are held: integers for foreign types. Raises CorruptedError for a
    name that means nothing."""
    if name in FOREIGN:
        return np.dtype(f"u{FOREIGN[name]}")
    try:
        if name.startswith(_FIELDS):
            dtype = np.lib.format.descr_to_dtype(_as_descr(read_json(name[len(_FIELDS) :])))
        elif _PLAIN.fullmatch(name):
            dtype = np.dtype(name)
        else:
            raise ValueError("unknown")
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
    except (*DAMAGED, SyntaxError) as e:
        raise CorruptedError(f"{name[:200]!r} is no dtype: {e}") from None
    return dtype


def _as_descr(value: Any) -> Any:
    """JSON has no tuples; a descr is a list of tuples, whose shapes are tuples."""
    if isinstance(value, list):
        return [tuple(_as_descr(e) if i == 1 else _tuple(e) for i, e in enumerate(field)) for field in value]
    if not isinstance(value, str) or not _PLAIN.fullmatch(value):
        raise ValueError(f"a field of type {value!r}")
    return value


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def named(name: str) -> np.dtype[Any] | None:
    """NumPy's dtype of that name, if ml_dtypes is installed."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    found = getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)


# -- arrays and their parts --------------------------------------------------------------------------------------------


class Shard:
    """This rank's part of an array that is divided among ranks.

    array : the part; in `like` anything with its shape and dtype
    global_shape : shape of the whole array
    offset : where the part's first element lies in it, one number per axis

    Together the parts of all ranks must make up the array. Parts that several ranks hold alike are written once.
    """

    __slots__ = ("array", "global_shape", "offset")

    def __init__(self, array: Any, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        self.array = array
        self.global_shape = tuple(int(n) for n in global_shape)
        self.offset = tuple(int(n) for n in offset)

    def __repr__(self) -> str:
        return f"Shard(global_shape={self.global_shape}, offset={self.offset})"


@dataclass(eq=False)
class PerRank:
    """What every rank has for itself: the state of a random generator, of a loader of its own.

    value : a tree without Shard and PerRank; its keys, types and shapes may differ between ranks

    `restore` gives each rank what the rank of the same number has saved, without the PerRank around it. On more ranks
    than have saved, those beyond get None; on fewer, what the others have saved is left out. Rank 0 warns of both.
    In `like` it may stand around what is wanted.
    """

    value: Any


class Bits:
    """The bits of an array whose type NumPy does not know, in an array of unsigned integers of that size.

    array : u8[...] or u16[...]; dtype : "bfloat16", "float8_e4m3fn", ...
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        if FOREIGN.get(dtype) != array.dtype.itemsize or array.dtype.kind not in "ui":
            raise OptionError(f"Bits need an integer array of a size that fits {dtype!r}, got {array.dtype}")
        self.array = array
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"Bits({self.array.shape}, {self.dtype})"


class Spec(NamedTuple):
    """One array of a tree, the same on all ranks.

    path : its keys from the root, escaped, with "/" between them
    dtype : see `dtype_of`; shape : of the whole array; kind : "array", "shard" or "scalar" (a NumPy scalar)
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return dtype_of(self.dtype).itemsize


def reaches_out(box: Box, shape: tuple[int, ...]) -> bool:
    """Of an array of that shape."""
    return any(o < 0 or n < 0 or o + n > m for o, n, m in zip(*box, shape, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """The part that both have; None if that is empty."""
    first = tuple(map(max, a[0], b[0]))
    shape = tuple(min(p + m, q + n) - f for p, m, q, n, f in zip(a[0], a[1], b[0], b[1], first, strict=True))
    return None if any(n <= 0 for n in shape) else (first, shape)


def slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of `box` in an array whose first element lies at `origin`."""
    return tuple(slice(p - o, p - o + n) for p, n, o in zip(box[0], box[1], origin, strict=True))


def runs(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of an array in C order, as at most 2 * ndim - 1 boxes, each one piece of the order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # both ends in one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, inner in runs(shape[1:], start, stop):
        yield (row, *offset), (1, *inner)


class Leaves:
    """NumPy's arrays. An adapter derives from it for the tensors of a framework; all methods are local."""

    def opened(self, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        """What stands for a node of a framework's own, a dict of its children or a Shard; and what makes such a node of
        what was restored for that. None for any other. Raises OptionError for one that cannot be saved."""
        return None

    def wanted(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        """As `describe`, of a leaf of `like`, which may lack its data."""
        return self.describe(leaf)

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        """(name of the dtype, shape); None if it is no array. Raises OptionError for one that cannot be saved."""
        if isinstance(leaf, np.ndarray | np.generic):
            kind = type(leaf)
            is_numpys = kind.__module__.partition(".")[0] == "numpy"
            if isinstance(leaf, np.ndarray) and (isinstance(leaf, np.ma.MaskedArray) or not is_numpys):
                raise OptionError(
                    f"a {kind.__module__}.{kind.__qualname__} would come back as a plain array, without what it adds",
                    hint="Save its parts, of a masked array data and mask, or numpy.asarray(it) where that is enough",
                )
            return dtype_name(leaf.dtype), leaf.shape
        if isinstance(leaf, Bits):
            return leaf.dtype, leaf.array.shape
        return None

    def copy(self, leaf: Any, target: np.ndarray, run: slice | None) -> None:
        """Copy the whole leaf to `target`, or these elements in C order; `target` has one axis then."""
        array = np.asarray(leaf.array if isinstance(leaf, Bits) else leaf)
        array = array if array.dtype == target.dtype else array.view(target.dtype)
        np.copyto(target, array if run is None else array.reshape(-1)[run])

    def held(self, leaf: Any, begin: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Of its bytes in C order, u8: every `step`-th page from number `begin` on, and what is no whole page."""
        flat = np.ascontiguousarray(leaf.array if isinstance(leaf, Bits) else leaf).reshape(-1).view(np.uint8)
        whole = flat.size // PAGE * PAGE
        return flat[:whole].reshape(-1, PAGE)[begin::step], flat[whole:]

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        """The array that lies in `memory`, u8[bytes], which it may keep. like : this leaf of the user's tree or None"""
        array = memory.view(dtype_of(dtype)).reshape(shape)
        if dtype in FOREIGN:
            known = named(dtype)
            return Bits(array, dtype) if known is None or isinstance(like, Bits) else array.view(known)
        return array
