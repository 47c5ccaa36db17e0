"""Several sources as one database, and one of them out of it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pario.errors import OptionError
from pario.packing.items import Items, joined
from pario.records import Records
from pario.text import counted

__all__ = ["Merged", "Subset", "own_names"]


def own_names(names: Sequence[str]) -> list[str]:
    """A name for each, no two alike, for files in one folder: one that occurs twice gets numbers before it."""
    times, taken, found = Counter(names), set(names), []
    for number, name in enumerate(names):
        if times[name] > 1:
            while name in taken:
                name = f"{number}-{name}"
            taken.add(name)
        found.append(name)
    return found


class Merged(Items):
    """The records of several sources in the order of their keys, each with its source's prefix before it.

    owners : u32[n], which source each record comes from
    Raises OptionError, which names both, if two have a key in common.
    """

    def __init__(self, parts: Sequence[tuple[str, bytes, Items]]) -> None:
        """parts : (path, prefix, records) of each source."""
        self._parts = [items for _, _, items in parts]
        self._prefixes = [prefix for _, prefix, _ in parts]
        self.n = sum(items.n for items in self._parts)
        prefixes = set(self._prefixes)
        if len(prefixes) == len(parts):  # none is the beginning of another one, since each ends at its only slash
            order = sorted(range(len(parts)), key=self._prefixes.__getitem__)
            self.owners = np.repeat(np.array(order, np.uint32), [parts[k][2].n for k in order])
            self._ids = np.concatenate([np.arange(parts[k][2].n) for k in order]) if order else np.empty(0, np.int64)
        else:
            self._merge(parts)
        self.sizes = np.empty(self.n, np.int64)
        for number, items in enumerate(self._parts):
            mine = self.owners == number
            self.sizes[mine] = items.sizes[self._ids[mine]]

    def _merge(self, parts: Sequence[tuple[str, bytes, Items]]) -> None:
        keyed = sorted(
            (prefix + key, number, record)
            for number, (_, prefix, items) in enumerate(parts)
            for record, key in enumerate(items.keys(0, items.n))
        )
        twice = [(a, b) for a, b in pairwise(keyed) if a[0] == b[0]]
        if twice:
            (key, one, _), (_, other, _) = twice[0]
            raise OptionError(
                f"{counted(len(twice), 'key is', 'keys are')} in two sources: {key!r} is in {parts[one][0]} and in "
                f"{parts[other][0]}",
                hint="Leave --no-prefix out, so that the keys begin with the names of their sources.",
            )
        self.owners = np.fromiter((number for _, number, _ in keyed), np.uint32, len(keyed))
        self._ids = np.fromiter((record for _, _, record in keyed), np.int64, len(keyed))

    def keys(self, begin: int, stop: int) -> list[bytes]:
        keys = []
        for number, record in zip(self.owners[begin:stop].tolist(), self._ids[begin:stop].tolist(), strict=True):
            keys.append(self._prefixes[number] + self._parts[number].keys(record, record + 1)[0])
        return keys

    def read(self, ids: np.ndarray) -> Records:
        owners = self.owners[ids]
        values: list[bytes] = [b""] * len(ids)
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            for row, value in zip(rows.tolist(), self._parts[number].read(self._ids[ids[rows]]), strict=True):
                values[row] = value.tobytes()
        return joined(ids, values)

    def close(self) -> None:
        for items in self._parts:
            items.close()


class Subset(Items):
    """Chosen records of a database, their keys without a prefix; `close` is not passed on."""

    def __init__(self, items: Items, ids: np.ndarray, prefix: bytes) -> None:
        self._items = items
        self._ids = ids.astype(np.int64)
        self._prefix = prefix
        self.n = len(ids)
        self.sizes = items.sizes[self._ids]

    def keys(self, begin: int, stop: int) -> list[bytes]:
        found = [self._items.keys(record, record + 1)[0] for record in self._ids[begin:stop].tolist()]
        return [key.removeprefix(self._prefix) for key in found]

    def read(self, ids: np.ndarray) -> Records:
        got = self._items.read(self._ids[ids])
        return Records(ids, got.data, got.starts, got.nbytes)
