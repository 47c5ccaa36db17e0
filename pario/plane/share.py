"""How a capacity is divided among those who want it: pure functions of arrays, one number per client.

All take and return f64[n] in one unit, bytes/s or operations/s. A share may be larger than the demand: what nobody
wants is handed out, too, so that anyone who wants more in a moment can begin at once.
"""

from __future__ import annotations

import math

import numpy as np


def fitted(guarantees: np.ndarray, capacity: float) -> np.ndarray:
    """The guarantees, smaller in proportion if they exceed the capacity together."""
    total = float(guarantees.sum())
    return guarantees * (capacity / total) if total > capacity else guarantees.astype(float)


def max_min(
    capacity: np.ndarray, demands: np.ndarray, group: np.ndarray, guarantees: np.ndarray | float = 0.0
) -> np.ndarray:
    """In each group: first everybody's demand up to its guarantee; then the rest evenly, to nobody more than it wants;
    at last what is left, evenly to those who want anything.

    Anyone who wants nothing gets nothing, unless nobody wants anything: then all get the same. The rest goes round in
    ascending order of the unmet demands, without which an even division is not max-min fair (PAIO, FAST'22, visits the
    jobs in the order of their arrival).

    capacity : f64[g]; group : i64[n], ascending, each of 0..g-1 at least once; guarantees : no more than the capacity
    """
    n = len(demands)
    counts = np.bincount(group, minlength=len(capacity))
    starts = np.cumsum(counts) - counts
    given = np.minimum(demands, guarantees)
    unmet = demands - given
    left = np.maximum(0.0, capacity - np.bincount(group, given))
    ascending = unmet[np.lexsort((unmet, group))]
    before = np.cumsum(ascending) - ascending
    before -= before[starts][group]
    behind = counts[group] - (np.arange(n) - starts[group])
    # What each would get if all with smaller demands had theirs, and it and those behind it the same.
    levels = (left[group] - before) / behind
    short = np.minimum.reduceat(np.where(ascending > levels, np.arange(n), n), starts)
    level = np.where(short < n, np.maximum(0.0, levels[np.minimum(short, n - 1)]), math.inf)
    given = given + np.minimum(unmet, level[group])
    left = np.maximum(0.0, capacity - np.bincount(group, given))
    active = demands > 0
    active |= (np.bincount(group, active) == 0)[group]
    return np.asarray(given + active * (left / np.bincount(group, active))[group])
