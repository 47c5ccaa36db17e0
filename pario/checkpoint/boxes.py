"""Boxes: rectangular parts of an array, as (offset, shape), and which of them make up an array or a run of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

__all__ = ["Box", "cover", "meet", "runs", "slices", "volume"]

#: (offset of the first element per axis, shape)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def volume(shape: Sequence[int]) -> int:
    """Elements of an array of that shape; 1 without axes."""
    count = 1
    for n in shape:
        count *= n
    return count


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
    row = volume(shape[1:])
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


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """What keeps the boxes from making up an array of that shape, each element once; "" if nothing does. Boxes may be
    empty."""
    for offset, part in boxes:
        if len(offset) != len(shape) or len(part) != len(shape):
            return f"a part at {offset} of shape {part} has another number of axes than the array {shape}"
        if any(o < 0 or n < 0 or o + n > m for o, n, m in zip(offset, part, shape, strict=True)):
            return f"the part at {offset} of shape {part} reaches out of the array {shape}"
    full = [(offset, part) for offset, part in boxes if volume(part)]
    held = sum(volume(part) for _, part in full)
    if len(full) > 1 and shape:
        first = np.array([offset for offset, _ in full])
        last = first + np.array([part for _, part in full])
        for k in range(len(full) - 1):
            both = (np.maximum(first[k], first[k + 1 :]) < np.minimum(last[k], last[k + 1 :])).all(axis=1)
            if both.any():
                other = full[k + 1 + int(both.argmax())]
                return f"the parts at {full[k][0]} of shape {full[k][1]} and at {other[0]} of shape {other[1]} overlap"
    if held != volume(shape):
        return f"the parts hold {held:,} elements, and an array {shape} has {volume(shape):,}"
    return ""
