"""One suite for everything that brings a rank its records: what `feed/source.py` promises, of every Source there is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import CorruptedError
from pario.feed.first_epoch import FirstEpochWriter
from pario.feed.ring_reader import RingReader
from pario.feed.seat import Seat
from pario.feed.source import Ahead, Piece, Source, Supply
from pario.options import Recipe
from pario.plan.stream import Work
from pario.recipes.lmdbio import AskingReader
from pario.recipes.per_rank import PerRankSource
from pario.records import Records

pytestmark = pytest.mark.usefixtures("grows")

N = 700


def value(i: int) -> bytes:
    """On both sides of the limit between leaf pages and pages of their own, and an empty one."""
    return np.random.default_rng(i).bytes((i * 611) % 6000)


@dataclass(frozen=True)
class Way:
    """A kind of source, and how to get one.

    tiers : None: those that a file of this node has by default
    """

    kind: type[Source]
    recipe: str | Recipe = "auto"
    indexed: bool = True
    decoder: Any = None
    shuffle: bool | str = False
    tiers: tuple[pario.Tier, ...] | None = ()


def slowly(record: np.ndarray) -> dict[str, Any]:
    """A function is decoded record by record, in other threads, ahead of the caller."""
    return {"data": np.frombuffer(bytes(record).ljust(6000, b"\0"), np.uint8), "n": len(record)}


MEMORY = (pario.Tier("memory"),)

WAYS = {
    "ring": Way(RingReader, "ring"),
    "ring, global": Way(RingReader, "ring", shuffle="global"),
    "ring, block": Way(RingReader, "ring", shuffle="block"),
    "ring, decoded ahead": Way(RingReader, "ring", decoder=slowly),
    "ring, first epoch": Way(RingReader, "ring", indexed=False),
    "first epoch": Way(RingReader, indexed=False),
    "first epoch, tier by default": Way(RingReader, tiers=None, indexed=False),
    "first epoch, memory tier": Way(RingReader, tiers=MEMORY, indexed=False),
    "no tier, global": Way(RingReader, shuffle="global"),
    "tier by default": Way(Seat, tiers=None),
    "tier by default, global": Way(Seat, tiers=None, shuffle="global"),
    "tier by default, block": Way(Seat, tiers=None, shuffle="block"),
    "tier by default, decoded ahead": Way(Seat, tiers=None, decoder=slowly),
    "memory tier": Way(Seat, tiers=MEMORY),
    "memory tier, global": Way(Seat, tiers=MEMORY, shuffle="global"),
    "memory tier, block": Way(Seat, tiers=MEMORY, shuffle="block"),
    "memory tier, decoded ahead": Way(Seat, tiers=MEMORY, decoder=slowly),
    "memory tier with room for a part": Way(RingReader, tiers=(pario.Tier("memory", "1 MiB"),)),
    "spans": Way(AskingReader, "coal"),
    "spans, block": Way(AskingReader, "prov", shuffle="block"),
    "leaves ahead": Way(AskingReader, "lmm", indexed=False),
    "guesses": Way(AskingReader, "dm", indexed=False),
    "turns": Way(AskingReader, Recipe("synchronous", "sidecar", "posix", span=True, stagger=1)),
    "py-lmdb": Way(PerRankSource, "plain"),
    "py-lmdb, global": Way(PerRankSource, "plain", shuffle="global"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract") / "x.lmdb"
    with lmdb.open(str(folder), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    return folder


@pytest.fixture(scope="module")
def indexed(written: Path) -> Path:
    with pario.Reader(written):
        pass
    return written


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


@pytest.fixture
def folder(way: Way, indexed: Path, tmp_path: Path) -> Path:
    """With its side-car, or a copy without."""
    if way.indexed:
        return indexed
    shutil.copytree(indexed, tmp_path / "x.lmdb", ignore=shutil.ignore_patterns("*.index"))
    return tmp_path / "x.lmdb"


def open_loader(folder: Path, way: Way) -> pario.Loader:
    sizes = {"slot_bytes": 128 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 4}
    options = pario.Options(**sizes, tiers=way.tiers)
    more: dict[str, Any] = {"shuffle": way.shuffle, "recipe": way.recipe, "options": options}
    return pario.Loader(folder, 16, way.decoder, save_index=way.indexed, **more)


class Hands:
    """A loader's supply in the hands of a test."""

    def __init__(self, loader: pario.Loader, way: Way) -> None:
        self.loader = loader
        self.way = way
        supply, slots = loader._life.supply, loader._life.slots
        assert supply is not None
        assert slots is not None
        self.supply: Supply = supply
        proposed = supply.propose()
        if supply.needs_ring(proposed):
            slots.allocate()
        self.work = Work(supply.context.stream, loader._progress._shape, 0, 0)
        # As a loop would: what goes wrong in the background reaches `Lifetime.check`.
        self.source = loader._life.source = supply.source(self.work, proposed)

    def check(self, step: int, parts: Any) -> None:
        expected = self.work.order.take(np.arange(*self.work.schedule.step_positions(step)))
        by_offset = self.loader.index.by_offset if self.work.order.space == "place" else None
        expected = expected if by_offset is None else by_offset[expected]
        if self.way.shuffle == "block":  # the seats of a step take their records in an order of their own
            assert sorted(parts.ids.tolist()) == sorted(expected.tolist())
        else:
            np.testing.assert_array_equal(parts.ids, expected)
        for k, i in enumerate(parts.ids.tolist()):
            if self.way.decoder is slowly:
                assert bytes(parts.arrays["data"][k])[: int(parts.arrays["n"][k])] == value(i)
            else:
                first, stop = parts.arrays["offsets"][k : k + 2]
                assert parts.arrays["data"][first:stop].tobytes() == value(i)
        assert not parts.failures


