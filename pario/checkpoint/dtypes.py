"""The types of arrays in checkpoints, by name: NumPy's own, records of them, and those of frameworks and ml_dtypes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from pario.errors import CorruptedError, OptionError
from pario.text import DAMAGED, read_json

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


def item_bytes(name: str) -> int:
    """Bytes of an element."""
    return dtype_of(name).itemsize
