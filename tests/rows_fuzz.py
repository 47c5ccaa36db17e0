"""Random sets of records with numbers and lists, and what plain Python makes of them.

The oracle knows nothing of NumPy's rules of promotion: it compares Python's integers and floats.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

MODES = (None, "flat", "pad", "list")
DTYPES = (None, None, None, "f4", "f8", "f2", "i4", "i8", "u1", "u2", "u8")
PADS = (0, 0, 0, -100, 1.5, math.nan, 1e300, 255, True, 7)
EDGES = (0, 1, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
LIMITS = {
    "i4": (-(2**31), 2**31 - 1),
    "i8": (-(2**63), 2**63 - 1),
    "u1": (0, 255),
    "u2": (0, 65535),
    "u8": (0, 2**64 - 1),
}
LARGEST = {"f2": 65504.0, "f4": float(np.finfo("f4").max), "f8": math.inf}


@dataclass
class Set:
    """values : of the field "x" of each record; all else: the decoder's options"""

    values: list[Any]
    mode: str | None
    dtype: str | None
    pad: Any


def random_set(seed: int) -> Set:
    rng = np.random.default_rng(seed)
    pick = lambda choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    what, depth, mode = pick(("small", "wide", "float", "mixed", "huge")), int(pick((0, 1, 1, 1, 2, 2))), pick(MODES)
    empty, fixed, odd = pick((0, 0.2, 0.9)), mode is None and rng.random() < 0.8, rng.random() < 0.1
    width, length = int(rng.integers(1, 4)), int(rng.integers(0, 4))

    def number() -> Any:
        kind = what if what != "mixed" else pick(("small", "float", "wide"))
        if kind == "small":
            return int(rng.integers(-3, 300))
        if kind == "wide":
            return pick(EDGES[:-2]) * pick((1, 1, -1))
        if kind == "huge":
            return pick(EDGES)
        return float(pick((rng.normal(), rng.normal() * 1e5, 1e300, -math.inf, 0.0)))

    def value(k: int) -> Any:
        if depth == 0:
            return [] if odd and rng.random() < 0.3 else number()
        if rng.random() < (0.5 if empty and not k else empty):
            return pick(([], [], [[]])) if depth == 2 else []
        n = length if fixed else int(rng.integers(0, 5))
        if depth == 1:
            return [number() for _ in range(n)]
        of = width if mode in ("flat", None) and not odd else int(rng.integers(0, 4))
        return [[number() for _ in range(of if rng.random() < 0.97 else of + 1)] for _ in range(n)]

    return Set([value(k) for k in range(int(rng.integers(1, 9)))], mode, pick(DTYPES), pick(PADS))


# -- the oracle ------------------------------------------------------------------------------------------------------


def shape_of(value: Any) -> tuple[int, ...] | None:
    """None if lists of one level differ in length."""
    if not isinstance(value, list):
        return ()
    shapes = {shape_of(item) for item in value}
    if len(shapes) > 1 or None in shapes:
        return None
    return (len(value), *(shapes.pop() if shapes else ()))


def numbers_of(value: Any) -> list[Any]:
    return [n for item in value for n in numbers_of(item)] if isinstance(value, list) else [value]


def kind_of(numbers: list[Any]) -> str:
    """What holds all of these exactly: "i8", "u8", "f8", "object"; "" if nothing does."""
    whole = [n for n in numbers if isinstance(n, int)]
    if any(not -(2**63) <= n < 2**64 for n in whole):
        return "object"
    if len(whole) == len(numbers):
        for kind in ("i8", "u8"):
            if all(fits(n, kind) for n in whole):
                return kind
    return "f8" if all(fits(n, "f8") for n in whole) else ""


def fits(number: Any, kind: str) -> bool:
    """Whether a column that nobody asked for by dtype holds this number as it is."""
    if kind in LIMITS:
        return isinstance(number, int) and LIMITS[kind][0] <= number <= LIMITS[kind][1]
    return isinstance(number, float) or (-(2**63) <= number < 2**64 and int(float(number)) == number)


def converts(number: Any, dtype: str) -> bool:
    """Whether a number becomes this dtype that somebody asked for: rounded, but not infinite."""
    if dtype in LIMITS:
        return fits(number, dtype)
    if isinstance(number, int) and not -(2**63) <= number < 2**64:
        return False
    half_a_step = 1 + 2.0 ** -{"f2": 12, "f4": 25, "f8": 54}[dtype]
    return math.isinf(number) or abs(number) < LARGEST[dtype] * half_a_step


@dataclass
class Truth:
    """good : per record; None: the set is refused. kind : "i8", "f4", ..., "object" """

    good: list[bool] | None
    kind: str = ""
    shape: tuple[int, ...] = ()


def truth(made: Set) -> Truth:
    def taken(value: Any) -> str:
        """The column that this record would make; "" if none."""
        numbers, shape = numbers_of(value), shape_of(value)
        if shape is None:
            return ""
        if made.dtype is not None:
            return made.dtype if all(converts(n, made.dtype) for n in numbers) else ""
        return kind_of(numbers) if numbers else "f8"

    first = taken(made.values[0])
    if not first:
        return Truth(None)
    kind, shape = first, shape_of(made.values[0])
    ragged = made.mode if isinstance(made.values[0], list) else None
    if ragged and not numbers_of(made.values[0]):  # record 0 does not say what the others are: the next one does
        for value in made.values:
            if isinstance(value, list) and numbers_of(value) and taken(value):
                kind, shape = taken(value), shape_of(value)
                break
        else:
            lists = [shape_of(value) or () for value in made.values if not numbers_of(value)]
            shape = max(lists, key=len)
    if kind == "object":
        return Truth([True] * len(made.values), kind)
    assert shape is not None
    if ragged == "pad" and not pads(made.pad, kind):
        return Truth(None)
    return Truth([fit(value, made.dtype, kind, shape, ragged) for value in made.values], kind, shape)


