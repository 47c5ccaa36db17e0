"""A full memory barrier, for processors that reorder stores (comm/futex.py says where it is needed)."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pario.kernels.jit import kernel

__all__ = ["full_fence"]


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
