"""The user's own kernel over the records of a batch: compiled with a loop around it, called once without the GIL.

Not cached: a user's function may use anything, and Numba cannot tell when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from pario.kernels.convert import mix


def compiled(function: Callable[..., Any], checked: bool) -> Any:
    """The function for Numba. checked : every index is compared with the array's size"""
    if isinstance(function, numba.core.registry.CPUDispatcher):
        function = function.py_func
    return numba.njit(nogil=True, boundscheck=checked)(function)


def is_code(kind: Any) -> bool:
    """Whether a function that returns this Numba type says how it went: nothing, or an integer."""
    if isinstance(kind, types.Optional):
        kind = kind.type
    return isinstance(kind, (types.Integer, types.NoneType)) and not isinstance(kind, types.Boolean)


def seed_of(key, record):  # type: ignore[no-untyped-def]
    """i64, not negative, of the epoch's key and a record: the same on any rank."""
    return np.int64(mix(np.uint64(key) ^ mix(np.uint64(record) ^ np.uint64(0x8CB92BA72F3D8DD7))) >> np.uint64(1))


_seed = numba.njit(seed_of)


def _rows(arrays, i):  # type: ignore[no-untyped-def]
    """Row i of each array."""
    raise NotImplementedError


@overload(_rows)
def _rows_of(arrays, i):  # type: ignore[no-untyped-def]
    if len(arrays) == 0:
        return lambda arrays, i: ()
    return lambda arrays, i: (arrays[0][i], *_rows(arrays[1:], i))


def _code(said):  # type: ignore[no-untyped-def]
    """i64: 0 if a kernel returned nothing."""
    raise NotImplementedError


@overload(_code)
def _code_of(said):  # type: ignore[no-untyped-def]
    if isinstance(said, types.NoneType):
        return lambda said: np.int64(0)
    if isinstance(said, types.Optional):
        return lambda said: np.int64(0) if said is None else np.int64(said)
    return lambda said: np.int64(said)


def loop_around(user: Any, wants_id: bool, wants_seed: bool) -> Any:
    """loop(data u8[:], starts i64[n], nbytes i64[n], ids i64[n], key, arrays, codes i64[n], at i64[1]).

    user : what `compiled` returned, called as user(value, *rows[, id][, seed])
    arrays : a tuple of arrays [n, ...]
    codes : what the function returned
    at : the record to begin with; if the function raises, the one that it raised for
    """

    @numba.njit(nogil=True)
    def loop(data, starts, nbytes, ids, key, arrays, codes, at):  # type: ignore[no-untyped-def]
        for i in range(at[0], len(starts)):
            at[0] = i
            value = data[starts[i] : starts[i] + nbytes[i]]
            if wants_id and wants_seed:
                codes[i] = _code(user(value, *_rows(arrays, i), ids[i], _seed(key, ids[i])))
            elif wants_id:
                codes[i] = _code(user(value, *_rows(arrays, i), ids[i]))
            elif wants_seed:
                codes[i] = _code(user(value, *_rows(arrays, i), _seed(key, ids[i])))
            else:
                codes[i] = _code(user(value, *_rows(arrays, i)))

    return loop
