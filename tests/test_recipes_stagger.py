"""Turns of the readers: simulated, for all small numbers."""

from __future__ import annotations

import pytest

from pario.recipes.lmdbio import candidates, neighbours


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("group", [*range(1, 13), 100])
def test_every_reader_gets_its_turn(size, group):
    """A reader starts when the one before it has ended; each takes one unit of time."""
    before, after = zip(*(neighbours(rank, size, group) for rank in range(size)), strict=True)
    ended: dict[int | None, int] = {None: 0}
    while len(ended) <= size:
        ready = [rank for rank in range(size) if rank not in ended and before[rank] in ended]
        assert ready, "nobody can go on"
        for rank in ready:
            ended[rank] = ended[before[rank]] + 1
    for rank in range(size):
        assert ended[rank] == rank // group + 1  # in the order of the file
        assert before[rank] is None or after[before[rank]] == rank
        assert after[rank] is None or before[after[rank]] == rank


def test_what_is_tried():
    assert candidates(1) == [1]
    assert candidates(2) == [1, 2]
    assert candidates(8) == [1, 2, 4, 8]
    assert candidates(11) == [1, 2, 4, 8, 11]
