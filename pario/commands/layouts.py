"""Which fields the samples of a dataset seem to have, by its keys alone: "image-000000001" and "label-000000001".

    names in front    a stretch of keys for each name    image-1 image-2 ... label-1 label-2 ...
    names behind      the keys of a sample in a row      0.cls 0.jpg 1.cls 1.jpg ...
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from pario.dataset.template import Template
from pario.format.layout import MDB_DUPSORT, MDB_INTEGERKEY, MDB_REVERSEKEY
from pario.locate.base import Index

__all__ = ["Field", "fields_of"]

#: The last number in a key, what stands before it, and behind it.
_PARTS = re.compile(rb"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)
#: More names than this are no fields.
_MOST = 8
#: Keys that are looked at in the beginning, the middle and the end.
_LOOK = 4 * _MOST
#: Numbers of records of two fields may differ by this share: samples may be incomplete.
_SHARE = 0.01


class Field(NamedTuple):
    """template : as one writes it; ids : records of it, a few from everywhere"""

    name: str
    template: str
    ids: list[int]


def fields_of(index: Index) -> list[Field]:
    """The fields, if there are several of which the same numbers have records; else []. Looks at a few hundred keys."""
    record = index.database.record
    if record is None or record.md_flags & (MDB_DUPSORT | MDB_INTEGERKEY | MDB_REVERSEKEY):
        return []
    stretches = _stretches(index)
    if len(stretches) == 1:
        found = _behind(index, *stretches[0])
    else:
        found = _in_front(index, stretches)
    names = [field.name for field in found]
    return found if len(found) > 1 and all(names) and len(set(names)) == len(names) else []


def _stretches(index: Index) -> list[tuple[int, int]]:
    """[low, high) of the records whose keys have the same bytes before the last number; [] if there are too many."""
    found: list[tuple[int, int]] = []
    low = 0
    while low < index.n:
        if low in index.meta:
            low += 1
            continue
        parts = _PARTS.fullmatch(index.keys([low])[0])
        if parts is None or len(found) == _MOST:
            return []
        before = parts[1]

        def begin(i: int, before: bytes = before) -> bool:
            return index.keys([i])[0][: len(before)] > before

        high = bisect_right(range(index.n), False, lo=low, key=begin) if before else index.n
        while high - 1 in index.meta:
            high -= 1
        found.append((low, high))
        low = high
    return found


def _in_front(index: Index, stretches: list[tuple[int, int]]) -> list[Field]:
    found = []
    numbers = set()
    for low, high in stretches:
        ids = np.unique(np.linspace(low, high - 1, min(high - low, _LOOK)).astype(np.int64))
        parts = [_PARTS.fullmatch(key) for key in index.keys(ids)]
        if None in parts or len({(one[1], one[3]) for one in parts if one}) != 1 or parts[0] is None:
            return []
        numbers.add((int(parts[0][2]), int(parts[-1][2]) if parts[-1] else 0))
        found.append(_field(parts[0][1], [one[2] for one in parts if one], parts[0][3], ids.tolist(), parts[0][1]))
    counts = [high - low for low, high in stretches]
    same = bool(counts) and max(counts) - min(counts) <= _SHARE * max(counts)
    return found if same and min(counts) > 1 and len(numbers) == 1 else []


def _behind(index: Index, low: int, high: int) -> list[Field]:
    """Of one stretch, in which the keys of a sample stand in a row."""
    ids = [i for begin in (low, (low + high - _LOOK) // 2, high - _LOOK) for i in range(max(low, begin), begin + _LOOK)]
    ids = sorted({i for i in ids if i < high})
    parts = [_PARTS.fullmatch(key) for key in index.keys(ids)]
    groups: dict[bytes, list[int]] = {}
    samples: dict[bytes, set[bytes]] = {}
    for i, one in zip(ids, parts, strict=True):
        if one is None:
            return []
        groups.setdefault(one[3], []).append(i)
        samples.setdefault(one[2], set()).add(one[3])
    whole = sum(len(has) == len(groups) for has in samples.values())
    if not 1 < len(groups) <= _MOST or whole < len(samples) - 6 or whole < 2:  # at each end of a look one may be cut
        return []
    by_id = dict(zip(ids, parts, strict=True))
    if len({one[1] for one in by_id.values() if one}) != 1:
        return []
    found = []
    for after, mine in sorted(groups.items()):
        digits = [one[2] for one in map(by_id.get, mine) if one]
        first = by_id[mine[0]]
        found.append(_field(first[1] if first else b"", digits, after, mine, after))
    return found


def _field(before: bytes, digits: list[bytes], after: bytes, ids: list[int], name: bytes) -> Field:
    width = min(map(len, digits))
    padded = any(one[:1] == b"0" for one in digits) and width > 1
    hole = b"%%0%dd" % width if padded else b"%d"
    text = (_written(before) + hole + _written(after)).decode("utf-8", errors="replace")
    words = re.findall(r"\w+", name.decode(errors="replace"))
    fits = all(Template(text).parse(before + one + after) is not None for one in digits)
    return Field("_".join(words) if fits else "", text, ids)


def _written(literal: bytes) -> bytes:
    """As it stands in a template."""
    return re.sub(rb"[%{}]", lambda one: one[0] * 2, literal)
