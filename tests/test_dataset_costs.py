"""What records cost, asked of a dataset. The oracle is py-lmdb's cursor."""

from __future__ import annotations

from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import OptionError, StateError

N = 307
SMALL: dict[str, Any] = {"block_bytes": 16 << 10, "mix_blocks": 4, "slot_bytes": 64 << 10}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Values of random sizes, written in a random order, and one meta record."""
    folder = str(tmp_path_factory.mktemp("costs") / "set")
    rng = np.random.default_rng(0)
    sizes = rng.lognormal(6, 1, N).astype(int) + 1
    with lmdb.open(folder, map_size=1 << 24) as env:
        for part in np.array_split(rng.permutation(N), 3):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%04d" % i, rng.bytes(int(sizes[i])))
        with env.begin(write=True) as txn:
            txn.put(b"__len__", b"307")
    return folder


@pytest.fixture(scope="module")
def sizes(path: str) -> list[int]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [len(value) for key, value in txn.cursor() if key != b"__len__"]


def epoch(loader: pario.Loader) -> list[list[int]]:
    steps = len(loader)
    found = [batch.ids.tolist() for batch in loader]
    assert len(found) == steps
    return found


@pytest.mark.parametrize("recipe", ["auto", "ring"])
@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_batches_of_bytes(path: str, sizes: list[int], shuffle: Any, recipe: str) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "recipe": recipe, "options": pario.Options(**SMALL)}
    with pario.Loader(path, pario.Budget(bytes=5000), **given) as loader:
        for epochs in (1, 2):
            for batch in loader:
                nbytes = np.diff(batch["offsets"]).tolist()
                assert nbytes == [sizes[i] for i in batch.ids.tolist()]
                assert sum(nbytes) <= 5000 or len(nbytes) == 1
            assert loader.stats()["node_bytes"] == epochs * sum(sizes)
        found = epoch(loader)
    assert sorted(i for batch in found for i in batch) == list(range(N))
    assert len(found) <= 1.1 * sum(sizes) / 5000 + sum(size > 5000 for size in sizes) + 1


@pytest.mark.parametrize(("kind", "shuffle"), [("array", "global"), ("function", "block")])
def test_batches_of_tokens(path: str, sizes: list[int], kind: str, shuffle: Any) -> None:
    tokens = [1 + size // 3 for size in sizes] + [1]
    cost: Any = tokens if kind == "array" else lambda ids, nbytes: 1 + nbytes // 3
    given: dict[str, Any] = {"shuffle": shuffle, "select": range(200), "options": pario.Options(**SMALL)}
    with pario.Loader(path, pario.Budget(tokens=2000, cost=cost), **given) as loader:
        found = epoch(loader)
    assert sorted(i for batch in found for i in batch) == list(range(200))
    assert all(sum(tokens[i] for i in batch) <= 2000 or len(batch) == 1 for batch in found)


def test_equal_costs_are_plain_batches(path: str) -> None:
    one = pario.Budget(tokens=10, cost=np.ones(N + 1, int))
    for shuffle in (False, "global", "block"):
        given: dict[str, Any] = {"shuffle": shuffle, "options": pario.Options(**SMALL)}
        with pario.Loader(path, one, **given) as loader, pario.Loader(path, 10, **given) as plain:
            assert [sorted(ids) for ids in epoch(loader)] == [sorted(ids) for ids in epoch(plain)]


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
def test_resuming_and_peeking(path: str, shuffle: Any) -> None:
    given: dict[str, Any] = {"shuffle": shuffle, "options": pario.Options(**SMALL)}
    budget = pario.Budget(bytes=9000)
    with pario.Loader(path, budget, **given) as loader:
        expected = epoch(loader) + epoch(loader)
        loader.set_epoch(0)
        found, states = [], []
        for batch in loader:
            found.append(batch.ids.tolist())
            states.append(loader.state_dict())
            assert loader.peek().ids.tolist() == expected[len(found)]
    assert found == expected[: len(found)]
    for step in (0, len(found) // 2, len(found) - 1):
        with pario.Loader(path, budget, **given) as loader:
            loader.load_state_dict(states[step])
            rest = epoch(loader)
            assert rest == (expected[step + 1 : len(found)] or expected[len(found) :])
    # A state says which records were delivered, not how they were cut: plain batches go on with the others.
    with pario.Loader(path, 7, **given) as loader:
        loader.load_state_dict(states[2])
        rest = epoch(loader)
    assert sorted(i for batch in [*found[:3], *rest] for i in batch) == list(range(N))
    with pario.Loader(path, budget, seed=1, **given) as loader, pytest.raises(StateError):
        loader.load_state_dict(states[2])


@pytest.mark.parametrize("recipe", ["plain", "prov", "stag"])
def test_other_ways_to_read(path: str, sizes: list[int], recipe: str) -> None:
    with pario.Loader(path, pario.Budget(bytes=5000), shuffle="block", recipe=recipe) as loader:
        found = epoch(loader)
    assert sorted(i for batch in found for i in batch) == list(range(N))
    assert all(sum(sizes[i] for i in batch) <= 5000 or len(batch) == 1 for batch in found)


def test_drop_last_and_bad_records(path: str) -> None:
    budget = pario.Budget(bytes=9000)
    with pario.Loader(path, budget) as loader, pario.Loader(path, budget, drop_last=True) as dropped:
        assert epoch(dropped) == epoch(loader)[:-1]
    with pytest.raises(OptionError, match=r"drop_last leaves no batch.*Budget\(bytes=1000000000\)"):
        pario.Loader(path, pario.Budget(bytes=10**9), drop_last=True)

    def picky(value: bytes) -> int:
        if value[0] % 7 == 0:
            raise ValueError("no")
        return len(value)

    with pario.Loader(path, budget, picky, on_error="skip") as loader:
        assert sum(len(batch.ids) + batch.skipped for batch in loader) == N
        assert loader.skipped > 0


def test_what_a_cost_gets_wrong(path: str) -> None:
    with pytest.raises(OptionError, match="has 3 integers, the dataset 308 records"):
        pario.Loader(path, pario.Budget(tokens=10, cost=[1, 2, 3]))
    with pytest.raises(ZeroDivisionError):
        pario.Loader(path, pario.Budget(tokens=10, cost=lambda ids, nbytes: 1 // 0))
    with pytest.raises(OptionError, match="or a Budget"):
        pario.Loader(path, 1.5)  # type: ignore[arg-type]


def test_costs_above_four_billion(path: str) -> None:
    cost = np.where(np.arange(N + 1) % 50 == 3, 1 << 33, 1)
    with pario.Loader(path, pario.Budget(tokens=1 << 33, cost=cost)) as loader:
        found = epoch(loader)
    assert all(len(batch) == 1 for batch in found if any(i % 50 == 3 for i in batch))
