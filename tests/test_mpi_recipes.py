"""Every recipe on several ranks and nodes: the same records in the same order as recipe auto, byte for byte what was
written (read back by py-lmdb). And what LMDBIO's own code could not do, case by case.

test_mpi.py runs this on 1, 2, 3 and 5 ranks of one and of two nodes, and on 8 ranks of four nodes. On more
than two ranks of one node only what the number of ranks changes is left, as each of them repeats the jobs of two.
"""

import time
from dataclasses import replace
from itertools import chain

import lmdb
import numpy as np
import pytest

import pario
from pario.comm.turns import Turns
from pario.comm.world import get_world
from pario.errors import CorruptedError, ParioError, PeerError
from pario.options import RECIPES
from pario.recipes.lmdbio import choose_stagger, neighbours

pytestmark = pytest.mark.mpi

SMALL = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 16 << 10, "mix_blocks": 4}


def options(**more):
    return pario.Options(**{**SMALL, **more})


def size_of(kind, i):
    """Bytes of record i. commits: as Caffe writes, of one size and one record 100 times as large. mixed: on both sides
    of the limit between leaf pages and pages of their own."""
    if kind == "commits":
        return 300_000 if i == 100 else 3000
    return (i * 611) % 5000


def pinned(name, readers):
    """This recipe with so many readers at once, where it lets them take turns."""
    recipe = RECIPES[name]
    return recipe if recipe.stagger is None else replace(recipe, stagger=readers)


def write(place, kind, n):
    order = np.arange(n) if kind == "commits" else np.random.default_rng(0).permutation(n)
    with lmdb.open(place, map_size=1 << 26) as env:
        for part in np.split(order, np.arange(39, n, 40)):  # the first commit comes one record early, like Caffe's
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%06d" % i, np.random.default_rng(i).bytes(size_of(kind, i)))


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def recipes(world):
    """Those that this job is about."""
    with get_world(world) as ranks:
        return ("auto", "coal", "stag") if ranks.nodes == 1 and ranks.size > 2 else tuple(RECIPES)


@pytest.fixture(scope="module")
def sets(world, tmp_path_factory):
    """kind -> (path, values in key order); 203 and 260 records, which no number of ranks and 7 divide."""
    places = None
    if world.rank == 0:
        places = {kind: str(tmp_path_factory.mktemp(kind) / "x.lmdb") for kind in ("commits", "mixed")}
        for kind, n in (("commits", 203), ("mixed", 260)):
            write(places[kind], kind, n)
            # The first epoch of auto reads its records in another way than all others: here it has an index.
            with pario.Reader(places[kind], comm=only_me()):
                pass
    made = {}
    for kind, place in world.bcast(places).items():
        with lmdb.open(place, readonly=True, lock=False) as env, env.begin() as txn:
            made[kind] = place, [bytes(value) for _, value in txn.cursor()]
    return made


def only_me():
    from mpi4py import MPI

    return MPI.COMM_SELF


def take(loader, values, pause=lambda batch: None):
    """[(epoch, step, ids)] of one epoch on this rank; content checked, also after a pause."""
    seen = []
    for batch in loader:
        pause(batch)
        offsets = batch["offsets"]
        for k, i in enumerate(batch.ids.tolist()):
            assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == values[i], f"record {i}"
        seen.append((batch.epoch, batch.step, batch.ids.tolist()))
    return seen


