"""Batches by cost on several ranks: within the budget, as many on each, every record once. The oracle is py-lmdb."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import OptionError, PeerError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 257
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
QUICK = [pytest.param(False, marks=pytest.mark.full), "global", "block"]
LIMIT = 8000


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def path(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = world.bcast(str(tmp_path_factory.mktemp("set") / "x") if world.rank == 0 else None)
    if world.rank == 0:
        rng = np.random.default_rng(3)
        with lmdb.open(folder, map_size=1 << 26, sync=False) as env:
            for part in np.array_split(rng.permutation(N), 2):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"%04d" % i, rng.bytes(int(rng.lognormal(6, 1)) + 1))
    return str(world.bcast(folder))


@pytest.fixture(scope="module")
def values(path: str) -> list[bytes]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [bytes(value) for _, value in txn.cursor()]


def take(loader: pario.Loader, values: list[bytes], steps: int | None = None) -> list[list[int]]:
    mine = []
    loop = iter(loader)
    for _ in range(len(loader) if steps is None else steps):
        batch = next(loop)
        o = batch["offsets"]
        assert [batch["data"][a:b].tobytes() for a, b in pairwise(o)] == [values[i] for i in batch.ids.tolist()]
        assert o[-1] <= LIMIT or len(batch.ids) == 1
        mine.append(batch.ids.tolist())
    if steps is None:
        assert next(loop, None) is None
    return mine


@pytest.mark.parametrize("shuffle", QUICK)
def test_ragged_batches_within_a_budget(world: Any, path: str, values: list[bytes], shuffle: Any) -> None:
    with pario.Loader(path, pario.Budget(bytes=LIMIT), shuffle=shuffle, options=SMALL) as loader:
        for _ in range(2):
            everyones = world.allgather(take(loader, values))
            assert len({len(theirs) for theirs in everyones}) == 1
            assert sorted(chain.from_iterable(chain.from_iterable(everyones))) == list(range(N))
            assert all(batch for theirs in everyones for batch in theirs[:-1])


@pytest.mark.parametrize("shuffle", QUICK)
def test_resuming_on_one_rank_on_all_and_in_groups(world: Any, path: str, values: list[bytes], shuffle: Any) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "options": SMALL, "seed": 2}
    budget = pario.Budget(bytes=LIMIT)
    with pario.Loader(path, budget, **given) as loader:
        before = world.allgather(take(loader, values, 3))
        state = loader.state_dict()
        rest = take(loader_at(loader, state), values)
    assert len({repr(theirs) for theirs in world.allgather(state)}) == 1
    with pario.Loader(path, budget, **given) as loader:  # as many ranks: the same batches
        assert take(loader_at(loader, state), values) == rest
    seen = sorted(chain.from_iterable(chain.from_iterable(before)))
    with pario.Loader(path, budget, comm="self", **given) as loader:
        alone = take(loader_at(loader, state), values)
    with pario.Loader(path, budget, share_batch=world, **given) as loader:  # one group is as one rank
        assert take(loader_at(loader, state), values) == alone
    assert sorted([*seen, *chain.from_iterable(alone)]) == list(range(N))


def loader_at(loader: pario.Loader, state: dict[str, Any]) -> pario.Loader:
    loader.load_state_dict(state)
    return loader


def test_budgets_that_differ_between_ranks(world: Any, path: str) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    last = world.rank == world.size - 1
    for budget in (
        pario.Budget(bytes=LIMIT + last),
        pario.Budget(tokens=9, cost=np.full(N, 1 + last)),
        9 if last else pario.Budget(bytes=9),
    ):
        with pytest.raises(OptionError, match="differ from those of rank 0"):
            pario.Loader(path, budget)

    def cost(ids: np.ndarray, nbytes: np.ndarray) -> np.ndarray:  # called on rank 0
        raise ZeroDivisionError("mine")

    with pytest.raises(PeerError if world.rank else ZeroDivisionError, match="mine"):
        pario.Loader(path, pario.Budget(tokens=9, cost=cost))
