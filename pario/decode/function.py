"""A plain Python function as decoder, and the rule that turns the user's argument into a decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pario.decode.base import ArraySpec, Decoder, Draw, Failures, describe, extent, shown
from pario.errors import DecodeError, OptionError
from pario.records import Records

__all__ = ["Function", "as_decoder"]


class _BadValue(Exception):
    """The function returned something that is not a row; never leaves this file."""


class Function(Decoder):
    """Calls `f(record)` for every record.

    An array or a number becomes {"data": ...}, a pair {"data": ..., "label": ...}; a dict or named tuple keeps its own
    names. Names, shapes and dtypes come from record 0, and every other record must return the same ones. A value whose
    dtype does not convert safely (a float where record 0 had an integer) is a failure.

    Parameters
    ----------
    f : callable
        Called by several threads at once. If it raises, the record is a failure. The decoder can be pickled if f can.
    view : bool
        Pass a read-only u8 array over the reader's memory instead of bytes. This saves a copy; the array is valid only
        during the call.
    rng : bool
        Call f(record, generator), with a numpy Generator that depends on the seed, the epoch and the record id only.
    parallel : bool
        False for functions that never release the GIL (a few microseconds of pure Python): one thread is then faster.
    """

    def __init__(
        self, f: Callable[..., Any], *, view: bool = False, rng: bool = False, parallel: bool = True
    ) -> None:
        if not callable(f):
            raise OptionError(f"a decoder function must be callable, got {f!r}")
        self.f, self.view, self.rng, self.parallel = f, bool(view), bool(rng), bool(parallel)
        #: name -> (shape of one row, dtype)
        self.spec: dict[str, tuple[tuple[int, ...], np.dtype]] | None = None

    def __repr__(self) -> str:
        name = getattr(self.f, "__qualname__", None) or repr(self.f)
        options = "".join(f", {key}=True" for key in ("view", "rng") if getattr(self, key))
        return f"Function({name}{options}{'' if self.parallel else ', parallel=False'})"

    def _call(self, record: np.ndarray, draw: Draw, i: int) -> dict[str, np.ndarray]:
        """f's arrays by name. Raises whatever f raises, or _BadValue."""
        if self.view:
            given: Any = record.view()
            given.flags.writeable = False
        else:
            given = record.tobytes()
        value = self.f(given, draw.rng(i)) if self.rng else self.f(given)
        if isinstance(value, Mapping):
            named = {str(name): item for name, item in value.items()}
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            named = dict(zip(value._fields, value, strict=True))
        elif isinstance(value, tuple):
            if not 1 <= len(value) <= 2:
                raise _BadValue(f"returned a tuple of {len(value)}; return a dict to name more than data and label")
            named = dict(zip(("data", "label"), value, strict=False))
        else:
            named = {"data": value}
        if not named:
            raise _BadValue("returned no arrays")
        return {name: _array(name, item) for name, item in named.items()}

    def learn(self, record: np.ndarray) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        try:
            arrays = self._call(record, Draw(), 0)
        except Exception as error:
            begins, _ = describe(record)
            raise DecodeError(f"{self!r} cannot decode this record: {_reason(error)}; {begins}") from error
        self.spec = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        return self.spec

    def shapes(self, records: Records) -> dict[str, ArraySpec]:
        n = len(records)
        return {name: ((n, *shape), dtype) for name, (shape, dtype) in self._learnt().items()}

    def decode(self, records: Records, out: dict[str, np.ndarray], draw: Draw) -> Failures:
        spec = self._learnt()
        failures: Failures = []
        for i in range(len(records)):
            try:
                arrays = self._call(records[i], draw, int(records.ids[i]))
                _check(spec, arrays)
                for name, array in arrays.items():
                    out[name][i] = array
            except Exception as error:
                failures.append((i, _reason(error)))
        return failures


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged lists
        raise _BadValue(f"{name!r} is not an array of numbers: {error}") from error
    if array.dtype.kind not in "biufc":
        raise _BadValue(f"{name!r} is not an array of numbers but {type(value).__name__} ({shown(array.dtype)})")
    return array


def _check(spec: dict[str, tuple[tuple[int, ...], np.dtype]], arrays: dict[str, np.ndarray]) -> None:
    if arrays.keys() != spec.keys():
        raise _BadValue(f"returned {sorted(arrays)}, for record 0 {sorted(spec)}")
    for name, array in arrays.items():
        shape, dtype = spec[name]
        if array.shape != shape or not np.can_cast(array.dtype, dtype, "safe"):
            raise _BadValue(
                f"{name!r} is {extent(array.shape, array.dtype)}, that of record 0 is {extent(shape, dtype)}; "
                "rows of one array need one shape and dtype"
            )


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _BadValue) else f"{type(error).__name__}: {error}"


def as_decoder(x: Any) -> Decoder:
    """The decoder for a user's argument: None -> Raw(), a Decoder -> itself, a callable -> Function."""
    if x is None:
        from pario.decode.raw import Raw

        return Raw()
    if isinstance(x, Decoder):
        return x
    if isinstance(x, type) and issubclass(x, Decoder):
        raise OptionError(f"decoder must be an object: {x.__name__}(), got the class {x.__name__}")
    if callable(x):
        return Function(x)
    raise OptionError(f"decoder must be a pario.decode decoder, a function or None, got {x!r}")
