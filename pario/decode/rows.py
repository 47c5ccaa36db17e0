"""Decoders that turn each record into Python values: columns of numbers, arrays of unequal sizes, and any objects.

    value   one record's bytes -> a Python value                     the leaf's part
    named   the value -> {name: item}: dicts, pairs, nested dicts
    column  by record 0: numbers of one shape are rows of one array; all else is an array of objects
    finish  "flat" and "pad" arrays of the whole batch
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, describe, extent
from pario.errors import DecodeError, OptionError
from pario.records import Records

__all__ = ["BadValue", "Column", "FieldDecoder", "RowDecoder", "reason"]

#: How rows of different shapes become one column.
RAGGED = ("flat", "pad", "list", "object")

_OBJECT = np.dtype(object)
_I64 = np.dtype(np.int64)
_F64 = np.dtype(np.float64)
#: Below, float64 has every integer.
_EXACT = 1 << 53
#: What is no dict, without asking.
_LEAVES = frozenset((np.ndarray, bool, int, float, str, bytes, list, tuple))
#: Padding of more bytes than this, and of this many times the records' own, is refused.
_MOST_PADDED, _SPARSE = 1 << 30, 8
_HOW = 'ragged="list", "flat" or "pad" takes arrays of different sizes'


class BadValue(Exception):
    """What the record holds does not fit; the text is the whole reason. Never leaves the decoders."""


class Column(NamedTuple):
    """One named array of a batch.

    shape, dtype : of record 0's row
    ragged : "" if every row has this shape; "flat", "pad" or "list" if the first axes differ; "object" for anything
    is_open : record 0 has no elements there, as [] has: the first record with some says what the column is
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    ragged: str = ""
    is_open: bool = False


