"""Which ranks have a batch together. The oracle of the shares is `node_share` of each seat alone."""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.plan.epoch import epoch_order
from pario.plan.schedule import Schedule
from pario.plan.seats import Seats, seat_share, seats_of_groups, seats_share


def test_groups_inside_nodes() -> None:
    members = [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    assert seats_of_groups(members, nodes, 3) == Seats(4, 1, ((0, 2),), 2)
    assert seats_of_groups(members, nodes, 4) == Seats(4, 2, ((2, 2),), 2)
    assert seats_of_groups(members, nodes, 7).local == 1


def test_groups_over_nodes_and_ranks_that_alternate() -> None:
    across = [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [seats_of_groups(across, [0, 0, 1, 1], rank).mine for rank in range(4)] == [0, 1, 0, 1]
    assert all(seats_of_groups(across, [0, 0, 1, 1], rank).parts == ((0, 2),) for rank in range(4))
    # Ranks dealt to the nodes in turn: a node's seats are neighbours all the same.
    assert seats_of_groups(across, [0, 1, 0, 1], 3) == Seats(2, 1, ((1, 1),), 2)


def test_the_order_of_ranks_in_a_communicator_does_not_matter() -> None:
    assert seats_of_groups([(1, 0), (0, 1)], [0, 0], 1) == Seats(1, 0, ((0, 1),), 2)


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


def test_seats_that_a_node_has_with_another_one_and_seats_of_its_own() -> None:
    """Six groups of two ranks: on node 0, on nodes 0 and 1, on nodes 0 and 2, on node 2, in this order."""
    places = [(0, 0), (0, 1), (0, 1), (0, 2), (2, 2), (2, 2)]
    nodes = [node for pair in places for node in pair]
    members = [(r // 2 * 2, r // 2 * 2 + 1) for r in range(12)]
    found = [seats_of_groups(members, nodes, rank) for rank in range(12)]
    assert [seats.mine for seats in found[::2]] == [seats.mine for seats in found[1::2]] == [0, 1, 2, 3, 4, 5]
    assert found[0].parts == ((0, 1), (1, 2), (3, 1))
    assert found[3].parts == ((1, 2),)
    assert found[11].parts == ((3, 1), (4, 2))
    assert [seats.local for seats in found] == [0, 0, 1, 0, 2, 1, 3, 0, 1, 1, 2, 2]
    assert [seats.here for seats in found[9:]] == [3, 3, 3]


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_node_divides_a_seat_alike(shuffle: bool | str, pieces: int) -> None:
    """Each rank's own share is what each node reads for its seat, and all seats together have every record."""
    if shuffle == "block" and pieces > 1:
        pytest.skip("a block order has no pieces")
    order = epoch_order(shuffle, 103, seed=2, block_records=5, mix_blocks=4)
    schedule = Schedule(103, 4, 6, pools=order.pools, per_group=1 if pieces > 1 else 2, pieces=pieces)
    places = [(0, 0), (0, 1), (0, 1), (0, 2), (2, 2), (2, 2)]
    nodes = [node for pair in places for node in pair]
    members = [(r // 2 * 2, r // 2 * 2 + 1) for r in range(12)]
    delivered: dict[int, set[tuple[int, int, int]]] = {}
    for rank in range(12):
        seats = seats_of_groups(members, nodes, rank)
        mine, of_node = set(), set()
        for group in range(schedule.groups):
            mine |= set(zip(*(column.tolist() for column in seat_share(schedule, order, group, seats)), strict=True))
            of_node |= set(zip(*(c.tolist() for c in seats_share(schedule, order, group, seats)), strict=True))
            if shuffle is False and pieces == 1:
                assert (np.diff(seats_share(schedule, order, group, seats)[0]) > 0).all()
        begin = seats.local * 4
        assert mine == {(n, step, row - begin) for n, step, row in of_node if begin <= row < begin + 4}
        assert delivered.setdefault(seats.mine, mine) == mine
    assert sorted(number for one in delivered.values() for number, _, _ in one) == list(range(103))
