"""Knobs that are set by measurement."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from pario.comm.turns import Turns
from pario.comm.world import AnyWorld
from pario.plan.stagger import turn
from pario.words import seconds

__all__ = ["choose_stagger", "readers_by_node", "turns_among"]

_log = logging.getLogger("pario")

#: Reads of each reader per candidate.
ROUNDS = 2


def readers_by_node(world: AnyWorld, feeder: int | None) -> list[list[int]]:
    """The ranks that read, by node, in the order in which a node's readers take its groups. Collective.

    feeder : the how-manieth reader of its node this rank is, or None
    """
    everyones = world.allgather((world.node, feeder))
    readers: list[list[int]] = [[] for _ in range(world.nodes)]
    for _, rank in sorted((place, rank) for rank, (_, place) in enumerate(everyones) if place is not None):
        readers[everyones[rank][0]].append(rank)
    return readers


def turns_among(world: AnyWorld, readers: list[list[int]], size: int) -> Turns | None:
    """This rank's turns when `size` nodes read at once; None if it is none of `readers` (`readers_by_node`)."""
    mine = readers[world.node]
    if world.rank not in mine:
        return None
    place = turn(world.node, world.nodes, size)

    def partners(node: int | None) -> list[int | None]:
        theirs = readers[node] if node is not None else []
        rounds = math.lcm(len(mine), max(1, len(theirs)))
        here = [mine[j % len(mine)] == world.rank for j in range(rounds)]
        return [theirs[j % len(theirs)] if theirs and here[j] else None for j in range(rounds)]

    return Turns(world, partners(place.before), partners(place.after))


def choose_stagger(
    world: AnyWorld,
    sizes: Sequence[int],
    turns_of: Callable[[int], Turns | None],
    read: Callable[[int], None] | None,
    samples: int,
) -> tuple[int, dict[int, float]]:
    """How many readers should read at once: (the best of `sizes`, seconds that each took). Collective.

    All readers read the same samples of the epoch in turns, `ROUNDS` for each size and other ones for the next size, so
    that no size finds in memory what another one has read; a size's time is that of the slowest reader.

    turns_of(size) -> this rank's turns when so many read at once; None: it reads nothing
    read(k) : reads sample k, on ranks that read
    samples : how many there are; used again from the first if they are too few
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
                    except BaseException as e:  # the others wait for this rank's message, and hear of it at the end
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
