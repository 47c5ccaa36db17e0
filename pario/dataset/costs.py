"""What the records of an epoch cost, for batches that are cut by cost."""

from __future__ import annotations

import numpy as np

from pario.comm.base import together
from pario.dataset.reader import Reader
from pario.plan.budget import Budget, Costs, cost_of
from pario.plan.selection import Selection

#: Records that a cost is asked for at once.
_PIECE = 1 << 20


def costs_of(budget: Budget | None, reader: Reader, chosen: Selection | None, *, file_order: bool) -> Costs | None:
    """The costs by the numbers of an order, one copy per node; None without a budget. Rank 0 finds them out.
    Collective; raises on all ranks.

    file_order : the order's numbers are ordinals in the file, not in key order
    """
    if budget is None:
        return None
    world, found = reader.world, None
    with together(world, "finding out what records cost"):
        if world.rank == 0:
            found = _found(budget, reader, chosen, file_order)
    return Costs.within(budget, world.share_array(found))


def _found(budget: Budget, reader: Reader, chosen: Selection | None, file_order: bool) -> np.ndarray:
    """u32[n], or i64[n] for larger costs."""
    index = reader.index
    n = index.n if chosen is None else chosen.n
    of = np.empty(n, np.uint32)
    for start in range(0, n, _PIECE):
        numbers = np.arange(start, min(start + _PIECE, n))
        if chosen is not None:
            ids = chosen.ids_of(numbers, "place" if file_order else "id")
        else:
            ids = index.by_offset[numbers] if file_order and index.by_offset is not None else numbers
        _, nbytes = index.extents_of(ids)
        if reader.unpacking is not None:
            nbytes = reader.unpacking.sizes(ids, nbytes)
        costs = nbytes if budget.cost is None else cost_of(budget.cost, ids, nbytes, index.n)
        if of.dtype == np.uint32 and int(costs.max(initial=0)) >= 1 << 32:
            of = of.astype(np.int64)
        of[start : start + len(costs)] = costs
    return of
