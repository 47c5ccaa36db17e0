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
def generation_of(states, first, last):  # type: ignore[no-untyped-def]
    """The sum of states[first[i]], ..., states[last[i]] (i64[n] each) of all i, after everything before and before
    everything after; -1 if one of them is even."""
    _fence()
    total = np.int64(0)
    for i in range(len(first)):
        for chunk in range(first[i], last[i] + 1):
            state = states[chunk]
            if not state & 1:
                return np.int64(-1)
            total += state
    _fence()
    return total
