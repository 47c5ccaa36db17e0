"""A full memory barrier, for processors that reorder stores (comm/futex.py says where it is needed); and what is read
between two of them."""

from __future__ import annotations

import numpy as np
from numba import types

from pario.kernels.jit import emitted, kernel


@emitted(types.void)
def _fence(builder):  # type: ignore[no-untyped-def]
    builder.fence("seq_cst")


@kernel
def full_fence() -> None:
    """Makes everything before it visible to all processors before anything after it."""
    _fence()


@kernel
def generation_of(states, first, last, each):  # type: ignore[no-untyped-def]
    """The sum of states[first[i]], ..., states[last[i]] (i64[n] each) of all i, after everything before and before
    everything after; -1 if one of them is even. each : gets the same of each i alone, i64[n]; or i64[0]"""
    _fence()
    total = np.int64(0)
    for i in range(len(first)):
        mine = np.int64(0)
        for chunk in range(first[i], last[i] + 1):
            state = states[chunk]
            mine = mine + state if mine >= 0 and state & 1 else np.int64(-1)
        if len(each) > 0:
            each[i] = mine
        elif mine < 0:
            return mine
        total += mine
    _fence()
    return total
