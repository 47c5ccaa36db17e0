"""Rendezvous hashing: the nodes' scores for a chunk, and who keeps it. See plan/placement.py."""

from __future__ import annotations

import numpy as np

from pario.kernels.jit import kernel
from pario.kernels.permute import mix64


@kernel
def place_copies(dataset, chunks, copy, left, room, owners, only):  # type: ignore[no-untyped-def]
    """Give each chunk that has none in this column one more node: of those with room that do not keep it yet, the one
    with the highest score.

    dataset : u64; chunks : i64[n]; copy : column of owners i32[n, copies]
    left, room : i64[nodes]: how many each node may still take of this copy, and in all; both count down
    only : bool[nodes, n]: which nodes may take which chunk; without columns: all
    Returns the number of chunks placed.
    """
    placed = 0
    seed = mix64(dataset)
    for k in range(len(chunks)):
        chunk = chunks[k]
        if owners[chunk, copy] >= 0:
            continue
        base = mix64(seed ^ np.uint64(chunk))
        best, best_score = -1, np.uint64(0)
        for node in range(len(room)):
            if left[node] <= 0 or room[node] <= 0 or (only.shape[1] > 0 and not only[node, chunk]):
                continue
            score = mix64(base + np.uint64(node) * np.uint64(0x9E3779B97F4A7C15))
            if best >= 0 and score <= best_score:
                continue
            known = False
            for c in range(copy):
                if owners[chunk, c] == node:
                    known = True
                    break
            if not known:
                best, best_score = node, score
        if best >= 0:
            owners[chunk, copy] = best
            left[best] -= 1
            room[best] -= 1
            placed += 1
    return placed