@pytest.fixture
def hands(way: Way, folder: Path) -> Iterator[Hands]:
    with open_loader(folder, way) as loader:
        made = Hands(loader, way)
        yield made
        made.source.leave()
        assert made.source.close(10)


def nothing() -> None:
    pass


def test_every_step_once_and_every_byte(hands: Hands) -> None:
    assert isinstance(hands.source, hands.way.kind)
    assert isinstance(getattr(hands.source, "_writer", None), FirstEpochWriter) == (not hands.way.indexed)
    for step in range(hands.work.schedule.steps):
        hands.check(step, *hands.source.prepare(step, nothing))
        hands.source.check()  # nothing went wrong in the background


def test_ahead_brings_the_same(hands: Hands) -> None:
    """Where other threads may prepare steps, several at once do not disturb each other."""
    ahead = hands.source.ahead
    if ahead is None:
        assert hands.way.kind in (AskingReader, PerRankSource) or not hands.loader.decoder.parallel
        return
    assert isinstance(ahead, Ahead)
    assert ahead.steps >= 1
    futures = [ahead.submit(hands.source.prepare, step, nothing) for step in range(1 + ahead.steps)]
    for step, future in enumerate(futures):
        hands.check(step, *future.result(30))


def test_values_stand_as_in_the_file(hands: Hands) -> None:
    """A value whose offset is a multiple of 2, 4 or 8 has such an address, so that arrays need not be copied first."""
    source = hands.source
    for step in range(hands.work.schedule.steps):
        for piece in source.pieces(step):
            records = taken(source, piece)
            offsets, _ = hands.loader.index.extents_of(records.ids)
            assert not ((records.data.ctypes.data + records.starts - offsets) % 8).any()


def taken(source: Source, piece: Piece) -> Records:
    """The records of a piece that its release has confirmed, with tables of their own: the ring's are filled anew."""
    while True:
        records = source.take(piece, nothing)
        kept = Records(records.ids.copy(), records.data, records.starts.copy(), records.nbytes.copy())
        if source.release(piece):
            return kept


def test_the_pieces_of_a_step_are_its_rows(hands: Hands) -> None:
    """All of them, one after the other, and the last one says so."""
    source, schedule = hands.source, hands.work.schedule
    for step in range(schedule.steps):
        pieces = source.pieces(step)
        assert [piece.number for piece in pieces] == list(range(len(pieces)))
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        edges = [0, *(piece.stop for piece in pieces)]
        assert [piece.first for piece in pieces] == edges[:-1]
        assert edges[-1] == np.ptp(schedule.step_positions(step))
        for piece in pieces:
            assert len(taken(source, piece)) == piece.stop - piece.first


class StopError(Exception):
    pass


def test_what_check_raises_comes_through(hands: Hands) -> None:
    """It is called while a source waits, and once per step where ranks fill their batches themselves."""

    def stop() -> None:
        raise StopError

    stopped = False
    try:
        for step in range(hands.work.schedule.steps):
            hands.check(step, *hands.source.prepare(step, stop))
    except StopError:
        stopped = True
    assert stopped or not isinstance(hands.source, Seat)


def test_left_early_it_ends(hands: Hands) -> None:
    if hands.work.schedule.steps > 1:
        hands.check(0, *hands.source.prepare(0, nothing))
    for _ in range(2):
        hands.source.leave()
    for _ in range(2):
        assert hands.source.close(10)
    for _ in range(2):
        hands.supply.settle()


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.kind is not PerRankSource], indirect=True)
def test_a_damaged_page_is_an_error_and_not_a_record(way: Way, indexed: Path, tmp_path: Path) -> None:
    """The header of an overflow page says that it is another page. (LMDB itself does not look.)"""
    folder = tmp_path / "damaged.lmdb"
    shutil.copytree(indexed, folder, ignore=shutil.ignore_patterns("*.index"))
    with pario.Reader(folder, save_index=way.indexed) as reader:  # the copy has another inode: a side-car of its own
        sizes, offsets = reader.index.extents["nbytes"], reader.index.extents["offset"]
        record = next(i for i in range(N // 2, N) if sizes[i] > 4096)
        page = (int(offsets[record]) - reader.index.header_bytes) // 4096
    status = (folder / "data.mdb").stat()
    with open(folder / "data.mdb", "r+b") as file:
        file.seek(page * 4096)
        file.write((page + 1).to_bytes(8, "little"))
    os.utime(folder / "data.mdb", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CorruptedError) as caught:
        read_all(folder, way)
    assert caught.value.page == page


def read_all(folder: Path, way: Way) -> None:
    with open_loader(folder, way) as loader:
        hands = Hands(loader, way)
        try:
            for step in range(hands.work.schedule.steps):
                hands.source.prepare(step, loader._life.check)
        finally:
            hands.source.leave()
            hands.source.close(10)
