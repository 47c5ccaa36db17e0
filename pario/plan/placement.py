"""Which node keeps which chunk of a dataset: known to every node without a message.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on
Networking 6, 1998): each node has a score for each chunk, and the nodes with the highest scores keep it. If a node is
lost, its chunks go to the nodes that follow in the order of scores, and few others move.

Scores alone load nodes unevenly: of 1,000 chunks on 16 nodes the busiest keeps 1.23 times the mean (9 of 10 times 1.14
to 1.34). So each round of copies has a bound per node (Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with
bounded loads", 2018): a chunk whose node has reached the bound, or its quota, goes to the next one in the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pario.errors import OptionError
from pario.kernels.rendezvous import place_copies

#: Stands for a node where a chunk has fewer copies than others.
NOBODY = -1

#: A node takes at most this many times the mean of a round of copies.
_BOUND = 1.1


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Who keeps what.

    owners : i32[chunks, copies], node numbers in the order of scores, NOBODY where there is no such copy
    nodes : number of nodes
    """

    owners: np.ndarray
    nodes: int

    def kept_by(self, node: int) -> np.ndarray:
        """The chunks that this node keeps, i64[k], ascending."""
        return np.flatnonzero((self.owners == node).any(axis=1))

    def sources(self, chunk: int, asker: int) -> list[int]:
        """The nodes that keep this chunk, in the order in which `asker` tries them: itself first; the others begin
        with another one for each asker, so that all of them serve."""
        kept = [int(node) for node in self.owners[chunk] if node != NOBODY]
        if asker in kept:
            first = kept.index(asker)
        else:
            first = (asker + chunk) % max(1, len(kept))
        return kept[first:] + kept[:first]

    @property
    def is_complete(self) -> bool:
        """True if each chunk has a node."""
        return bool((self.owners != NOBODY).any(axis=1).all())


def assign(
    dataset: int,
    chunks: Sequence[int] | np.ndarray,
    quotas: Sequence[int],
    copies: int | None = None,
    *,
    held: np.ndarray | None = None,
) -> Placement:
    """Assign the chunks of a dataset to nodes. The same on every node that asks.

    dataset : identity of the dataset, 64 bits
    chunks : in the order of their worth. Where not all fit, the last ones have no node
    quotas : per node, how many chunks it can hold
    copies : of each chunk, if the quotas hold them; None: as many as they hold
    held : bool[nodes, chunks]: what nodes have from an earlier job, with other nodes or quotas, goes to them first

    Raises OptionError.
    """
    nodes, n = len(quotas), len(chunks)
    if nodes < 1 or min(quotas) < 0:
        raise OptionError(f"a placement needs nodes with quotas of 0 or more chunks, got {list(quotas)}")
    if copies is not None and copies < 1:
        raise OptionError(f"copies must be at least 1, got {copies!r}", hint="None means as many as there is room for")
    order = np.asarray(chunks, dtype=np.int64)
    if n and not np.array_equal(np.sort(order), np.arange(n)):
        raise OptionError(f"chunks must be the numbers 0 to {n - 1}, each once")
    room = np.minimum(np.asarray(quotas, dtype=np.int64), n)
    most = min(copies if copies is not None else nodes, nodes)
    owners = np.full((n, most), NOBODY, dtype=np.int32)
    everybody = np.empty((0, 0), np.bool_)
    for copy in range(most):
        passes = [(room.copy(), held)] if held is not None and held.any() else []
        # What the bound kept from all nodes that do not keep it yet goes to the first one with room.
        passes += [(np.minimum(room, _bound(n, room)), everybody), (room.copy(), everybody)]
        for left, only in passes:
            place_copies(np.uint64(dataset & (1 << 64) - 1), order, copy, left, room, owners, only)
    while owners.shape[1] > 1 and (owners[:, -1] == NOBODY).all():
        owners = owners[:, :-1]
    return Placement(owners=owners, nodes=nodes)


def _bound(n: int, room: np.ndarray) -> int:
    """How many chunks of one round of copies a node may take: the water level at which `room` holds them all, and a
    tenth more."""
    low, high = 0, n
    while low < high:
        level = (low + high) // 2
        if np.minimum(room, level).sum() >= min(n, room.sum()):
            high = level
        else:
            low = level + 1
    return int(np.ceil(low * _BOUND))
