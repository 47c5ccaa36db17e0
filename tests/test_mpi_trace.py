"""A trace of several ranks: one file, in which every rank is a process, and what the ranks did on their nodes."""

import json
import os

import lmdb
import pytest

import pario
from pario.stats.trace_file import read_head
from pario.stats.trace_summary import read_ranks

pytestmark = pytest.mark.mpi

N = 240
SMALL = {"slot_bytes": 64 << 10, "slots": 3, "tiers": (), "once": True}


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def folder(world, tmp_path_factory):
    where = None
    if world.rank == 0:
        where = str(tmp_path_factory.mktemp("set"))
        with lmdb.open(f"{where}/x.lmdb", map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in range(N):
                txn.put(b"%06d" % i, bytes([i % 251]) * 3000)
    return world.bcast(where)


def test_rank_0_makes_one_file_of_all_ranks(world, folder):
    trace = f"{folder}/t.json"
    options = pario.Options(trace=trace, **SMALL)
    with pario.Loader(f"{folder}/x.lmdb", 5, comm=world, recipe="ring", options=options) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        report = loader.report(all_ranks=True)
    world.barrier()
    if world.rank == 0:
        assert [name for name in os.listdir(folder) if name.startswith("t.")] == ["t.json"]
        ranks = read_ranks(read_head(trace), trace)
        assert [rank.rank for rank in ranks] == list(range(world.size))
        assert [rank.node for rank in ranks] == [rank.node for rank in report.ranks]
        for rank, told in zip(ranks, report.ranks, strict=True):
            stats = rank.loaders[0].stats
            assert (stats.records, stats.bytes_read) == (told.records, told.bytes_read)
            assert sum(file.nbytes for file in rank.files) >= stats.bytes_read
        with open(trace) as file:
            events = json.load(file)["traceEvents"]
        assert {event["pid"] for event in events} == set(range(world.size))
    world.barrier()


def fails(loader, divisor):
    with loader:
        for _ in range(100):
            for _ in loader:
                if not divisor:
                    _ = 1 / divisor


def test_an_error_on_one_rank_leaves_the_parts_of_all(world, folder):
    trace = f"{folder}/e.json"
    loader = pario.Loader(f"{folder}/x.lmdb", 5, comm=world, recipe="ring", options=pario.Options(trace=trace, **SMALL))
    with pytest.raises((ZeroDivisionError, pario.PeerError)):
        fails(loader, world.rank - world.size + 1)
    world.barrier()
    if world.rank == 0:
        names = [f"e.rank{rank}.json" for rank in range(world.size)] if world.size > 1 else ["e.json"]
        assert sorted(name for name in os.listdir(folder) if name.startswith("e.")) == sorted(names)
        for name in names:
            read_ranks(read_head(f"{folder}/{name}"), name)
    world.barrier()
