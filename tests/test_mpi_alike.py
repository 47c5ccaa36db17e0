"""Trees that differ between ranks: nothing is mixed, everything is named; what ranks have of their own; a `like` that
does not fit on one rank. The oracle is rank 0's tree, made anew by its seed, never by pario."""

from __future__ import annotations

import logging
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import equal

import pario
from pario.checkpoint import flat, layout, tree

pytestmark = pytest.mark.mpi

WAYS = [{}, {"incremental": True}, {"compress": "zstd"}]


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def folder(world, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(layout, "LEAST_BLOCK", 64 << 10)  # even arrays of 1 MiB are cut among the ranks
    made = str(tmp_path_factory.mktemp("alike")) if world.rank == 0 else None
    yield Path(world.bcast(made))
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(made)


def tree_of(seed, step, differing, rank, size):
    """Arrays, scalars, other values, of one structure for all steps; `differing` leaves are each rank's own from a rank
    on."""
    sizes, rng = np.random.default_rng(seed), np.random.default_rng([seed, step // 2])
    tree = {
        **{f"bn{k}": {"mean": rng.random(sizes.integers(1, 400)), "n": k} for k in range(8)},
        "large": rng.random(sizes.integers(150_000, 159_000)),
        "turned": rng.random((400, 500)).T,
        "list": [rng.integers(0, 99, 50).astype("i2"), 1.5, "text", {}],
        "scalar": np.float32(rng.random()),
        "dates": np.arange(40).astype("M8[s]"),
        "rows": pario.Shard(np.full((1, 7), 1.0 * rank), (size, 7), (rank, 0)),
    }
    for path, first in differing.items():
        if rank >= first:
            spoil(tree, path, rank)
    return tree


PLACES = [*(f"bn{k}/mean" for k in range(8)), *(f"bn{k}/n" for k in range(8)), "large", "turned", "scalar", "dates"]
PLACES += ["list/[0]", "list/[1]", "list/[2]", "list/[3]", "bn0/more"]


def spoil(tree, path, rank):
    *above, key = path.split("/")
    for each in above:
        tree = tree[each]
    key = int(key[1:-1]) if key[0] == "[" else key
    value = tree.get(key) if isinstance(tree, dict) else tree[key]
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.reshape(-1)[(2 * rank + 1) % 7 * value.size // 7 - 1] += rank  # a single element
    elif isinstance(value, dict):
        value = []
    elif isinstance(value, str):
        value += str(rank)
    else:
        value = rank if value is None else value + type(value)(rank)
    tree[key] = value


def whole(tree, size):
    return {**tree, "rows": np.repeat(np.arange(size * 1.0), 7).reshape(size, 7)}


def check_mixed(world, folder, seed, way, caplog):
    """Two saves, of one structure mostly, each with differences of its own."""
    rng = random.Random(seed)
    before = {path: rng.randrange(1, max(2, world.size)) for path in rng.sample(PLACES, rng.choice([0, 1, 4]))}
    more = ["large", "turned", *rng.sample(PLACES[:8], 4), *rng.sample(PLACES[8:-1], 3)][rng.randrange(2) :]
    now = {path: rng.randrange(1, max(2, world.size)) for path in more} | before
    caplog.clear()
    with pario.Checkpointer(world, slow=folder / str(seed), **way) as ckpt, caplog.at_level(logging.WARNING, "pario"):
        for step, differing in ((1, before), (2, now), (3, now)):
            ckpt.save(step, tree_of(seed, step, differing, world.rank, world.size)).wait()
        for step, differing in ((1, before), (2, now), (3, now)):
            assert equal(whole(tree_of(seed, step, differing, 0, world.size), world.size), ckpt.restore(step))
    if world.size > 1 and world.rank == 0:
        said = re.findall(r"'([^' ]+)'(?: differs between ranks 0 and (\d)|, and rank (\d) does not)", caplog.text)
        assert sorted((path, int(a or b or 0)) for path, a, b in said) == sorted(
            (path, first if path != "bn0/more" else 0) for path, first in now.items()
        )
    elif world.rank:
        assert "differs" not in caplog.text


def test_trees_that_differ_are_not_mixed_and_each_leaf_is_named_once(world, folder, caplog):
    check_mixed(world, folder, 3, {}, caplog)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_many_trees_that_differ(world, folder, way, caplog):
    # Most of them on three ranks; on each other number a few that are tried nowhere else. Alone, nothing can differ.
    first, count = {1: (200, 1), 2: (210, 5), 3: (100, 8)}.get(world.size, (220, 3))
    for seed in range(first, first + count):
        check_mixed(world, folder, seed, way, caplog)


def test_what_differs_is_refused_before_anything_is_written(world, folder):
    if world.size == 1:
        return
    last = world.size - 1
    with pario.Checkpointer(world, slow=folder, differing="raise") as ckpt:
        for wrong in (np.arange(5) + world.rank // last, np.arange(200_000.0) + world.rank // last):
            with pytest.raises(pario.OptionError, match=rf"'a/b' differs between ranks 0 and {last}"):
                ckpt.save(1, {"a": {"b": wrong}})
        with pytest.raises(pario.OptionError, match=rf"rank {last} has 'k', and rank 0 does not"):
            ckpt.save(1, {"a": 1, **({"k": 2} if world.rank == last else {})})
        with pytest.raises(
            pario.OptionError, match=rf"'k' differs between ranks: rank 0 has nothing.*rank {last} <f8\[2\]"
        ):
            ckpt.save(1, {"a": 1, **({"k": np.zeros(2)} if world.rank == last else {})})
        with pytest.raises(pario.OptionError, match=rf"'a/b' differs between ranks 0 and {last}"):
            ckpt.save(1, {"a/b": 5, "a": {"b": np.arange(5) + world.rank // last}})  # another key looks like its path
        both = [("x", np.zeros(2)), ("y", np.zeros(2))]
        with pytest.raises(pario.OptionError, match="in another order"):
            ckpt.save(1, dict(both[::-1] if world.rank == last else both))
        assert ckpt.latest() is None
        ckpt.save(1, {"a": {"b": np.arange(5)}}).wait()
        assert ckpt.restore()["a"]["b"].tolist() == [0, 1, 2, 3, 4]


def test_a_large_tree_is_looked_at_in_parts_and_what_differs_is_found_all_the_same(world, folder, monkeypatch):
    """One byte in a page of a large array: found in the first save, or by the time all pages have had their turn."""
    if world.size == 1:
        return
    monkeypatch.setattr(flat, "_BYTES", 1 << 20)
    array = np.zeros(4 << 20, np.uint8)
    read = []
    real = flat.Alike._digests

    def counted(self, flat, step):
        read.append(step)
        return real(self, flat, step)

    monkeypatch.setattr(flat.Alike, "_digests", counted)
    with pario.Checkpointer(world, slow=folder, keep=1, differing="rank0") as ckpt:
        ckpt.save(0, {"a": array})
        array[tree.PAGE * 197 + 5] = world.rank
        for step in range(1, 5):
            ckpt.save(step, {"a": array})
        ckpt.close()
    assert read == [1, 4, 4, 4, 4]
    with pario.Checkpointer(world, slow=folder) as ckpt:
        assert not ckpt.restore()["a"].any()


def mine(rank):
    """A generator's state, and arrays whose number and shapes differ between ranks."""
    state = np.random.Generator(np.random.MT19937(rank)).bit_generator.state
    return {"rng": state, "own": [np.full((rank + 1, 3), rank)] * (rank % 3), "n": rank, "big": np.full(200_000, rank)}


@pytest.mark.parametrize(
    ("fast", "way"),
    [(True, WAYS[2]), *(pytest.param(fast, way, marks=pytest.mark.full) for fast in (False, True) for way in WAYS)],
    ids=str,
)
def test_each_rank_gets_its_own(world, folder, fast, way):
    tree = {"w": np.arange(300_000.0), "it": pario.PerRank(mine(world.rank)), "n": [pario.PerRank(world.rank), 3]}
    expected = {"w": tree["w"], "it": mine(world.rank), "n": [world.rank, 3]}
    with pario.Checkpointer(world, slow=folder / "slow", fast=folder / "fast" if fast else None, **way) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree).wait()
            tree["it"].value["n"] = expected["it"]["n"] = world.rank + step
        expected["it"]["n"] = world.rank + 1
        assert equal(expected, ckpt.restore())
        like = {"it": pario.PerRank({"big": np.zeros(200_000, int)}), "n": [None, None]}
        assert equal({"it": {"big": expected["it"]["big"]}, "n": expected["n"]}, ckpt.restore(like=like))
        tree["it"].value["own"] = [np.zeros(world.rank)]
        ckpt.save(3, tree).wait()
        assert ckpt.restore()["it"]["own"][0].size == world.rank
        with pytest.raises(pario.ParioError, match="PerRank at 'x' holds a Shard"):
            ckpt.save(4, {"x": pario.PerRank(pario.Shard(np.ones(1), (1,), (0,)))})
    world.Barrier()
    # on another number of ranks
    for color in (world.rank == 0, True):
        part = world.Split(int(color), world.rank)
        if color:
            with pario.Checkpointer(part, slow=folder / "slow") as ckpt:
                assert equal(
                    expected["it"] | {"own": [np.zeros(world.rank)], "n": world.rank + 2}, ckpt.restore(3)["it"]
                )
        part.Free()
        world.Barrier()


def test_more_ranks_than_have_saved_get_none(world, folder, caplog):
    if world.rank == 0:
        with pario.Checkpointer("self", slow=folder) as alone:
            alone.save(1, {"it": pario.PerRank({"a": np.arange(3)}), "w": 1})
    world.Barrier()
    with pario.Checkpointer(world, slow=folder) as ckpt:
        for like in (None, {"it": {"a": np.zeros(3, int)}, "w": 0}):
            got = ckpt.restore(like=like)
            assert got["w"] == 1
            assert got["it"] is None if world.rank else got["it"]["a"].tolist() == [0, 1, 2]
    assert ("saved by 1 ranks" in caplog.text) == (world.rank == 0 and world.size > 1)


SHAPE = (60, 5)


def saved():
    return {
        "m": {"w": np.ones((40, 3)), "b": np.ones(4, "f4"), "deep": [{"x": np.ones(2), "s": "t"}, 5]},
        "shard": pario.Shard(np.ones(SHAPE), SHAPE, (0, 0)),
        "n": 7,
        "empty": {},
    }


MISFITS = {
    "m": [np.ones(3), [1, 2], 3, {"nope": 1}, pario.Shard(np.ones(2), (2,), (0,))],
    "m/w": [
        np.ones((3, 40)),
        np.ones((40, 3), "f4"),
        {"w": 1},
        [],
        3,
        "x",
        object(),
        pario.Shard(np.ones(3), (3,), (0,)),
    ],
    "m/b": [np.ones(4), pario.Shard(np.ones((1, 2), "f4"), (4,), (0, 0)), pario.Shard(np.ones(3, "f4"), (4,), (2,))],
    "m/deep": [[{"x": np.ones(2)}], {"x": 1}, np.ones(2), [1, 2, 3]],
    "m/deep/[0]": [[1], np.ones(1), 5],
    "m/deep/[0]/x": [{}, np.array([None]), np.ones(3), b"x"],
    "m/deep/[0]/s": [np.ones(1), {"a": 1}, [1]],
    "shard": [
        pario.Shard(np.ones((60,)), SHAPE, (0,)),
        pario.Shard(np.ones((60,)), SHAPE, (0, 0)),
        pario.Shard(np.ones((1, 5, 1)), SHAPE, (0, 0, 0)),
        pario.Shard(np.ones((2, 5)), SHAPE, (59, 0)),
        pario.Shard(np.ones((2, 5)), SHAPE, (-1, 0)),
        pario.Shard(None, SHAPE, (0, 0)),
        pario.Shard(np.ones((2, 5), "i8"), SHAPE, (0, 0)),
        np.ones((60, 6)),
    ],
    "n": [np.ones(1), {}, [], np.float64(1), pario.Shard(np.ones(1), (1,), (0,))],
    "empty": [[1], np.ones(1), 4, {"k": 1}],
}


def put(tree, path, value):
    *above, key = [int(each[1:-1]) if each[0] == "[" else each for each in path.split("/")]
    for each in above:
        tree = tree[each]
    tree[key] = value


def check_misfits(world, folder, count):
    """On all ranks, or on one. An older checkpoint fits some of them: it must not be restored."""
    rng = random.Random(5)
    cases = [(path, k) for path, all_of in MISFITS.items() for k in range(len(all_of))]
    rng.shuffle(cases)
    with pario.Checkpointer(world, slow=folder) as ckpt:
        ckpt.save(1, saved() | {"m": np.ones(3), "n": np.ones(1), "empty": [1]})
        ckpt.save(2, saved()).wait()
        for path, k in (cases * (1 + count // len(cases)))[:count]:
            like = saved()
            if rng.choice([world.rank, 0, world.size - 1]) == world.rank:
                put(like, path, MISFITS[path][k])
            with pytest.raises(pario.StateError) as caught:
                ckpt.restore(like=like)
            assert f"'{path}'" in str(caught.value), (path, str(caught.value))
        assert ckpt.restore(like=saved())["n"] == 7


def test_a_like_that_does_not_fit_is_an_error_that_names_the_leaf_on_all_ranks(world, folder):
    check_misfits(world, folder, 20)


@pytest.mark.full
def test_many_likes_that_do_not_fit(world, folder):
    check_misfits(world, folder, 200)
