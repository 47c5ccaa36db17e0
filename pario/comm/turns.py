"""Waiting for a turn and passing it on: messages of one number between two ranks, in the order of rounds.

A rank waits for at most one other, without polling, and meanwhile listens for errors and dead ranks like every other
wait (`comm/messages.py`). A rank that leaves tells its successors, which then continue without it. Before the next use
every rank receives its predecessors' farewells, so no message is left over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: Tag of these messages on the private communicator.
TAG = 78

#: The sender hands over nothing more.
_LEFT = 1 << 62


class Turns:
    """One rank's position in the chain. Use it in the thread that constructed the World; not collective.

    world : a World
    before, after : the ranks that this one waits for and hands over to, or None
    """

    def __init__(self, world: Any, before: int | None, after: int | None) -> None:
        self._world = world
        self._before = before
        self._after = after
        self._heard = -1  # the last round that the rank before has passed on
        self._sending: list[tuple[Any, np.ndarray]] = []
        self._left = False

    def leave(self) -> None:
        """This rank takes no more turns until `settle`. Idempotent; does not wait."""
        if not self._left:
            self._left = True
            self.pass_on(_LEFT)

    def settle(self) -> None:
        """Receive messages that are in transit to this rank. All ranks must have called `leave`; then rounds start
        again."""
        self.wait(_LEFT)
        self._heard = -1
        for request, _ in self._sending:
            self._world.wait(request)
        self._sending = []
        self._left = False
        self._world.settled = True

    def wait(self, j: int) -> None:
        """Return when the rank before has passed round j on. Raises PeerError, DeadRankError."""
        world = self._world
        word = np.empty(1, np.int64)
        while self._before is not None and self._heard < j:
            world.wait(world.comm.Irecv(word, source=self._before, tag=TAG))
            self._heard = int(word[0])

    def pass_on(self, j: int) -> None:
        """Let the next rank start round j. Does not wait."""
        if self._after is None:
            return
        self._sending = [(request, word) for request, word in self._sending if not request.Test()]
        self._world.settled = False
        word = np.array([j], np.int64)
        self._sending.append((self._world.comm.Isend(word, dest=self._after, tag=TAG), word))
