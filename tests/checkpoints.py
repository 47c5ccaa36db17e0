"""What the tests of checkpoints save, and how they compare it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["DTYPES", "equal", "rich_tree"]

#: every kind of dtype that a checkpoint takes
DTYPES = [
    *("?", "i1", "<i2", ">i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", ">f8", "g", "c8", "c16", "G"),
    *("S5", "U3", "M8[ns]", "m8[D]", "V7"),
]


def rich_tree(seed: int = 0) -> dict[str, Any]:
    """Arrays of all dtypes and of many shapes, not contiguous ones among them, and other values."""
    rng = np.random.default_rng(seed)
    fields = np.zeros(3, [("a", "i4"), ("b", "f8", (2,)), ("c", [("d", "u1")])])
    fields["b"] = rng.random((3, 2))
    return {
        "model": {"w": rng.random((300, 1000)), "b": np.arange(10, dtype=np.int16), "t": rng.random((70, 60)).T},
        "dtypes": {name: _of(name, rng) for name in DTYPES},
        "shapes": [rng.random(shape) for shape in [(), (0,), (1,), (3, 0, 2), (1, 1, 1, 1), (2, 3, 4)]],
        "fields": fields,
        "scalars": (np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2020-02-02")),
        "plain": [None, True, False, 0, -(1 << 70), 2.5, float("inf"), -0.0, 3 - 4j],
        "words": ["text \ud800 \x00 ü", b"\x00\xff", "", b""],
        3: {"a/b": np.ones(2), "..": np.ones(3), "": np.ones(4), "[3]": 1, -1: 2},
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "strided": rng.random((40, 50))[::3, ::-2],
    }


def _of(name: str, rng: np.random.Generator) -> np.ndarray:
    """Random bits; numbers that stay themselves in text."""
    dtype = np.dtype(name)
    if dtype.kind in "SU":
        return np.array(["", "a", "äbc" if dtype.kind == "U" else "abc"], dtype)
    if dtype.kind == "b":
        return rng.random((2, 5)) > 0.5
    if dtype.kind in "fc" and dtype.itemsize > 16:
        return rng.random((2, 5)).astype(dtype)
    return np.frombuffer(rng.bytes(10 * dtype.itemsize), dtype).reshape(2, 5).copy()


def equal(a: Any, b: Any) -> bool:
    """Same structure, same types, same bits."""
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray | np.generic):
        same = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return same and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    return type(a) is type(b) and repr(a) == repr(b)
