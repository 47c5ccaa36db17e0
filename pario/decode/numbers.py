"""Python's numbers as arrays, without a change of what they say but for the rounding that was asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from pario.decode.base import extent

#: Below, float64 has every integer.
EXACT = 1 << 53


class BadValue(Exception):
    """What the record holds does not fit; the text is the whole reason. Never leaves the decoders."""


def check_exact(name: str, numbers: list[Any], dtype: np.dtype) -> None:
    """Raises BadValue if float64 would round one of the integers among them."""
    for number in numbers:
        if isinstance(number, (int, np.integer)) and int(float(number)) != number:
            raise BadValue(f"{name!r} holds {number}, which {dtype} would round; {as_it_is(name)}")


def unrounded(name: str, item: Any, array: np.ndarray, wanted: np.dtype | None) -> np.ndarray:
    """The array of a list with large integers, which NumPy has made floats. Raises BadValue if it has rounded some and
    nobody wanted floats."""
    numbers = np.array(item, object)
    listed = numbers.ravel().tolist()
    if all(isinstance(number, (int, np.integer)) and number >= 0 for number in listed):
        return numbers.astype(np.uint64)
    if wanted is None or wanted.kind not in "fc":
        check_exact(name, listed, array.dtype)
    return array


def holds(dtype: np.dtype, number: Any) -> bool:
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


def converted(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
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
        made = array.astype(dtype)
    if dtype.kind in "fc" and array.dtype.kind in "iufc":
        lost = np.isfinite(array) & ~np.isfinite(made)
        if lost.any():
            raise BadValue(f"{name!r} holds {array[lost][0]}, which does not fit {dtype}")
    return made


def single(dtype: np.dtype) -> np.dtype:
    """NumPy's only object for this dtype, which arrays have; one that was pickled is another."""
    return np.dtype(dtype.type) if dtype.isnative and dtype.kind in "biufc" else dtype


def as_it_is(name: str) -> str:
    return f'ragged={{"{name}": "object"}} takes it as it is'
