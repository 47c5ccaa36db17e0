"""Decoders that turn each record into Python values: columns of numbers, arrays of unequal sizes, and any objects.

    value   one record's bytes -> a Python value                     the leaf's part
    named   the value -> {name: item}: dicts, pairs, nested dicts
    column  by record 0: numbers of one shape are rows of one array; all else is an array of objects
    finish  "flat" and "pad" arrays of the whole batch
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, extent
from pario.decode.numbers import EXACT, BadValue, as_it_is, check_exact, converted, holds, single, unrounded
from pario.errors import DecodeError, OptionError
from pario.records import Records

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: How rows of different shapes become one column.
RAGGED = ("flat", "pad", "list", "object")

_OBJECT = np.dtype(object)
_I64 = np.dtype(np.int64)
_F64 = np.dtype(np.float64)
#: What is no dict, without asking.
_LEAVES = frozenset((np.ndarray, bool, int, float, str, bytes, list, tuple))
#: Padding of more bytes than this, and of this many times the records' own, is refused.
_MOST_PADDED, _SPARSE = 1 << 30, 8
_HOW = 'ragged="list", "flat" or "pad" takes arrays of different sizes'


class RowOptions(TypedDict, total=False):
    """The options of `RowDecoder`, which decoders of documents and functions take beside their own."""

    ragged: str | Mapping[str, str] | None
    pad_value: Any
    pad_multiple: int
    optional: Iterable[str]


class Column(NamedTuple):
    """One named array of a batch.

    shape, dtype : of record 0's row
    ragged : "" if every row has this shape; "flat", "pad" or "list" if the first axes differ; "object" for anything
    is_open : record 0 has no elements there, as [] has, or lacks this optional item: the first record with some says
        what the column is. Until then, "object" if it is lacking
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
    optional : names of items that records may lack, or have as None. Beside x[b, ...] comes x_there, bool[b] (of
        "data": "there"). Where it is False a row is 0, ragged ones are empty, and an array of objects has None
    """

    #: name -> dtype that its arrays are converted to
    dtypes: Mapping[str, np.dtype] = {}

    def __init__(
        self,
        *,
        ragged: str | Mapping[str, str] | None = None,
        pad_value: Any = 0,
        pad_multiple: int = 1,
        optional: Iterable[str] = (),
        **unknown: Any,
    ) -> None:
        for name in unknown:  # in the name of the class that was called
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
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
        one = isinstance(optional, str) or not isinstance(optional, Iterable)
        self.optional: tuple[str, ...] = (optional,) if one else tuple(optional)  # type: ignore[assignment]
        if not all(isinstance(name, str) for name in self.optional):
            raise OptionError(f"optional must be names, got {optional!r}")
        self.spec: dict[str, Column] | None = None

    def arguments(self) -> dict[str, tuple[Any, Any]]:
        return {
            **super().arguments(),
            "ragged": (self.ragged, None),
            "pad_value": (self.pad_value if self.pad_value != 0 else 0, 0),
            "pad_multiple": (self.pad_multiple, 1),
            "optional": (self.optional, ()),
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
        if not items and not self.optional:
            raise BadValue("returned no arrays")
        return items

    def _items(self, record: np.ndarray, number: int, draw: Draw, key: bytes) -> dict[str, Any]:
        """name -> item of one record, None for optional ones that it lacks. Raises anything, as `value`."""
        items = self.named(self.value(record, number, draw, key))
        return {**items, **{name: items.get(name) for name in self.optional}} if self.optional else items

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
        if item is None and name in self.optional:
            return Column((), _OBJECT, "object", mode != "object")
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
            raise BadValue(f"{name!r} is not an array of numbers: {error}; {as_it_is(name)}") from error
        dtype = self.dtypes.get(name)
        if isinstance(item, (list, tuple)) and array.dtype.kind in "fc" and (np.abs(array) >= EXACT).any():
            array = unrounded(name, item, array, dtype)
        if dtype is not None and array.dtype != dtype:
            array = converted(name, array, dtype)
        return array.astype(_OBJECT) if array.dtype.hasobject or array.dtype.kind in "SU" else array

    def learn(self, record: np.ndarray) -> dict[str, Column]:
        return self.learn_at(record, 0, Draw())

    def learn_at(self, record: np.ndarray, number: int, draw: Draw) -> dict[str, Column]:
        try:
            key = draw.keys(np.array([number]))[0] if self.wants_key and draw.keys is not None else b""
            items = self._items(record, number, draw, key)
            spec = {name: self._column(name, item) for name, item in items.items()}
        except Exception as error:
            raise self._refused(record, reason(error)) from error
        if self.is_open:  # what an earlier record has settled stays
            known = self._columns()
            if known.keys() != spec.keys():
                raise DecodeError(f"this record has {sorted(spec)}, record 0 {sorted(known)}")
            spec = {
                name: _settled(column, spec[name], items[name]) if column.is_open else column
                for name, column in known.items()
            }
        _check(spec, self.optional, self.pad_value)
        self.spec = spec
        return spec

    def settle(self, seen: int) -> None:
        spec = self._columns()
        lacking = [name for name, column in spec.items() if column.is_open and column.ragged == "object"]
        for name in lacking:
            dtype, mode = self.dtypes.get(name), self._mode(name)
            if dtype is None:
                raise OptionError(
                    f"none of the {seen} records that were looked at has the optional item {name!r}",
                    hint=f'Say the dtype of its number, fields={{"{name}": "float32"}}, and of arrays '
                    f'ragged={{"{name}": "pad"}}, too; or {as_it_is(name)}, None where it lacks.',
                )
            spec[name] = Column((0,) if mode else (), dtype, mode)
        _check(spec, self.optional, self.pad_value)

    @property
    def is_open(self) -> bool:
        return self.spec is not None and any(column.is_open for column in self._columns().values())

    def _columns(self) -> dict[str, Column]:
        columns: dict[str, Column] = self._learnt()
        return columns

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        n = len(records)
        arrays: dict[str, ArraySpec] = {}
        for name, (shape, dtype, ragged, _) in self._columns().items():
            arrays[name] = ((n,), _OBJECT) if ragged else ((n, *shape), dtype)
            if name in self.optional:
                arrays[_beside(name, "there")] = ((n,), np.dtype(bool))
        return arrays

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        spec = {name: column._replace(dtype=single(column.dtype)) for name, column in self._columns().items()}
        failures: Failures = []
        keys = draw.keys(np.array(records.ids)) if self.wants_key and draw.keys is not None else None
        ids = records.ids.tolist()
        for i in range(len(ids)):
            try:
                items = self._items(records[i], ids[i], draw, b"" if keys is None else keys[i])
                if items.keys() != spec.keys():
                    raise BadValue(f"returned {sorted(items)}, for record 0 {sorted(spec)}")
                for name, item in items.items():
                    out[name][i] = self._row(name, item, spec[name])
                for name in self.optional:
                    out[_beside(name, "there")][i] = items[name] is not None
            except Exception as error:
                failures.append((i, reason(error)))
        return failures

    def _row(self, name: str, item: Any, column: Column) -> Any:
        """What goes into the column's row. Raises BadValue if it does not fit."""
        shape, dtype, ragged, _ = column
        if item is None and name in self.optional:
            return _nothing(column)
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
                array = converted(name, array, dtype)
            elif dtype.type in (np.float64, np.complex128):
                check_exact(name, array[(array >= EXACT) | (array <= -EXACT)].tolist(), dtype)
        if same and (np.can_cast(array.dtype, dtype, "safe") or (ragged and not array.size)):
            return np.array(array, dtype) if ragged else array
        if not same and array.dtype != _OBJECT:
            how = f"; {_HOW}" if not ragged and array.ndim else ""
            why = f"rows of one array need one shape and dtype{how}" if not ragged else "too different to be one array"
        else:
            why = "rows of one array need one shape and dtype"
        got = type(item).__name__ if array.dtype == _OBJECT else extent(array.shape, array.dtype)
        raise BadValue(f"{name!r} is {got}, that of record 0 is {extent(shape, dtype)}; {why}")

    def blank(self, arrays: dict[str, np.ndarray], row: int) -> None:
        super().blank(arrays, row)
        for name, column in self._columns().items():
            arrays[name][row] = _nothing(column)

    def finish(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        spec = self._columns()
        whole: dict[str, np.ndarray] = {}
        for name, rows in arrays.items():
            column = spec.get(name)  # None of an array that says what is there
            if column is not None and column.ragged == "flat":
                whole[name], whole[_beside(name, "flat")] = _flat(rows, column)
            elif column is not None and column.ragged == "pad":
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

    def __init__(self, fields: Any = None, **rows: Unpack[RowOptions]) -> None:
        super().__init__(**rows)
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
        unknown = [name for name in self.optional if self.fields != "all" and name not in map(str, self.fields or ())]
        if unknown:
            raise OptionError(f"optional={unknown}: no such fields are asked for, fields={fields!r}")

    def named(self, value: Any) -> dict[str, Any]:
        if self.fields is None:
            return {"data": value}
        if self.fields == "all":
            if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
                if len(value) == 2:
                    return {"data": value[0], "label": value[1]}
                return {str(i): item for i, item in enumerate(value)}
            return super().named(value)
        return {str(name): self._field_of(value, str(name)) for name in self.fields}

    def _field_of(self, value: Any, name: str) -> Any:
        try:
            return _field(value, name)
        except BadValue:
            if name not in self.optional:
                raise
            return None

    def _column(self, name: str, item: Any) -> Column:
        return Column((), _OBJECT, "object") if self.fields is None else super()._column(name, item)


def _field(value: Any, name: str) -> Any:
    """The value of a field: "a.b", 3, or "a.3". Raises BadValue."""
    for part in name.split("."):
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
        raise BadValue(f"no field {name!r}; there is {had}")
    return value


def _check(spec: dict[str, Column], optional: Collection[str], pad_value: Any) -> None:
    """Raises OptionError if options do not fit these columns."""
    for name, column in spec.items():
        more = [column.ragged] if column.ragged in ("flat", "pad") else []
        for beside in (_beside(name, word) for word in [*more, *(["there"] if name in optional else [])]):
            if beside in spec:
                raise OptionError(f"{name!r} needs the name {beside!r}, which the records use")
        if column.ragged == "pad" and not holds(column.dtype, pad_value):
            raise OptionError(
                f"pad_value={pad_value!r} is no {column.dtype}, the dtype of {name!r}",
                hint="Choose a value that this dtype holds.",
            )


def _nothing(column: Column) -> Any:
    """The row of a record that lacks the item."""
    if column.ragged in ("flat", "pad"):
        shape = (0, *column.shape[1:]) if column.ragged == "flat" else (0,) * len(column.shape)
        return np.empty(shape, column.dtype)
    return None if column.ragged else np.zeros(column.shape, column.dtype)


def _settled(known: Column, found: Column, item: Any) -> Column:
    """A column of which the records so far have no elements, after one more. float64 is what NumPy calls []."""
    if known.ragged == "object":  # all of them lack it
        return found
    if found.ragged == "object":  # a list of strings, but not a field that this record lacks
        return found if isinstance(item, (list, tuple, np.ndarray)) else known
    keeps_shape = not found.shape or (found.is_open and len(found.shape) <= len(known.shape))
    return Column(
        known.shape if keeps_shape else found.shape,
        found.dtype if known.dtype == _F64 and found.shape else known.dtype,
        known.ragged,
        keeps_shape or found.is_open,
    )


def _is_object(item: Any) -> bool:
    """Whether an item is neither a number nor an array nor a list that may become one."""
    if item is None or isinstance(item, (str, bytes, bytearray, Mapping, set, frozenset)):
        return True
    if isinstance(item, (bool, int, float, complex, np.ndarray, np.generic, list, tuple)):
        return False
    return not any(hasattr(item, name) for name in ("__array__", "__array_interface__", "__buffer__", "__len__"))


def _beside(name: str, ragged: str) -> str:
    """Name of the array that tells where the rows of a ragged one are, or which rows are "there"."""
    word = {"flat": "offsets", "pad": "lengths"}.get(ragged, ragged)
    return word if name == "data" else f"{name}_{word}"


def _flat(rows: np.ndarray, column: Column) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.zeros(len(rows) + 1, _I64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    empty = np.empty((0, *column.shape[1:]), column.dtype)
    return (np.concatenate(list(rows)) if len(rows) else empty), offsets


def reason(error: Exception) -> str:
    if isinstance(error, BadValue):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text if len(text) <= 500 else text[:500] + ' ...'}"