class RowDecoder(Decoder):
    """Base of decoders whose records become Python values.

    ragged : None, or "flat", "pad", "list" or "object" for all arrays, or a dict of names with one of them:
        None      every record has the shape of record 0
        "flat"    arrays one after the other, x[total, ...], and x_offsets i64[b + 1]: record i is
                  x[x_offsets[i]:x_offsets[i + 1]] (of "data": "offsets")
        "pad"     x[b, longest, ...], filled up with `pad_value`, and x_lengths i64[b], or i64[b, axes] if rows have
                  several axes (of "data": "lengths")
        "list"    an array of objects [b], each an array of its own size
        "object"  an array of objects [b], each as it is: strings, lists, dicts
    pad_value : number
    pad_multiple : round the first axis of padded arrays up to a multiple of this
    """

    #: name -> dtype that its arrays are converted to
    dtypes: Mapping[str, np.dtype] = {}

    def __init__(self, ragged: str | Mapping[str, str] | None, pad_value: Any, pad_multiple: int) -> None:
        modes = ragged.values() if isinstance(ragged, Mapping) else () if ragged is None else (ragged,)
        for mode in modes:
            if mode not in RAGGED:
                raise OptionError(f"ragged must be None or one of {', '.join(RAGGED)}, or name -> one, got {ragged!r}")
        if isinstance(pad_multiple, bool) or not isinstance(pad_multiple, (int, np.integer)) or pad_multiple < 1:
            raise OptionError(f"pad_multiple must be an integer of at least 1, got {pad_multiple!r}")
        if np.ndim(pad_value) or np.asarray(pad_value).dtype.kind not in "biufc":
            raise OptionError(f"pad_value must be a number, got {pad_value!r}")
        self.ragged = dict(ragged) if isinstance(ragged, Mapping) else ragged
        self.pad_value, self.pad_multiple = pad_value, int(pad_multiple)
        self.spec: dict[str, Column] | None = None

    def options(self) -> dict[str, tuple[Any, Any]]:
        """The options of this class, for a repr: name -> (value, default)."""
        return {
            "ragged": (self.ragged, None),
            "pad_value": (self.pad_value if self.pad_value != 0 else 0, 0),
            "pad_multiple": (self.pad_multiple if self.pad_multiple != 1 else 1, 1),
        }

    @abstractmethod
    def value(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> Any:
        """The content of one record u8[k]. Raises anything; BadValue if its text is the whole reason.

        number : the record's id; key : its key if `wants_key`, else b""
        """

    #: True: `value` is called with each record's key. Looking keys up costs time.
    wants_key: bool = False

    def named(self, value: Any) -> dict[str, Any]:
        """name -> item, of the value of one record. Raises BadValue."""
        kind = type(value)
        if kind is np.ndarray:
            return {"data": value}
        if kind is tuple and len(value) == 2:
            return {"data": value[0], "label": value[1]}
        if kind is dict and value and all(type(item) in _LEAVES for item in value.values()):
            return {str(name): item for name, item in value.items()}
        if isinstance(value, Mapping):
            items = dict(self._leaves(value, ""))
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            items = dict(zip(value._fields, value, strict=True))
        elif isinstance(value, tuple):
            if not 1 <= len(value) <= 2:
                raise BadValue(f"returned a tuple of {len(value)}; return a dict to name more than data and label")
            items = dict(zip(("data", "label"), value, strict=False))
        elif value is None:
            raise BadValue("returned None")
        else:
            items = {"data": value}
        if not items:
            raise BadValue("returned no arrays")
        return items

    def _leaves(self, value: Mapping[Any, Any], before: str, depth: int = 0) -> Any:
        """(name, item) of a dict, and of the dicts in it as "outer.inner"."""
        if depth > 16:
            raise BadValue(f"dicts are nested deeper than {depth} levels at {before!r}")
        for name, item in value.items():
            whole = f"{before}{name}"
            if isinstance(item, Mapping) and self._mode(whole) != "object":
                yield from self._leaves(item, f"{whole}.", depth + 1)
            else:
                yield whole, item

    def _mode(self, name: str) -> str:
        if isinstance(self.ragged, Mapping):
            return self.ragged.get(name, "")
        return self.ragged or ""

    def _column(self, name: str, item: Any) -> Column:
        mode = self._mode(name)
        if mode == "object" or _is_object(item):
            return Column((), _OBJECT, "object")
        array = self._array(name, item)
        if array.dtype == _OBJECT:
            return Column((), _OBJECT, "object")
        if not mode or not array.ndim:
            return Column(array.shape, array.dtype)
        return Column(array.shape, array.dtype, mode, not array.size)

    def _array(self, name: str, item: Any) -> np.ndarray:
        """The item as an array of numbers, of the dtype that was asked for; lists of other things as object."""
        try:
            array = np.asarray(item)
        except ValueError as error:  # lists of unequal lengths
            raise BadValue(f"{name!r} is not an array of numbers: {error}; {_as_it_is(name)}") from error
        dtype = self.dtypes.get(name)
        if isinstance(item, (list, tuple)) and array.dtype.kind in "fc" and (np.abs(array) >= _EXACT).any():
            array = _unrounded(name, item, array, dtype)
        if dtype is not None and array.dtype != dtype:
            array = _converted(name, array, dtype)
        return array.astype(_OBJECT) if array.dtype.hasobject or array.dtype.kind in "SU" else array

    def learn(self, record: np.ndarray) -> dict[str, Column]:
        return self.learn_at(record, 0, Draw())

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> dict[str, Column]:
        try:
            key = draw.keys(np.array([number]))[0] if self.wants_key and draw.keys is not None else b""
            items = self.named(self.value(record, number, draw, key))
            spec = {name: self._column(name, item) for name, item in items.items()}
        except Exception as error:
            begins, advice = describe(record)
            raise DecodeError(
                f"{self!r} cannot decode this record: {reason(error)}; {begins}",
                hint=_hint(advice, type(self).__name__),
            ) from error
        if self.is_open:  # what an earlier record has settled stays
            known = self._columns()
            if known.keys() != spec.keys():
                raise DecodeError(f"this record has {sorted(spec)}, record 0 {sorted(known)}")
            spec = {
                name: _settled(column, spec[name], items[name]) if column.is_open else column
                for name, column in known.items()
            }
        for name, column in spec.items():
            if column.ragged in ("flat", "pad") and _beside(name, column.ragged) in spec:
                raise OptionError(f"{name!r} needs the name {_beside(name, column.ragged)!r}, which the records use")
            if column.ragged == "pad" and not _holds(column.dtype, self.pad_value):
                raise OptionError(
                    f"pad_value={self.pad_value!r} is no {column.dtype}, the dtype of {name!r}",
                    hint="Choose a value that this dtype holds.",
                )
        self.spec = spec
        return spec

    @property
    def is_open(self) -> bool:
        return self.spec is not None and any(column.is_open for column in self._columns().values())

    def _columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = self._learnt()
        return columns

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        n = len(records)
        return {
            name: ((n,), _OBJECT) if ragged else ((n, *shape), dtype)
            for name, (shape, dtype, ragged, _) in self._columns().items()
        }

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        spec = {name: column._replace(dtype=_single(column.dtype)) for name, column in self._columns().items()}
        failures: Failures = []
        keys = draw.keys(np.array(records.ids)) if self.wants_key and draw.keys is not None else None
        ids = records.ids.tolist()
        for i in range(len(ids)):
            try:
                items = self.named(self.value(records[i], ids[i], draw, b"" if keys is None else keys[i]))
                if items.keys() != spec.keys():
                    raise BadValue(f"returned {sorted(items)}, for record 0 {sorted(spec)}")
                for name, item in items.items():
                    out[name][i] = self._row(name, item, spec[name])
            except Exception as error:
                failures.append((i, reason(error)))
        return failures

    def _row(self, name: str, item: Any, column: Column) -> Any:
        """What goes into the column's row. Raises BadValue if it does not fit."""
        shape, dtype, ragged, _ = column
        if not ragged and not self.dtypes:  # the usual cases, in a fraction of the time
            kind = type(item)
            if kind is np.ndarray and item.dtype is dtype and item.shape == shape:
                return item
            if not shape and (
                (kind is int and dtype is _I64 and -1 << 63 <= item < 1 << 63) or (kind is float and dtype is _F64)
            ):
                return item
        if ragged == "object":  # arrays may lie in the reader's memory
            return item.copy() if isinstance(item, np.ndarray) else item
        array = self._array(name, item)
        same = array.shape == shape
        if not same and ragged:
            if array.shape == (0,):  # [] has as many axes as the others
                array = array.reshape((0,) * len(shape) if ragged == "pad" else (0, *shape[1:]))
            same = array.ndim == len(shape) and (ragged != "flat" or array.shape[1:] == shape[1:])
        if same and array.dtype.kind in "iu":
            if dtype.kind in "iu" and isinstance(item, (int, list, tuple)):  # int64 is only what NumPy makes of them
                array = _converted(name, array, dtype)
            elif dtype.type in (np.float64, np.complex128):
                _check_exact(name, array[(array >= _EXACT) | (array <= -_EXACT)].tolist(), dtype)
        if same and (np.can_cast(array.dtype, dtype, "safe") or (ragged and not array.size)):
            return np.array(array, dtype) if ragged else array
        if not same and array.dtype != _OBJECT:
            how = f"; {_HOW}" if not ragged and array.ndim else ""
            why = f"rows of one array need one shape and dtype{how}" if not ragged else "too different to be one array"
        else:
            why = "rows of one array need one shape and dtype"
        got = type(item).__name__ if array.dtype == _OBJECT else extent(array.shape, array.dtype)
        raise BadValue(f"{name!r} is {got}, that of record 0 is {extent(shape, dtype)}; {why}")

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        spec = self._columns()
        if not any(column.ragged in ("flat", "pad") for column in spec.values()):
            return arrays
        whole: dict[str, np.ndarray] = {}
        for name, rows in arrays.items():
            column = spec[name]
            if column.ragged == "flat":
                whole[name], whole[_beside(name, "flat")] = _flat(rows, column)
            elif column.ragged == "pad":
                whole[name], whole[_beside(name, "pad")] = self._padded(rows, column)
            else:
                whole[name] = rows
        return whole

    def _padded(self, rows: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
        axes = len(column.shape)
        sizes = np.array([row.shape for row in rows], _I64).reshape(len(rows), axes)
        longest = sizes.max(axis=0) if sizes.any() else np.array([0, *column.shape[1:]], _I64)
        first = -(-int(longest[0]) // self.pad_multiple) * self.pad_multiple
        want = len(rows) * first * math.prod(longest[1:].tolist()) * column.dtype.itemsize
        if want > _MOST_PADDED and want > _SPARSE * sum(row.nbytes for row in rows):
            raise DecodeError(
                f"row {int(sizes[:, 0].argmax())} of this batch is so much longer than the others that padding would "
                f"take {want:,} bytes",
                hint='ragged="flat" or "list" takes no more memory than the records.',
            )
        array = np.full((len(rows), first, *longest[1:].tolist()), self.pad_value, column.dtype)
        for i, row in enumerate(rows):
            array[i][tuple(slice(k) for k in row.shape)] = row
        return array, sizes[:, 0] if axes == 1 else sizes


class FieldDecoder(RowDecoder):
    """Base of decoders of documents: the whole value, or fields of it by name.

    fields : None: {"data": object[b]}, each record's whole value. "all": a column for each name of record 0. Names, or
        name -> dtype: these columns; "a.b" is b in a, and a number the element of a list. A value is looked up in a
        dict, in a list, or as an attribute.
    """

    def __init__(
        self,
        fields: Any = None,
        *,
        ragged: str | Mapping[str, str] | None = None,
        pad_value: Any = 0,
        pad_multiple: int = 1,
    ) -> None:
        super().__init__(ragged, pad_value, pad_multiple)
        self.fields: Any = fields
        if isinstance(fields, str) and fields != "all":
            self.fields = (fields,)
        elif fields is not None and not isinstance(fields, (str, Mapping)):
            self.fields = tuple(fields)
        if isinstance(self.fields, Mapping):
            wanted = {str(name): np.dtype(dtype) for name, dtype in self.fields.items() if dtype is not None}
            if any(dtype.hasobject or not dtype.itemsize for dtype in wanted.values()):
                raise OptionError(f"dtypes must be numbers of a fixed size, got {fields!r}")
            self.dtypes = wanted
        if self.fields is not None and not self.fields:
            raise OptionError(f'fields must be None, "all" or names, got {fields!r}')

    def __repr__(self) -> str:
        return self._repr(fields=(self.fields, None), **self.options())

    def named(self, value: Any) -> dict[str, Any]:
        if self.fields is None:
            return {"data": value}
        if self.fields == "all":
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                if len(value) == 2:
                    return {"data": value[0], "label": value[1]}
                return {str(i): item for i, item in enumerate(value)}
            return super().named(value)
        return {str(name): _field(value, name) for name in self.fields}

    def _column(self, name: str, item: Any) -> Column:
        return Column((), _OBJECT, "object") if self.fields is None else super()._column(name, item)


def _field(value: Any, name: Any) -> Any:
    """The value of a field: "a.b", 3, or "a.3". Raises BadValue."""
    for part in str(name).split("."):
        if isinstance(value, Mapping):
            if part in value:
                value = value[part]
                continue
            had: Any = sorted(map(str, value))[:20]
        elif isinstance(value, (list, tuple)):
            if part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
                continue
            if part in getattr(value, "_fields", ()):  # of a namedtuple
                value = getattr(value, part)
                continue
            had = f"{len(value)} elements"
        else:
            # torch_geometric keeps the fields of a Data in `_store`, older versions in the object itself.
            own = getattr(value, "__dict__", {})
            store = own.get("_store")
            if part in own:
                value = own[part]
                continue
            if isinstance(store, Mapping) and part in store:
                value = store[part]
                continue
            if not part.startswith("_") and hasattr(value, part):
                value = getattr(value, part)
                continue
            had = type(value).__name__
        raise BadValue(f"no field {str(name)!r}; there is {had}")
    return value


def _settled(known: Column, found: Column, item: Any) -> Column:
    """A column of which the records so far have no elements, after one more. float64 is what NumPy calls []."""
    if found.ragged == "object":  # a list of strings, but not a field that this record lacks
        return found if isinstance(item, (list, tuple, np.ndarray)) else known
    keeps_shape = not found.shape or (found.is_open and len(found.shape) <= len(known.shape))
    return Column(
        known.shape if keeps_shape else found.shape,
        found.dtype if known.dtype == _F64 and found.shape else known.dtype,
        known.ragged,
        keeps_shape or found.is_open,
    )


def _check_exact(name: str, numbers: list[Any], dtype: np.dtype) -> None:
    """Raises BadValue if float64 would round one of the integers among them."""
    for number in numbers:
        if isinstance(number, (int, np.integer)) and int(float(number)) != number:
            raise BadValue(f"{name!r} holds {number}, which {dtype} would round; {_as_it_is(name)}")


def _unrounded(name: str, item: Any, array: np.ndarray, wanted: np.dtype | None) -> np.ndarray:
    """The array of a list with large integers, which NumPy has made floats. Raises BadValue if it has rounded some and
    nobody wanted floats."""
    numbers = np.array(item, _OBJECT)
    listed = numbers.ravel().tolist()
    if all(isinstance(number, (int, np.integer)) and number >= 0 for number in listed):
        return numbers.astype(np.uint64)
    if wanted is None or wanted.kind not in "fc":
        _check_exact(name, listed, array.dtype)
    return array


def _holds(dtype: np.dtype, number: Any) -> bool:
    """Whether a column of this dtype can be filled up with this number, but for the rounding of floats."""
    if dtype.kind not in "biufc":
        return True
    if np.iscomplexobj(number) and dtype.kind != "c":
        return False
    with np.errstate(all="ignore"):
        try:
            filled = np.full((), number, dtype)[()]
        except (OverflowError, ValueError, TypeError):
            return False
    if dtype.kind in "fc":
        return bool(np.isfinite(filled) or not np.isfinite(number))
    return bool(filled == number)


def _converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in this dtype. Raises BadValue if numbers would change by more than rounding."""
    integers = array.dtype.kind in "biu" and dtype.kind in "iu"
    if array.size and not integers and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise BadValue(f"{name!r} is {extent(array.shape, array.dtype)}, which does not become {dtype}")
    if array.size and integers:
        limits = np.iinfo(dtype)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise BadValue(f"{name!r} holds {low} to {high}, which does not fit {dtype}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    if dtype.kind in "fc" and array.dtype.kind in "iufc":
        lost = np.isfinite(array) & ~np.isfinite(converted)
        if lost.any():
            raise BadValue(f"{name!r} holds {array[lost][0]}, which does not fit {dtype}")
    return converted


def _single(dtype: np.dtype) -> np.dtype:
    """NumPy's only object for this dtype, which arrays have; one that was pickled is another."""
    return np.dtype(dtype.type) if dtype.isnative and dtype.kind in "biufc" else dtype


def _as_it_is(name: str) -> str:
    return f'ragged={{"{name}": "object"}} takes it as it is'


def _is_object(item: Any) -> bool:
    """Whether an item is neither a number nor an array nor a list that may become one."""
    if item is None or isinstance(item, (str, bytes, bytearray, Mapping, set, frozenset)):
        return True
    if isinstance(item, (bool, int, float, complex, np.ndarray, np.generic, list, tuple)):
        return False
    return not any(hasattr(item, name) for name in ("__array__", "__array_interface__", "__buffer__", "__len__"))


def _beside(name: str, ragged: str) -> str:
    """Name of the array that tells where the rows of a ragged one are."""
    word = "offsets" if ragged == "flat" else "lengths"
    return word if name == "data" else f"{name}_{word}"


def _flat(rows: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, _I64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    empty = np.empty((0, *column.shape[1:]), column.dtype)
    return (np.concatenate(list(rows)) if len(rows) else empty), offsets


def _hint(advice: str, mine: str) -> str | None:
    """The advice about a record, unless it is to use the decoder that has just failed."""
    return None if not advice or f".{mine}(" in advice else f"{advice[0].upper()}{advice[1:]}"


def reason(error: Exception) -> str:
    if isinstance(error, BadValue):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text if len(text) <= 500 else text[:500] + ' ...'}"
