"""JAX arrays in checkpoints.

    from pario.adapters.jax import Checkpointer

    with Checkpointer(slow="/scratch/run1") as ckpt:
        ckpt.save(step, params)                      # a tree of jax.Array, NumPy arrays, numbers, ...
        params = ckpt.restore(like=params)           # jax.Arrays where `like` has them, on their devices
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pario.checkpoint.checkpointer import Checkpointer as NumpyCheckpointer
from pario.checkpoint.tree import Leaves, dtype_name
from pario.errors import OptionError

__all__ = ["Checkpointer"]


class _Arrays(Leaves):
    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, jax.Array):
            return super().describe(leaf)
        if not leaf.is_fully_addressable:
            raise OptionError(
                f"an array of shape {leaf.shape} lies on devices of several processes",
                hint="Save pario.Shard(numpy.asarray(shard.data), array.shape, offset) of its addressable_shards",
            )
        return dtype_name(np.dtype(leaf.dtype)), tuple(leaf.shape)

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        array = super().build(memory, dtype, shape, like)
        return jax.device_put(array, like.sharding) if isinstance(like, jax.Array) else array


class Checkpointer(NumpyCheckpointer):
    """`pario.Checkpointer` for trees with `jax.Array`s, which this process must have whole on its devices.

    They come back as NumPy arrays, or where `like` has a `jax.Array`, as such, placed as that one.
    """

    leaves = _Arrays()
