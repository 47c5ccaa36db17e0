"""The Loader on several ranks, nodes and communicators. The oracle is what was written, read back by py-lmdb."""

import gc
import shutil
import time
from itertools import chain
from pathlib import Path

import lmdb
import numpy as np
import pytest
from leftovers import communicators_left, open_things
from pairwise import pairwise

import pario
from pario.comm.world import get_world
from pario.errors import CorruptedError, DecodeError, ParioError, PeerError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 517
SHUFFLES = [False, "global", "block"]
SMALL = pario.Options(slot_bytes=128 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)


def only_me():
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def value(i):
    return np.random.default_rng(i).integers(0, 256, 10 + (i * 37) % 6000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    """Inserted in random order in several commits; every rank gets the path, rank 0 writes."""
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("set") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env:
            for part in np.array_split(np.random.default_rng(0).permutation(N), 7):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"%06d" % i, value(i))
    return world.bcast(place)


@pytest.fixture(scope="module")
def expected(path):
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [bytes(v) for _, v in txn.cursor()]


@pytest.fixture
def comm(request, world):
    """COMM_SELF, COMM_WORLD, and two halves that work beside each other."""
    from mpi4py import MPI

    if request.param == "self":
        yield MPI.COMM_SELF
    elif request.param == "world":
        yield world
    else:
        part = world.Split(world.rank % 2, world.rank)
        yield part
        part.Free()


def flat(lists):
    return list(chain.from_iterable(lists))


def take(loader, expected):
    """(epoch, step, ids) of one epoch on this rank, content checked."""
    seen = []
    for batch in loader:
        offsets = batch["offsets"]
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == expected[i]
        seen.append((batch.epoch, batch.step, batch.ids.tolist()))
    return seen


def global_steps(comm, seen):
    """The records of each step over all ranks, as sorted lists."""
    everyone = comm.allgather(seen)
    assert len({len(s) for s in everyone}) == 1, "every rank has the same number of batches"
    return [sorted(i for s in everyone for i in s[k][2]) for k in range(len(seen))]


