"""Tiers on several ranks and nodes. The oracle is what was written, and the bytes that left the store."""

from __future__ import annotations

import os
import time
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest

import pario
from pario.comm.world import get_world
from pario.dataset import host as host_module
from pario.dataset.host import Host
from pario.errors import OptionError, PeerError, ReadError
from pario.feed import seat
from pario.fetch.file import FileFetcher
from pario.tiers import asking

pytestmark = pytest.mark.mpi

N = 1200
SIZE = 4000
MiB = 1 << 20


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def value(i):
    return np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("tiers") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(N).tolist():
                txn.put(b"%06d" % i, value(i))
    place = world.bcast(place)
    with pario.Reader(place):
        pass  # saves the index
    return place


@pytest.fixture
def store_bytes(monkeypatch):
    seen = []
    read = FileFetcher.read

    def counting(self, reads, out, starts):
        seen.extend(reads["nbytes"].tolist())
        read(self, reads, out, starts)

    monkeypatch.setattr(FileFetcher, "read", counting)
    return seen


def options(*tiers, **more):
    """None: no tiers of the job's own"""
    own = None if tiers == (None,) else tiers
    return pario.Options(tiers=own, slot_bytes=256 << 10, block_bytes=128 << 10, mix_blocks=4, **more)


def epoch(loader):
    """Record ids of all ranks, content checked."""
    seen = []
    for batch in loader:
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][k].tobytes() == value(i)
        seen.append(batch.ids.tolist())
    everyone = loader.world.allgather(seen)
    assert len({len(s) for s in everyone}) == 1
    return sorted(chain.from_iterable(chain.from_iterable(everyone)))


def two_epochs(loader):
    """A rank that has had all its batches when another one fails hears of it at the start of the next epoch."""
    for _ in range(2):
        for _batch in loader:
            pass


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_the_ranks_of_a_node_share_one_memory(world, path, store_bytes, shuffle):
    size = Path(path, "data.mdb").stat().st_size
    with pario.Loader(
        path, 16, pario.decode.Raw(shape=(SIZE,)), shuffle=shuffle, options=options(pario.Tier("memory"))
    ) as loader:
        nodes = loader.world.nodes
        for _ in range(2):
            assert epoch(loader) == list(range(N))
        assert sum(world.allgather(sum(store_bytes))) <= 1.02 * size
        for _ in range(1 + nodes):
            assert epoch(loader) == list(range(N))
        store_bytes.clear()
        if nodes == 1:
            assert epoch(loader) == list(range(N))
            assert world.allgather(sum(store_bytes)) == [0] * world.size


def test_no_filling_looks_for_what_other_nodes_read(world, tmp_path_factory, monkeypatch):
    """In key order a node's memory never gets all chunks: each epoch began a filling that found nothing to do."""
    place = world.bcast(str(tmp_path_factory.mktemp("key") / "x.lmdb") if world.rank == 0 else None)
    n = 40 * world.size + 7
    if world.rank == 0:
        with lmdb.open(place, map_size=1 << 28) as env, env.begin(write=True) as txn:
            for i in range(n):
                txn.put(b"%06d" % i, np.full(100_000, i % 251, np.uint8).tobytes())
    begun = []
    begin = seat.begin_fill
    monkeypatch.setattr(seat, "begin_fill", lambda *a: (begun.append((made := begin(*a)) is not None), made)[1])
    everyones = [[True]]
    with pario.Loader(place, 20, drop_last=True) as loader:
        for _ in range(500):
            for batch in loader:
                time.sleep(0.002)  # the filling of an epoch that has ended is cancelled
                assert [batch["data"][a] for a in batch["offsets"][:-1]] == [i % 251 for i in batch.ids]
            everyones = world.allgather(begun)
            if not any(begun[-1] for begun in everyones if begun):
                break
        held = world.allgather(loader.stats()["tiers"][0]["held_bytes"] if loader.world.is_leader else 0)
        # Of what lies between the records of its ranks a node brings next to nothing.
        assert 0.95 * 100_000 * n < sum(held) < 1.1 * os.path.getsize(os.path.join(place, "data.mdb"))
    assert any(begun[0] for begun in everyones if begun)
    assert not any(begun[-1] for begun in everyones if begun)


def test_a_disk_of_the_node(world, path, store_bytes, tmp_path_factory):
    folder = world.bcast(str(tmp_path_factory.mktemp("disk")) if world.rank == 0 else None)
    for _ in range(2):
        with pario.Loader(
            path, 16, pario.decode.Raw(shape=(SIZE,)), shuffle="global", options=options(pario.Tier(folder))
        ) as loader:
            store_bytes.clear()  # opening compares a sample of leaf pages with the saved index
            for _ in range(2):
                assert epoch(loader) == list(range(N))
    assert world.allgather(sum(store_bytes)) == [0] * world.size


# -- nodes that read from each other ----------------------------------------------------------------------------------


