"""What the ranks of a node have finished of an epoch, and whether they wait: words of the ring, for those that read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pario.comm import futex

__all__ = ["LEFT", "LINE", "Consumers"]

#: `done` of a rank that takes nothing more from this epoch.
LEFT = 0x7FFFFFFF

#: int32 words per cache line: one line per word, so that ranks do not slow each other down.
LINE = 16


class Consumers:
    """The ranks of one node that take from the ring. None of its methods waits but `wait_further`.

    words : the ring's; from `done_at` on a line per rank with what it has finished, from `waits_at` on one with whether
        it waits
    done_addresses : those of the first
    """

    def __init__(self, words: memoryview, done_at: int, done_addresses: Sequence[int], waits_at: int) -> None:
        self._words = words
        self._done_address = done_addresses
        self._done = [done_at + LINE * rank for rank in range(len(done_addresses))]
        self._waits = [waits_at + LINE * rank for rank in range(len(done_addresses))]

    @contextmanager
    def waiting(self, rank: int) -> Iterator[None]:
        """This rank waits for a group meanwhile."""
        words, at = self._words, self._waits[rank]
        words[at] = 1
        try:
            yield
        finally:
            words[at] = 0

    @property
    def wait(self) -> bool:
        """One of them waits for a group."""
        words = self._words
        return any(words[at] for at in self._waits) if words else False

    @property
    def furthest(self) -> int | None:
        """The most steps that one of them has finished, without those that have left; None if all have."""
        words = self._words
        return max((done for at in self._done if (done := words[at]) != LEFT), default=None) if words else None

    def wait_further(self, than: int, seconds: float) -> None:
        """Wait until the one that had finished so many steps goes on, or for so long."""
        words = self._words
        for at, address in zip(self._done, self._done_address, strict=True):
            if words and words[at] == than:
                futex.wait(address, than, seconds)
                return

    def reset(self) -> None:
        """Nobody waits."""
        for at in self._waits:
            self._words[at] = 0

    def close(self) -> None:
        """Drop the view of the ring's memory."""
        self._words = memoryview(b"")
