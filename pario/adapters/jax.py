"""JAX arrays in checkpoints.

    from pario.adapters.jax import Checkpointer

    with Checkpointer(slow="/scratch/run1") as ckpt:
        ckpt.save(step, params)                      # a tree of jax.Array, NumPy arrays, numbers, ...
        params = ckpt.restore(like=params)           # jax.Arrays where `like` has them, on their devices
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pario.checkpoint.checkpointer import Checkpointer as NumpyCheckpointer
from pario.checkpoint.tree import Leaves, dtype_name
from pario.errors import OptionError, StateError

__all__ = ["Checkpointer"]


class _Arrays(Leaves):
    """Nodes of JAX's registry (flax's TrainState, registered dataclasses) are dicts of their children, and typed keys
    of random generators are dicts of the name of their kind and their bits; `like` makes them anew."""

    def opened(self, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        if isinstance(node, jax.Array | jax.ShapeDtypeStruct):
            return _opened_key(node) if _is_key(node) else None
        if type(node) is dict or isinstance(node, list | tuple) or jax.tree_util.all_leaves((node,)):
            return None
        pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
        names = [_name(path[0]) for path, _ in pairs]
        if len(set(names)) < len(names):
            names = list(range(len(names)))
        return dict(zip(names, (child for _, child in pairs), strict=True)), lambda got: treedef.unflatten(got.values())

    def wanted(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return dtype_name(np.dtype(leaf.dtype)), tuple(leaf.shape)
        return self.describe(leaf)

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, jax.Array):
            return super().describe(leaf)
        if _is_key(leaf):
            raise OptionError("a Shard of typed keys cannot be saved", hint="Save one of their jax.random.key_data")
        if not leaf.is_fully_addressable:
            raise OptionError(
                f"an array of shape {leaf.shape} lies on devices of several processes",
                hint="Save pario.Shard(numpy.asarray(shard.data), array.shape, offset) of its addressable_shards",
            )
        return dtype_name(np.dtype(leaf.dtype)), tuple(leaf.shape)

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        array = super().build(memory, dtype, shape, like)
        return jax.device_put(array, like.sharding) if isinstance(like, jax.Array | jax.ShapeDtypeStruct) else array


def _is_key(array: Any) -> bool:
    return bool(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key))


def _opened_key(key: Any) -> tuple[Any, Callable[[Any], Any]]:
    lacks = isinstance(key, jax.ShapeDtypeStruct)
    impl = "" if lacks else jax.random.key_impl(key)
    if not isinstance(impl, str):
        raise OptionError(f"keys of {key.dtype} cannot be saved: nothing says how to make them anew")

    def closed(got: dict[str, Any]) -> Any:
        try:
            made = jax.random.wrap_key_data(got["key_data"], impl=got["key_impl"])
        except (TypeError, ValueError) as e:
            raise StateError(f"the checkpoint has no keys of {key.dtype} there: {e}") from None
        if made.dtype != key.dtype:
            raise StateError(f"like has keys of {key.dtype}, and the checkpoint {made.dtype}")
        return jax.device_put(made, key.sharding)

    data = jax.eval_shape(jax.random.key_data, key) if lacks else jax.random.key_data(key)
    return {"key_impl": impl, "key_data": data}, closed


def _name(step: Any) -> Any:
    """Of a child, as its parent's class names it."""
    return next((getattr(step, kind) for kind in ("name", "key", "idx") if hasattr(step, kind)), str(step))


class Checkpointer(NumpyCheckpointer):
    """`pario.Checkpointer` for trees with `jax.Array`s, which this process must have whole on its devices.

    They come back as NumPy arrays, or where `like` has a `jax.Array` or a `jax.ShapeDtypeStruct`, as `jax.Array`s,
    placed as `like` says. Nodes that JAX knows as parts of a tree (flax's TrainState, registered dataclasses) and typed
    keys come back as such where `like` has them, and as dicts without it; what is static in them is that of `like`.
    """

    leaves = _Arrays()
