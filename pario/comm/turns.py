"""Wait for my turn, pass it on: messages of one number between two ranks, in the order of rounds.

No rank waits for more than one other, and nobody polls without pause: a wait listens for errors and lost ranks as every
other one does (`comm/world.py`). A rank that leaves says so to those that come after it, who then go on without it;
before the next use everybody hears its predecessors' farewell, so that no message is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pario.comm.world import AnyWorld, World

__all__ = ["Turns"]

#: Tag of these messages on the private communicator.
TAG = 78

#: Says that its sender hands over nothing more.
_LEFT = 1 << 62


class Turns:
    """One rank's place in the chain. Called in the thread that made the World; not collective.

    before, after : in round j this rank waits for rank `before[j % len(before)]` and hands over to
        `after[j % len(after)]`; None: for nobody, to nobody
    """

    def __init__(self, world: AnyWorld, before: Sequence[int | None], after: Sequence[int | None]) -> None:
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
        """The rank after may go on with round j. Waits for nobody."""
        rank = self._after[j % len(self._after)]
        if rank is not None:
            self._tell(rank, j)

    def leave(self) -> None:
        """This rank takes no more turns until `settle`; idempotent, waits for nobody."""
        if not self._left:
            self._left = True
            for rank in self._told:
                self._tell(rank, _LEFT)

    def settle(self) -> None:
        """Hear what is still on its way to this rank. All ranks must have called `leave`; then rounds begin anew."""
        for rank in self._heard:
            self._hear(rank, _LEFT)
            self._heard[rank] = -1
        for request, _ in self._sending:
            assert isinstance(self._world, World)  # who is alone sends nothing
            self._world.wait(request)
        self._sending = []
        self._left = False

    def _hear(self, rank: int, number: int) -> None:
        world = self._world
        assert isinstance(world, World)
        word = np.empty(1, np.int64)
        while self._heard[rank] < number:
            world.wait(world.comm.Irecv(word, source=rank, tag=TAG))
            self._heard[rank] = int(word[0])

    def _tell(self, rank: int, number: int) -> None:
        assert isinstance(self._world, World)
        self._sending = [(request, word) for request, word in self._sending if not request.Test()]
        word = np.array([number], np.int64)
        self._sending.append((self._world.comm.Isend(word, dest=rank, tag=TAG), word))
