"""Unpickles plain data and NumPy arrays without running code that the pickle names.

The arrays and dtypes of a pickle are built here from their parts, because NumPy's own `__setstate__` believes what it
is told. The unpickler is the one in Python: the one in C reserves memory for whatever number a pickle mentions.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import functools
import io
import math
import pickle
from collections.abc import Collection, Iterable
from typing import IO, Any

import numpy as np

#: A value may be this many times larger, as a tree, than its pickle has bytes: parts may be used twice, not 2^50 times.
_SHARED = 16
_LEAST_NODES = 10_000
#: What a copy of a part is worth in such parts: one in a set takes up to 100 bytes.
_CALL = 4
_DEEPEST = 500
#: Parts of a tuple that is a key of a dict or in a set.
_KEY_NODES = 1_000
#: Keys of one hash in all dicts and sets of a pickle: each is compared with the others.
_ALIKE = 64
#: Integers closer to 0 have hashes of their own.
_OWN_HASH = 1 << 60
#: Digits of a Decimal.
_DIGITS = 4_300


class NotAllowed(Exception):
    """The pickle wants a class or function that nobody has allowed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Unfinished:
    """A dtype or an array that the pickle has begun, and whose parts come with BUILD."""

    def finished(self, state: Any) -> Any:
        raise NotImplementedError


class _Array(_Unfinished):
    def finished(self, state: Any) -> np.ndarray:
        _version, shape, dtype, fortran, data = state if len(state) == 5 else (1, *state)
        return _filled(data, dtype, shape, "F" if fortran else "C")


class _Dtype(_Unfinished):
    def __init__(self, said: Any, align: Any = False, copy: Any = True) -> None:
        self.dtype = np.dtype(said) if isinstance(said, str) and len(said) < 32 else None
        if self.dtype is None or self.dtype.names or not (self.dtype.itemsize or self.dtype.hasobject):
            raise pickle.UnpicklingError(f"no dtype of numbers: {said!r:.60}")

    def finished(self, state: Any) -> np.dtype:
        assert self.dtype is not None  # checked by the constructor
        version, order, *rest = state
        if version != 3 or self.dtype.kind in "mM":  # their units stand in the state
            raise pickle.UnpicklingError("dates of NumPy, which pario reads with allow_pickle=True only")
        if order not in ("<", ">", "|", "=") or any(part is not None for part in rest[:3]):
            raise pickle.UnpicklingError("a structured dtype, which pario reads with allow_pickle=True only")
        return self.dtype if order in ("|", "=") else self.dtype.newbyteorder(order)


def _filled(data: Any, dtype: Any, shape: Any, order: str) -> np.ndarray:
    """An array from the parts in a pickle. Raises UnpicklingError if they contradict each other."""
    if isinstance(dtype, _Dtype):
        dtype = dtype.dtype
    if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or len(shape) > 32:
        raise pickle.UnpicklingError("no dtype or shape of an array")
    if any(type(k) is not int or k < 0 for k in shape):
        raise pickle.UnpicklingError(f"no shape of an array: {shape!r:.60}")
    count = math.prod(shape)
    if dtype == np.dtype(object):
        if not isinstance(data, list) or len(data) != count:
            raise pickle.UnpicklingError("an array of objects without as many objects")
        array = np.empty(count, object)
        for i, item in enumerate(data):
            array[i] = item
        return array.reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]
    if isinstance(data, str):  # protocol 2 and older
        data = data.encode("latin1")
    if not isinstance(data, (bytes, bytearray)) or dtype.hasobject or len(data) != count * dtype.itemsize:
        raise pickle.UnpicklingError(f"an array of {dtype}, shape {shape!r:.60}, with other bytes than that needs")
    array = np.frombuffer(bytes(data), dtype) if data else np.empty(0, dtype)
    return array.reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]


def _reconstruct(subtype: Any, shape: Any, code: Any) -> _Array:
    return _Array()


def _frombuffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> np.ndarray:
    if order not in ("C", "F"):
        raise pickle.UnpicklingError("no order of an array")
    return _filled(data, dtype, shape, order)


def _scalar(dtype: Any, data: Any = None) -> Any:
    return _filled(data, dtype, (), "C")[()]