def data_bytes(path):
    return Path(path, "data.mdb").stat().st_size


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("part", [1.3, 0.6])
def test_every_byte_leaves_the_store_once_per_job(world, path, store_bytes, shuffle, part):
    """Of several nodes, whatever room each one has, if all of them together have enough."""
    quota = int(part * data_bytes(path))
    with pario.Loader(
        path,
        16,
        pario.decode.Raw(shape=(SIZE,)),
        shuffle=shuffle,
        options=options(pario.Tier("memory", quota)),
    ) as loader:
        nodes = loader.world.nodes
        store_bytes.clear()
        assert epoch(loader) == list(range(N))
        total = world.allreduce(sum(store_bytes))
        if nodes * part > 1.2:
            assert total <= 1.02 * data_bytes(path)
            store_bytes.clear()
            for _ in range(2):
                assert epoch(loader) == list(range(N))
            assert world.allreduce(sum(store_bytes)) == 0
        stats = loader.stats()
        assert ("peers" in stats) == (nodes > 1)
        if nodes > 1 and part < 1:
            assert world.allreduce(stats["peers"]["read_bytes"]) > 0
            assert stats["peers"]["lost"] == 0


def test_small_records_without_a_saved_index(world, store_bytes, tmp_path_factory):
    """Their leaf pages are the file: the nodes bring it while they walk through it."""
    folder = world.bcast(str(tmp_path_factory.mktemp("small")) if world.rank == 0 else None)
    n = 30_000
    if world.rank == 0:
        with lmdb.open(folder, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(n).tolist():
                txn.put(b"%06d" % i, b"%0100d" % i)
    world.barrier()
    with pario.Loader(
        folder, 500, pario.decode.Raw(shape=(100,)), shuffle="global", options=options(pario.Tier("memory")),
        save_index=False,
    ) as loader:  # fmt: skip
        seen = [row.tobytes() for batch in loader for row in batch["data"]]
        assert sorted(chain.from_iterable(world.allgather(seen))) == [b"%0100d" % i for i in range(n)]
    assert sum(world.allgather(sum(store_bytes))) <= 1.02 * data_bytes(folder) + 64 * 4096 * world.size


def test_each_node_for_itself(world, path, store_bytes):
    with pario.Loader(path, 16, shuffle="global", options=options(pario.Tier("memory"), peers=False)) as loader:
        for _batch in loader:
            pass
        assert "peers" not in loader.stats()
        nodes = loader.world.nodes
    assert world.allreduce(sum(store_bytes)) >= 0.9 * nodes * data_bytes(path)


def test_a_node_that_serves_no_more(world, path, store_bytes):
    """Only what it alone kept is read again, by whoever needs it."""
    with pario.Reader(path) as reader:
        quota = int((0.6 if reader.world.nodes > 1 else 1.3) * data_bytes(path))
    with pario.Loader(
        path,
        16,
        pario.decode.Raw(shape=(SIZE,)),
        shuffle="block",
        options=options(pario.Tier("memory", quota)),
    ) as loader:
        assert epoch(loader) == list(range(N))
        stage, node = loader._life.reader.stage, loader.world.node
        lost = 0
        if loader.world.nodes > 1:
            lost = len(stage.placement.kept_by(1)) * stage.tiers[0].grid.chunk_bytes
            if node == 1 and stage.service is not None:
                stage.service.close()
        world.Barrier()
        store_bytes.clear()
        for _ in range(2):
            assert epoch(loader) == list(range(N))
        assert world.allreduce(sum(store_bytes)) <= 2 * world.size * lost
        if loader.world.nodes > 1:
            assert world.allreduce(loader.stats()["peers"]["lost"]) > 0


def test_disks_of_several_nodes_and_the_next_job(world, path, store_bytes, tmp_path_factory, monkeypatch):
    folder = world.bcast(str(tmp_path_factory.mktemp("disks")) if world.rank == 0 else None)
    for job in range(2):
        with pario.Reader(path) as reader:
            nodes, node = reader.world.nodes, reader.world.node
        monkeypatch.setenv("NODE", str(node))
        store_bytes.clear()
        quota = int(1.4 * data_bytes(path) / nodes) + (2 << 20)
        with pario.Loader(
            path,
            16,
            pario.decode.Raw(shape=(SIZE,)),
            shuffle="block",
            options=options(pario.Tier(f"{folder}/$NODE", quota)),
        ) as loader:
            assert epoch(loader) == list(range(N))
        # Less are leaf pages, drawn at random for the index; four of them are neighbours once in a thousand jobs.
        chunks = world.allreduce(sum(n for n in store_bytes if n > 16384))
        assert chunks <= (1.02 * data_bytes(path) if job == 0 else 0)


@pytest.fixture
def services(world, path, tmp_path_factory, monkeypatch):
    """services(part) starts one on each node, with so much room as a part of the data."""
    hosts = []

    def start(part):
        folder = world.bcast(str(tmp_path_factory.mktemp("services")) if world.rank == 0 else None)
        tier = pario.Tier("memory", (int(part * data_bytes(path)) // MiB + 1) * MiB)
        with get_world(world) as everybody:
            here = f"{folder}/{everybody.node}"
            hosts.append(Host(here, pario.Options(tiers=(tier,)), everybody))
        monkeypatch.setenv("PARIO_SERVICE", here)
        return hosts[-1]

    yield start
    world.barrier()  # nobody's service ends while others may ask it
    for host in hosts:
        host.close()


@pytest.mark.parametrize(("shuffle", "part"), [(False, 0.5), ("block", 1.3), ("global", 0.5)])
def test_a_job_on_each_node_and_services_that_they_share(world, path, store_bytes, services, shuffle, part):
    """The jobs know nothing of each other, and together read the store once."""
    size, host = data_bytes(path), services(part)
    nodes = world.allreduce(host.number is not None)
    raw = pario.decode.Raw(shape=(SIZE,))
    for epochs in (1 + world.rank % 2, 1):  # and have different lengths
        with pario.Loader(path, 16, raw, comm="self", shuffle=shuffle, options=options(None)) as loader:
            for _ in range(epochs):
                assert epoch(loader) == list(range(N))
            assert loader.stats()["store_bytes"] == 0 or nodes * part < 1
        world.barrier()
    assert sum(world.allgather(sum(n for n in store_bytes if n > 8192))) <= 1.02 * size or nodes * part < 1
    if host.number is not None:
        assert sum(each["held_bytes"] for each in host.state()) <= part * size + 2 * MiB


@pytest.mark.parametrize(("shuffle", "part"), [("block", 0.5), ("global", 1.3)])
def test_a_job_of_all_ranks_and_a_service_on_each_node(world, path, store_bytes, services, shuffle, part):
    size, host = data_bytes(path), services(part)
    nodes = world.allreduce(host.number is not None)
    raw = pario.decode.Raw(shape=(SIZE,))
    for _ in range(2):
        with pario.Loader(path, 16, raw, shuffle=shuffle, options=options(None)) as loader:
            for _ in range(2):
                assert epoch(loader) == list(range(N))
            assert [tier["name"] for tier in loader.stats()["tiers"]] == ["service"]
    assert sum(world.allgather(sum(n for n in store_bytes if n > 8192))) <= 1.02 * size or nodes * part < 1


def test_a_job_of_all_ranks_whose_services_have_gone(world, path, services):
    host = services(1.3)
    raw = pario.decode.Raw(shape=(SIZE,))
    with pario.Loader(path, 16, raw, shuffle="global", options=options(None)) as loader:
        assert epoch(loader) == list(range(N))
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["service"]
        world.barrier()
        host.close()
        world.barrier()
        for _ in range(2):
            assert epoch(loader) == list(range(N))
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory"]  # of its own


def test_a_dataset_that_a_service_has_let_go(world, path, services, monkeypatch):
    """The next job that opens it, on whichever node, brings it back on all of them."""
    host = services(0.5)
    monkeypatch.setattr(host_module, "_LOOK_S", 0.0)
    for _ in range(2):
        if world.rank == 0:
            with pario.Loader(
                path, 16, pario.decode.Raw(shape=(SIZE,)), comm="self", shuffle="block", options=options(None)
            ) as loader:
                assert epoch(loader) == list(range(N))
        world.barrier()
        if host.number:
            (dataset,) = host._open_now()
            assert dataset.stage.held().any()
            del host._datasets[dataset.identity]
            dataset.close()
        world.barrier()


def test_a_node_without_a_service(world, path, services, monkeypatch):
    """Then nobody uses one, and each node keeps the file by itself."""
    services(1.3)
    with get_world(world) as everybody:
        node, nodes = everybody.node, everybody.nodes
    folder = world.bcast(str(Path(os.environ["PARIO_SERVICE"]).parent))
    monkeypatch.setenv("PARIO_SERVICE", f"{folder}/$PARIO_NODE")
    monkeypatch.setenv("PARIO_NODE", str(node) if node < nodes - 1 else "x")
    monkeypatch.setattr(asking, "START_S", 0.2)
    with pario.Loader(path, 16, pario.decode.Raw(shape=(SIZE,)), options=options(None)) as loader:
        assert epoch(loader) == list(range(N))
        assert [tier["name"] for tier in loader.stats()["tiers"]] == ["memory"]  # of its own


def test_tiers_that_cannot_be_meant_are_an_error_on_all_ranks(world, path):
    with pytest.raises((OptionError, PeerError), match="does not hold one chunk"):
        pario.Loader(path, 16, options=options(pario.Tier("memory", 1000)))


def test_an_error_of_the_filling_rank_reaches_all(world, path, monkeypatch):
    loader = pario.Loader(path, 16, shuffle="global", options=options(pario.Tier("memory"), alive_seconds=0.2))

    def refuse(*_):
        raise ReadError("broken store", path=path)

    if loader.world.is_leader:
        monkeypatch.setattr(FileFetcher, "read", refuse)
    with pytest.raises((ReadError, PeerError), match="broken store"), loader:
        two_epochs(loader)


def test_the_filling_rank_leaves_early(world, path):
    with pario.Loader(
        path, 16, pario.decode.Raw(shape=(SIZE,)), shuffle="global", options=options(pario.Tier("memory"))
    ) as loader:
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][k].tobytes() == value(i)
            if loader.world.is_leader:
                break
        assert epoch(loader) == list(range(N))