@pytest.mark.parametrize(
    ("comm", "shuffle", "batch_size"),
    [
        *pairwise(["world", "parts"], SHUFFLES, [1, 16, 400]),
        *(pytest.param("self", shuffle, size, marks=pytest.mark.full) for shuffle in SHUFFLES for size in (1, 16, 400)),
    ],
    indirect=["comm"],
)
def test_every_record_exactly_once(comm, path, expected, shuffle, batch_size):
    with pario.Loader(path, batch_size, shuffle=shuffle, seed=1, comm=comm, options=SMALL) as loader:
        for epoch in range(2):
            seen = take(loader, expected)
            assert len(seen) == len(loader) == -(-N // (batch_size * comm.size))
            assert all(e == epoch for e, _, _ in seen)
            assert all(len(ids) == batch_size for _, _, ids in seen[:-1])
            sizes = comm.allgather(len(seen[-1][2]))
            assert max(sizes) - min(sizes) <= 1
            assert sorted(flat(global_steps(comm, seen))) == list(range(N))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_same_global_batches_for_every_number_of_ranks(world, path, expected, shuffle):
    from mpi4py import MPI

    steps = {}
    for name, comm in (("self", MPI.COMM_SELF), ("world", world)):
        batch_size = 30 // comm.size
        if 30 % comm.size:
            pytest.skip("30 records per step do not divide among these ranks")
        with pario.Loader(path, batch_size, shuffle=shuffle, seed=4, comm=comm, options=SMALL) as loader:
            steps[name] = global_steps(comm, take(loader, expected))
    assert steps["self"] == steps["world"]


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_resume_on_another_number_of_ranks(world, path, expected, shuffle):
    from mpi4py import MPI

    def loader_of(comm, batch_size):
        return pario.Loader(path, batch_size, shuffle=shuffle, seed=9, comm=comm, options=SMALL)

    with loader_of(world, 10) as loader:
        first = []
        for batch in loader:
            first += batch.ids.tolist()
            if batch.step == min(3, len(loader) - 1):
                break
        state = loader.state_dict()
        assert len({str(s) for s in world.allgather(state)}) == 1
    done = sorted(flat(world.allgather(first)))
    with loader_of(MPI.COMM_SELF, 7) as loader:
        loader.load_state_dict(state)
        rest = [i for _, _, ids in take(loader, expected) for i in ids]
    assert sorted(done + rest) == list(range(N))
    with loader_of(world, 3) as loader:
        loader.load_state_dict(state)
        seen = take(loader, expected)
        rest = flat(world.allgather([i for _, _, ids in seen for i in ids]))
    assert sorted(done + rest) == list(range(N))


def test_more_ranks_than_records(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("two") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 20) as env, env.begin(write=True) as txn:
            for i in range(2):
                txn.put(b"%d" % i, bytes([i]) * 12)
    place = world.bcast(place)
    with pario.Loader(place, 4, pario.decode.Raw("u1", (12,)), comm=world) as loader:
        assert len(loader) == 1
        for _ in range(2):
            (batch,) = list(loader)
            assert batch["data"].shape == (len(batch.ids), 12)
            assert sorted(flat(world.allgather(batch.ids.tolist()))) == [0, 1]


def test_a_slow_rank_delays_nobody_until_the_ring_is_full(world, path):
    if world.size == 1:
        pytest.skip("needs a second rank")
    options = pario.Options(slot_bytes=64 << 10, slots=3)
    with get_world(world) as all_ranks:
        nodes = all_ranks.nodes
    if nodes > 1:
        pytest.skip("all ranks must share a ring here")
    reached = Path(f"{path}.reached")
    reached.unlink(missing_ok=True)
    world.Barrier()
    with pario.Loader(path, 2, comm=world, options=options) as loader:
        for batch in loader:
            if world.rank == world.size - 1 and batch.step == 0:
                end = time.monotonic() + 20
                while not reached.exists():
                    assert time.monotonic() < end, "rank 0 waited for the slow rank"
                    time.sleep(0.01)
            if world.rank == 0 and batch.step == 3:
                reached.touch()
    world.Barrier()


def test_wrong_arguments_on_one_rank_raise_everywhere(world, path):
    if world.size == 1:
        pytest.skip("needs a second rank")
    with pytest.raises(ParioError, match="differ from those of rank 0"):
        pario.Loader(path, 4 + (world.rank == 1), comm=world)
    with pytest.raises(ParioError):
        pario.Loader(path if world.rank else "/nowhere/x.lmdb", 4, comm=world)
    with pytest.raises(ParioError):
        pario.Loader(path, 0 if world.rank == 1 else 4, comm=world)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_decoder_that_fails_on_one_rank_stops_all(world, path, parallel):
    def decode(record):
        if world.rank == world.size - 1 and len(record) > 3000:
            raise RuntimeError("no such picture")
        return {"n": len(record)}

    class Inline(pario.decode.Raw):
        def decode(self, records, out, draw):
            if world.rank == world.size - 1 and max(records.nbytes) > 3000:
                return [(int(np.argmax(records.nbytes)), "no such picture")]
            return super().decode(records, out, draw)

    kind = DecodeError if world.rank == world.size - 1 else PeerError
    with pytest.raises(kind, match="no such picture"):  # noqa: PT012, SIM117
        with pario.Loader(path, 2, decode if parallel else Inline(), shuffle="global", comm=world) as loader:
            for _ in range(10_000):
                for _batch in loader:
                    time.sleep(0.002)
    world.Barrier()


def test_an_exception_of_the_user_on_one_rank_stops_all(world, path):
    kind = ZeroDivisionError if world.rank == 0 else PeerError
    with pytest.raises(kind):  # noqa: PT012, SIM117
        with pario.Loader(path, 2, comm=world) as loader:
            for _ in range(10_000):
                for batch in loader:
                    time.sleep(0.002)
                    if world.rank == 0 and batch.step == 5:
                        1 / 0  # noqa: B018
    world.Barrier()


def test_ranks_that_are_done_hear_of_an_error_too(world, path):
    if world.size == 1:
        pytest.skip("needs a second rank")
    kind = ZeroDivisionError if world.rank == 0 else PeerError
    started = time.perf_counter()
    with pytest.raises(kind):  # noqa: PT012, SIM117
        with pario.Loader(path, 2, comm=world) as loader:
            for _ in range(2):
                for _batch in loader:
                    pass
                if world.rank == 0:  # the others wait in the start of the next epoch, then in close()
                    time.sleep(0.2)
                    1 / 0  # noqa: B018
    assert time.perf_counter() - started < 5
    world.Barrier()


def test_ranks_that_open_different_files_are_told(world, path, tmp_path_factory):
    if world.size == 1:
        pytest.skip("needs a second rank")
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("other") / "x.lmdb")
        shutil.copytree(path, place)
    place = world.bcast(place)
    with pytest.raises(ParioError, match="differ from those of rank 0"):
        pario.Loader(place if world.rank == 1 else path, 4, comm=world)
    with pytest.raises(ParioError, match="differ from those of rank 0"):
        pario.Loader(path, 4, comm=world, db="x" if world.rank == 1 else None)


