"""The ring of a node of two ranks, both in this process: who waits for whom, and what a word announces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from pario.comm import futex
from pario.comm.solo import Solo
from pario.comm.window import LEFT, Notes, Ring
from pario.errors import ParioError, PeerError

SLOTS = 3


class Half(Solo):
    """One of two ranks of a node that share memory, and tell each other nothing by other ways."""

    node_size = 2
    node_ranks = (0, 1)

    def __init__(self, node_rank: int, memory: list[np.ndarray]) -> None:
        super().__init__()
        self.node_rank = node_rank
        self._memory = memory
        self._taken = 0

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        if self._taken == len(self._memory):
            self._memory.append(super().shared_bytes(nbytes))
        self._taken += 1
        return self._memory[self._taken - 1]


class Enough(Exception):
    """This has waited long enough."""


def enough() -> None:
    raise Enough


@pytest.fixture
def pair() -> tuple[Ring, Ring]:
    memory: list[np.ndarray] = []
    first, second = (Ring(Half(rank, memory), SLOTS, alive_seconds=30) for rank in range(2))
    return first, second


def test_a_feeder_waits_for_every_rank(pair) -> None:
    ring, other = pair
    for done in ((0, 0), (5, 4), (4, 5), (5, 0)):
        ring.finish(0, done[0])
        other.finish(1, done[1])
        assert not ring.is_done(5)
        with pytest.raises(Enough):
            ring.wait_done(5, enough)
    other.finish(1, 5)
    assert ring.is_done(5)
    assert ring.wait_done(5, enough)
    assert not ring.is_done(6)


def test_deserted_is_who_was_left_by_all(pair) -> None:
    ring, other = pair
    assert not ring.deserted()
    other.finish(1, LEFT)
    assert other.has_left(1)
    assert not ring.has_left(0)
    assert not ring.deserted()
    ring.finish(0, LEFT)
    assert ring.deserted()


def test_a_new_run_knows_nothing_of_the_last_one(pair) -> None:
    ring, other = pair
    for group in range(SLOTS + 1):
        ring.publish(group, group + 1)
    ring.finish(0, LEFT)
    other.fail(1, "ValueError: of the last run")
    ring.reset(done_steps=2)
    ring.check()
    assert [ring.full_slots(group) for group in range(SLOTS + 2)] == [0] * (SLOTS + 2)
    assert ring.is_done(2)
    assert not ring.is_done(3)
    assert not ring.deserted()
    other.fail(1, "ValueError: of this run")  # the note is free again
    with pytest.raises(PeerError, match="of this run"):
        ring.check()


def test_the_first_error_is_told_to_the_others(pair) -> None:
    ring, other = pair
    other.fail(7, "ValueError: the first")
    ring.fail(3, "ValueError: the second")
    other.fail(7, "ValueError: the third")
    with pytest.raises(PeerError, match=r"the first \[rank 7\]"):
        ring.check()
    with pytest.raises(PeerError, match=r"the second \[rank 3\]"):
        other.check()  # of its own it has heard


def test_of_several_errors_the_earliest_is_told() -> None:
    memory = np.zeros(Notes.nbytes(3), dtype=np.uint8)
    first, second, reader = (Notes(memory, 3, rank) for rank in (1, 0, 2))
    assert reader.first() is None
    assert first.post(11, "the first")
    assert second.post(10, "the second")
    assert reader.first() == (11, "the first")


def test_who_has_closed_is_not_missed() -> None:
    class Watching(Half):
        def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
            assert left is not None
            self.expected = [rank for rank in self.node_ranks if not left(rank)]

    memory: list[np.ndarray] = []
    worlds = [Watching(rank, memory) for rank in range(2)]
    ring, other = (Ring(world, SLOTS, alive_seconds=0) for world in worlds)
    ring.check()
    assert worlds[0].expected == [0, 1]
    other.close()
    ring.check()
    assert worlds[0].expected == [0]


def test_who_waits_is_woken(pair) -> None:
    """Each of these wakes a rank that would sleep for 30 seconds."""
    ring, other = pair
    stop = threading.Event()

    def publish() -> None:
        ring.publish(0, 1)

    def finish() -> None:
        other.finish(1, 1)

    def fail() -> None:
        other.fail(1, "ValueError: no")

    ring.finish(0, 9)
    for wait, wake in (
        (lambda: other.wait_group(0), publish),
        (lambda: ring.wait_done(1), finish),
        (lambda: ring.wait_done(5), fail),
    ):
        ended: list[object] = []

        def sleeper(wait=wait, ended=ended) -> None:
            try:
                ended.append(wait())
            except ParioError as error:
                ended.append(error)

        thread = threading.Thread(target=sleeper, daemon=True)
        thread.start()
        time.sleep(0.05)
        assert ended == []
        begin = time.monotonic()
        wake()
        thread.join(10)
        assert ended
        assert time.monotonic() - begin < 5
    thread = threading.Thread(target=ring.wait_done, args=(5, None, stop), daemon=True)
    ring.reset()
    thread.start()
    time.sleep(0.05)
    assert ring.stop_feeder(stop, thread, 5)


def test_data_come_before_the_word_that_announces_them(pair, monkeypatch) -> None:
    """On a processor that reorders memory only `fence` keeps them apart, so it stands between both."""
    ring, _ = pair
    seen: list[tuple[int, ...]] = []

    def fenced() -> None:
        seen.append((ring._ready_steps[0], ring.full_slots(0), ring._words[ring._done_at], ring._notes._heads[0]))

    monkeypatch.setattr(futex, "fence", fenced)
    ring.publish(0, 17)
    assert seen == [(17, 0, 0, 0)]
    seen.clear()
    ring.finish(0, 4)  # what was read of a slot is read before the slot is given back
    assert seen == [(17, 1, 0, 0)]
    seen.clear()
    ring.fail(0, "ValueError: no")
    assert seen[0][3] == 0
    assert ring._notes._heads[1] == len("0 ValueError: no")
    assert [heads > 0 for *_, heads in seen] == [False, True]


def test_data_are_read_after_the_word_that_announces_them(pair, monkeypatch) -> None:
    ring, other = pair
    ring.publish(0, 17)
    ring.finish(0, 3)
    other.finish(1, 3)

    def fenced() -> None:  # what this processor sees from now on
        ring._ready_steps[0] = 18
        heard.append(1)

    heard: list[int] = []
    monkeypatch.setattr(futex, "fence", fenced)
    assert other.wait_group(0) == 18
    for look in (lambda: ring.wait_done(3), lambda: ring.is_done(3)):
        heard.clear()
        assert look()
        assert heard
