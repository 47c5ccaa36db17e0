"""First epochs without an index, on several ranks and nodes. The oracle is py-lmdb's cursor."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from itertools import chain

import lmdb
import numpy as np
import pytest
from datasets import MAKERS, truth_of

import pario
from pario.comm.world import get_world
from pario.errors import CorruptedError, ParioError, PeerError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.locate import growing
from pario.locate.database import Database
from pario.locate.open import open_index

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

SMALL = pario.Options(slot_bytes=128 << 10, slots=3)
KINDS = ["caffe_datum", "variable_sizes", "small_records", "random_insertion", "named_databases", "one_giant"]


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def place(world):
    folder = world.bcast(tempfile.mkdtemp(prefix="pario-test-") if world.rank == 0 else None)
    yield folder
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sets(world, place):
    """name -> (path, db, values), every file written once, by rank 0."""
    if world.rank == 0:
        for name in KINDS:
            MAKERS[name](f"{place}/{name}")
    world.Barrier()
    found = {}
    for name in KINDS:
        db = b"second" if name == "named_databases" else None
        found[name] = f"{place}/{name}", db, [value for _, value in truth_of(f"{place}/{name}", db)]
    return found


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Without an index also where a walk would be the better choice."""
    monkeypatch.setattr(growing, "LEAST_LEAVES", 1)
    monkeypatch.setattr(growing, "MOST_REPEATED", 9.0)


def take(loader, expected):
    """[ids] of each step on this rank, content checked."""
    seen = []
    for batch in loader:
        offsets = batch["offsets"]
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == expected[i], f"record {i}"
        seen.append(batch.ids.tolist())
    return seen


def steps_of(comm, seen):
    """The records of each step over all ranks."""
    everyone = comm.allgather(seen)
    return [sorted(chain.from_iterable(s[k] for s in everyone)) for k in range(len(seen))]


def forget(comm, path):
    comm.Barrier()
    if comm.rank == 0:
        for name in glob.glob(f"{path}/*.pario.index"):
            os.unlink(name)
    comm.Barrier()


#: dm and lmm over all kinds of files: tests/test_mpi_recipes.py
@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, "auto") for name in KINDS), ("caffe_datum", "dm"), ("variable_sizes", "lmm")]
)
def test_every_record_in_order(world, sets, name, recipe):
    path, db, expected = sets[name]
    forget(world, path)
    options = pario.Options(slot_bytes=128 << 10, slots=3) if recipe == "auto" else None
    batch_size = 23
    with pario.Loader(path, batch_size, db=db, comm=world, options=options, recipe=recipe) as loader:
        assert not loader.index.sizes_known
        per_step = batch_size * world.size
        for _ in range(2):
            steps = steps_of(world, take(loader, expected))
            assert list(chain.from_iterable(steps)) == list(range(len(expected)))
            assert all(len(step) == per_step for step in steps[:-1])
        world.Barrier()
        assert bool(glob.glob(f"{path}/*.pario.index")) == (recipe == "auto")


@pytest.mark.parametrize("name", ["caffe_datum", "variable_sizes", "named_databases"])
def test_the_index_is_the_walks(world, sets, name):
    path, db, expected = sets[name]
    forget(world, path)
    with pario.Loader(path, 16, db=db, comm=world, options=SMALL) as loader:
        take(loader, expected)
        grown = loader.index
        with get_world(world) as everybody:
            pool = ReadPool(PosixFetcher(f"{path}/data.mdb"), 2)
            snapshot = world.bcast(read_snapshot(pool.fetcher) if world.rank == 0 else None)
            saved = open_index(Database(f"{path}/data.mdb", snapshot, db), pool, everybody)
            assert saved.bytes_read == 0, "the first epoch saved an index that fits"
            ids = np.arange(len(expected))
            keys = [index.keys(ids) for index in (saved, grown)]
            forget(world, path)
            walked = open_index(Database(f"{path}/data.mdb", snapshot, db), pool, everybody, save=False)
            assert keys == [walked.keys(ids)] * 2
            for index in (saved, grown):
                assert (index.content_id, index.database.fingerprint) == (
                    walked.content_id,
                    walked.database.fingerprint,
                )
                np.testing.assert_array_equal(index.extents, walked.extents)
                assert (index.by_offset is None) == (walked.by_offset is None)
                if walked.by_offset is not None:
                    np.testing.assert_array_equal(index.by_offset, walked.by_offset)
                assert index.mean_bytes == walked.mean_bytes
            pool.close()
            pool.fetcher.close()