def everything(world, seen):
    return sorted(chain.from_iterable(ids for some in world.allgather(seen) for _, _, ids in some))


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("commits", False), ("commits", "block"), ("mixed", False), ("mixed", "global")]
)
def test_every_recipe_delivers_what_auto_delivers(world, sets, recipes, kind, shuffle):
    if world.size == 1:
        pytest.skip("test_recipes.py does that on one rank, with more files")
    if len(recipes) < len(RECIPES) and (kind, shuffle) != ("commits", False):
        pytest.skip("the number of ranks changes nothing here")
    path, values = sets[kind]
    wanted = None
    for recipe in recipes:
        with pario.Loader(path, 7, shuffle=shuffle, seed=5, comm=world, recipe=recipe, options=options()) as loader:
            # The second epoch begins at the front again.
            seen = [take(loader, values) for _ in range(2 if kind == "commits" else 1)]
            stats = loader.stats()
        for some in seen:
            assert everything(world, some) == list(range(len(values))), recipe
        wanted = wanted or seen
        assert seen == wanted, recipe
        assert sum(world.allgather(stats["records"])) == len(seen) * len(values)
        if stats["reads"]:
            # Nobody waits for bytes that are in memory.
            names = ["locate", "read", "bytes_read", *["share"] * ("tiers" not in stats)]
            assert min(stats[name] for name in names) > 0, recipe


def test_no_barrier_of_the_application_is_needed(world, sets, recipes):
    """LMDBIO overwrote what a slow rank was still reading."""
    path, values = sets["mixed"]

    def pause(batch):
        if world.rank == world.size - 1 and batch.step % 4 == 1:
            time.sleep(0.01)

    for recipe in recipes:
        with pario.Loader(path, 6, comm=world, recipe=recipe, options=options()) as loader:
            assert everything(world, take(loader, values, pause)) == list(range(len(values))), recipe


def test_a_loop_that_all_ranks_leave_early(world, sets, recipes):
    path, values = sets["commits"]
    for recipe in ("plain", "lmm", "coal", "stag"):
        if recipe not in recipes:
            continue
        with pario.Loader(path, 3, comm=world, recipe=pinned(recipe, 1), options=options()) as loader:
            for batch in loader:
                if batch.step == min(4, len(loader) - 1):
                    break
            assert everything(world, take(loader, values)) == list(range(len(values))), recipe


def test_a_reader_that_leaves_before_the_others(world, sets):
    """An error, and no hang: nobody reads for them any more."""
    path, _ = sets["commits"]
    with get_world(world) as ranks:
        if ranks.nodes > 1 or ranks.size == 1:
            pytest.skip("needs all ranks on one node, and two of them")
    with pytest.raises(ParioError, match="left the loop before"):  # noqa: PT012, SIM117
        with pario.Loader(path, 3, comm=world, recipe="dio", options=options()) as loader:
            for batch in loader:
                if world.rank == 0 and batch.step == 2:
                    break
    world.Barrier()


def test_go_on_with_another_recipe_on_another_number_of_ranks(world, sets, recipes):
    if len(recipes) < len(RECIPES):
        pytest.skip("two ranks and one are another number, too")
    path, values = sets["mixed"]
    for first, second in (("lmm", "stag"), ("coal", "plain"), ("plain", "dm")):
        with pario.Loader(path, 5, shuffle="block", comm=world, recipe=first, options=options()) as loader:
            done = []
            for batch in loader:
                done += batch.ids.tolist()
                if batch.step == min(2, len(loader) - 1):
                    break
            state = loader.state_dict()
        done = sorted(chain.from_iterable(world.allgather(done)))
        with pario.Loader(path, 4, shuffle="block", comm=only_me(), recipe=second, options=options()) as loader:
            loader.load_state_dict(state)
            if len(done) == len(values):
                assert loader.epoch == 1
                continue
            rest = [i for _, _, ids in take(loader, values) for i in ids]
        assert sorted(done + rest) == list(range(len(values))), (first, second)


