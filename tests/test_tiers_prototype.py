"""What a published prototype of nodes that read from each other (DistMonarch) got wrong, asked of two nodes and a file
of more than 4 GiB; what needs more nodes is in tests/test_tiers_peers.py and tests/system/test_peers.py."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pario.fetch.posix import PosixFetcher
from pario.plan.placement import assign
from pario.records import EXTENT
from pario.tiers.disk import DiskTier
from pario.tiers.grid import BLOCK_BYTES, Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.peers import READ, Peers, Servers
from pario.tiers.service import Service
from pario.tiers.staged import StagedFetcher
from pario.wire import client as client_module
from pario.wire.client import Address, Client
from pario.wire.frames import Word

#: of files that are no LMDBs
SNAPSHOTS: list[Any] = [SimpleNamespace(page_size=0, stamp=b"")]

GiB = 1 << 30
GRID = Grid(5 * GiB + 1234, BLOCK_BYTES)
SECRET, IDENTITY = b"s" * 32, bytes(range(32))
#: The chunks that are not zeros; the 65536th begins at 4 GiB.
WRITTEN = [0, 1, 32767, 32768, 65535, 65536, 65537, GRID.chunks - 1]


def chunk_of(chunk: int) -> bytes:
    return np.random.default_rng(chunk).bytes(GRID.span(chunk)[1])


class Store(PosixFetcher):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen: list[tuple[int, int]] = []

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self.seen += reads.tolist()
        super().read(reads, out, starts)


class Node:
    def __init__(self, path: str) -> None:
        self.tier = MemoryTier.made(GRID, 1 << 26)
        self.store = Store(path)
        self.staged = StagedFetcher(
            self.store,
            SNAPSHOTS,
            [self.tier],
            grid=GRID,
            read_bytes=1 << 20,
            count=lambda *_: None,
        )
        self.service = Service({IDENTITY: self.staged}.get, SECRET, threads=2, clients=2)

    def read(self, offset: int, nbytes: int) -> bytes:
        out = np.full(nbytes, 0xEE, np.uint8)
        self.staged.read(np.array([(offset, nbytes)], EXTENT), out, np.zeros(1, np.int64))
        return out.tobytes()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Node]]:
    """The first one keeps everything, the second nothing."""
    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", lambda *_: None)  # this file is no LMDB
    path = tmp_path / "data.mdb"
    with open(path, "wb") as file:
        file.truncate(GRID.file_bytes)
        for chunk in WRITTEN:
            file.seek(GRID.span(chunk)[0])
            file.write(chunk_of(chunk))
    made = [Node(os.fspath(path)) for _ in range(2)]
    placement = assign(7, range(GRID.chunks), [GRID.chunks, 0], 1)
    addresses = [node.service.address for node in made]
    for k, node in enumerate(made):
        peers = Peers(placement, Servers(k, addresses, SECRET), serves=True, identity=IDENTITY, grid=GRID)
        node.staged.join(peers, np.full(GRID.chunks, k == 0))
    yield made
    for node in made:
        assert node.staged.peers is not None
        node.staged.peers.close()
        node.service.close()
        node.tier.close()
        node.staged.close()


def test_offsets_beyond_4_gib(nodes: list[Node]) -> None:
    """Of the file, through another node."""
    for _ in range(2):
        for chunk in WRITTEN:
            assert nodes[1].read(*GRID.span(chunk)) == chunk_of(chunk)
            assert nodes[1].read(GRID.span(chunk)[0] + 77, 1000) == chunk_of(chunk)[77:1077]
    assert sorted(nodes[0].store.seen) == [GRID.span(chunk) for chunk in WRITTEN]
    assert nodes[1].store.seen == []


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_offsets_beyond_4_gib_in_a_tier(tmp_path: Path, kind: str) -> None:
    tier: MemoryTier | DiskTier
    tier = MemoryTier.made(GRID, 1 << 26) if kind == "memory" else DiskTier(str(tmp_path), IDENTITY, GRID, 1 << 26)
    for chunk in WRITTEN:
        assert tier.put(chunk, np.frombuffer(chunk_of(chunk), np.uint8))
    for chunk in WRITTEN:
        offset, nbytes = GRID.span(chunk)
        out = np.zeros(nbytes, np.uint8)
        assert tier.read(offset, out)
        assert out.tobytes() == chunk_of(chunk)
        out[:] = 0
        assert tier.read_many(np.array([(offset + 5, 100)], EXTENT), out, np.array([9])).all()
        assert out[9:109].tobytes() == chunk_of(chunk)[5:105]
    tier.close()


def test_nobody_reads_the_store_on_behalf_of_who_asks_for_what_is_here(nodes: list[Node]) -> None:
    """A chunk that a node does not hold, or not yet, it does not hold: whoever asked knows better what to do."""
    client = Client(nodes[0].service.address, SECRET, 5.0)
    extents = np.array([(65536 * BLOCK_BYTES, 100)], EXTENT)
    _, flags = client.call(READ, IDENTITY + extents.tobytes())
    client.close()
    assert flags == bytes([Word.ABSENT])
    assert nodes[0].store.seen == []


def test_connections_are_used_again(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    connect = client_module.reached
    monkeypatch.setattr(client_module, "reached", lambda *arguments: (made.append(arguments), connect(*arguments))[1])  # type: ignore[func-returns-value]
    for k in range(300):
        chunk = WRITTEN[k % len(WRITTEN)]
        assert nodes[1].read(GRID.span(chunk)[0] + k, 50) == chunk_of(chunk)[k : k + 50]
    assert 0 < len(made) <= 8, "four for each kind of request, however many there are"


def test_a_read_allocates_what_it_brings(nodes: list[Node]) -> None:
    """And not a buffer for the longest one that could be."""
    for chunk in WRITTEN:
        nodes[1].read(GRID.span(chunk)[0], 100)
    tracemalloc.start()
    try:
        for k in range(100):
            nodes[1].read(GRID.span(WRITTEN[k % len(WRITTEN)])[0], 100)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1 << 20


def test_whom_to_ask_is_not_searched_for() -> None:
    """In a dataset of a million chunks it takes as long as in one of a hundred."""

    def seconds(chunks: int) -> float:
        grid = Grid(chunks * BLOCK_BYTES, BLOCK_BYTES)
        placement = assign(7, range(chunks), [chunks, chunks], 1)
        nowhere = Address("another machine", "", ("127.0.0.1",), 1)
        peers = Peers(placement, Servers(0, [nowhere] * 2, SECRET), serves=False, identity=IDENTITY, grid=grid)
        begin = time.process_time()
        for k in range(1000):
            assert list(peers._whom(k * chunks // 1000, False))
        spent = time.process_time() - begin
        peers.close()
        return spent

    assert min(seconds(1_000_000) for _ in range(3)) < 10 * min(seconds(100) for _ in range(3))
