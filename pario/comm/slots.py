"""Slots: the memory of a node's ring.

    data      u8[count, slot_bytes]                page-aligned, so that O_DIRECT reads go straight into it
    tables    ids, starts, nbytes: i64[table_steps, table_rows]; step s is row s % table_steps

Who may write or read which part, and when, is what `window.Ring` says.
"""

from __future__ import annotations

import numpy as np

from pario.comm.base import AnyWorld
from pario.comm.memory import PAGE, shared_parts
from pario.errors import OptionError


class Slots:
    """The memory that the ranks of one node share for records; it exists after `allocate`.

    Parameters
    ----------
    world : World or Solo
    count : slots of the ring
    slot_bytes : bytes per slot; rounded up to whole pages
    table_steps, table_rows : shape of the tables; a table row holds one step of the whole node

    Attributes
    ----------
    data : u8[count, slot_bytes]
    ids, starts, nbytes : i64[table_steps, table_rows]; `starts` are byte offsets into `data.reshape(-1)`
    """

    def __init__(self, world: AnyWorld, count: int, slot_bytes: int, table_steps: int, table_rows: int) -> None:
        for name, value in (("count", count), ("slot_bytes", slot_bytes), ("table_steps", table_steps)):
            if value < 1:
                raise OptionError(f"{name} must be at least 1, got {value!r}")
        self.count = count
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self._world = world
        self._shape = table_steps, table_rows
        self.data: np.ndarray = np.empty((0, 0), np.uint8)
        self.ids: np.ndarray = np.empty((0, 0), np.int64)
        self.starts = self.nbytes = self.ids

    def allocate(self) -> None:
        """Allocate the memory, unless it exists. Collective over `world`; raises on all ranks."""
        if len(self.data):
            return
        steps, rows = self._shape
        sizes = [3 * 8 * steps * rows, self.count * self.slot_bytes]
        tables, data = shared_parts(self._world, sizes, "allocating the ring")
        self.ids, self.starts, self.nbytes = tables.view(np.int64).reshape(3, steps, rows)
        self.data = data.reshape(self.count, self.slot_bytes)

    def close(self) -> None:
        """Drop this rank's views. The memory itself belongs to the World, which frees it. Local, idempotent."""
        self.data = self.ids = self.starts = self.nbytes = np.empty(0, np.uint8)