def test_empty_batches_of_variable_records(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("ten") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 20) as env, env.begin(write=True) as txn:
            for i in range(world.size * 3 + 1):
                txn.put(b"%03d" % i, bytes([i]) * i)
    place = world.bcast(place)
    with pario.Loader(place, 3, comm=world) as loader:
        for _ in range(2):
            batches = list(loader)
            assert len(batches) == 2
            for batch in batches:
                assert batch["offsets"].tolist() == np.cumsum([0, *batch.ids.tolist()]).tolist()


def test_the_rank_where_it_happens_raises_the_error_itself(world, path, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("damaged") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in range(300):
                txn.put(b"%03d" % i, bytes([i % 251]) * 5000)
        with pario.Reader(place, comm=only_me()) as reader:
            offset = int(reader.index.extents[250]["offset"])
        with open(f"{place}/data.mdb", "r+b") as file:
            file.seek(offset - 16)
            file.write(b"\xff" * 8)
    place = world.bcast(place)
    options = pario.Options(slot_bytes=64 << 10, slots=3)
    for _ in range(5):
        reads = False
        with pytest.raises((CorruptedError, PeerError)) as caught:  # noqa: PT012, SIM117
            with pario.Loader(place, 5, comm=world, options=options) as loader:
                reads = loader.world.is_leader
                for _batch in loader:
                    pass
        kinds = world.allgather((reads, type(caught.value).__name__, caught.value.record))
        assert ("CorruptedError", 250) in [(kind, record) for leader, kind, record in kinds if leader]
        assert all(leader for leader, kind, _ in kinds if kind == "CorruptedError")


def test_leaving_on_purpose_is_no_failure(world, path):
    def batches(loader):
        with loader:
            yield from loader

    for _ in range(3):
        stream = batches(pario.Loader(path, 2, comm=world))
        for batch in stream:
            if batch.step == 3:
                break
        time.sleep(0.05 * world.rank)
        stream.close()
    with pytest.raises(SystemExit):  # noqa: PT012, SIM117
        with pario.Loader(path, 2, comm=world) as loader:
            for batch in loader:
                if batch.step == 3:
                    raise SystemExit(0)


def test_ranks_that_go_different_ways_are_told(world, path):
    if world.size == 1:
        pytest.skip("needs a second rank")
    loader = pario.Loader(path, 16, comm=world)
    with pytest.raises(ParioError, match="different ways"):  # noqa: PT012
        for _ in range(1 + world.rank):
            for _batch in loader:
                pass
        loader.close()
    world.Barrier()


@pytest.mark.parametrize("closes", [True, False])
def test_loaders_give_everything_back(world, path, closes):
    """Those that somebody closes without a garbage collector, and the next one takes the communicators of the last; of
    one that the script just drops, threads that are still busy may keep a cycle of objects."""

    # The threads of a fill take what others leave, and several ranks on a busy machine leave them little for a minute:
    # they, too, keep what nobody closes. A single rank tries it with a fill.
    options = pario.Options(once=not closes and world.size > 1)

    def one() -> None:
        loader = pario.Loader(path, 16, comm=world, options=options)
        for _ in loader:
            pass
        if closes:
            loader.close()

    one()
    gc.collect()
    gc.disable()
    try:
        before, left = open_things(), communicators_left()
        for _ in range(6):
            one()
        end = time.monotonic() + 60
        if not closes:
            gc.collect()
        # A thread may be at its end.
        while any(now > then for now, then in zip(open_things(), before, strict=True)):
            assert time.monotonic() < end, (open_things(), before)
            time.sleep(0.2)
            if not closes:
                gc.collect()
        assert communicators_left() == left
    finally:
        gc.enable()


@pytest.mark.full
def test_hundreds_of_loaders_that_nobody_closes(world, path):
    """MPICH has 2,000 communicators, and each of them had seven. (More ranks than cores take turns: a few do there.)"""
    for _ in range(400 if world.size <= 2 else 40):
        loader = pario.Loader(path, 100, comm=world)
        for _batch in loader:
            pass
    things = open_things()
    assert things[0] < 400
    assert things[1] < 100
    del loader


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_peek_shows_each_rank_its_next_batch(world, path, shuffle):
    """Before there is an index, in a loop, and on one rank alone: it is not collective."""
    with pario.Loader(path, 7, shuffle=shuffle, seed=4, comm=world, options=SMALL, save_index=False) as loader:
        shown = loader.peek() if world.rank == world.size - 1 else None
        for k, batch in enumerate(loader):
            if shown is not None:
                assert (shown.epoch, shown.step, shown.ids.tolist()) == (0, k, batch.ids.tolist())
                assert all((array == shown[name]).all() for name, array in batch.items())
            shown = loader.peek() if k < 3 or k > len(loader) - 3 else None
        assert shown is not None
        assert (shown.epoch, shown.step) == (1, 0)
