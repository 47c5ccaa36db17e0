"""Waiting for a turn and passing it on: messages of one number between two ranks, in the order of rounds.

A rank waits for at most one other, without polling, and meanwhile listens for errors and dead ranks like every other
wait (`comm/messages.py`). A rank that leaves tells its successors, which then continue without it. Before the next use
every rank receives its predecessors' farewells, so no message is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Turns"]

#: Tag of these messages on the private communicator.
TAG = 78

#: The sender hands over nothing more.
_LEFT = 1 << 62


class Turns:
    """One rank's position in the chain. Use it in the thread that constructed the World; not collective.

    world : a World
    before, after : in round j this rank waits for rank `before[j % len(before)]` and hands over to
        `after[j % len(after)]`; None: no other rank
    """

    def __init__(self, world: Any, before: Sequence[int | None], after: Sequence[int | None]) -> None:
        self._world = world
        self._before = before
        self._after = after
        self._heard = {rank: -1 for rank in sorted({rank for rank in before if rank is not None})}
        self._told = sorted({rank for rank in after if rank is not None})
        self._sending: list[tuple[Any, np.ndarray]] = []
        self._left = False

    def wait(self, j: int) -> None:
        """Return when the rank before has passed round j on. Raises PeerError, DeadRankError."""
        rank = self._before[j % len(self._before)]
        if rank is not None:
            self._hear(rank, j)

    def pass_on(self, j: int) -> None:
        """Let the next rank start round j. Does not wait."""
        rank = self._after[j % len(self._after)]
        if rank is not None:
            self._tell(rank, j)

    def leave(self) -> None:
        """This rank takes no more turns until `settle`. Idempotent; does not wait."""
        if not self._left:
            self._left = True
            for rank in self._told:
                self._tell(rank, _LEFT)

    def settle(self) -> None:
        """Receive messages that are in transit to this rank. All ranks must have called `leave`; then rounds start
        again."""
        for rank in self._heard:
            self._hear(rank, _LEFT)
            self._heard[rank] = -1
        for request, _ in self._sending:
            self._world.wait(request)
        self._sending = []
        self._left = False

    def _hear(self, rank: int, number: int) -> None:
        world = self._world
        word = np.empty(1, np.int64)
        while self._heard[rank] < number:
            world.wait(world.comm.Irecv(word, source=rank, tag=TAG))
            self._heard[rank] = int(word[0])

    def _tell(self, rank: int, number: int) -> None:
        self._sending = [(request, word) for request, word in self._sending if not request.Test()]
        word = np.array([number], np.int64)
        self._sending.append((self._world.comm.Isend(word, dest=rank, tag=TAG), word))
