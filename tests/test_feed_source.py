"""The loop that each source shares: take, decode, release, and take again what has changed meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pario.feed.source import Piece, Source
from pario.records import Records

NOTHING = np.empty(0, np.uint8)
CUTS = [0, 3, 4, 9]


class Told(Source):
    """Steps of nine rows in three pieces; the `again`-th piece must be taken twice."""

    def __init__(self, again: int = -1, width: int = 1) -> None:
        self.calls: list[tuple[str, int]] = []
        self._again, self.made = again, 0
        decode = SimpleNamespace(arrays=self._arrays, decode=self._decode)
        context: Any = SimpleNamespace(
            decode=decode,
            stats=SimpleNamespace(share=0.0, decode=0.0),
            reader=SimpleNamespace(keys=None),
            width=width,
            seats=SimpleNamespace(mine=0),
        )
        schedule = SimpleNamespace(rows=lambda step, seat: [4, 0, 5][step - 1])
        work: Any = SimpleNamespace(stream=SimpleNamespace(seed=0), epoch=0, schedule=schedule)
        super().__init__(context, work)

    def _arrays(self, records: Records, rows: int) -> Any:
        self.made += 1
        return {"n": np.full(rows, -1)}, np.full(rows, -1)

    def _decode(self, records: Records, arrays: Any, draw: Any) -> list[Any]:
        """Row 1 of each piece cannot be decoded, if there is one."""
        arrays["n"][:] = records.ids[:: self.width] * 10
        return [(1, f"record {records.ids[self.width]}")] if len(arrays["n"]) > 1 else []

    def pieces(self, step: int, steps: int = 1) -> list[Piece]:
        return [Piece(step, k, CUTS[k], CUTS[k + 1], k == 2) for k in range(3)]

    def take(self, piece: Piece, check: Any) -> Records:
        self.calls.append(("take", piece.number))
        ids = np.arange(piece.first * self.width, piece.stop * self.width) + 100 * piece.step
        if self._again == piece.number:
            ids += 1000  # what is decoded first is not right
        return Records(ids, NOTHING, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64))

    def release(self, piece: Piece) -> bool:
        self.calls.append(("release", piece.number))
        if self._again == piece.number:
            self._again = -1
            return False
        return True


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("again", [-1, 0, 1, 2])
def test_pieces_become_one_batch(again: int, width: int) -> None:
    source = Told(again, width)
    (parts,) = source.prepare(1, lambda: None)
    expected = np.arange(9) * width + 100
    assert parts.ids.tolist() == expected.tolist()
    assert parts.arrays["n"].tolist() == (expected * 10).tolist()
    assert parts.failures == [(1, f"record {expected[1]}"), (5, f"record {expected[5]}")]
    wanted = [(what, k) for k in range(3) for _ in range(1 + (k == again)) for what in ("take", "release")]
    assert source.calls == wanted


def test_what_is_taken_again_may_have_other_sizes() -> None:
    """So it gets arrays of its own, where a step is one piece; parts of steps have rows of a known size."""
    source = Told(again=0)
    source.pieces = lambda step, steps=1: [Piece(step, 0, 0, 9, True)]  # type: ignore[method-assign]
    (parts,) = source.prepare(1, lambda: None)
    assert source.made == 2
    assert parts.ids.tolist() == list(range(100, 109))
    source = Told(again=0)
    source.prepare(1, lambda: None)
    assert source.made == 1


def test_several_steps_are_prepared_at_once() -> None:
    """Each has its rows, and what could not be decoded of them. These have 4, none, and 5."""
    steps = Told().prepare(1, lambda: None, 3)
    assert [parts.ids.tolist() for parts in steps] == [[100, 101, 102, 103], [], [104, 105, 106, 107, 108]]
    assert [parts.arrays["n"].tolist() for parts in steps] == [(10 * parts.ids).tolist() for parts in steps]
    assert [parts.failures for parts in steps] == [[(1, "record 101")], [], [(1, "record 105")]]


def test_what_take_raises_is_not_released() -> None:
    source = Told()

    def fails(piece: Piece, check: Any) -> Records:
        raise OSError("gone")

    source.take = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="gone"):
        source.prepare(0, lambda: None)
    assert source.calls == []
