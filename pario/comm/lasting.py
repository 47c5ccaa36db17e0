"""What the ranks of a group keep until their processes end: made with their first World, and never freed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from pario.comm.alive import Watch, myself
from pario.comm.messages import Messages

#: Ranks compare so many of the communicators that they could use again.
_MOST = 60


class Comms(NamedTuple):
    """The communicators of one World after another, never of two at once: a collective has no tag, so messages of two
    Loaders, perhaps of two threads, would mix; and after an error they are out of step.

    number : among those of the group, the same on all ranks
    everybody, node, leaders : all ranks, those of this node, the first ranks of all nodes (COMM_NULL on others)
    nodes, at, seat : number of nodes, this one's, and its first seat; node_ranks : ranks of this node
    """

    number: int
    everybody: Any
    node: Any
    leaders: Any
    nodes: int
    at: int
    seat: int
    node_ranks: tuple[int, ...]


class Group:
    """Some ranks in some order, whatever communicators they have.

    unused : what Worlds have given back, on this rank
    last_call : a communicator, because an error may leave the script uncaught long after its World is gone, and then
        all ranks of the group meet there a last time (farewell.py); None before the first World of several ranks
    watch : over the group's processes
    """

    def __init__(self, ranks: Any, MPI: Any) -> None:
        self.ranks, self._mpi = ranks, MPI
        self.unused: list[Comms] = []
        self.last_call: Any = None
        #: without MPI it is known from the beginning who is gone
        self._lifeline = getattr(MPI, "lifeline", None)
        self.watch = Watch([], [], 0, self._lifeline)
        self._numbers = count()
        self._taking = threading.Lock()

    def take(
        self, comm: Any, wait: Callable[[Any], None], dropped: Callable[[], dict[int, Callable[[], None]]]
    ) -> Comms | int:
        """Communicators that no rank uses any more; without such the number for new ones. Collective over `comm`, of
        these ranks.

        dropped() : number -> what gives those of a World back that nobody freed, and whose user is gone on this rank
        """
        # Not while another thread takes some, by another communicator of the same ranks.
        first = self._taking.acquire(blocking=False)
        try:
            gone = dropped() if first else {}
            mine = {each.number for each in self.unused} | gone.keys() if first else set()
            told = np.full(_MOST + 1, -1, np.int64)
            if comm.Get_rank() == 0:
                numbers = sorted(mine)[:_MOST]
                told[: len(numbers)], told[_MOST] = numbers, next(self._numbers)
            wait(comm.Ibcast(told, root=0))
            *numbers, new = told.tolist()
            bits, common = np.zeros(1, np.int64), np.empty(1, np.int64)
            bits[0] = sum(1 << k for k, number in enumerate(numbers) if number in mine)
            wait(comm.Iallreduce(bits, common, op=self._mpi.BAND))
            agreed = [number for k, number in enumerate(numbers) if int(common[0]) >> k & 1]
            for number in gone.keys() & agreed:
                gone[number]()
            if not agreed:
                return new
            found = next(each for each in self.unused if each.number == agreed[0])
            self.unused.remove(found)
            return found
        finally:
            if first:
                self._taking.release()

    def meet(self, everybody: Messages, node: Messages, leaders: Messages | None, node_ranks: tuple[int, ...]) -> None:
        """Make what lasts, unless it is there. Collective over `everybody`.

        node, leaders, node_ranks : as in `Comms`
        """
        # Worlds are made collectively, so all ranks find it missing or there alike.
        if self.last_call is None and everybody.size > 1:
            people = np.empty((node.size, 3), dtype=np.int64)
            node.wait(node.comm.Iallgather(np.array(myself(), dtype=np.int64), people))
            lifeline = self._lifeline
            if lifeline is None and leaders is not None and leaders.size > 1:
                from pario.comm.lifeline import connected  # few jobs of MPI have several nodes

                lifeline = connected(leaders, everybody.rank)
            watch = Watch(people.tolist(), node_ranks, node.rank, lifeline)
            everybody.barrier()  # Dup blocks, and leaders may still wait for each other
            self.last_call, self.watch = everybody.comm.Dup(), watch


_groups: list[Group] = []
_finding = threading.Lock()


def group_of(comm: Any, MPI: Any) -> Group:
    """That of the communicator's ranks. Local."""
    ranks = comm.Get_group()
    with _finding:
        for group in _groups:
            if MPI.Group.Compare(group.ranks, ranks) == MPI.IDENT:
                ranks.Free()
                return group
        _groups.append(Group(ranks, MPI))
        return _groups[-1]