def pads(pad: Any, kind: str) -> bool:
    if kind in LIMITS:
        return not isinstance(pad, float) and LIMITS[kind][0] <= pad <= LIMITS[kind][1]
    return math.isnan(pad) or abs(pad) <= LARGEST[kind]


def fit(value: Any, asked: str | None, kind: str, column: tuple[int, ...], ragged: str | None) -> bool:
    shape, numbers = shape_of(value), numbers_of(value)
    if shape is None or not all(converts(n, kind) if asked else fits(n, kind) for n in numbers):
        return False
    if kind == "f8" and not asked and numbers and kind_of(numbers) == "":
        return False
    if not ragged:
        return shape == column and (bool(numbers) or kind == "f8" or bool(asked))
    if shape == (0,) and column:
        return True
    return len(shape) == len(column) and (ragged != "flat" or shape[1:] == column[1:])


# -- what the decoder returned, as Python's values ------------------------------------------------------------------


def unbatched(arrays: dict[str, np.ndarray], name: str, rows: int) -> list[Any]:
    """Each record's value."""
    array = arrays[name]
    if f"{name}_offsets" in arrays:
        edges = arrays[f"{name}_offsets"].tolist()
        assert len(edges) == rows + 1
        return [array[a:b].tolist() for a, b in itertools.pairwise(edges)]
    if f"{name}_lengths" in arrays:
        lengths = arrays[f"{name}_lengths"].reshape(rows, -1).tolist()
        assert len(array) == rows
        return [row[tuple(map(slice, size))].tolist() for row, size in zip(array, lengths, strict=True)]
    assert len(array) == rows
    return [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in array]


def padding(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """All that fills up."""
    array = arrays[name]
    filled = np.ones(array.shape, bool)
    for row, size in zip(filled, arrays[f"{name}_lengths"].reshape(len(array), -1).tolist(), strict=True):
        row[tuple(map(slice, size))] = False
    return array[filled]


def same(got: Any, want: Any, kind: str) -> bool:
    """Whether the batch's value is the record's: exactly, or rounded as the dtype that was asked for does it."""
    if isinstance(want, list):
        if not numbers_of(want):
            return numbers_of(got) == []
        return isinstance(got, list) and len(got) == len(want) and all(map(same, got, want, [kind] * len(want)))
    if kind in ("f2", "f4") and not math.isinf(want):
        return got == struct.unpack({"f2": "e", "f4": "f"}[kind], packed(float(want), kind))[0]
    return bool(got == (float(want) if kind == "f8" else want))


def packed(number: float, kind: str) -> bytes:
    """IEEE's bytes, rounded by Python; where it finds that too large, the largest number."""
    code = {"f2": "e", "f4": "f"}[kind]
    try:
        return struct.pack(code, number)
    except OverflowError:
        return struct.pack(code, math.copysign(LARGEST[kind], number))


ENCODERS = {
    "json": lambda value: json.dumps({"x": value, "n": 1}).encode(),
    "pickle": lambda value: pickle.dumps({"x": value, "n": 1}),
    "msgpack": lambda value: __import__("msgpack").packb({"x": value, "n": 1}),
}


# -- arrays ----------------------------------------------------------------------------------------------------------


@dataclass
class Arrays:
    """values : an array of each record, all of one dtype; mode : of "data" """

    values: list[np.ndarray]
    mode: str | None


def random_arrays(seed: int, dtypes: tuple[str, ...], most_axes: int = 3) -> Arrays:
    rng = np.random.default_rng(seed)
    axes, mode, dtype = int(rng.integers(1, most_axes + 1)), MODES[int(rng.integers(4))], dtypes[seed % len(dtypes)]
    first = tuple(int(k) for k in rng.integers(0, 4, axes))
    empty, odd = float(rng.choice((0, 0.3, 0.95))), rng.random() < 0.2

    def shape() -> tuple[int, ...]:
        if mode is None and not odd:
            return first
        if rng.random() < empty:
            return (0,)
        same_rest = mode == "flat" and not odd
        return (int(rng.integers(0, 4)), *(first[1:] if same_rest else tuple(map(int, rng.integers(0, 4, axes - 1)))))

    shapes = [shape() for _ in range(int(rng.integers(1, 9)))]
    return Arrays([(rng.integers(0, 2**20, one) % 251).astype(dtype) for one in shapes], mode)


def good_arrays(made: Arrays) -> list[bool]:
    shapes = [array.shape for array in made.values]
    if made.mode is None:
        return [shape == shapes[0] for shape in shapes]
    full = [shape for shape in shapes if 0 not in shape]
    # What the first record with elements has counts, but record 0's own if it has some; among empty ones the longest.
    column = full[0] if full and 0 in shapes[0] else shapes[0] if full else max(shapes, key=len)
    return [
        shape == (0,) or (len(shape) == len(column) and (made.mode != "flat" or shape[1:] == column[1:]))
        for shape in shapes
    ]
