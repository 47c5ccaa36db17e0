"""Selections on several ranks: each record once, equal steps, resuming on other ranks, and what differs between ranks.
The oracle is py-lmdb's cursor."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.comm.world import get_world
from pario.errors import OptionError, ParioError, PeerError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 211
SHUFFLES = [False, "global", "block"]
#: the others run with `-m full`
QUICK = [pytest.param(False, marks=pytest.mark.full), "global", pytest.param("block", marks=pytest.mark.full)]
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def write(world: Any, folder: str, keys: list[bytes], nbytes: int) -> str:
    if world.rank == 0:
        with lmdb.open(folder, map_size=1 << 26, sync=False) as env:
            for part in np.array_split(np.random.default_rng(0).permutation(len(keys)), 3):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(keys[i], np.random.default_rng(i).bytes(10 + i * 37 % nbytes))
    return str(world.bcast(folder))


@pytest.fixture(scope="module")
def path(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = world.bcast(str(tmp_path_factory.mktemp("set") / "x") if world.rank == 0 else None)
    return write(world, folder, [(b"a%04d" if i % 3 else b"b%04d") % i for i in range(N)], 6000)


@pytest.fixture(scope="module")
def pairs(path: str) -> list[tuple[bytes, bytes]]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [(bytes(k), bytes(v)) for k, v in txn.cursor()]


def take(loader: pario.Loader, pairs: list[tuple[bytes, bytes]], steps: int | None = None) -> list[list[int]]:
    """Per step the ids of all ranks; the values of this one are right, and all have equal numbers of steps."""
    mine = []
    loop = iter(loader)
    for _ in range(len(loader) if steps is None else steps):
        batch = next(loop)
        o = batch["offsets"]
        for row, i in enumerate(batch.ids.tolist()):
            assert batch["data"][o[row] : o[row + 1]].tobytes() == pairs[i][1]
        mine.append(batch.ids.tolist())
    if steps is None:
        assert next(loop, None) is None
    everyones = loader.world.allgather(mine)
    assert len({len(theirs) for theirs in everyones}) == 1
    return [list(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]


KINDS: dict[str, Any] = {
    "range": range(13, 150),
    "ids": sorted(np.random.default_rng(8).choice(N, 60, replace=False).tolist()),
    "prefix": b"b",
    "pattern": re.compile(rb".*[05]$"),
    "function": lambda key: key.endswith((b"1", b"3", b"7")),
    "one": [100],
}


def right(kind: str, pairs: list[tuple[bytes, bytes]]) -> list[int]:
    select = KINDS[kind]
    if kind == "prefix":
        return [i for i, (k, _) in enumerate(pairs) if k.startswith(select)]
    if kind == "pattern":
        return [i for i, (k, _) in enumerate(pairs) if select.match(k)]
    if kind == "function":
        return [i for i, (k, _) in enumerate(pairs) if select(k)]
    return list(select)


@pytest.mark.parametrize(
    ("kind", "shuffle"),
    [
        pytest.param(kind, shuffle, marks=() if (i, j) in ((1, 1), (4, 2), (5, 0)) else pytest.mark.full)
        for i, kind in enumerate(KINDS)
        for j, shuffle in enumerate(SHUFFLES)
    ],
)
def test_each_record_once(world: Any, path: str, pairs: list[tuple[bytes, bytes]], kind: str, shuffle: Any) -> None:
    ids = right(kind, pairs)
    with pario.Loader(path, 4, shuffle=shuffle, select=KINDS[kind], seed=1, options=SMALL) as loader:
        assert len(loader) == -(-len(ids) // (4 * world.size))
        whole = [take(loader, pairs) for _ in range(2)]
    assert all(sorted(chain.from_iterable(epoch)) == ids for epoch in whole)
    # One rank alone has the same records in the same steps, as far as its steps are as long.
    with pario.Loader(
        path, 4 * world.size, shuffle=shuffle, select=KINDS[kind], seed=1, options=SMALL, comm="self"
    ) as alone:
        assert [sorted(step) for step in take(alone, pairs)] == [sorted(step) for step in whole[0]]


def test_rare_records_as_often_as_the_others(world: Any, path: str, pairs: list[tuple[bytes, bytes]]) -> None:
    """Two of a hundred: in every step of all ranks half of the records, and as in one process."""
    rare = np.arange(40, N, 100)
    select = [rare, np.setdiff1d(np.arange(N), rare)]
    given: dict[str, Any] = {"shuffle": "global", "select": select, "weights": [1, 1], "options": SMALL}
    with pario.Loader(path, 4, **given) as loader:
        whole = [take(loader, pairs) for _ in range(2)]
        begun = take(loader, pairs, 3)
        state = loader.state_dict()
    for step in chain.from_iterable(whole):
        assert abs(int(np.isin(step, rare).sum()) - len(step) / 2) <= 1
    with pario.Loader(path, 4 * world.size, comm="self", **given) as alone:
        assert [[sorted(step) for step in take(alone, pairs)] for _ in range(2)] == [
            [sorted(step) for step in epoch] for epoch in whole
        ]
        third = list(chain.from_iterable(take(alone, pairs)))
    with pario.Loader(path, 5, comm="self", **given) as alone:
        alone.load_state_dict(state)
        rest = list(chain.from_iterable(take(alone, pairs)))
    assert sorted([*chain.from_iterable(begun), *rest]) == sorted(third)


@pytest.mark.parametrize("shuffle", QUICK)
def test_resuming_on_one_rank_and_on_all(world: Any, path: str, pairs: list[tuple[bytes, bytes]], shuffle: Any) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "select": b"a", "options": SMALL}
    ids = right("prefix", [(k.translate(bytes.maketrans(b"ab", b"ba")), v) for k, v in pairs])
    with pario.Loader(path, 3, **given) as loader:
        before = take(loader, pairs, 5)
        state = loader.state_dict()
    assert len({repr(theirs) for theirs in world.allgather(state)}) == 1
    for comm, batch_size in (("self", 7), (None, 2)):
        with pario.Loader(path, batch_size, comm=comm, **given) as loader:
            loader.load_state_dict(state)
            after = take(loader, pairs)
        assert sorted(chain.from_iterable([*before, *after])) == ids
    given["select"] = b"b"
    with pario.Loader(path, 3, **given) as loader, pytest.raises(StateError, match="selection is"):
        loader.load_state_dict(state)


def test_what_differs_between_ranks(world: Any, path: str) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    last = world.rank == world.size - 1
    for select in (
        range(10 + last),
        np.array([1, 2 + last]),
        b"b" if last else b"a",
        None if last else "all",
        (lambda key: key > b"a") if last else (lambda key: True),
    ):
        with pytest.raises(OptionError, match=r"the arguments of rank \d differ from those of rank 0: select "):
            pario.Loader(path, 4, select=select)


def test_what_one_rank_alone_gets_wrong(world: Any, path: str) -> None:
    last = world.rank == world.size - 1
    with pytest.raises(OptionError if last else PeerError, match=r"select is empty|select cannot be"):
        pario.Loader(path, 4, select=[] if last else [1])

    def likes(key: bytes) -> bool:
        if last and world.size > 1:
            raise ZeroDivisionError("mine")
        return True

    if world.size > 1:
        with pytest.raises(ZeroDivisionError if last else PeerError, match="mine"):
            pario.Loader(path, 4, select=likes)


@pytest.mark.parametrize(
    ("select", "message"), [([0, N], "out of range"), (b"c", "picks none"), (range(N, N + 1), "out of range")]
)
def test_what_is_wrong_on_all_is_raised_on_all(world: Any, path: str, select: Any, message: str) -> None:
    with pytest.raises(ParioError, match=message):
        pario.Loader(path, 4, select=select)
    with pario.Loader(path, 4, select=[0]) as loader:
        assert world.allreduce(sum(len(batch.ids) for batch in loader)) == 1


def test_each_key_is_looked_at_once(world: Any, path: str, pairs: list[tuple[bytes, bytes]]) -> None:
    seen: list[bytes] = []
    with pario.Loader(path, 4, select=lambda key: seen.append(key) or True) as loader:
        assert loader.records == N
    everyones = world.allgather(seen)
    assert list(chain.from_iterable(everyones)) == [key for key, _ in pairs]
    assert max(map(len, everyones)) - min(map(len, everyones)) <= 1


@pytest.fixture(scope="module")
def growing(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = world.bcast(str(tmp_path_factory.mktemp("set") / "grows") if world.rank == 0 else None)
    return write(world, folder, [*(b"%06d" % i for i in range(300)), b"__keys__", b"__len__"], 4000)


@pytest.mark.parametrize(
    ("shuffle", "save_index"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.full),
        pytest.param("block", True, marks=pytest.mark.full),
    ],
)
def test_meta_records_are_left_out(world: Any, growing: str, shuffle: Any, save_index: bool) -> None:
    with lmdb.open(growing, readonly=True, lock=False) as env, env.begin() as txn:
        pairs = [(bytes(k), bytes(v)) for k, v in txn.cursor()]
    with pario.Loader(growing, 5, shuffle=shuffle, save_index=save_index, options=SMALL) as loader:
        assert loader.records == 300
        for _ in range(2):
            assert sorted(chain.from_iterable(take(loader, pairs))) == list(range(300))
        with get_world(None) as mine:
            assert len({repr(meta) for meta in mine.allgather(loader.index.meta)}) == 1


@pytest.mark.parametrize("by", ["id", pytest.param("key", marks=pytest.mark.full)])
def test_a_split_is_the_same_on_all_ranks_and_on_one(
    world: Any, path: str, pairs: list[tuple[bytes, bytes]], by: Any
) -> None:
    parts = pario.split(path, (0.7, 0.3), seed=4, by=by)
    alone = pario.split(path, (0.7, 0.3), seed=4, by=by, comm="self")
    found = []
    for part, same in zip(parts, alone, strict=True):
        with pario.Loader(path, 4, select=part) as loader, pario.Loader(path, 4, select=same, comm="self") as other:
            found.append(sorted(chain.from_iterable(take(loader, pairs))))
            assert sorted(chain.from_iterable(take(other, pairs))) == found[-1]
    assert sorted(found[0] + found[1]) == list(range(N))
    if by == "id":
        assert len(found[0]) == round(0.7 * N)


def test_a_split_with_other_arguments_on_a_rank(world: Any, path: str) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    with pytest.raises(OptionError, match=r"pario.split has other arguments on rank"):
        pario.split(path, (0.7, 0.3), seed=int(world.rank == 1))
    with pytest.raises(OptionError if world.rank == 1 else PeerError, match="fractions must be"):
        pario.split(path, (0.7, 0.3 + (world.rank == 1)))
