"""What a group of ranks keeps until its processes end, made with its first World and never freed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pario.comm.alive import Lifeline, Watch, myself
from pario.comm.messages import Messages

__all__ = ["Lasting", "lasting"]


class Lasting(NamedTuple):
    """
    last_call : a communicator, because an error may leave the script uncaught long after its World is gone, and then
        all ranks of the group meet there a last time (farewell.py)
    watch : over the group's processes
    """

    last_call: Any
    watch: Watch


_kept: dict[tuple[int, ...], Lasting] = {}


def lasting(everybody: Messages, node: Messages, leaders: Messages | None, node_ranks: tuple[int, ...]) -> Lasting:
    """That of the ranks of `everybody`. Collective over it.

    node : the ranks of this node; leaders : the first ranks of all nodes, on those; node_ranks : ranks of this node
    """
    MPI = everybody.mpi
    group, processes = everybody.comm.Get_group(), MPI.COMM_WORLD.Get_group()
    # Worlds are made collectively, so all ranks of a group find it known or unknown alike.
    ranks = tuple(MPI.Group.Translate_ranks(group, list(range(everybody.size)), processes))
    group.Free()
    processes.Free()
    if ranks not in _kept:
        people = np.empty((node.size, 3), dtype=np.int64)
        node.wait(node.comm.Iallgather(np.array(myself(), dtype=np.int64), people))
        lifeline = None if leaders is None or leaders.size == 1 else _connected(leaders, everybody.rank)
        watch = Watch(people.tolist(), node_ranks, node.rank, lifeline)
        everybody.barrier()  # Dup blocks, and leaders may still wait for each other
        _kept[ranks] = Lasting(everybody.comm.Dup(), watch)
    return _kept[ranks]


def _connected(leaders: Messages, rank: int) -> Lifeline:
    """The connections between the nodes. Collective over `leaders`.

    rank : this one's number among all ranks
    """
    lifeline = Lifeline()
    address = leaders.bcast(lifeline.listen(leaders.size - 1) if leaders.rank == 0 else None)
    if leaders.rank:
        lifeline.connect(address, rank)
    lifeline.settle()
    return lifeline
