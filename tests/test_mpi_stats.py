"""What the ranks did, told on several ranks and nodes."""

import logging
import os
import time

import lmdb
import pytest

import pario
from pario.fetch.posix import PosixFetcher

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 240
SLOW_S = 0.5  # of the slow part in one loop
SMALL = pario.Options(slot_bytes=64 << 10, slots=3)


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("set") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in range(N):
                txn.put(b"%06d" % i, bytes([i % 251]) * (2000 + i))
    return world.bcast(place)


def told(loader, step=lambda: None):
    """The report of one loop, without the first one, which compiles."""
    for _batch in loader:
        pass
    before = loader.report(all_ranks=True)
    for _batch in loader:
        step()
    return loader.report(all_ranks=True).since(before)


def test_every_rank_gets_the_same_report(world, path, caplog):
    caplog.set_level(logging.INFO, "pario")
    with pario.Loader(path, 5, shuffle="global", comm=world, options=SMALL) as loader:
        for _ in range(2):
            for _batch in loader:
                pass
        report = loader.report(all_ranks=True)
        mine = loader.stats()
    assert len({str(report) for report in world.allgather(report)}) == 1
    assert [rank.rank for rank in report.ranks] == list(range(world.size))
    assert report.ranks[world.rank].node_bytes == mine["node_bytes"]
    assert report.total["records"] == 2 * N
    assert report.total["node_bytes"] == 2 * sum(2000 + i for i in range(N))
    assert report.total["node_bytes"] <= report.total["bytes_read"]
    readers = [rank for rank in report.ranks if rank.reader]
    assert len(readers) == loader.world.nodes
    assert {rank.node for rank in readers} == set(range(loader.world.nodes))
    assert all(rank.reads == 0 for rank in report.ranks if not rank.reader)
    lines = [record.getMessage() for record in caplog.records if record.name == "pario"]
    assert [line.split(":")[0] for line in lines] == (["epoch 0", "epoch 1"] if world.rank == 0 else [])
    assert all(f": {N} records in " in line for line in lines)


def test_a_slow_consumer_on_one_rank(world, path):
    slow = world.size - 1
    with pario.Loader(path, 3, comm=world, options=SMALL) as loader:
        pause = SLOW_S / len(loader) if world.rank == slow else 0
        report = told(loader, lambda: time.sleep(pause))
        neighbours = [rank for rank in loader.world.node_ranks if rank != slow]
        beside = slow in loader.world.node_ranks
    if world.size == 1:
        assert report.sentence.startswith("the consumer's own code was the slow part"), report
        return
    assert report.sentence.startswith(f"rank {slow}'s consumer was the slow part: it took "), report
    assert "the store was idle" in report.sentence
    assert report.skew[0] == slow
    assert report.skew[1] > 1.5 or world.size == 2
    if beside:  # the ring was full, or so the others of its node found it empty
        assert all(report.ranks[rank].lost > report.ranks[slow].lost for rank in neighbours), report


def test_a_rank_asks_alone(world, path):
    """While the others wait for it elsewhere; and between its own batches."""
    with pario.Loader(path, 3, comm=world, options=SMALL) as loader:
        for batch in loader:
            if batch.step % 2 == world.rank % 2:
                (mine,) = loader.report().ranks
                assert (mine.rank, mine.batches) == (world.rank, batch.step + 1)
        text = str(loader.report()) if world.rank == world.size - 1 else ""
        world.Barrier()
        everyone = loader.report(all_ranks=True)
    assert sum(rank.records for rank in everyone.ranks) == N
    assert not text or ("report(all_ranks=True)" in text) == (world.size > 1)


def test_a_slow_rank_that_the_others_wait_for(world, path):
    """As in synchronous training: all are as long in their own code, and one computes."""
    slow = world.size - 1

    def step():
        end = time.thread_time() + SLOW_S / 20
        while world.rank == slow and time.thread_time() < end:
            pass
        met = world.Ibarrier()
        while not met.Test():
            time.sleep(0.001)

    with pario.Loader(path, N // 20 // world.size, comm=world, options=SMALL) as loader:
        report = told(loader, step)
    what = "the training loop's own code" if world.size > 1 else "the consumer's own code"
    assert report.sentence.startswith(f"{what} was the slow part: it took "), report
    assert (f"and on rank {slow} it computed " in report.sentence) == (world.size > 1), report


def test_a_slow_decoder_on_one_rank(world, path):
    slow = world.size // 2

    class Slow(pario.decode.Raw):
        def decode(self, records, out, draw):
            time.sleep(SLOW_S * 3 * world.size / N if world.rank == slow else 0)
            return super().decode(records, out, draw)

    with pario.Loader(path, 3, Slow(), comm=world, options=SMALL) as loader:
        report = told(loader)
    where = f"decoding on rank {slow}" if world.size > 1 else "decoding"
    assert report.sentence.startswith(f"{where} was the slow part: it took "), report


def test_a_slow_store(world, path, monkeypatch):
    read = PosixFetcher.read

    def late(self, reads, out, starts):
        for k in range(len(reads)):
            time.sleep(0.03)
            read(self, reads[k : k + 1], out, starts[k : k + 1])

    with pario.Loader(path, 10, comm=world, options=pario.Options(slot_bytes=64 << 10, slots=2, inflight=1)) as loader:
        for _batch in loader:
            pass
        before = loader.report(all_ranks=True)
        monkeypatch.setattr(PosixFetcher, "read", late)
        for _batch in loader:
            pass
        report = loader.report(all_ranks=True).since(before)
        nodes = loader.world.nodes
    assert "was the slow part" in report.sentence
    assert report.sentence.startswith("the store " if nodes == 1 else ("the store ", "reading on rank ")), report
    assert all(rank.lost > 0.4 * rank.loop for rank in report.ranks), report
    assert report.stalled


def test_metrics_of_all_ranks_in_one_file(world, path, tmp_path_factory):
    parser = pytest.importorskip("prometheus_client.parser")
    folder = world.bcast(str(tmp_path_factory.mktemp("metrics")) if world.rank == 0 else None)
    options = pario.Options(slot_bytes=64 << 10, slots=3, metrics_file=f"{folder}/pario.prom")
    with pario.Loader(path, 5, comm=world, options=options) as loader:
        for _batch in loader:
            pass
    if world.rank == 0:
        assert os.listdir(folder) == ["pario.prom"]
        with open(f"{folder}/pario.prom") as file:
            families = {family.name: family for family in parser.text_string_to_metric_families(file.read())}
        records = {sample.labels["rank"]: sample.value for sample in families["pario_records"].samples}
        assert set(records) == {str(rank) for rank in range(world.size)}
        assert sum(records.values()) == N
        assert len(families["pario_read_bytes"].samples) == loader.world.nodes
    world.Barrier()


def test_a_report_on_one_rank_only_is_told(world, path):
    if world.size == 1:
        pytest.skip("needs a second rank")
    loader = pario.Loader(path, 5, comm=world, options=SMALL)
    with pytest.raises(pario.ParioError, match="different ways"):
        loader.report(all_ranks=True) if world.rank == 0 else loader.close()
    world.Barrier()
