"""Turns of the readers: simulated, for all small numbers."""

from __future__ import annotations

import pytest

from pario.errors import OptionError
from pario.recipes.lmdbio import candidates, turn


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("group", [*range(1, 13), 100])
def test_every_reader_gets_its_turn(size, group):
    """A reader starts when the one before it has ended; each takes one unit of time."""
    places = [turn(rank, size, group) for rank in range(size)]
    ended: dict[int | None, int] = {None: 0}
    while len(ended) <= size:
        ready = [rank for rank, place in enumerate(places) if rank not in ended and place.before in ended]
        assert ready, "nobody can go on"
        for rank in ready:
            ended[rank] = ended[places[rank].before] + 1
    for rank, place in enumerate(places):
        assert ended[rank] == place.turn + 1
        assert place.before is None or places[place.before].after == rank
        assert place.after is None or places[place.after].before == rank
    at_once = [sum(place.turn == number for place in places) for number in range(size)]
    assert max(at_once) <= group
    assert [place.turn for place in places] == sorted(place.turn for place in places)  # in the order of the file


@pytest.mark.parametrize("bad", [(3, 3, 1), (-1, 3, 1), (0, 0, 1), (0, 3, 0), (0, 3, -1)])
def test_no_turn(bad):
    with pytest.raises(OptionError, match="no turn for reader"):
        turn(*bad)


def test_what_is_tried():
    assert candidates(1) == [1]
    assert candidates(2) == [1, 2]
    assert candidates(8) == [1, 2, 4, 8]
    assert candidates(11) == [1, 2, 4, 8, 11]
