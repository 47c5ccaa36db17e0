"""Ranks that take their records from a file of their node, out of a tier and by themselves, on several ranks, nodes and
communicators. The oracle is what was written, read back by py-lmdb."""

from __future__ import annotations

import os
import shutil
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest

import pario
from pario.decode import Raw
from pario.errors import CorruptedError, DecodeError, PeerError
from pario.feed.choose import Way
from pario.feed.seat import Seat

pytestmark = pytest.mark.mpi

N = 211
ROW = 20_000
SIZES = {"slot_bytes": 256 << 10, "block_bytes": 128 << 10, "mix_blocks": 4}
#: out of the tier by default, which gets nothing, or everything
FORMS = ["scratch", "tier"]


@pytest.fixture(params=FORMS)
def seated(request):
    """Options."""
    if request.param == "scratch":
        request.getfixturevalue("nothing_copied")
    return pario.Options(**SIZES)


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def value(i):
    return np.random.default_rng(i).integers(0, 256, ROW, dtype=np.uint8).tobytes()


def write(world, tmp_path_factory, name):
    """Inserted in random order in several commits; every rank gets the path, rank 0 writes."""
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp(name) / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env:
            for part in np.array_split(np.random.default_rng(0).permutation(N), 5):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"%06d" % i, value(i))
    return world.bcast(place)


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    return write(world, tmp_path_factory, "own")


@pytest.fixture(scope="module")
def expected(path):
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [bytes(v) for _, v in txn.cursor()]


def take(loader, expected):
    """Record ids of one epoch on this rank, by steps; content checked."""
    seen = []
    for batch in loader:
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][k].tobytes() == expected[i]
        seen.append(batch.ids.tolist())
    return seen


def steps_of_all(comm, seen):
    everyone = comm.allgather(seen)
    assert len({len(s) for s in everyone}) == 1, "every rank has the same number of batches"
    return [sorted(chain.from_iterable(s[k] for s in everyone)) for k in range(len(seen))]


def two_epochs(loader):
    """A rank that has had all its batches when another one fails hears of it at the start of the next epoch."""
    for _ in range(2):
        for _batch in loader:
            pass


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize(
    ("alone", "batch_size"), [(False, 3), (False, 100), pytest.param(True, 7, marks=pytest.mark.full)]
)
def test_the_same_steps_as_through_the_ring(world, path, expected, shuffle, alone, batch_size, request):
    from mpi4py import MPI

    comm = MPI.COMM_SELF if alone else world
    steps = {}
    for way in ("ring", "tier", "scratch"):
        if way == "scratch":
            request.getfixturevalue("nothing_copied")
        options = pario.Options(**SIZES)
        given = {"shuffle": shuffle, "comm": comm, "recipe": "ring" if way == "ring" else "auto", "options": options}
        with pario.Loader(path, batch_size, Raw("u1", ROW), **given) as loader:
            mine = [take(loader, expected) for _ in range(2)]
            steps[way] = [steps_of_all(comm, seen) for seen in mine]
            assert loader.stats()["staged"] == (way != "ring")
            report = loader.report(all_ranks=True)
        for epoch in steps[way]:
            assert sorted(chain.from_iterable(epoch)) == list(range(N))
        if way == "scratch":
            assert sum(rank.records for rank in report.ranks) == 2 * N
            looks = sum(rank.batches for rank in report.ranks)  # whether the snapshot is still there
            assert 0 < sum(rank.reads for rank in report.ranks) <= 2 * N + looks  # neighbours are one read
    assert steps["scratch"] == steps["tier"] == steps["ring"]


@pytest.mark.parametrize("shuffle", [False, "block"])
def test_resume_on_another_number_of_ranks(world, path, expected, seated, shuffle):
    from mpi4py import MPI

    with pario.Loader(path, 4, Raw("u1", ROW), shuffle=shuffle, seed=9, comm=world, options=seated) as loader:
        first = []
        for batch in loader:
            first += batch.ids.tolist()
            if batch.step == 3:
                break
        state = loader.state_dict()
    done = list(chain.from_iterable(world.allgather(first)))
    with pario.Loader(path, 7, Raw("u1", ROW), shuffle=shuffle, seed=9, comm=MPI.COMM_SELF, options=seated) as loader:
        loader.load_state_dict(state)
        rest = list(chain.from_iterable(take(loader, expected)))
    assert sorted(done + rest) == list(range(N))


def test_each_node_decides_for_itself_and_its_ranks_agree(world, path, expected, monkeypatch):
    options = pario.Options(slot_bytes=256 << 10)
    way = Way.RING if world.rank == 0 else Way.SEAT  # others than the first ranks of nodes are not asked
    monkeypatch.setattr("pario.feed.automatic.choose", lambda _: way)
    with pario.Loader(path, 8, Raw("u1", ROW), shuffle="global", comm=world, options=options) as loader:
        for _ in range(2):
            take(loader, expected)
            places = set(world.allgather((loader.world.node, isinstance(loader._life.source, Seat))))
            assert places == {(node, node != 0) for node in range(loader.world.nodes)}


def test_a_record_of_another_size_on_one_rank_stops_all(world, path, seated):
    """Every rank gets some records; one of them cannot read the last ones."""
    decoder = Raw("u1", ROW if world.rank else (2, ROW // 2))
    decoder.spec = (ROW,)
    with pario.Loader(path, 2, decoder, comm=world, options=seated) as loader:
        if world.rank == world.size - 1:
            loader.decoder.spec = (ROW + 1,)
        kind = DecodeError if world.rank == world.size - 1 else PeerError
        with pytest.raises(kind, match="expected 20001 bytes"):
            two_epochs(loader)
    world.Barrier()


def test_a_file_that_is_replaced_stays_the_old_one(world, tmp_path_factory, expected, seated):
    """Ranks that open it only now have its leader's."""
    path = write(world, tmp_path_factory, "replaced")
    with pario.Loader(path, 5, Raw("u1", ROW), comm=world, options=seated) as loader:
        world.Barrier()
        if world.rank == 0:
            Path(path, "data.mdb").unlink()
            Path(path, "data.mdb").write_bytes(b"no database")
        world.Barrier()
        seen = take(loader, expected)
        steps_of_all(world, seen)
    world.Barrier()


def test_damage_stops_all(world, tmp_path_factory, seated):
    path = write(world, tmp_path_factory, "damaged")
    with pario.Reader(path, comm=world) as reader:
        offset = int(reader.index.extents["offset"][77])
    if world.rank == 0:
        before = os.stat(f"{path}/data.mdb")
        with open(f"{path}/data.mdb", "r+b") as f:
            f.seek(offset - 16)
            f.write(b"\xff")
        os.utime(f"{path}/data.mdb", ns=(before.st_atime_ns, before.st_mtime_ns))
    world.Barrier()
    with (
        pario.Loader(path, 5, Raw("u1", ROW), comm=world, options=seated) as loader,
        pytest.raises((CorruptedError, PeerError), match="page header") as caught,
    ):
        two_epochs(loader)
    assert any(world.allgather(isinstance(caught.value, CorruptedError)))  # of two nodes both may find it
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)
