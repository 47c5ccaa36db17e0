"""Which ranks deliver the same batches: seats, the data-parallel positions of a job.

Without shared batches every rank has a seat of its own, in the order of nodes. If groups of ranks share a batch
(tensor, pipeline or context parallel ones), a group has one seat, and the job has as many seats as groups:

    ranks     0   1   2   3   4   5   6   7
    nodes     |------ 0 ------|------ 1 ------|
    groups    {0, 1}  {2, 3}  {4, 5}  {6, 7}           seats 0 1 2 3; the nodes have seats (0, 1) and (2, 3)
    groups    {0, 4}  {1, 5}  {2, 6}  {3, 7}           seats 0 1 2 3; both nodes have all of them, and both read them
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pario.errors import OptionError
from pario.plan.epoch import Order
from pario.plan.schedule import Schedule, node_share


@dataclass(frozen=True)
class Seats:
    """count : seats of the job
    mine : this rank's seat
    parts : (first seat, number of seats) of this node, ascending: seats beside each other that the same nodes have. All
        of these nodes divide a part alike. The node's tables have the seats in this order
    shared : ranks that have a seat together
    """

    count: int
    mine: int
    parts: tuple[tuple[int, int], ...]
    shared: int = 1

    @property
    def here(self) -> int:
        """Seats of this node."""
        return sum(count for _, count in self.parts)

    @property
    def local(self) -> int:
        """This rank's seat among those of its node."""
        before = 0
        for first, count in self.parts:
            if first <= self.mine < first + count:
                break
            before += count
        return before + self.mine - first


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
    nodes_of = {group: sorted({nodes[one] for one in group}) for group in groups}
    ordered = sorted(nodes_of, key=lambda group: (nodes_of[group], group))
    parts, first = [], 0
    for where, seats in itertools.groupby(ordered, key=nodes_of.__getitem__):
        count = len(list(seats))
        if nodes[rank] in where:
            parts.append((first, count))
        first += count
    return Seats(len(ordered), ordered.index(groups[rank]), tuple(parts), len(groups[rank]))


def _named(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def seats_share(
    schedule: Schedule, order: Order, group: int, seats: Seats
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`node_share` of all seats of this node: item i of the l-th of them has row l * batch_size + i."""
    shares, before = [], 0
    for first, count in seats.parts:
        numbers, step, row = node_share(schedule, order, group, first, count)
        shares.append((numbers, step, (row + before * schedule.batch_size).astype(np.int32) if before else row))
        before += count
    if len(shares) == 1:
        return shares[0]
    numbers, step, row = (np.concatenate(column) for column in zip(*shares, strict=True))
    by_step = np.argsort(step, kind="stable")  # as of one part: key order goes on ascending
    return numbers[by_step], step[by_step], row[by_step]


def seat_share(schedule: Schedule, order: Order, group: int, seats: Seats) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The part of `seats_share` that belongs to this rank's seat: item i has row i."""
    first, count = next(part for part in seats.parts if part[0] <= seats.mine < part[0] + part[1])
    return node_share(schedule, order, group, first, count, seats.mine)
