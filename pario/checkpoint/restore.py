"""A tree out of a checkpoint: what is wanted of it, for which restoring.py reads the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pario.checkpoint.boxes import Box, volume
from pario.checkpoint.finding import Found, open_found
from pario.checkpoint.restoring import Wish, empty_bytes, read_all
from pario.checkpoint.tree import Leaves, Shard, Spec, item_bytes, pick, unflatten
from pario.comm.base import AnyWorld, together
from pario.comm.world import same_ranks
from pario.errors import CorruptedError, MissingError, PeerError, ReadError, StateError

__all__ = ["kind_of", "restored"]

#: What makes `Checkpointer.restore` try an older checkpoint.
_DAMAGE = (CorruptedError, MissingError, ReadError)


def restored(
    world: AnyWorld,
    found: Found,
    tiers: tuple[str, str | None],
    like: Any,
    leaves: Leaves,
    take: Callable[[int], None] | None = None,
) -> Any:
    """The tree, or what `like` asks for of it. Collective.

    tiers : the slow folder and the fast one; take(nbytes) : returns when so many may be read from the slow one
    Raises on all ranks: CorruptedError, MissingError, ReadError for damage, StateError if `like` does not fit.
    """
    opened = open_found(world, found, *tiers)
    manifest = opened.manifest
    wishes: list[Wish] = []

    def wish(leaf: Any, number: int, path: str) -> None:
        spec = manifest.specs[number]
        box = _wanted(leaf, spec, leaves, path)
        wishes.append(Wish(number, box, empty_bytes(volume(box[1]) * item_bytes(spec.dtype))))

    def built(leaf: Any, number: int, path: str = "") -> Any:
        spec, got = manifest.specs[number], next(results)
        like = leaf.array if isinstance(leaf, Shard) else leaf
        array = leaves.build(got.memory, spec.dtype, got.box[1], like)
        return array[()] if spec.kind == "scalar" else array

    def tree(array: Callable[[Any, int, str], Any]) -> Any:
        count = len(manifest.specs)
        if like is None:
            return unflatten(manifest.description, lambda number: array(None, number, ""), count)
        return pick(like, manifest.description, array, lambda node: unflatten(node, _nothing, 0))

    with together(world, "comparing `like` with the checkpoint"):
        tree(wish)
    # A world of its own: the memory that its ranks share goes back when it ends.
    twin = same_ranks(world)
    try:
        read_all(twin, opened, wishes, None if found.fast else take)
    except BaseException as e:
        twin.abandon(e)
        raise
    twin.free()
    results = iter(wishes)
    return tree(built)


def kind_of(error: Exception | None) -> str:
    """Of an error of `restored`: "damage" of the checkpoint, "peer", "other"; "" without one."""
    if error is None or isinstance(error, PeerError):
        return "" if error is None else "peer"
    return "damage" if isinstance(error, _DAMAGE) else "other"


def _wanted(leaf: Any, spec: Spec, leaves: Leaves, path: str) -> Box:
    """The box of an array that a leaf of `like` asks for. Raises StateError if it does not fit."""
    whole: Box = ((0,) * len(spec.shape), spec.shape)
    if leaf is None:
        return whole
    shard = leaf if isinstance(leaf, Shard) else None
    described = leaves.describe(leaf.array if shard is not None else leaf)
    if described is None:
        raise StateError(f"like has {type(leaf).__name__} at {path!r}, and the checkpoint an array")
    dtype, shape = described
    expected = shard.global_shape if shard is not None else shape
    if dtype != spec.dtype or expected != spec.shape:
        raise StateError(
            f"like has {dtype}{list(expected)} at {path!r}, and the checkpoint {spec.dtype}{list(spec.shape)}"
        )
    if shard is None:
        return whole
    if len(shard.offset) != len(shape) or _outside(shard.offset, shape, spec.shape):
        raise StateError(f"{shard} with an array of shape {shape} does not lie in the whole array, at {path!r}")
    return shard.offset, shape


def _outside(offset: tuple[int, ...], part: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return any(o < 0 or o + n > m for o, n, m in zip(offset, part, shape, strict=True))


def _nothing(number: int) -> Any:
    raise StateError("like has no array where the checkpoint has one")
