"""Samples of several records on several ranks: each sample once, equal steps, missing records, resuming on other ranks,
and what differs between ranks. The oracle is py-lmdb."""

from __future__ import annotations

from itertools import chain
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import DecodeError, OptionError, ParioError, PeerError, StateError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 97
#: samples without a label
BAD = [9, 10, 50]
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=24 << 10, mix_blocks=4)
FIELDS = {"image": ("image-%09d", None), "label": ("label-%09d", None)}
#: the others run with `-m full`
QUICK_PAIRS = [("skip", "global"), ("substitute", "block")]
QUICK = [pytest.param(False, marks=pytest.mark.full), "global", "block"]


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def whole(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(world, tmp_path_factory, [])


@pytest.fixture(scope="module")
def broken(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(world, tmp_path_factory, BAD)


def write(world: Any, tmp_path_factory: pytest.TempPathFactory, bad: list[int]) -> str:
    """Numbers 1, 3, 4, ...; images and labels beside each other, as they were written."""
    folder = None
    if world.rank == 0:
        folder = str(tmp_path_factory.mktemp("fields") / "x")
        with lmdb.open(folder, map_size=1 << 26, sync=False) as env:
            for part in np.array_split(np.array([1, *range(3, N + 2)]), 4):
                with env.begin(write=True) as txn:
                    for i in part.tolist():
                        txn.put(b"image-%09d" % i, np.random.default_rng(i).bytes(10 + i * 997 % 6000))
                        if i not in bad:
                            txn.put(b"label-%09d" % i, b"%d" % i)
                    txn.put(b"num-samples", b"%d" % N)
    return str(world.bcast(folder))


def take(loader: pario.Loader, path: str, steps: int | None = None) -> list[list[int]]:
    """Per step the samples of all ranks; this one's are right, and all have equal numbers of steps."""
    mine, loop = [], iter(loader)
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        for _ in range(len(loader) if steps is None else steps):
            batch = next(loop)
            for i, image, label in zip(batch.ids.tolist(), *batch, strict=True):
                assert (image, label) == (txn.get(b"image-%09d" % i), b"%d" % i)
            mine.append(batch.ids.tolist())
    if steps is None:
        assert next(loop, None) is None
    everyones = loader.world.allgather(mine)
    assert len({len(theirs) for theirs in everyones}) == 1
    return [list(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]


NUMBERS = [1, *range(3, N + 2)]


@pytest.mark.parametrize("shuffle", QUICK)
def test_each_sample_once(world: Any, whole: str, shuffle: Any) -> None:
    given: dict[str, Any] = {"fields": FIELDS, "shuffle": shuffle, "seed": 1, "options": SMALL}
    with pario.Loader(whole, 4, **given) as loader:
        assert len(loader) == -(-N // (4 * world.size))
        looked = loader.peek().ids.tolist()
        epochs = [take(loader, whole) for _ in range(2)]
    assert list(chain.from_iterable(world.allgather(looked))) == epochs[0][0]
    assert all(sorted(chain.from_iterable(epoch)) == NUMBERS for epoch in epochs)
    # One rank alone has the same samples in the same steps.
    with pario.Loader(whole, 4 * world.size, comm="self", **given) as alone:
        assert [sorted(step) for step in take(alone, whole)] == [sorted(step) for step in epochs[0]]


@pytest.mark.parametrize(
    ("policy", "shuffle"),
    [
        pytest.param(policy, shuffle, marks=() if (policy, shuffle) in QUICK_PAIRS else pytest.mark.full)
        for policy in ("skip", "substitute")
        for shuffle in (False, "global", "block")
    ],
)
def test_missing_records(world: Any, broken: str, shuffle: Any, policy: Any) -> None:
    given: dict[str, Any] = {"fields": FIELDS, "shuffle": shuffle, "on_error": policy, "options": SMALL}
    with pario.Loader(broken, 4, **given) as loader:
        numbers = list(chain.from_iterable(take(loader, broken)))
        assert world.allreduce(loader.skipped) == len(BAD)
        assert world.allreduce(sum(loader.stats()["bad"].values())) == len(BAD)
    assert len(numbers) == (N - len(BAD) if policy == "skip" else N)
    assert sorted(set(numbers)) == sorted(set(NUMBERS) - set(BAD))


def test_a_missing_record_is_raised_on_all(world: Any, broken: str) -> None:
    said = r"sample \d+ has no record 'label-0000000\d\d' \(field 'label'\)"
    with (
        pytest.raises(ParioError, match=said) as caught,
        pario.Loader(broken, 4, fields=FIELDS, options=SMALL) as loader,
    ):
        list(loader)
    assert isinstance(caught.value, (DecodeError, PeerError))
    assert sum(world.allgather(isinstance(caught.value, DecodeError))) >= 1


@pytest.mark.parametrize("shuffle", [*QUICK[:1], pytest.param("global", marks=pytest.mark.full), "block"])
def test_resuming_on_one_rank_and_on_all(world: Any, broken: str, shuffle: Any) -> None:
    given: dict[str, Any] = {"fields": FIELDS, "shuffle": shuffle, "on_error": "skip", "options": SMALL}
    with pario.Loader(broken, 3, **given) as loader:
        before = take(loader, broken, 4)
        state = loader.state_dict()
    assert len({repr(theirs) for theirs in world.allgather(state)}) == 1
    for comm, batch_size in (("self", 7), (None, 2)):
        with pario.Loader(broken, batch_size, comm=comm, **given) as loader:
            loader.load_state_dict(state)
            after = take(loader, broken)
        assert sorted(chain.from_iterable([*before, *after])) == sorted(set(NUMBERS) - set(BAD))
    given["fields"] = {"image": FIELDS["image"], "label": ("image-%09d", None)}
    with pario.Loader(broken, 3, **given) as loader, pytest.raises(StateError, match="selection is"):
        loader.load_state_dict(state)


def test_functions_and_selections(world: Any, whole: str) -> None:
    fields = {name: ((lambda i, n=name: b"%s-%09d" % (n.encode(), i)), None) for name in FIELDS}
    for select in (range(20, 60), [98, 1, 3]):
        with pario.Loader(whole, 4, fields=fields, select=select, shuffle="block", options=SMALL) as loader:
            assert sorted(chain.from_iterable(take(loader, whole))) == sorted(select)


def test_what_is_wrong_on_all_is_raised_on_all(world: Any, whole: str) -> None:
    for fields, select, message in (
        ({"a": ("x-%d", None)}, None, "no key fits"),
        (FIELDS, [2], "no sample has: 2"),
        (FIELDS, b"label", "picks none"),
        ({"a": (lambda i: b"x", None)}, None, "which numbers"),
        ({"a": (lambda i: b"x", None)}, range(9), "whose first record"),
    ):
        with pytest.raises(ParioError, match=message):
            pario.Loader(whole, 4, fields=fields, select=select)


def test_what_differs_between_ranks(world: Any, whole: str) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    last = world.rank == world.size - 1
    with pytest.raises(OptionError, match=r"the arguments of rank \d differ from those of rank 0: fields "):
        pario.Loader(whole, 4, fields={"image": ("image-%09d" if last else "label-%09d", None)})
    with pytest.raises(OptionError if last else PeerError, match="has 0 numbers"):
        pario.Loader(whole, 4, fields={"image": ("image-" if last else "image-%09d", None)})

    def key(number: int) -> bytes:
        if last:
            raise ZeroDivisionError("mine")
        return b"label-%09d" % number

    with pytest.raises(ZeroDivisionError if last else PeerError, match="mine"):
        pario.Loader(whole, 4, fields={"image": FIELDS["image"], "label": (key, None)})