def _encode(text: Any, codec: Any = "latin1") -> bytes:
    """What protocol 2 calls to write bytes."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("no bytes of an old protocol")
    return text.encode("latin1")


def _bytes() -> bytes:
    """What old protocols call for b""."""
    return b""


def _bytearray(data: Any = b"", codec: Any = "latin1") -> bytearray:
    if isinstance(data, str):
        data = _encode(data, codec)
    if not isinstance(data, (bytes, list)):  # a number would reserve as many bytes
        raise pickle.UnpicklingError("no bytes of a bytearray")
    return bytearray(data)


def _decimal(said: Any) -> decimal.Decimal:
    if not isinstance(said, str) or len(said) > _DIGITS:
        raise pickle.UnpicklingError("no Decimal, or one of too many digits")
    return decimal.Decimal(said)


def _numpy_names() -> dict[str, Any]:
    names: dict[str, Any] = {"numpy.ndarray": None, "numpy.dtype": _Dtype}  # `_reconstruct` makes arrays only
    for core in ("numpy.core", "numpy._core"):
        names |= {
            f"{core}.multiarray._reconstruct": _reconstruct,
            f"{core}.multiarray.scalar": _scalar,
            f"{core}.numeric._frombuffer": _frombuffer,
        }
    return names


_BUILTINS: dict[str, Any] = {
    "bytearray": _bytearray,
    "bytes": _bytes,
    "complex": complex,
    "frozenset": frozenset,
    "set": set,
}

#: full name -> what stands for it
_KEYED = (set, frozenset, collections.OrderedDict)
_PLAIN: dict[str, Any] = {
    **_numpy_names(),
    "_codecs.encode": _encode,
    "collections.OrderedDict": collections.OrderedDict,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "decimal.Decimal": _decimal,
    **{f"{module}.{name}": made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
}


#: full names that a pickle of plain data uses
PLAIN = frozenset(_PLAIN)

_InPython: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_InPython):  # type: ignore[misc]
    """pickle's own, in Python, which finds plain data only and builds what is unfinished."""

    dispatch = dict(_InPython.dispatch)  # noqa: RUF012

    def __init__(self, file: IO[bytes], nbytes: int, allow: Collection[str], encoding: str) -> None:
        super().__init__(file, encoding=encoding)
        self._allow = allow
        #: steps that the rest may take: a few bytes can have a part of the pickle used again
        self._left = _SHARED * nbytes + _LEAST_NODES
        self._known: dict[int, tuple[Any, ...]] = {}  # hash -> keys

    def _charge(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise pickle.UnpicklingError("a pickle that uses its parts too often")

    def _hashed(self, keys: Iterable[Any]) -> None:
        """Raise UnpicklingError for keys that cost too much to hash and to compare: a tuple asks all its parts, shared
        ones again and again, and keys of one hash make a dict quadratic."""
        for key in keys:
            kind = type(key)
            if kind is str or kind is bytes or (kind is int and -_OWN_HASH < key < _OWN_HASH):
                continue
            cost = _measure(key, _KEY_NODES) if kind is tuple else key.bit_length() >> 6 if kind is int else 1
            same = self._known.get(hash(key), ())
            self._charge(cost * (1 + len(same)))
            if key not in same:
                if len(same) == _ALIKE:
                    raise pickle.UnpicklingError("too many keys of one hash")
                self._known[hash(key)] = (*same, key)

    def _made(self, make: Any, *parts: Any) -> Any:
        """What a pickle's call of a name of plain data gives."""
        self._charge(_CALL * sum(len(part) for part in parts if hasattr(part, "__len__")))
        if make in _KEYED and parts:
            self._hashed(parts[0] if make is not collections.OrderedDict else [pair[0] for pair in parts[0]])
        return make(*parts)

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._allow:
            return super().find_class(module, name)
        if full not in _PLAIN:
            raise NotAllowed(full)
        return functools.partial(self._made, _PLAIN[full])

    def get_extension(self, code: int) -> None:
        raise NotAllowed(f"copyreg extension {code}")

    def load_build(self) -> None:
        unfinished = self.stack[-2]
        if not isinstance(unfinished, _Unfinished):
            kind = type(unfinished)
            if f"{kind.__module__}.{kind.__qualname__}" not in self._allow:
                raise pickle.UnpicklingError(f"more parts for a {kind.__name__}, which is complete")
            super().load_build()
            return
        state = self.stack.pop()
        self._charge(_CALL * sum(len(part) for part in state if isinstance(part, (str, bytes, bytearray, list))))
        self.stack[-1] = whole = unfinished.finished(state)
        for number, known in reversed(self.memo.items()):
            self._charge(1)
            if known is unfinished:
                self.memo[number] = whole
                break

    def load_bytearray8(self) -> None:
        nbytes = int.from_bytes(self.read(8), "little")
        data = self.read(nbytes)
        if len(data) != nbytes:
            raise pickle.UnpicklingError("the pickle ends inside a bytearray")
        self.append(bytearray(data))

    def load_setitem(self) -> None:
        self._hashed(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._hashed(self.stack[::2])
        super().load_setitems()

    def load_dict(self) -> None:
        self._hashed(self.stack[::2])
        super().load_dict()

    def load_additems(self) -> None:
        self._hashed(self.stack)
        super().load_additems()

    def load_frozenset(self) -> None:
        self._hashed(self.stack)
        super().load_frozenset()

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.FROZENSET[0]] = load_frozenset


def unpickle(data: bytes, allow: Collection[str], encoding: str = "latin1") -> Any:
    """The value of a pickle of plain data. Raises NotAllowed, or anything for a broken pickle.

    allow : full names of classes and functions that the pickle may use as well
    encoding : of Python 2's strings
    """
    file = io.BytesIO(data)
    value = _Unpickler(file, len(data), allow, encoding).load()
    _measure(value, _SHARED * len(data) + _LEAST_NODES)
    whole(file)
    return value


def whole(file: IO[bytes]) -> None:
    """Raise UnpicklingError for a file in which more than a pickle stands, but zeros: pickle ignores what follows."""
    if (rest := file.read()).strip(b"\0"):
        raise pickle.UnpicklingError(f"{len(rest):,} bytes follow the end")


def _measure(value: Any, most: int) -> int:
    """How many parts a value has, its shared ones counted each time. Raises UnpicklingError if they are more than
    `most`, or lie deeper than any data: walking over them, as numpy does, would take forever."""
    waiting = [iter((value,))]
    seen = 1
    while waiting:
        for item in waiting[-1]:
            kind = type(item)
            if kind in (dict, collections.OrderedDict):
                parts: Any = item.values()
            elif kind in (list, tuple, set, frozenset):
                parts = item
            elif kind is np.ndarray and item.dtype.hasobject:
                parts = item.reshape(-1)
            elif isinstance(item, _Unfinished):
                raise pickle.UnpicklingError("an array or a dtype without its parts")
            else:
                continue
            seen += len(parts)
            if seen > most or len(waiting) > _DEEPEST:
                raise pickle.UnpicklingError("a value that contains parts of itself, or one part too often")
            waiting.append(iter(parts))
            break
        else:
            waiting.pop()
    return seen
