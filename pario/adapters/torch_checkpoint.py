"""Checkpoints of trees with tensors: `pario.adapters.torch.Checkpointer`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pario.checkpoint.checkpointer import Checkpointer as NumpyCheckpointer
from pario.checkpoint.tree import FOREIGN, PAGE, Leaves, Shard, dtype_name, dtype_of
from pario.errors import OptionError


class _Tensors(Leaves):
    """Tensors of any device; what was saved as a tensor or as an array is restored as a tensor. A DTensor is the Shard
    that its mesh gives this rank."""

    def opened(self, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        if not isinstance(node, torch.Tensor) or not _is_dtensor(node):
            return None
        if any(each.is_partial() for each in node.placements):
            raise OptionError(f"a DTensor of placements {node.placements} holds sums that are not added up yet")
        shape, mesh = tuple(node.shape), node.device_mesh
        if mesh.get_coordinate() is None:  # this rank has nothing of it
            if not shape:
                raise OptionError("a DTensor without axes cannot be saved where not all ranks hold it")
            return Shard(torch.empty([0] * len(shape), dtype=node.dtype), shape, (0,) * len(shape)), lambda _: node
        local, chunks = node.detach().to_local(), node.__create_chunk_list__()
        if len(chunks) != 1 or chunks[0].sizes != local.shape:
            raise OptionError(f"a DTensor of placements {node.placements} gives this rank no part that is one box")

        def closed(made: torch.Tensor) -> torch.Tensor:
            shapes = {"shape": node.shape, "stride": node.stride()}
            return type(node).from_local(made, mesh, node.placements, run_check=False, **shapes)

        return Shard(local, shape, chunks[0].offsets), closed

    def wanted(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and not _is_wrapped(leaf):
            return type_name(leaf.dtype), tuple(leaf.shape)
        return self.describe(leaf)

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, torch.Tensor):
            return super().describe(leaf)
        if _is_wrapped(leaf):
            what = f"a {type(leaf).__qualname__} is no plain tensor, and nothing says how to read it back"
            raise OptionError(what, hint="Save the tensors that it is made of; a DTensor not in a Shard")
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested or leaf.is_meta:
            raise OptionError(f"a tensor of layout {leaf.layout} on {leaf.device} cannot be saved")
        return type_name(leaf.dtype), tuple(leaf.shape)

    def copy(self, leaf: Any, target: np.ndarray, run: slice | None) -> None:
        if isinstance(leaf, torch.Tensor):
            whole = leaf.detach()
            tensor_over(target, leaf.dtype).copy_(whole if run is None else whole.reshape(-1)[run])
        else:
            super().copy(leaf, target, run)

    def held(self, leaf: Any, begin: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(leaf, torch.Tensor):
            return super().held(leaf, begin, step)
        flat = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // PAGE * PAGE
        # Pages are picked on the device: the others do not cross the bus.
        return flat[:whole].reshape(-1, PAGE)[begin::step].cpu().numpy(), flat[whole:].cpu().numpy()

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        if isinstance(like, np.ndarray | np.generic) or dtype not in TORCH:
            return super().build(memory, dtype, shape, like)
        array = memory.view(dtype_of(dtype)).reshape(shape)
        tensor = tensor_over(array, TORCH[dtype])
        return tensor.to(like.device) if isinstance(like, torch.Tensor) and not like.is_meta else tensor


class Checkpointer(NumpyCheckpointer):
    """`pario.Checkpointer` for trees with tensors: `model.state_dict()`, `optimizer.state_dict()`, Shard(tensor, ...).

    Tensors come back on the CPU, or on the device of the tensor in `like`; NumPy arrays come back as tensors, unless
    `like` has an array there. Tensors of an accelerator are copied when `save` returns.

    Of a DTensor (FSDP2, tensor parallel) each rank saves its part. It comes back as a DTensor of the mesh and the
    placements that `like` has there, whatever those were that saved it, and without `like` as a whole tensor. The ranks
    of its mesh are those of the Checkpointer.
    """

    leaves = _Tensors()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """There is none while nobody has loaded the class."""
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is no memory of its own: its class answers for what is done with it."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _torch_types() -> dict[str, torch.dtype]:
    names = ("float16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16", "int32", "int64")
    known = {dtype_name(np.dtype(name)): getattr(torch, name) for name in names} | {"|b1": torch.bool}
    unsigned = {f"<u{n}": getattr(torch, f"uint{8 * n}") for n in (2, 4, 8) if hasattr(torch, f"uint{8 * n}")}
    foreign = {name: getattr(torch, name) for name in FOREIGN if hasattr(torch, name) and "int" not in name}
    return known | unsigned | foreign


TORCH = {name: dtype for name, dtype in _torch_types().items() if type(dtype) is torch.dtype}
_NAMES = {dtype: name for name, dtype in TORCH.items()}


def type_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise OptionError(f"tensors of {dtype} cannot be saved")
    return _NAMES[dtype]


def tensor_over(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over that memory."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8)) if array.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(array.shape)
