"""Who is told in which round, without MPI; between ranks: tests/test_mpi_recipes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pario.comm.turns import Turns


class Peers:
    """A world whose messages are noted, and which hears what a test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.heard: list[int] = []
        self.says: dict[int, list[int]] = {}
        self.comm = SimpleNamespace(Isend=self._send, Irecv=self._receive)

    def _send(self, word: np.ndarray, dest: int, tag: int) -> Any:
        self.sent.append((dest, int(word[0])))
        return SimpleNamespace(Test=lambda: True)

    def _receive(self, word: np.ndarray, source: int, tag: int) -> None:
        self.heard.append(source)
        word[0] = self.says[source].pop(0)

    def wait(self, request: Any) -> None:
        pass


def test_each_round_is_heard_once_and_passed_on() -> None:
    world = Peers()
    turns = Turns(world, 3, 1)
    world.says = {3: [0, 2]}  # round 1 was passed on, too, with round 2
    for j, messages in enumerate([1, 2, 2]):
        turns.wait(j)
        assert world.heard == [3] * messages
        turns.pass_on(j)
    assert world.sent == [(1, 0), (1, 1), (1, 2)]


def test_the_first_waits_for_nobody_and_the_last_tells_nobody() -> None:
    world = Peers()
    turns = Turns(world, None, None)
    turns.wait(0)
    turns.pass_on(0)
    turns.leave()
    turns.settle()
    assert world.heard == world.sent == []


def test_who_waits_hears_once_that_a_rank_left() -> None:
    world = Peers()
    turns = Turns(world, None, 1)
    turns.leave()
    turns.leave()
    ((rank, number),) = world.sent
    assert rank == 1
    assert number > 1 << 60


def test_a_farewell_is_no_turn_of_the_next_epoch() -> None:
    world = Peers()
    left = 1 << 62
    turns = Turns(world, 3, None)
    world.says = {3: [left, 0]}
    turns.wait(0)
    turns.leave()
    turns.settle()
    turns.wait(0)
    assert world.says == {3: []}
