"""Packed values, unpacked one by one: does each have the size and the checksum that it was packed with?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pario.commands.dataset import Dataset
from pario.commands.screen import screen
from pario.commands.verify_tree import CHUNK, TreeCheck
from pario.decode.unpacking import laid_out
from pario.errors import CorruptedError, ParioError
from pario.plan.coalesce import coalesce
from pario.records import Records

if TYPE_CHECKING:
    from pario.codec.packing import Packing

__all__ = ["packed_values"]

#: Errors that each rank tells.
_TOLD = 20


def packed_values(dataset: Dataset, packing: Packing, check: TreeCheck) -> tuple[int, list[ParioError]]:
    """(how many packed values are damaged, the errors about the first ones of each rank). Collective."""
    n = packing.n
    # Named databases may lie among the records of the main one: they have no packed values.
    offsets, nbytes = (np.delete(np.array(found, np.int64), check.named_rows) for found in (check.offsets, check.sizes))
    first = dataset.world.exscan(len(offsets))
    mine = np.arange(first, min(first + len(offsets), n))  # not the reserved entry
    count, errors = 0, list[ParioError]()
    work = dataset.together(lambda: packing.sizes[mine], "reading the table of sizes")
    ends = np.cumsum(np.maximum(work, nbytes[: len(mine)]))
    bar = screen.bar(int(ends[-1]) if len(ends) else 0, "packed values", "B")
    at = 0
    while at < len(mine):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + CHUNK, side="right")))
        part = slice(at, stop)
        for row, why in _damaged(dataset, packing, mine[part], offsets[part], nbytes[part]):
            count += 1
            if len(errors) < _TOLD:
                errors.append(CorruptedError(why, record=int(mine[at + row]), offset=int(offsets[at + row])))
        at = stop
        bar.update(int(ends[stop - 1]) - bar.n)
    screen.end_bar()
    everyones = dataset.world.allgather((count, errors))
    return sum(count for count, _ in everyones), [error for _, told in everyones for error in told]


def _damaged(
    dataset: Dataset, packing: Packing, ids: np.ndarray, offsets: np.ndarray, nbytes: np.ndarray
) -> list[tuple[int, str]]:
    """(row, reason) of these values, which this reads and unpacks."""
    plan = coalesce(
        offsets,
        nbytes,
        align=dataset.fetcher.align,
        gap_bytes=64 << 10,
        read_bytes=4 << 20,
        file_bytes=dataset.fetcher.nbytes,
    )
    data = np.empty(plan.nbytes, np.uint8)
    dataset.pool.read(plan.reads, data, plan.starts)
    sizes = packing.sizes[ids]
    starts, total = laid_out(sizes)
    records = Records(ids, data, plan.record_starts, nbytes)
    return packing.unpack(records, np.empty(total, np.uint8), starts, sizes)
