"""Who is gone, in a job of MPI with several nodes: their first ranks keep connections by the wire's server, as ranks
without MPI do (star.py)."""

from __future__ import annotations

import atexit
import logging
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress

from pario.comm.hub import MOST_FRAME, SEAT, Hub, Say
from pario.comm.launcher import own_addresses
from pario.comm.messages import Messages
from pario.comm.star import Star
from pario.errors import ParioError
from pario.machine import boot, open_files
from pario.threads import aside
from pario.wire.client import Address, reached

_log = logging.getLogger("pario")

#: Seconds that the start of a job waits for the connections between nodes, and that one of them may take.
_START_S, _CALL_S = 0.25, 5.0


class Lifeline:
    """The connection of a node's first rank to that of the first node. TCP's keep-alive notices a node that loses its
    power after a minute. Where nodes cannot connect to each other, only the launcher notices the loss of a whole node.

    ranks : the first ranks of all nodes
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._hub: Hub | None = None
        self._star: Star | None = None

    def listen(self) -> tuple[Address, bytes] | None:
        """Of the first node: what `connect` takes; None where the system refuses it."""
        name, secret = f"pario-nodes-{secrets.token_hex(16)}", secrets.token_bytes(32)
        try:
            if len(self._ranks) > open_files() // 2:  # the other half is for the script
                raise OSError(f"{len(self._ranks)} of them, and {open_files()} open files")
            self._hub = Hub(name, len(self._ranks), secret)
        except (OSError, ParioError) as e:
            _log.debug("no connections between nodes: %s", e)
            return None
        return Address(boot(), name, (*own_addresses(), socket.gethostname()), self._hub.port), secret

    def connect(self, where: Address, secret: bytes, number: int) -> None:
        """number : of the node"""
        try:
            link = reached(where, secret, _CALL_S, most_bytes=MOST_FRAME, trusts_system=True)
        except OSError as e:
            _log.debug("no connection to rank 0: %s", e)
            return
        self._star = star = Star(link, number, len(self._ranks), self._hub)
        star.say(Say.HERE, SEAT.pack(number, len(self._ranks)))
        atexit.register(star.leave)

    def gone(self) -> int | None:
        """A rank whose process has ended, and not by the end of its script."""
        lost = self._star.lost if self._star is not None else None
        return None if lost is None else self._ranks[lost]


def connected(leaders: Messages, rank: int) -> Lifeline:
    """Collective over `leaders`, the first ranks of the nodes. rank : this one's number among all ranks"""
    lifeline = Lifeline(leaders.allgather(rank))
    told = leaders.bcast(lifeline.listen() if leaders.rank == 0 else None)
    if told is not None:
        with suppress(ParioError):  # no thread: as without a network
            aside(_START_S, lifeline.connect, *told, leaders.rank)
    return lifeline
