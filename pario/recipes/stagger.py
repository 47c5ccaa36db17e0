"""LMDBIO's staggering: at most `group` of all readers read at once, in the order of the file.

    size 7, group 3        turn   0        1        2
                           ranks  0 1 2    3 4 5    6
    each hands over to     rank + 3, which reads the part of the file that is `group` parts further on

A reader starts when the one `group` positions before it has finished. So at most `group` readers are active, their
window moves through the file, and no reader waits for a whole turn to end. Any number of readers and any `group` work;
a trial before the first epoch finds the best `group`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pario.comm.base import AnyWorld
from pario.comm.turns import Turns
from pario.errors import OptionError
from pario.text import seconds

__all__ = ["Stagger", "Turn", "candidates", "choose_stagger", "readers_by_node", "turn", "turns_among"]

_log = logging.getLogger("pario")

#: Reads that each reader does per candidate.
ROUNDS = 2


class Turn(NamedTuple):
    """turn : 0, 1, ...; before, after : the readers to wait for and to hand over to, or None"""

    turn: int
    before: int | None
    after: int | None


def turn(rank: int, size: int, group: int) -> Turn:
    """The turn of reader `rank` of `size`, of which `group` may read at once."""
    if not 0 <= rank < size or group < 1:
        raise OptionError(f"no turn for reader {rank!r} of {size!r} with {group!r} at once")
    before, after = rank - group, rank + group
    return Turn(rank // group, before if before >= 0 else None, after if after < size else None)


def candidates(size: int) -> list[int]:
    """1, 2, 4, ... and `size` itself: the numbers that the trial tests."""
    found = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return [*found, size]


class Stagger:
    """One rank's turns, epoch after epoch.

    feeder : this rank's number among the readers of its node, or None
    wanted : readers of all nodes that may read at once; 0: a trial before the first epoch finds the number
    """

    def __init__(self, world: AnyWorld, feeder: int | None, wanted: int) -> None:
        self._world = world
        self._feeder = feeder
        self._wanted = wanted or (1 if world.nodes == 1 else 0)
        self._found: tuple[int, dict[int, float]] | None = None  # (readers at once, seconds per tested number)
        self._turns: Turns | None = None

    def turns(self, read: Callable[[int], None] | None, samples: int) -> Turns | None:
        """This rank's turns in the next epoch. The first call runs the trial. Collective.

        read(k) : reads sample k of `samples`, on ranks that read
        """
        world = self._world
        if self._found is None:
            readers = readers_by_node(world, self._feeder)
            self._found = self._wanted, {}
            if not self._wanted:
                first = [ranks[:1] for ranks in readers]
                self._found = choose_stagger(
                    world, candidates(world.nodes), lambda size: turns_among(world, first, size), read, samples
                )
            self._turns = turns_among(world, readers, self._found[0])
        return self._turns

    def leave(self) -> None:
        """This rank reads nothing more in this epoch. Does not wait."""
        if self._turns is not None:
            self._turns.leave()

    def settle(self) -> None:
        """Receive the messages that are still in transit; all ranks have left."""
        if self._turns is not None:
            self._turns.settle()

    def stats(self) -> dict[str, Any]:
        return {} if self._found is None else {"stagger": self._found[0], "stagger_seconds": self._found[1]}


def readers_by_node(world: AnyWorld, feeder: int | None) -> list[list[int]]:
    """The reading ranks of each node, in the order in which they take its groups. Collective.

    feeder : this rank's number among the readers of its node, or None
    """
    everyones = world.allgather((world.node, feeder))
    readers: list[list[int]] = [[] for _ in range(world.nodes)]
    for _, rank in sorted((number, rank) for rank, (_, number) in enumerate(everyones) if number is not None):
        readers[everyones[rank][0]].append(rank)
    return readers


def turns_among(world: AnyWorld, readers: list[list[int]], size: int) -> Turns | None:
    """This rank's turns if `size` nodes read at once; None if it is not among `readers` (`readers_by_node`)."""
    mine = readers[world.node]
    if world.rank not in mine:
        return None
    my_turn = turn(world.node, world.nodes, size)

    def partners(node: int | None) -> list[int | None]:
        theirs = readers[node] if node is not None else []
        rounds = math.lcm(len(mine), max(1, len(theirs)))
        here = [mine[j % len(mine)] == world.rank for j in range(rounds)]
        return [theirs[j % len(theirs)] if theirs and here[j] else None for j in range(rounds)]

    return Turns(world, partners(my_turn.before), partners(my_turn.after))


def choose_stagger(
    world: AnyWorld,
    sizes: Sequence[int],
    turns_of: Callable[[int], Turns | None],
    read: Callable[[int], None] | None,
    samples: int,
) -> tuple[int, dict[int, float]]:
    """How many readers should read at once: (the best of `sizes`, seconds of each size). Collective.

    All readers read the same samples of the epoch in turns, `ROUNDS` for each size. Every size gets other samples, so
    that none finds in memory what another has read. A size's time is that of its slowest reader.

    turns_of(size) -> this rank's turns if `size` readers read at once; None: it reads nothing
    read(k) : reads sample k, on ranks that read
    samples : number of samples; if there are too few, the trial starts over with the first
    """
    took: dict[int, float] = {}
    error: BaseException | None = None
    for number, size in enumerate(sizes):
        turns = turns_of(size)
        world.barrier()
        begin = time.perf_counter()
        if turns is not None and read is not None:
            for k in range(ROUNDS):
                turns.wait(k)
                if error is None:
                    try:
                        read((number * ROUNDS + k) % samples)
                    except BaseException as e:  # the others wait for this rank's message, and learn of it at the end
                        error = e
                turns.pass_on(k)
        mine = time.perf_counter() - begin
        if turns is not None:
            turns.leave()
            turns.settle()
        world.agree(error, "trying how many readers should read at once")
        took[size] = world.allreduce_max(round(mine * 1e6)) / 1e6
    best = min(took, key=took.__getitem__)
    if world.rank == 0:
        each = ", ".join(f"{size}: {seconds(time_s)}" for size, time_s in took.items())
        _log.info("%d of %d readers at once, by a trial of %d reads each (%s)", best, max(sizes), ROUNDS, each)
    return best, took
