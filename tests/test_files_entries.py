"""Entries of folders, as getdents gives them: every position, however little is kept, and each name found once."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pario.files.entries import Entries
from pario.files.spots import Spot

FOLDER = Spot(0, "folder")
KINDS = {4: "folder", 8: "file", 10: "link"}


class Node(NamedTuple):
    kind: str
    number: int
    at: int


class Names:
    """A folder of `count` names of many lengths, which counts how many of them it was asked for."""

    def __init__(self, count: int) -> None:
        rng = random.Random(count)
        kinds = list(KINDS.values())
        self.all = [
            (b"%d-" % k + b"n" * rng.randrange(240), Node(rng.choice(kinds), rng.getrandbits(63), k))
            for k in range(count)
        ]
        self.given = 0

    def __call__(self, spot: Spot, start: Node | None) -> Iterator[tuple[bytes, Node]]:
        here = Node("folder", 7, -1)
        if start is None:
            yield from ((b".", here), (b"..", here))
        for name, node in self.all[start.at if start else 0 :]:
            self.given += 1
            yield name, node

    def expected(self, position: int) -> list[tuple[bytes, str, int, int]]:
        every = [(b".", "folder", 7), (b"..", "folder", 7)] + [(name, n.kind, n.number) for name, n in self.all]
        return [(*each, k + 1) for k, each in enumerate(every)][position:]


def entries(data: bytes, old: bool) -> list[tuple[bytes, str, int, int]]:
    """(name, kind, number, position behind it), read as the kernel's structures are"""
    found = []
    while data:
        number, offset, length = struct.unpack_from("<QQH", data)
        own, data = data[:length], data[length:]
        assert len(own) == length
        assert length % 8 == 0
        kind, text = (own[-1], own[18:-1]) if old else (own[18], own[19:])
        found.append((text.partition(b"\0")[0], KINDS[kind], number, offset))
    return found


def listed(made: Entries, position: int, most: int, old: bool = False) -> list[tuple[bytes, str, int, int]]:
    """From a position to the end, by calls with room for `most` bytes."""
    found = []
    while True:
        data, behind = made.answer(FOLDER, position, most, old)
        if not data:
            assert behind == position
            return found
        assert len(data) <= most
        found += entries(data, old)
        assert found[-1][3] == behind
        position = behind


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kept", [0, 100_000, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_every_position_of_a_folder(count: int, kept: int, old: bool) -> None:
    names = Names(count)
    made = Entries(names, kept)
    for most in (280, 1000, 32 << 10, 1 << 20):
        assert listed(made, 0, most, old) == names.expected(0)
        for position in (1, 2, count // 2, count + 1, count + 2, count + 1000):
            assert listed(made, position, most, old) == names.expected(position)
        assert made.nbytes <= kept + 34_000  # one piece is always kept


def test_what_is_kept_is_not_asked_for_again() -> None:
    names = Names(3000)
    made = Entries(names)
    for _ in range(3):
        listed(made, 0, 32 << 10)
    pieces = made.nbytes // (32 << 10) + 1
    assert names.given <= 3000 + pieces  # each looks at the name that the next one begins with


def test_a_piece_that_is_not_kept_is_made_again_alone() -> None:
    names = Names(3000)
    made = Entries(names, 0)
    listed(made, 0, 32 << 10)
    before = names.given
    assert entries(made.answer(FOLDER, 2500, 32 << 10)[0], False)[0][3] == 2501
    assert names.given - before < 1000


def test_folders_that_are_forgotten_begin_anew() -> None:
    names = Names(1000)
    made = Entries(names, most_starts=8)
    for k in range(20):
        assert made.answer(Spot(0, str(k)), 900, 300)[0] == made.answer(Spot(1, str(k)), 900, 300)[0]
    assert listed(made, 0, 32 << 10) == names.expected(0)


def test_listings_side_by_side_and_errors() -> None:
    names = Names(2000)
    made = Entries(names, 0)
    places, found = [0, 0], [b"", b""]
    while any(made.answer(FOLDER, place, 500)[0] for place in places):
        for k, most in enumerate((500, 4000)):
            data, places[k] = made.answer(FOLDER, places[k], most)
            found[k] += data
    assert [entries(each, False) for each in found] == [names.expected(0)] * 2
    with pytest.raises(OSError) as failed:
        made.answer(FOLDER, 0, 20)
    assert failed.value.errno == errno.EINVAL

    broken = True

    def sometimes(spot: Spot, start: Node | None) -> Iterator[tuple[bytes, Node]]:
        for k, each in enumerate(names(spot, start)):
            if broken and k == 50:
                raise OSError(errno.EIO, "storage")
            yield each

    made = Entries(sometimes)
    with pytest.raises(OSError, match="storage"):
        made.answer(FOLDER, 0, 32 << 10)
    broken = False
    assert listed(made, 0, 500) == names.expected(0)
