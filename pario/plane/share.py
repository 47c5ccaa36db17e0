"""How a capacity is divided among those who want it: pure functions of arrays, one number per client.

All take and return f64[n] in one unit, bytes/s or operations/s. A share may be larger than the demand: what nobody
wants is handed out, too, so that anyone who wants more in a moment can begin at once.
"""

from __future__ import annotations

import math

import numpy as np


def max_min(capacity: float, demands: np.ndarray, guarantees: np.ndarray | None = None) -> np.ndarray:
    """First everybody's demand up to its guarantee; then the rest evenly, to nobody more than it wants; at last what
    is left, evenly to those who want anything.

    Anyone who wants nothing gets nothing, unless nobody wants anything: then all get the same. The rest goes round in
    ascending order of the unmet demands, without which an even division is not max-min fair (PAIO, FAST'22, visits the
    jobs in the order of their arrival). Guarantees that exceed the capacity together shrink in proportion.
    """
    n = len(demands)
    if not n:
        return np.zeros(0)
    given = np.zeros(n)
    if guarantees is not None:
        given = np.minimum(demands, fitted(guarantees, capacity))
    left = max(0.0, capacity - float(given.sum()))
    unmet = demands - given
    given = given + np.minimum(unmet, max_min_each(np.array([left]), unmet, np.zeros(n, np.int64)))
    left = max(0.0, capacity - float(given.sum()))
    active = demands > 0
    if not active.any():
        active[:] = True
    given[active] += left / int(active.sum())
    return given


def fitted(guarantees: np.ndarray, capacity: float) -> np.ndarray:
    """The guarantees, smaller in proportion if they exceed the capacity together."""
    total = float(guarantees.sum())
    return guarantees * (capacity / total) if total > capacity else guarantees.astype(float)


def max_min_each(capacity: np.ndarray, demands: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Several divisions at once: f64[n], `max_min` of each group without guarantees.

    capacity : f64[g]; group : i64[n], ascending, each of 0..g-1 at least once
    """
    n = len(demands)
    counts = np.bincount(group, minlength=len(capacity))
    starts = np.cumsum(counts) - counts
    ascending = demands[np.lexsort((demands, group))]
    before = np.cumsum(ascending) - ascending
    before -= before[starts][group]
    behind = counts[group] - (np.arange(n) - starts[group])
    # What each would get if all with smaller demands had theirs, and it and those behind it the same.
    levels = (capacity[group] - before) / behind
    short = np.minimum.reduceat(np.where(ascending > levels, np.arange(n), n), starts)
    level = np.where(short < n, np.maximum(0.0, levels[np.minimum(short, n - 1)]), math.inf)
    given = np.minimum(demands, level[group])
    left = np.maximum(0.0, capacity - np.bincount(group, given))
    active = demands > 0
    active |= (np.bincount(group, active) == 0)[group]
    return np.asarray(given + active * (left / np.bincount(group, active))[group])
