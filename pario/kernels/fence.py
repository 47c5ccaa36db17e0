"""A full memory barrier, for processors that reorder stores (comm/futex.py says where it is needed)."""

from __future__ import annotations

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
def in_order(words, first, second):  # type: ignore[no-untyped-def]
    """(words[first], words[second]), after everything before, the first one first, and before everything after."""
    _fence()
    one = words[first]
    _fence()
    two = words[second]
    _fence()
    return one, two
