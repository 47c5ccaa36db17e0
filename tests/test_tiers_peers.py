"""Nodes that read from each other, in one process. The oracle is the file as the test wrote it, and a store that counts
what it was asked for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bad_wire import Wire

from pario.errors import ReadError
from pario.fetch.posix import PosixFetcher
from pario.plan.placement import Placement, assign
from pario.records import EXTENT
from pario.tiers import peers as peers_module
from pario.tiers import service as service_module
from pario.tiers.base import AnyTier
from pario.tiers.disk import DiskTier
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.peers import BRING, KEEP, READ, Peers, Servers
from pario.tiers.service import Service
from pario.tiers.staged import StagedFetcher
from pario.wire.client import Address, Client
from pario.wire.frames import Part, Word
from pario.wire.server import Reply

#: of files that are no LMDBs
SNAPSHOTS: list[Any] = [SimpleNamespace(page_size=0, stamp=b"")]

GRID = Grid((40 << 16) + 1234, 1 << 16)
DATA = np.random.default_rng(0).integers(1, 256, GRID.file_bytes, dtype=np.uint8)
SECRET, IDENTITY = b"s" * 32, bytes(range(32))


class CountingStore(PosixFetcher):
    """The one store of all nodes."""

    def __init__(self, path: str, seen: list[tuple[int, int]], wait_s: float) -> None:
        super().__init__(path)
        self._seen, self._wait_s = seen, wait_s

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        time.sleep(self._wait_s)
        self._seen += reads.tolist()
        super().read(reads, out, starts)


class Node:
    def __init__(self, path: str, tier: AnyTier, seen: list[tuple[int, int]], *, wait_s: float, threads: int) -> None:
        store = CountingStore(path, seen, wait_s)
        self.tier = tier
        self.staged = StagedFetcher(store, SNAPSHOTS, [tier], grid=tier.grid, read_bytes=1 << 20, count=lambda *_: None)
        self.service = Service({IDENTITY: self.staged}.get, SECRET, threads=threads, clients=8)
        self.peers: Peers | None = None

    def join(self, placement: Placement, node: int, addresses: Sequence[Address | None]) -> None:
        self.peers = Peers(placement, Servers(node, addresses, SECRET), serves=True, identity=IDENTITY, grid=GRID)
        keeps = np.zeros(GRID.chunks, bool)
        keeps[placement.kept_by(node)] = True
        self.staged.join(self.peers, keeps)

    def read(self, *ranges: tuple[int, int]) -> bool:
        """Whether the bytes are right."""
        reads = np.array(list(ranges), EXTENT)
        starts = np.cumsum([0, *reads["nbytes"]])
        out = np.full(int(starts[-1]), 0xEE, np.uint8)
        self.staged.read(reads, out, starts[:-1])
        found = zip(ranges, pairwise(starts.tolist()), strict=True)
        return all(np.array_equal(out[a:b], DATA[offset : offset + n]) for (offset, n), (a, b) in found)

    def read_all(self, seed: int) -> bool:
        """Pieces of the whole file in random order, a few of which lie in two chunks or more."""
        order = np.random.default_rng(seed)
        cuts = np.unique(order.integers(1, GRID.file_bytes, 200))
        ranges = [(int(a), int(b - a)) for a, b in pairwise([0, *cuts, GRID.file_bytes])]
        order.shuffle(ranges)
        return all(self.read(*ranges[k : k + 20]) for k in range(0, len(ranges), 20))

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self.service.close()
        self.tier.close()
        self.staged.close()


class Cluster:
    """nodes; `seen`: (offset, bytes) of every read of the store."""

    def __init__(self, path: str, tiers: list[AnyTier], copies: int | None, *, wait_s: float, threads: int) -> None:
        self.seen: list[tuple[int, int]] = []
        self.nodes = [Node(path, tier, self.seen, wait_s=wait_s, threads=threads) for tier in tiers]
        self.placement = assign(7, range(GRID.chunks), [tier.room() for tier in tiers], copies)
        self.join([node.service.address for node in self.nodes])

    def join(self, addresses: Sequence[Address | None]) -> None:
        for k, node in enumerate(self.nodes):
            node.join(self.placement, k, addresses)

    @property
    def store_bytes(self) -> int:
        return sum(n for _, n in self.seen)

    def all_read_all(self, seed: int = 0) -> bool:
        """At the same time."""
        right: list[bool] = []
        threads = [
            threading.Thread(target=lambda n=node, k=k: right.append(n.read_all(seed + k)))  # type: ignore[misc]
            for k, node in enumerate(self.nodes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return right == [True] * len(self.nodes)


Build = Callable[..., Cluster]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", lambda *_: None)  # this file is no LMDB
    DATA.tofile(tmp_path / "data.mdb")
    made: list[Cluster] = []

    def build(
        *quotas: int, copies: int | None = None, disk: bool = False, wait_s: float = 0.0, threads: int = 4
    ) -> Cluster:
        """quotas : in chunks"""
        tiers: list[AnyTier] = []
        for k, quota in enumerate(quotas):
            if disk:
                folder = os.fspath(tmp_path / f"{len(made)} {k}")
                tiers.append(DiskTier(folder, IDENTITY, GRID, quota * GRID.chunk_bytes + 65536, floor=0.0))
            else:
                tiers.append(MemoryTier.made(GRID, quota * GRID.chunk_bytes))
        path = os.fspath(tmp_path / "data.mdb")
        made.append(Cluster(path, tiers, copies, wait_s=wait_s, threads=threads))
        return made[-1]

    yield build
    for each in made:
        for node in each.nodes:
            node.close()


@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("quotas", [(50, 50, 50), (14, 14, 14), (41, 1, 1), (30, 20, 5)], ids=str)
def test_every_byte_leaves_the_store_once(cluster: Build, quotas: tuple[int, ...], disk: bool) -> None:
    nodes = cluster(*quotas, disk=disk)
    for epoch in range(3):
        assert nodes.all_read_all(3 * epoch)
        assert nodes.store_bytes == GRID.file_bytes, f"in epoch {epoch}"
    counts = [node.peers.counts for node in nodes.nodes if node.peers is not None]
    assert not any(count.lost or count.damaged for count in counts)
    assert sum(count.read_bytes for count in counts) == sum(node.service.served_bytes for node in nodes.nodes)


def test_what_has_no_room_anywhere_is_read_from_the_store(cluster: Build) -> None:
    nodes = cluster(10, 10)
    kept = sum(GRID.span(chunk)[1] for chunk in range(GRID.chunks) if nodes.placement.owners[chunk, 0] >= 0)
    assert nodes.all_read_all()
    assert nodes.store_bytes == kept + 2 * (GRID.file_bytes - kept), "exactly what was asked for"


def test_copies(cluster: Build) -> None:
    one, two = cluster(50, 50, 50, 50, copies=1), cluster(50, 50, 50, 50, copies=2)
    for nodes, copies in ((one, 1), (two, 2)):
        for epoch in range(2):
            assert nodes.all_read_all(epoch)
        held = sum(int(node.tier.held().sum()) for node in nodes.nodes)
        assert held == copies * GRID.chunks
        assert nodes.store_bytes == GRID.file_bytes
        served = [node.service.served_bytes for node in nodes.nodes]
        assert max(served) < 1.5 * np.mean(served)


def test_the_loss_of_a_node_with_two_copies(cluster: Build, caplog: pytest.LogCaptureFixture) -> None:
    nodes = cluster(50, 50, 50, 50, copies=2)
    assert nodes.all_read_all()
    nodes.seen.clear()
    nodes.nodes.pop(1).close()
    assert nodes.all_read_all(9)
    assert nodes.store_bytes == 0
    assert caplog.text.count("node 1 does not answer") == 3, "each of the others says so once"


def test_the_loss_of_the_only_copies(cluster: Build) -> None:
    """Only what was lost is read again; here no node has the task to keep it."""
    nodes = cluster(14, 14, 14, copies=1)
    assert nodes.all_read_all()
    nodes.seen.clear()
    lost = nodes.nodes.pop(0)
    lost.close()
    lost_bytes = sum(GRID.span(chunk)[1] for chunk in nodes.placement.kept_by(0).tolist())
    assert nodes.all_read_all(9)
    assert nodes.store_bytes == 2 * lost_bytes


def test_a_chunk_that_a_node_has_lost_is_brought_again(cluster: Build) -> None:
    nodes = cluster(50, 50, copies=1)
    assert nodes.all_read_all()
    nodes.seen.clear()
    memory = nodes.nodes[0].tier
    assert isinstance(memory, MemoryTier)
    memory.give_back(int(nodes.placement.kept_by(0)[0]))
    assert nodes.all_read_all(5)
    assert nodes.store_bytes in {GRID.chunk_bytes, 1234}


def stopped(node: Node, seconds: float) -> None:
    answer = node.service._answer

    def slow(kind: int, body: bytes) -> Reply:
        time.sleep(seconds)
        return answer(kind, body)

    node.service._server._answer = slow


def test_a_node_that_is_stopped(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "LIMIT_S", 0.5)
    nodes = cluster(14, 14, 14, copies=1)
    assert nodes.all_read_all()
    stopped(nodes.nodes[2], 30.0)
    begin = time.monotonic()
    assert nodes.all_read_all(5)
    first = time.monotonic() - begin
    assert first >= 0.5
    begin = time.monotonic()
    assert nodes.all_read_all(7)
    assert time.monotonic() - begin < first, "it is not asked again for a while"
    asker = nodes.nodes[0].peers
    assert asker is not None
    assert asker.counts.lost == 1


def test_a_node_that_comes_back(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_REST_S", 0.3)
    nodes = cluster(14, 14, 14, copies=1)
    assert nodes.all_read_all()
    address = nodes.nodes[2].service.address
    nowhere = Address("another machine", "", ("127.0.0.1",), 1)
    nodes.join([*(node.service.address for node in nodes.nodes[:2]), nowhere])
    assert nodes.all_read_all(3)
    peers = nodes.nodes[0].peers
    assert peers is not None
    assert peers.counts.lost > 0
    peers._clients[2] = Client(address, SECRET, 5.0)
    time.sleep(0.4)
    nodes.seen.clear()
    assert nodes.nodes[0].read_all(4)
    assert nodes.store_bytes == 0


def test_memory_that_is_given_back_while_it_is_lent(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole reads as zeros: they must not arrive with a sum that fits."""
    nodes = cluster(50, 50, copies=1)
    assert nodes.all_read_all()
    memory = nodes.nodes[0].tier
    assert isinstance(memory, MemoryTier)
    lend = MemoryTier.lend

    def lend_and_lose(self: MemoryTier, offset: int, nbytes: int) -> Part | None:
        part = lend(self, offset, nbytes)
        if self is memory:
            memory.give_back(offset // GRID.chunk_bytes)
        return part

    monkeypatch.setattr(MemoryTier, "lend", lend_and_lose)
    kept = nodes.placement.kept_by(0)[:5].tolist()  # whole chunks, which are not copied before they are sent
    assert nodes.nodes[1].read(*(GRID.span(chunk) for chunk in kept))
    asker = nodes.nodes[1].peers
    assert asker is not None
    assert asker.counts.damaged > 0
    assert asker.counts.lost == 0


def test_many_slow_requests_make_no_node_look_dead(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_BRING_S", 0.3)
    monkeypatch.setattr(peers_module, "LIMIT_S", 1.0)
    nodes = cluster(50, 1, copies=1, wait_s=0.1, threads=2)
    kept = nodes.placement.kept_by(0).tolist()
    asker = nodes.nodes[1]
    given: dict[str, Any] = {"serves": True, "identity": IDENTITY, "grid": GRID}
    others = [
        Peers(nodes.placement, Servers(1, [nodes.nodes[0].service.address, None], SECRET), **given) for _ in range(12)
    ]
    right: list[bool] = []

    def ask(peers: Peers) -> None:
        extents = np.array([(chunk * GRID.chunk_bytes, 100) for chunk in kept], EXTENT)
        out = np.empty(100 * len(kept), np.uint8)
        found = peers.read(extents, out, np.arange(len(kept)) * 100)
        right.append(bool(found.all()))

    threads = [threading.Thread(target=ask, args=(peers,)) for peers in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right == [True] * 12
    assert not any(peers.counts.lost for peers in others)
    assert nodes.store_bytes == sum(GRID.span(chunk)[1] for chunk in kept), "each chunk is brought once"
    assert asker.read_all(0)
    for peers in others:
        peers.close()


def test_nothing_is_there_at_once(cluster: Build) -> None:
    peers = cluster(10, 10).nodes[0].peers
    found = peers.read(np.empty(0, EXTENT), np.empty(0, np.uint8), np.empty(0, np.int64))
    assert found.tolist() == []


def test_a_connection_that_was_closed_meanwhile(cluster: Build) -> None:
    nodes = cluster(14, 14, 14, copies=1)
    assert nodes.all_read_all()
    for node in nodes.nodes:
        while node.service._server._drop_idle():
            pass
    assert nodes.all_read_all(3)
    assert not any(node.peers.counts.lost for node in nodes.nodes if node.peers is not None)


def test_few_descriptors(cluster: Build) -> None:
    nodes = cluster(14, 14, 14, copies=1)
    asker = nodes.nodes[0].peers
    assert asker is not None
    asker._most_idle = 1
    assert nodes.all_read_all()
    assert sum(client.idle for client in asker._clients if client is not None) <= 2


@pytest.mark.parametrize("garbage", ["flags", "too few", "too many", "nothing", "other flags"])
def test_answers_that_are_garbage(cluster: Build, garbage: str) -> None:
    nodes = cluster(14, 14, 14, copies=1)

    def answer(kind: int, body: bytes) -> Reply:
        n = (len(body) - 32) // EXTENT.itemsize
        flags = Part(np.ones(n, np.uint8))
        return {
            "flags": Reply(kind, [flags]),
            "too few": Reply(kind, [flags, Part(np.zeros(10, np.uint8))]),
            "too many": Reply(kind, [flags, Part(np.zeros(32 << 20, np.uint8))]),
            "nothing": Reply(kind, []),
            "other flags": Reply(kind, [Part(np.full(n, 77, np.uint8))]),
        }[garbage]

    nodes.nodes[1].service._server._answer = answer
    for seed in range(2):
        assert nodes.nodes[0].read_all(seed)
        assert nodes.nodes[2].read_all(seed)


def test_a_thousand_flipped_bits_on_the_wire(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are found, and the bytes fetched again from elsewhere."""
    monkeypatch.setattr(peers_module, "_REST_S", 0.0)
    monkeypatch.setattr(peers_module, "_MOST_REST_S", 0.0)
    nodes = cluster(21, 21, copies=1)
    wires = [Wire(node.service.address, range(500, 1 << 40, 9973)) for node in nodes.nodes]
    nodes.join([wire.address for wire in wires])
    seed = 0
    while sum(wire.flipped for wire in wires) < 1000:
        assert nodes.all_read_all(seed)
        seed += 2
        assert seed < 1000
    found = sum(node.peers.counts.damaged + node.peers.counts.lost for node in nodes.nodes if node.peers is not None)
    assert found > 20, "an answer has many of them; that all bytes were right above is what counts"


def test_chunks_are_brought_for_others_a_few_at_a_time(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store must not make a node look as if it did not answer."""
    monkeypatch.setattr(service_module, "_BRING_S", 0.02)
    monkeypatch.setattr(peers_module, "LIMIT_S", 1.0)
    nodes = cluster(50, 1, copies=1, wait_s=0.05)
    kept = nodes.placement.kept_by(0).tolist()
    assert nodes.nodes[1].read(*((chunk * GRID.chunk_bytes, 100) for chunk in kept))
    peers = nodes.nodes[1].peers
    assert peers is not None
    assert peers.counts.lost == 0
    assert peers.counts.requests > 5


def test_nodes_that_ask_each_other_for_everything_wait_for_nobody(cluster: Build) -> None:
    """One thread each that answers: a circle of nodes that wait for each other would never end."""
    nodes = cluster(50, 50, 50, 50, threads=1, wait_s=0.002)
    begin = time.monotonic()
    assert nodes.all_read_all()
    assert time.monotonic() - begin < 8, "the time after which nodes give each other up"
    assert nodes.store_bytes == GRID.file_bytes


def test_an_error_of_the_store(cluster: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs the bytes meets it, with the path; the node that was asked goes on."""
    nodes = cluster(50, 50, copies=1)
    chunk = int(nodes.placement.kept_by(0)[0])
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise ReadError("broken store", path="x")

        patch.setattr(CountingStore, "read", refuse)
        with pytest.raises(ReadError, match="broken store"):
            nodes.nodes[1].read((chunk * GRID.chunk_bytes, 10))
    assert nodes.all_read_all()


def test_the_end_of_the_file_and_beyond(cluster: Build) -> None:
    """Reads of aligned lengths reach beyond the file: those bytes stay as they are."""
    nodes = cluster(50, 50, copies=1)
    for node in nodes.nodes:
        offset = (GRID.chunks - 1) * GRID.chunk_bytes
        out = np.full(4096, 0xEE, np.uint8)
        node.staged.read(np.array([(offset, 4096)], EXTENT), out, np.zeros(1, np.int64))
        assert np.array_equal(out[:1234], DATA[offset:])
        assert (out[1234:] == 0xEE).all() or node.tier.held()[-1]


def requests(what: str) -> tuple[int, bytes]:
    def extents(*pairs: tuple[int, int]) -> bytes:
        return np.array(list(pairs), EXTENT).tobytes()

    cases: dict[str, tuple[int, bytes]] = {
        "no dataset": (READ, b"123"),
        "another kind": (9, IDENTITY + extents((0, 10))),
        "half an extent": (READ, IDENTITY + extents((0, 10)) + b"123"),
        "before the file": (BRING, IDENTITY + extents((-5, 10))),
        "behind the file": (BRING, IDENTITY + extents((GRID.file_bytes - 5, 10))),
        "far behind it": (READ, IDENTITY + extents((2**62, 10))),
        "no bytes": (READ, IDENTITY + extents((0, 0))),
        "fewer than none": (READ, IDENTITY + extents((100, -10))),
        "two chunks": (READ, IDENTITY + extents((GRID.chunk_bytes - 5, 10))),
        "too much": (READ, IDENTITY + extents(*[(0, GRID.chunk_bytes)] * 200)),
        "overflow": (READ, IDENTITY + extents((0, 2**63 - 1), (0, 2**63 - 1))),
    }
    return cases[what]


@pytest.mark.parametrize(
    "what",
    [
        *("no dataset", "another kind", "half an extent", "before the file", "behind the file"),
        *("far behind it", "no bytes", "fewer than none", "two chunks", "too much", "overflow"),
    ],
)
def test_requests_that_cannot_be_meant(cluster: Build, what: str) -> None:
    nodes = cluster(50, 50)
    client = Client(nodes.nodes[0].service.address, SECRET, 5.0)
    with pytest.raises(OSError, match=r"closed|reset"):
        client.call(*requests(what))
    assert nodes.all_read_all()
    client.close()


@pytest.mark.parametrize("kind", [READ, BRING, KEEP])
def test_a_dataset_that_the_server_does_not_have(cluster: Build, kind: int) -> None:
    nodes = cluster(50, 50)
    client = Client(nodes.nodes[0].service.address, SECRET, 5.0)
    assert client.call(kind, bytes(32) + np.array([(0, 10), (10, 10)], EXTENT).tobytes())[1] == bytes([Word.ABSENT] * 2)
    client.close()


def test_a_node_without_an_address(cluster: Build) -> None:
    """It could not open a socket: it reads from others, and they read what it should keep from the store."""
    nodes = cluster(14, 14, 14)
    nodes.join([nodes.nodes[0].service.address, nodes.nodes[1].service.address, None])
    for seed in (0, 3):
        assert nodes.all_read_all(seed)


def test_peers_that_are_closed_answer_nothing(cluster: Build) -> None:
    nodes = cluster(21, 21, copies=1)
    assert nodes.all_read_all()
    for node in nodes.nodes:
        assert node.peers is not None
        node.peers.close()
    assert nodes.all_read_all(2)


def test_bounds(cluster: Build) -> None:
    node: Any = cluster(50, 50).nodes[0]
    with pytest.raises(IndexError):
        node.staged.read(np.array([(0, 100)], EXTENT), np.empty(10, np.uint8), np.zeros(1, np.int64))
