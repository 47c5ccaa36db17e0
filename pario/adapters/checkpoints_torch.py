"""Tensors of torch in checkpoints: `from pario.adapters.torch import Checkpointer`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pario.checkpoint.checkpointer import Checkpointer as NumpyCheckpointer
from pario.checkpoint.tree import FOREIGN, Leaves, dtype_name, dtype_of
from pario.errors import OptionError

__all__ = ["Checkpointer"]


class _Tensors(Leaves):
    """Tensors of any device; what was saved as a tensor or as an array is restored as a tensor."""

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, torch.Tensor):
            return super().describe(leaf)
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
            raise OptionError(f"a tensor of layout {leaf.layout} on {leaf.device} cannot be saved")
        return _name(leaf.dtype), tuple(leaf.shape)

    def copy(self, leaf: Any, target: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            _like(target, leaf.dtype).copy_(leaf.detach())
        else:
            super().copy(leaf, target)

    def copy_run(self, leaf: Any, start: int, stop: int, target: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            _like(target, leaf.dtype).copy_(leaf.detach().reshape(-1)[start:stop])
        else:
            super().copy_run(leaf, start, stop, target)

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        if isinstance(like, np.ndarray | np.generic) or dtype not in _TORCH:
            return super().build(memory, dtype, shape, like)
        array = memory.view(dtype_of(dtype)).reshape(shape)
        tensor = _like(array, _TORCH[dtype])
        return tensor.to(like.device) if isinstance(like, torch.Tensor) else tensor


class Checkpointer(NumpyCheckpointer):
    """`pario.Checkpointer` for trees with tensors: `model.state_dict()`, `optimizer.state_dict()`, Shard(tensor, ...).

    Tensors come back on the CPU, or on the device of the tensor in `like`; NumPy arrays come back as tensors, unless
    `like` has an array there. Tensors of an accelerator are copied when `save` returns.
    """

    leaves = _Tensors()


def _named() -> dict[str, torch.dtype]:
    names = ("float16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16", "int32", "int64")
    known = {dtype_name(np.dtype(name)): getattr(torch, name) for name in names} | {"|b1": torch.bool}
    unsigned = {f"<u{n}": getattr(torch, f"uint{8 * n}") for n in (2, 4, 8) if hasattr(torch, f"uint{8 * n}")}
    return known | unsigned | {name: getattr(torch, name) for name in FOREIGN if hasattr(torch, name)}


_TORCH = {name: dtype for name, dtype in _named().items() if type(dtype) is torch.dtype}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise OptionError(f"tensors of {dtype} cannot be saved")
    return _NAMES[dtype]


def _like(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over that memory."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8)) if array.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(array.shape)
