"""The strongest readers that one can write by hand with py-lmdb, measured beside the recipes.

They know their job and do nothing else: a rank reads a contiguous shard of the keys with a cursor (or random records
with `get`), copies each value once, and hands out views of that copy. There is no shuffling, no resuming, no equal
number of batches, and no error reaches another rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.study.cells import LOOPS
from pario.comm.base import AnyWorld
from pario.errors import OptionError
from pario.lmdb.real import real
from pario.plan.schedule import even_split
from pario.records import Batch
from pario.stats.rank import COUNTED

__all__ = ["HandLoop"]

#: Up to this size of a batch, joining its values into new memory is faster than filling one array value by value in
#: Python: 1.7 times with 3 KB values. Above it the pages of new memory cost more than the loop.
_JOIN_BYTES = 4 << 20


class HandLoop:
    """One rank's loop over a Datum set; has as much of a Loader's surface as the worker uses.

    task : of the worker. "loop" is a name of `LOOPS`; "head" and "pixels" are bytes of each value, one behind the other
    """

    def __init__(self, world: AnyWorld, task: dict[str, Any]) -> None:
        if real is None:
            raise OptionError("loops written by hand need py-lmdb", hint="pip install lmdb")
        self.world = world
        self._batch, self._pixels = task["batch"], slice(task["head"], task["head"] + task["pixels"])
        self._in_order = LOOPS[task["loop"]].in_order
        self._env = real.open(task["path"], readonly=True, lock=False, readahead=self._in_order)
        self._txn = self._env.begin(buffers=True)
        n = self._txn.stat()["entries"]
        first, stop = even_split(n, world.size, world.rank)
        if self._in_order:
            self._ids = np.arange(first, stop)
        else:
            self._ids = np.random.default_rng(task["seed"]).permutation(n)[first:stop]
        self._keys = [b"%08d" % record for record in self._ids]

    def stats(self) -> dict[str, float]:
        return dict.fromkeys(COUNTED, 0)

    def close(self) -> None:
        self._txn.abort()
        self._env.close()

    def __iter__(self) -> Iterator[Batch]:
        """One epoch; the arrays of a batch are valid until the next one is asked for."""
        if not self._keys:
            return
        values = self._values()
        row = len(self._txn.get(self._keys[0]))
        joined = self._batch * row <= _JOIN_BYTES
        memory = np.empty((0 if joined else self._batch, row), np.uint8)
        flat = memoryview(memory.reshape(-1))
        for step, first in enumerate(range(0, len(self._ids), self._batch)):
            ids = self._ids[first : first + self._batch]
            if joined:
                rows = np.frombuffer(b"".join(islice(values, len(ids))), np.uint8).reshape(len(ids), row)
            else:
                at = 0
                for value in islice(values, len(ids)):
                    flat[at : at + row] = value
                    at += row
                rows = memory[: len(ids)]
            # A Datum of these sets ends with its label, in one byte.
            yield Batch({"data": rows[:, self._pixels], "label": rows[:, -1]}, ids, 0, step)

    def _values(self) -> Iterator[Any]:
        if not self._in_order:
            return map(self._txn.get, self._keys)
        cursor = self._txn.cursor()
        cursor.set_key(self._keys[0])
        return iter(cursor.iternext(keys=False))
