"""Staging memory: the copy of a tree that `save` makes, laid out once per structure of the tree.

The memory is used again as long as keys, types and shapes stay the same, so that all but the first `save` cost a copy
of the bytes and little else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pario.checkpoint.boxes import volume
from pario.checkpoint.hdf5 import skeleton
from pario.checkpoint.layout import Arranged, NodeFile, arrange, finish, share_out
from pario.checkpoint.tree import Flat, Leaves
from pario.comm.base import AnyWorld, together
from pario.comm.memory import private_bytes
from pario.errors import OptionError

__all__ = ["Staging"]

#: Copies from this size on are announced to those who write at once.
_TELL = 1 << 20


class Staging:
    """Of one rank. file : the node's file, and what this rank writes of it; memory : u8[bytes that this rank writes]"""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves
        self.file = NodeFile()
        self.memory = np.empty(0, np.uint8)
        self._copies: list[tuple[int, Any, Callable[[Any, Any], None] | None, int]] = []

    def copy(self, flat: Flat, staged: Callable[[int], None]) -> None:
        """A tree of the structure that was laid out. staged(bytes) : so many from the beginning on are copied"""
        values = flat.values
        copyto = np.copyto
        for k, (number, target, copy, end) in enumerate(self._copies):
            value = values[number]
            if copy is None and type(value) is np.ndarray:
                copyto(target, value)
            else:
                (copy or self._leaves.copy)(value, target)
            if not k % 64 or target.nbytes >= _TELL:
                staged(end)
        staged(self.file.staging_bytes)

    def lay_out(self, world: AnyWorld, flat: Flat) -> None:
        """A new structure: which rank writes what, and where. Collective."""
        self._copies, self.memory = [], np.empty(0, np.uint8)
        digest = hashlib.sha256(repr(flat.specs).encode()).hexdigest()
        shards = {n: box for n, box in enumerate(flat.boxes) if flat.specs[n].kind == "shard"}
        everyones = world.allgather((world.node, digest, shards, len(flat.specs)))
        arranged = Arranged()
        made = None
        with together(world, "laying out a checkpoint"):
            other = next((rank for rank, each in enumerate(everyones) if each[1] != everyones[0][1]), None)
            if other is not None:
                raise OptionError(
                    f"rank {other} saves another tree than rank 0: keys, types and shapes must agree "
                    f"({everyones[other][3]} and {everyones[0][3]} arrays)",
                    hint="What differs between ranks goes in as a pario.Shard",
                )
            nodes = [[rank for rank, each in enumerate(everyones) if each[0] == node] for node in range(world.nodes)]
            pieces = share_out(flat.specs, [each[2] for each in everyones], nodes)[world.node]
            arranged = arrange(pieces, world.node_size)
            if world.is_leader:
                large = [(flat.specs[piece.array], piece.box) for piece in arranged.large]
                nbytes = [piece.nbytes for piece in arranged.large]
                made = skeleton(large, nbytes, arranged.rows(flat.specs), arranged.packed_bytes)
        made = world.node_bcast(made)
        with together(world, "laying out a checkpoint"):
            self.file = finish(arranged, flat.specs, made, world.node_rank, world.node_size)
            self.memory = private_bytes(self.file.staging_bytes)
            self._copies = list(self._copiers(flat))

    def _copiers(self, flat: Flat) -> Iterator[tuple[int, Any, Callable[[Any, Any], None] | None, int]]:
        """(array, target in staging memory, what copies to it if the leaf is no plain array, bytes copied then)"""
        leaves = self._leaves
        for array, box, start, stop, at, nbytes in self.file.copies:
            dtype = flat.specs[array].dtype
            memory = self.memory[at : at + nbytes]
            if stop - start == volume(box[1]):
                target = leaves.target(memory, dtype, box[1])
                yield array, target, None if _same(flat.values[array], target) else leaves.copy, at + nbytes
            else:
                target = leaves.target(memory, dtype, (stop - start,))
                yield array, target, _run_copier(leaves, start, stop), at + nbytes


def _same(value: Any, target: Any) -> bool:
    return type(value) is np.ndarray and bool(value.dtype == target.dtype)


def _run_copier(leaves: Leaves, start: int, stop: int) -> Callable[[Any, Any], None]:
    return lambda leaf, target: leaves.copy_run(leaf, start, stop, target)