def test_a_damaged_page_header_stops_all_ranks(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("damaged") / "x.lmdb")
        write(place, "commits", 90)
        with pario.Reader(place, comm=only_me()) as reader:
            offset = int(reader.index.extents[70]["offset"])
        with open(f"{place}/data.mdb", "r+b") as file:
            file.seek(offset - 16)
            file.write(b"\xff" * 8)
    place = world.bcast(place)
    for recipe in ("dio", "stag"):
        with pytest.raises((CorruptedError, PeerError)) as caught:  # noqa: PT012, SIM117
            with pario.Loader(place, 4, comm=world, recipe=recipe, options=options()) as loader:
                for batch in loader:
                    del batch
        kinds = world.allgather((type(caught.value).__name__, caught.value.record))
        assert ("CorruptedError", 70) in kinds, (recipe, kinds)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_no_more_readers_at_once_than_there_are_turns(world, size):
    """Also where their number is no multiple of it: LMDBIO hung."""
    with get_world(world) as ranks:
        turns = Turns(ranks, *neighbours(ranks.rank, ranks.size, size))
        for _ in range(2):
            spans = []
            for j in range(3):
                turns.wait(j)
                begin = time.monotonic()
                time.sleep(0.003)
                spans.append((begin, time.monotonic()))
                turns.pass_on(j)
            turns.leave()
            turns.settle()
            everyones = world.allgather(spans)
            for j in range(3):
                round_j = [spans[j] for spans in everyones]
                for rank in range(size, ranks.size):
                    assert round_j[rank][0] >= round_j[rank - size][1]
                for begin, _ in round_j:
                    assert sum(a <= begin < b for a, b in round_j) <= size


def test_who_leaves_early_keeps_nobody_waiting(world):
    with get_world(world) as ranks:
        turns = Turns(ranks, *neighbours(ranks.rank, ranks.size, 1))
        for j in range(3 if ranks.rank == 0 else 10):
            turns.wait(j)
            turns.pass_on(j)
        turns.leave()
        turns.settle()


def test_an_error_reaches_those_who_wait_for_their_turn(world):
    if world.size == 1:
        pytest.skip("needs a second rank")
    kind = ZeroDivisionError if world.rank == 0 else PeerError
    ranks = get_world(world)
    turns = Turns(ranks, *neighbours(ranks.rank, ranks.size, 1))
    with pytest.raises(kind):  # noqa: PT012
        if world.rank == 0:
            error = ZeroDivisionError("no turn for anybody")
            ranks.abandon(error)
            raise error
        try:
            turns.wait(0)
        except PeerError as e:
            ranks.abandon(e)
            raise
    world.Barrier()


@pytest.mark.parametrize("size", [0, 2])
def test_how_many_readers_at_once(world, sets, size):
    path, values = sets["commits"]
    with pario.Loader(path, 4, comm=world, recipe=pinned("stag", size), options=options()) as loader:
        assert "stagger" not in loader.stats()
        for _ in range(2):
            assert everything(world, take(loader, values)) == list(range(len(values)))
        stats, nodes = loader.stats(), loader.world.nodes
    assert len(set(world.allgather(stats["stagger"]))) == 1
    if size or nodes == 1:
        assert stats["stagger"] == (size or 1)
    else:
        tried = stats["stagger_seconds"]
        assert sorted(tried) == sorted({1, nodes} | {2**k for k in range(8) if 2**k < nodes})
        assert stats["stagger"] == min(tried, key=tried.get)


def test_the_trial_finds_the_best_number(world):
    """A store that serves two at a time well, and every further one badly."""
    with get_world(world) as ranks:

        def turns_of(size):
            cost.append(0.05 if size == 1 else 0.01 if size == 2 else 0.02 * ranks.size)
            return Turns(ranks, *neighbours(ranks.rank, ranks.size, size))

        cost = []
        read = []

        def slow(k):
            read.append(k)
            time.sleep(cost[-1])

        best, took = choose_stagger(ranks, [1, 2, 100], turns_of, slow, 4)
        assert best == 2
        assert sorted(took) == [1, 2, 100]
        assert read == [0, 1, 2, 3, 0, 1]
        with pytest.raises(ParioError if world.rank else ZeroDivisionError):
            choose_stagger(ranks, [1], turns_of, lambda k: 1 // world.rank, 4)
