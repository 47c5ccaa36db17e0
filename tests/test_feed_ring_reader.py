"""The ring's steps, which two threads prepare at once: records are taken in order, and released in order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pario.errors import ClosedError
from pario.feed.ring_reader import RingReader
from pario.feed.source import Piece
from pario.records import Records

NOTHING = np.empty(0, np.uint8)


class Recorded(RingReader):
    """Steps of two records, whose decoding waits for `go[step]`."""

    def __init__(self, pieces: int = 1) -> None:
        self.taken: list[int] = []
        self.done: list[int] = []
        self.go = [threading.Event() for _ in range(4)]
        self.decoding = [threading.Event() for _ in range(4)]
        held = SimpleNamespace(
            arrays=lambda records, rows: ({}, np.zeros(rows, np.int64)),
            decode=self._decode,
            held=SimpleNamespace(held_bytes=0),
        )
        context: Any = SimpleNamespace(
            decode=held,
            stats=SimpleNamespace(share=0.0, decode=0.0),
            reader=SimpleNamespace(keys=None),
            width=1,
            ring=SimpleNamespace(finish=lambda rank, ticks: self.done.append(ticks)),
            slots=SimpleNamespace(data=NOTHING),
            seats=SimpleNamespace(local=0, mine=0),
            options=SimpleNamespace(held_bytes=1 << 20),
            world=SimpleNamespace(node_rank=0),
        )
        schedule = SimpleNamespace(
            pieces=pieces,
            batch_size=2,
            rows=lambda step, seat: 2,
            piece_rows=lambda step, seat, number: (number, number + 1),
        )
        work: Any = SimpleNamespace(schedule=schedule, stream=SimpleNamespace(seed=0), epoch=0)
        super().__init__(context, work, None, spills=False, ahead=None)

    def _take(self, piece: Piece, check: Any) -> Records:
        self.taken.append(piece.step)
        ids = np.arange(2 * piece.step + piece.first, 2 * piece.step + piece.stop)
        return Records(ids, NOTHING, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64))

    def _decode(self, records: Records, arrays: Any, draw: Any) -> list[Any]:
        step = int(records.ids[0]) // 2
        self.decoding[step].set()
        assert self.go[step].wait(10)
        return []


def test_a_later_step_that_is_decoded_first_is_released_last() -> None:
    source = Recorded()
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(source.prepare, 1, lambda: None)
        assert not source.decoding[1].wait(0.05)  # the first one's records come first
        first = threads.submit(source.prepare, 0, lambda: None)
        assert source.decoding[0].wait(10)
        source.go[1].set()
        assert second.result(10)[0].ids.tolist() == [2, 3]
        assert source.taken == [0, 1]
        assert source.done == [0]  # step 0 is not: nothing may be written over it
        source.go[0].set()
        assert first.result(10)[0].ids.tolist() == [0, 1]
        assert source.done == [0, 2]


def test_who_waits_for_its_turn_hears_that_the_epoch_was_left() -> None:
    source = Recorded()

    def check() -> None:
        raise ClosedError("the epoch was left")

    with pytest.raises(ClosedError):
        source.prepare(1, check)
    assert source.taken == []


def test_pieces_of_a_step_are_taken_when_the_last_one_is_decoded() -> None:
    source = Recorded(pieces=2)
    for event in source.go:
        event.set()
    for step in (0, 1):
        source.prepare(step, lambda: None)
    assert source.taken == [0, 0, 1, 1]
    assert source.done == [1, 2, 3, 4]