@pytest.mark.parametrize("recipe", ["auto", "dm"])
def test_an_interrupted_first_epoch_goes_on(world, sets, recipe):
    from mpi4py import MPI

    path, db, expected = sets["variable_sizes"]
    forget(world, path)

    def loader_of(comm, batch_size):
        return pario.Loader(path, batch_size, db=db, comm=comm, recipe=recipe, options=SMALL, save_index=False)

    first = []
    with loader_of(world, 9) as loader:
        for batch in loader:
            first.append(batch.ids.tolist())
            if batch.step == 5:
                state = loader.state_dict()
                break
    assert not glob.glob(f"{path}/*.pario.index")
    done = sorted(chain.from_iterable(steps_of(world, first)))
    assert done == list(range(6 * 9 * world.size))
    for comm in (world, MPI.COMM_SELF):
        with loader_of(comm, 11) as loader:
            loader.load_state_dict(state)
            rest = list(chain.from_iterable(steps_of(comm, take(loader, expected))))
            assert done + rest == list(range(len(expected)))
    # The walk's index and the growing one mean the same place.
    with pario.Loader(path, 11, db=db, comm=world, shuffle=False, options=SMALL) as loader:
        take(loader, expected)
    with pario.Loader(path, 11, db=db, comm=world, options=SMALL) as loader:
        assert loader.index.sizes_known
        loader.load_state_dict({**state})


def test_records_that_do_not_fit_the_ring(world, place):
    """Sizes are estimated from the mean: runs of much larger records are read by the ranks that take them."""
    path = f"{place}/uneven"
    if world.rank == 0:
        sizes = np.where(np.arange(900) % 300 < 280, 2500, 60_000)
        with lmdb.open(path, map_size=1 << 27) as env, env.begin(write=True) as txn:
            for i, size in enumerate(sizes.tolist()):
                txn.put(b"%06d" % i, np.random.default_rng(i).bytes(size))
    world.Barrier()
    expected = [value for _, value in truth_of(path)]
    forget(world, path)
    with pario.Loader(path, 4, comm=world, options=SMALL) as loader:
        for _ in range(2):
            steps = steps_of(world, take(loader, expected))
            assert list(chain.from_iterable(steps)) == list(range(900))


@pytest.mark.parametrize("recipe", ["auto", "dm"])
def test_damage_in_the_middle_stops_all(world, sets, place, recipe):
    path, db, expected = sets["caffe_datum"]
    copy = f"{place}/damaged-{recipe}"
    if world.rank == 0:
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.index"))
        with pario.Reader(copy, comm=_self(), save_index=False) as reader:
            offset = int(reader.index.extents[2500]["offset"])
        with open(f"{copy}/data.mdb", "r+b") as file:
            file.seek(offset - 16)
            file.write(b"\xff" * 8)
    world.Barrier()
    with pytest.raises((CorruptedError, PeerError)) as caught:  # noqa: SIM117
        with pario.Loader(copy, 5, db=db, comm=world, recipe=recipe, options=SMALL) as loader:
            take(loader, expected)
    kinds = world.allgather((type(caught.value).__name__, caught.value.record))
    assert ("CorruptedError", 2500) in kinds


def test_a_damaged_leaf_stops_all(world, sets, place):
    path, db, _ = sets["caffe_datum"]
    copy = f"{place}/leaf"
    if world.rank == 0:
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.index"))
        pool = ReadPool(PosixFetcher(f"{copy}/data.mdb"), 1)
        with get_world(_self()) as me:
            snapshot = read_snapshot(pool.fetcher)
            index = open_index(Database(f"{copy}/data.mdb", snapshot), pool, me, save=False, grow=lambda: pool)
            page = int(index.growth.leaves[12])
        pool.close()
        with open(f"{copy}/data.mdb", "r+b") as file:
            file.seek(page * 4096 + 16)
            file.write(b"\xff" * 64)
    world.Barrier()
    with pytest.raises(ParioError) as caught:  # noqa: PT012, SIM117
        with pario.Loader(copy, 5, db=db, comm=world, options=SMALL) as loader:
            for _batch in loader:
                pass
    assert "CorruptedError" in world.allgather(type(caught.value).__name__)


def test_any_rank_may_ask_for_any_record(world, sets):
    path, _, expected = sets["caffe_datum"]
    keys = [key for key, _ in truth_of(path)]
    forget(world, path)
    with pario.Loader(path, 16, comm=world, options=SMALL, save_index=False) as loader:
        some = [3, 700 + world.rank, 2000, len(expected) - 1]
        assert loader.keys(some) == [keys[i] for i in some]
        records = loader._life.reader.read(some)
        assert [bytes(record) for record in records] == [expected[i] for i in some]
        steps = steps_of(world, take(loader, expected))
        assert list(chain.from_iterable(steps)) == list(range(len(expected)))


def _self():
    from mpi4py import MPI

    return MPI.COMM_SELF
