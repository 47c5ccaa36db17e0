"""A full memory barrier, for processors that reorder stores (comm/futex.py says where it is needed)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pario.kernels.jit import kernel


@intrinsic
def _fence(typingctx: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


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
