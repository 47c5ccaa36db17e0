"""Which ranks deliver the same batches: seats, the data-parallel positions of a job.

Without shared batches every rank has a seat of its own, in the order of nodes. If groups of ranks share a batch
(tensor, pipeline or context parallel ones), a group has one seat, and the job has as many seats as groups:

    ranks     0   1   2   3   4   5   6   7
    nodes     |------ 0 ------|------ 1 ------|
    groups    {0, 1}  {2, 3}  {4, 5}  {6, 7}           seats 0 1 2 3; the nodes have seats (0, 1) and (2, 3)
    groups    {0, 4}  {1, 5}  {2, 6}  {3, 7}           seats 0 1 2 3; both nodes have all of them, and both read them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pario.errors import OptionError
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule, node_share

__all__ = ["Seats", "seats_of_groups", "seats_share"]


@dataclass(frozen=True)
class Seats:
    """count : seats of the job
    mine : this rank's seat
    node : seats of this node's ranks, ascending; the node's tables have them in this order
    shared : ranks that have a seat together
    """

    count: int
    mine: int
    node: tuple[int, ...]
    shared: int = 1

    @property
    def local(self) -> int:
        """This rank's seat among those of its node."""
        return self.node.index(self.mine)


def seats_of_groups(members: Sequence[Sequence[int] | None], nodes: Sequence[int], rank: int) -> Seats:
    """The seats of a job as `rank` sees them, if groups of ranks share their batches.

    members : for each rank the ranks that it says it shares its batches with, itself among them; None: it says nothing
    nodes : for each rank its node

    Raises OptionError, for the same reason on every rank, unless the groups divide the ranks into equal parts.
    """
    for one, said in enumerate(members):
        if said is None:
            raise OptionError(
                f"rank {one} has no share_batch, others have",
                hint="Pass a communicator on every rank; a rank that shares with nobody passes MPI.COMM_SELF.",
            )
    groups = [tuple(sorted(said)) for said in members if said is not None]
    for one, group in enumerate(groups):
        if one not in group:
            raise OptionError(f"share_batch of rank {one} has the ranks {_named(group)} of comm, and not rank {one}")
        for other in group:
            if groups[other] != group:
                raise OptionError(
                    f"share_batch has the ranks {_named(group)} on rank {one} and {_named(groups[other])} on rank "
                    f"{other}: the groups must divide the ranks of comm",
                    hint="Make it on every rank by one call: comm.Split(color, key).",
                )
        if len(group) != len(groups[0]):
            raise OptionError(
                f"share_batch has {len(groups[0])} ranks on rank 0 and {len(group)} on rank {one}: groups of unequal "
                "sizes cannot share batches",
                hint="Give each group as many ranks, or make a Loader of another comm for the ranks that are left.",
            )
    # Node by node, so that a node's seats stand beside each other if groups do not go over nodes.
    ordered = sorted(set(groups), key=lambda group: (sorted({nodes[one] for one in group}), group))
    seat_of = {group: seat for seat, group in enumerate(ordered)}
    here = {seat_of[group] for group, node in zip(groups, nodes, strict=True) if node == nodes[rank]}
    return Seats(len(ordered), seat_of[groups[rank]], tuple(sorted(here)), len(groups[rank]))


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def seats_share(
    schedule: Schedule, order: Order, group: int, seats: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`node_share` of these seats, which ascend and need not be neighbours: item i of the l-th of them has row
    l * batch_size + i."""
    first = seats[0]
    if seats[-1] - first + 1 == len(seats):
        return node_share(schedule, order, group, first, len(seats))
    parts = []
    begin = 0
    for stop in range(1, len(seats) + 1):
        if stop == len(seats) or seats[stop] != seats[stop - 1] + 1:
            numbers, step, row = node_share(schedule, order, group, seats[begin], stop - begin)
            parts.append((numbers, step, (row + begin * schedule.batch_size).astype(np.int32)))
            begin = stop
    numbers, step, row = (np.concatenate(column) for column in zip(*parts, strict=True))
    return numbers, step, row
