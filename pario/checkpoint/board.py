"""What the ranks of a node tell each other about a checkpoint under way: words in their shared memory.

Threads in the background must not call MPI. Every word has one writer and holds the number of an attempt, which only
grows: `written[rank]` says that this rank has written all its blocks of that attempt.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from pario.comm import futex
from pario.comm.base import AnyWorld
from pario.comm.memory import shared_parts
from pario.errors import CheckpointError

__all__ = ["ALIKE", "TAKEN", "Board", "Limits", "apart"]

ALIKE = "All ranks must call the same methods in the same order"

#: Bytes of an error's text.
_NOTE = 2048
_PAUSE_S = 2e-3
#: Words of the node's leader, then WORDS of each rank.
OPENED, STRAIGHT, CHOSEN, DONE, DRAINED, CANCELLED, DRAINING, COPYING, LEADERS = range(9)
WRITTEN, SUMMED, CODED, FAILED, MOVED, CALLED, BUSY, WORDS = range(8)
#: Of `Board.places`.
TAKEN = -1


class Limits(Protocol):
    """How long a thread waits: without a byte moved, and whether it is to end."""

    @property
    def limit_s(self) -> float: ...

    def stopped(self) -> bool: ...


class Board:
    """Collective over `world`; afterwards local, for any thread.

    sums, stored, coded : u64 per block of the node's file, which the rank that writes the block fills in: checksum of
        the block, checksum of what is written of it, and bytes that a codec made of it, 0 without one
    places : i64 per block, of the leader: where it lies in the file, or TAKEN from an older one
    """

    def __init__(self, world: AnyWorld) -> None:
        self._world = world
        self._ranks = world.node_size
        self._seat = world.node_rank
        sizes = [8 * (LEADERS + WORDS * self._ranks), _NOTE * self._ranks]
        words, notes = shared_parts(world, sizes, "preparing checkpoints")
        self._words = memoryview(words.view(np.int64))
        self._notes = notes.reshape(self._ranks, _NOTE)
        self._table(np.empty(0, np.uint64))

    def _table(self, memory: np.ndarray) -> None:
        self.sums, self.stored, self.coded, self.places = memory.reshape(4, -1)
        self.places = self.places.view(np.int64)

    def fit(self, blocks: int) -> None:
        """Room for the checksums of so many blocks. Collective over all ranks; the most of all nodes is taken."""
        most = self._world.allreduce_max(blocks)
        if most > self.sums.size:
            (memory,) = shared_parts(self._world, [4 * 16 * most], "preparing checkpoints")
            self._table(memory.view(np.uint64))

    def close(self) -> None:
        """Forget the shared memory, which no thread uses any more, so that its window can be freed: some MPI libraries
        abort a job at its end that still has one."""
        self._words.release()
        self._notes = np.empty((0, 0), np.uint8)
        self._table(np.empty(0, np.uint64))

    def get(self, word: int) -> int:
        value = self._words[word]
        futex.fence()
        return value

    def put(self, word: int, value: int) -> None:
        """Only the leader."""
        futex.fence()
        self._words[word] = value

    def mine(self, word: int, value: int) -> None:
        """A word of this rank."""
        self.put(LEADERS + WORDS * self._seat + word, value)

    def theirs(self, word: int) -> list[int]:
        """That word of every rank of the node."""
        return [self.get(LEADERS + WORDS * seat + word) for seat in range(self._ranks)]

    def movement(self) -> list[int]:
        """Changes when any rank of the node writes something, or its first rank drains or copies something."""
        return [*self.theirs(MOVED), *self.theirs(WRITTEN), *map(self.get, (DONE, DRAINED, DRAINING, COPYING))]

    def late(self, call: int) -> list[int]:
        """The ranks of the node that have not come to that call, and are not held up in the one before."""
        came, busy = self.theirs(CALLED), self.theirs(BUSY)
        return [self._rank(seat) for seat in range(self._ranks) if came[seat] < call and busy[seat] < came[seat]]

    def fail(self, attempt: int, text: str) -> None:
        """This rank cannot do its part."""
        note = text.encode(errors="replace")[:_NOTE]
        self._notes[self._seat] = 0
        self._notes[self._seat, : len(note)] = np.frombuffer(note, np.uint8)
        self.mine(FAILED, attempt)

    def failure(self, attempt: int) -> CheckpointError | None:
        """What another rank of the node has said about that attempt."""
        for seat, number in enumerate(self.theirs(FAILED)):
            if number == attempt and seat != self._seat:
                text = bytes(self._notes[seat]).rstrip(b"\0").decode(errors="replace")
                return CheckpointError(f"a rank of the node could not write its part: {text}", rank=self._rank(seat))
        return None

    def wait(self, word: int, attempt: int, limits: Limits, what: str) -> None:
        """Until a word of the leader, or from LEADERS on one of every rank, has reached that attempt.

        Raises CheckpointError if another rank fails, if this one is stopped, or if no rank of the node moves any byte
        for so long; it names who is missing.
        """
        moved, since = self.theirs(MOVED), time.monotonic()
        pause = 1e-4
        while (self.get(word) if word < LEADERS else min(self.theirs(word - LEADERS))) < attempt:
            failure = self.failure(attempt)
            if failure is not None:
                raise failure
            if limits.stopped():
                raise CheckpointError(f"given up while it waited for {what}")
            if self.get(CANCELLED) >= attempt:
                raise CheckpointError("the node's first rank has given up this checkpoint")
            now = time.monotonic()
            if moved != (moved := self.theirs(MOVED)):
                since = now
            if now - since > limits.limit_s:
                step = self.theirs(word - LEADERS if word >= LEADERS else WRITTEN)
                late = [self._rank(seat) for seat, number in enumerate(step) if number < attempt]
                raise CheckpointError(
                    f"no byte was written for {limits.limit_s:.0f} s while it waited for {what}; missing: "
                    f"{', '.join(f'rank {rank}' for rank in late) or 'the first rank of the node'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)

    def _rank(self, seat: int) -> int:
        return self._world.node_ranks[seat]


def apart(doing: list[str]) -> CheckpointError:
    """Ranks have come to different calls. doing : of each rank"""
    first = {words: rank for rank, words in reversed(list(enumerate(doing)))}
    said = ", ".join(f"rank {rank} is {words}" for words, rank in sorted(first.items(), key=lambda each: each[1]))
    return CheckpointError(f"ranks call different methods: {said}", hint=ALIKE)
