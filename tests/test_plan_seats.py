"""Which ranks have a batch together. The oracle of the shares is `node_share` of each seat alone."""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.plan.epoch import epoch_order
from pario.plan.schedule import Schedule, node_share
from pario.plan.seats import Seats, seats_of_groups, seats_share


def test_groups_inside_nodes() -> None:
    members = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert seats_of_groups(members, nodes, 3) == Seats(4, 1, (0, 1), 2)
    assert seats_of_groups(members, nodes, 4) == Seats(4, 2, (2, 3), 2)
    assert seats_of_groups(members, nodes, 7).local == 1


def test_groups_over_nodes_and_ranks_that_alternate() -> None:
    across = [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [seats_of_groups(across, [0, 0, 1, 1], rank).mine for rank in range(4)] == [0, 1, 0, 1]
    assert all(seats_of_groups(across, [0, 0, 1, 1], rank).node == (0, 1) for rank in range(4))
    # Ranks dealt to the nodes in turn: a node's seats are neighbours all the same.
    assert seats_of_groups(across, [0, 1, 0, 1], 3) == Seats(2, 1, (1,), 2)


def test_the_order_of_ranks_in_a_communicator_does_not_matter() -> None:
    assert seats_of_groups([(1, 0), (0, 1)], [0, 0], 1) == Seats(1, 0, (0,), 2)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([(0,), None], "rank 1 has no share_batch"),
        ([None, (1,)], "rank 0 has no share_batch"),
        ([(0, 1), (1,)], "must divide the ranks"),
        ([(0,), (0,)], "and not rank 1"),
        ([(0, 1), (0, 1), (2,)], "unequal sizes"),
        ([(0, 1), (1, 2), (0, 2)], "must divide the ranks"),
    ],
)
def test_what_no_groups_are(members: list, message: str) -> None:
    told = set()
    for rank in range(len(members)):
        with pytest.raises(OptionError, match=message) as caught:
            seats_of_groups(members, [0] * len(members), rank)
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_shares_of_seats_that_are_no_neighbours(shuffle: bool | str, pieces: int) -> None:
    if shuffle == "block" and pieces > 1:
        pytest.skip("a block order has no pieces")
    order = epoch_order(shuffle, 103, seed=2, block_records=5, mix_blocks=4)
    schedule = Schedule(103, 4, 6, pools=order.pools, per_group=1 if pieces > 1 else 2, pieces=pieces)
    seats = (0, 2, 3, 5)
    for group in range(schedule.groups):
        found = seats_share(schedule, order, group, seats)
        table = {(s, r): n for n, s, r in zip(*(column.tolist() for column in found), strict=True)}
        expected = {}
        for local, seat in enumerate(seats):
            for n, s, r in zip(*node_share(schedule, order, group, seat, 1), strict=True):
                expected[int(s), local * 4 + int(r)] = int(n)
        assert table == expected
        assert len(table) == len(found[0])
    run = seats_share(schedule, order, 0, (2, 3))
    assert all(np.array_equal(a, b) for a, b in zip(run, node_share(schedule, order, 0, 2, 2), strict=True))
