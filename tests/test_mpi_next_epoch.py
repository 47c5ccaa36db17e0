"""Loops that follow each other, or jump: what was read ahead of the next epoch is used or forgotten, and every record
that is delivered is the plain order's, byte for byte. The oracle reads without the ring, on one rank."""

from __future__ import annotations

import random
import time
from functools import cache
from itertools import chain
from typing import Any

import lmdb
import numpy as np
import pytest

import pario

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N, G = 517, 30  # records, and of a step on all ranks
SMALL: dict[str, Any] = {"slot_bytes": 128 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 8}

KINDS: dict[str, dict[str, Any]] = {
    "key order": {},
    "global": {"shuffle": "global"},
    "block": {"shuffle": "block"},
    "block, two slots": {"shuffle": "block", "options": {"slots": 2}},
    "a selection": {"shuffle": "block", "select": slice(0, None, 3)},
    "drop_last": {"shuffle": "global", "drop_last": True},
    "a ring of two epochs": {"shuffle": "global", "select": slice(0, 70)},
}


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@cache  # compared some hundred thousand times
def value(i: int) -> bytes:
    return np.random.default_rng(i).integers(0, 256, 10 + (i * 37) % 6000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = None
    if world.rank == 0:
        found = str(tmp_path_factory.mktemp("set") / "x.lmdb")
        with lmdb.open(found, map_size=1 << 26) as env:
            for part in np.array_split(np.random.default_rng(0).permutation(N), 3):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"%06d" % i, value(i))
        with pario.Reader(found, comm="self"):
            pass  # saves the index
    return world.bcast(found)


class Plain:
    """What an epoch delivers: the sets of records of its steps, by a loader of one rank that does without the ring."""

    def __init__(self, path: str, kind: dict[str, Any]) -> None:
        options = pario.Options(**SMALL, tiers=())
        self._loader = pario.Loader(path, G, seed=5, comm="self", **{**kind, "recipe": "auto", "options": options})
        self._known: dict[int, list[list[int]]] = {}

    def epoch(self, number: int) -> list[list[int]]:
        if number not in self._known:
            self._loader.set_epoch(number)
            self._known[number] = [sorted(batch.ids.tolist()) for batch in self._loader]
        return self._known[number]

    def close(self) -> None:
        self._loader.close()


def run(world: Any, loader: pario.Loader, plain: Plain, dice: random.Random, most: int | None) -> dict[str, Any]:
    """Take a loop's batches, at most so many; returns the state after the last one."""
    loop = iter(loader)
    epoch, first = loader.epoch, loader.batches - len(loader)
    mine = random.Random(f"{dice.random()} {world.rank}")  # each rank at its own speed
    taken, state = [], loader.state_dict()
    for batch in loop:
        assert batch.epoch == epoch
        for k, i in enumerate(batch.ids.tolist()):
            start, stop = batch["offsets"][k : k + 2]
            assert batch["data"][start:stop].tobytes() == value(i)
        taken.append(batch.ids.tolist())
        state = loader.state_dict()
        if mine.random() < 0.1:
            time.sleep(0.002)
        if len(taken) == most:
            break
    everyones = world.allgather(taken)
    found = [sorted(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]
    expected = plain.epoch(epoch)[first:]
    assert found == (expected if most is None else expected[:most])
    return state


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=[pytest.mark.full] * (seed > 0 or kind != "block"))
        for kind in KINDS
        for seed in range(8)
    ],
)
def test_loops_that_jump(world: Any, path: str, kind: str, seed: int) -> None:
    if G % world.size:
        pytest.skip("a step must be the same on so many ranks")
    dice = random.Random(f"{kind} {seed}")  # the same on every rank
    given = dict(KINDS[kind])
    options = pario.Options(**{**SMALL, **given.pop("options", {})})
    plain = Plain(path, given)
    states = []
    with (
        pario.Loader(path, G // world.size, seed=5, comm=world, options=options, **given) as loader,
        pario.Loader(path, 7, comm=world, options=options, select=slice(0, 60)) as other,
    ):
        for _ in range(10 if world.size < 4 else 4):
            jump = dice.random()
            if jump < 0.15:
                loader.set_epoch(dice.randrange(6))
            elif jump < 0.35 and states:
                loader.load_state_dict(dice.choice(states))
            if dice.random() < 0.2:
                mine = [i for batch in other for i in batch.ids.tolist()]
                assert sorted(chain.from_iterable(world.allgather(mine))) == list(range(60))
            most = dice.choice([None, None, 1, 2, 1 + dice.randrange(20)])
            states.append(run(world, loader, plain, dice, most))
            if dice.random() < 0.1:
                loader.report(all_ranks=True)
    plain.close()


@pytest.mark.parametrize(
    "shuffle", ["global", pytest.param("block", marks=pytest.mark.full), pytest.param(False, marks=pytest.mark.full)]
)
def test_batches_cut_by_cost(world: Any, path: str, shuffle: Any) -> None:
    """The number of steps and groups depends on the epoch."""
    options = pario.Options(**SMALL)
    budget = pario.Budget(40_000)
    with pario.Loader(path, budget, shuffle=shuffle, seed=5, comm=world, options=options) as loader:
        for epoch in (0, 1, 2, 7, 8):
            loader.set_epoch(epoch)
            seen = []
            for batch in loader:
                for k, i in enumerate(batch.ids.tolist()):
                    start, stop = batch["offsets"][k : k + 2]
                    assert batch["data"][start:stop].tobytes() == value(i)
                seen += batch.ids.tolist()
                if epoch == 1 and batch.step == 1:
                    break
            if epoch != 1:
                assert sorted(chain.from_iterable(world.allgather(seen))) == list(range(N))
