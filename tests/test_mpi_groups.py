"""Ranks that share a batch: the same arrays on each rank of a group, every record once over the groups, one read of the
store per node, states that know no groups. The oracle is py-lmdb's cursor."""

from __future__ import annotations

from itertools import chain
from typing import Any

import lmdb
import numpy as np
import pytest

import pario
from pario.errors import OptionError, ParioError, PeerError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 157
NBYTES = 3000
SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
QUICK = [pytest.param(False, marks=pytest.mark.full), "global", pytest.param("block", marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def path(world: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = world.bcast(str(tmp_path_factory.mktemp("set") / "x") if world.rank == 0 else None)
    if world.rank == 0:
        with lmdb.open(folder, map_size=1 << 26, sync=False) as env, env.begin(write=True) as txn:
            for i in range(N):
                txn.put(b"%04d" % i, np.random.default_rng(i).bytes(NBYTES))
    return str(world.bcast(folder))


@pytest.fixture(scope="module")
def values(path: str) -> list[bytes]:
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        return [bytes(value) for _, value in txn.cursor()]


def sizes(world: Any) -> list[int]:
    return [size for size in range(1, world.size + 1) if world.size % size == 0]


def groups(world: Any, size: int, apart: bool = False) -> Any:
    """Neighbouring ranks, or (`apart`) ranks as far from each other as can be."""
    count = world.size // size
    return world.Split(world.rank % count if apart else world.rank // size, world.rank)


def take(loader: pario.Loader, values: list[bytes], steps: int | None = None) -> list[list[int]]:
    mine = []
    loop = iter(loader)
    for _ in range(len(loader) if steps is None else steps):
        batch = next(loop)
        assert [row.tobytes() for row in batch["data"]] == [values[i] for i in batch.ids.tolist()]
        mine.append(batch.ids.tolist())
    if steps is None:
        assert next(loop, None) is None
    return mine


def of_the_job(world: Any, share: Any, mine: list[list[int]]) -> list[list[int]]:
    """Per step the ids of all groups; each rank of a group has the same ones."""
    assert all(theirs == mine for theirs in share.allgather(mine))
    firsts = [theirs for theirs in world.allgather(mine if share.rank == 0 else None) if theirs is not None]
    return [list(chain.from_iterable(step)) for step in zip(*firsts, strict=True)]


def bytes_read(world: Any, loader: pario.Loader) -> int:
    return int(world.allreduce(loader.stats()["bytes_read"]))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shuffle", QUICK)
def test_groups_have_the_same_batches(world: Any, path: str, values: list[bytes], shuffle: Any, apart: bool) -> None:
    raw = pario.decode.Raw("uint8")
    for size in sizes(world):
        share, count = groups(world, size, apart), world.size // size
        with pario.Loader(path, 8, raw, shuffle=shuffle, share_batch=share, options=SMALL) as loader:
            assert len(loader) == -(-N // (8 * count))
            epochs = [of_the_job(world, share, take(loader, values)) for _ in range(2)]
        assert all(sorted(chain.from_iterable(epoch)) == list(range(N)) for epoch in epochs)
        with pario.Loader(path, 8 * count, raw, shuffle=shuffle, comm="self", options=SMALL) as alone:
            assert [sorted(step) for step in epochs[0]] == [sorted(step) for step in take(alone, values)]
        share.Free()


def test_a_group_on_a_node_reads_once(
    world: Any, path: str, values: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    monkeypatch.setattr("pario.feed.automatic.Automatic._follow", lambda *_: None)  # one epoch's bytes, no more
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    nodes = world.allreduce(int(node.rank == 0))
    raw, given = pario.decode.Raw("uint8"), {"shuffle": "global", "options": SMALL}
    share = groups(world, world.size)  # all ranks: on each node one reads all of it
    with pario.Loader(path, 8, raw, share_batch=share, **given) as loader:
        before = bytes_read(world, loader)
        take(loader, values)
        world.Barrier()
        shared = bytes_read(world, loader) - before
    with pario.Loader(path, 8, raw, comm="self", **given) as loader:
        before = loader.stats()["bytes_read"]
        take(loader, values)
        alone = loader.stats()["bytes_read"] - before
    assert alone >= N * NBYTES
    assert abs(shared - nodes * alone) < 0.02 * alone
    share.Free()
    node.Free()


@pytest.mark.parametrize("shuffle", ["global", pytest.param("block", marks=pytest.mark.full)])
def test_groups_read_out_of_a_memory_tier(world: Any, path: str, values: list[bytes], shuffle: Any) -> None:
    tier = pario.Options(tiers=(pario.Tier("memory"),), block_bytes=32 << 10, mix_blocks=4)
    share = groups(world, world.size)
    with pario.Loader(path, 8, pario.decode.Raw("uint8"), shuffle=shuffle, share_batch=share, options=tier) as loader:
        mine = take(loader, values)
    assert sorted(chain.from_iterable(of_the_job(world, share, mine))) == list(range(N))
    share.Free()


def test_groups_read_while_the_index_grows(world: Any, path: str, values: list[bytes]) -> None:
    share = groups(world, world.size, apart=True)
    with pario.Loader(path, 8, share_batch=share, save_index=False, options=SMALL) as loader:
        mine = [batch.ids.tolist() for batch in loader]
    assert list(chain.from_iterable(of_the_job(world, share, mine))) == list(range(N))
    share.Free()


@pytest.mark.parametrize("shuffle", QUICK)
def test_a_state_knows_no_groups(world: Any, path: str, values: list[bytes], shuffle: Any) -> None:
    raw = pario.decode.Raw("uint8")
    given: dict[str, Any] = {"shuffle": shuffle, "options": SMALL, "seed": 3}
    share = groups(world, world.size)
    with pario.Loader(path, 12, raw, share_batch=share, **given) as loader:
        before = of_the_job(world, share, take(loader, values, 5))
        state = loader.state_dict()
        rest = of_the_job(world, share, take_rest(loader, values, state))
    for comm in ("self", None):
        seats = 1 if comm else world.size
        if 12 % seats:
            continue
        with pario.Loader(path, 12 // seats, raw, comm=comm, **given) as loader:
            loader.load_state_dict(state)
            mine = take(loader, values)
            everyones = [mine] if comm else world.allgather(mine)
        after = [sorted(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]
        assert after == [sorted(step) for step in rest]
    assert sorted(chain.from_iterable([*before, *rest])) == list(range(N))
    share.Free()


def take_rest(loader: pario.Loader, values: list[bytes], state: dict[str, Any]) -> list[list[int]]:
    loader.load_state_dict(state)
    return take(loader, values)


def test_a_random_decoder_gives_each_rank_of_a_group_the_same(world: Any, path: str) -> None:
    def noisy(value: bytes, rng: Any) -> np.ndarray:
        return rng.standard_normal(3)

    share = groups(world, world.size)
    with pario.Loader(path, 16, pario.decode.Function(noisy, rng=True), share_batch=share, shuffle="global") as loader:
        for batch in loader:
            everyones = share.allgather([np.asarray(array).tolist() for array in batch])
            assert all(theirs == everyones[0] for theirs in everyones)
    share.Free()


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_bad_records_are_the_same_in_a_group(world: Any, path: str, on_error: Any) -> None:
    def picky(value: bytes) -> np.ndarray:
        if value[0] % 5 == 0:
            raise ValueError("bad")
        return np.frombuffer(value[:4], np.uint8)

    share = groups(world, world.size)
    with pario.Loader(path, 16, picky, share_batch=share, on_error=on_error) as loader:
        mine = [(batch.ids.tolist(), batch.skipped) for batch in loader]
        assert loader.skipped > 0
    assert all(theirs == mine for theirs in share.allgather(mine))
    share.Free()


def test_a_list_of_ranks(world: Any, path: str) -> None:
    with pario.Loader(path, 4, share_batch=list(range(world.size))) as loader:
        mine = [batch.ids.tolist() for batch in loader]
    assert all(theirs == mine for theirs in world.allgather(mine))
    with pytest.raises(OptionError, match=r"or a list of ranks of comm, got \["):
        pario.Loader(path, 4, share_batch=[0, world.size])


def test_one_rank_without_a_communicator(world: Any, path: str) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    last = world.rank == world.size - 1
    with pytest.raises(OptionError, match=rf"rank {world.size - 1} has no share_batch"):
        pario.Loader(path, 4, share_batch=None if last else world)
    with pytest.raises(OptionError if last else PeerError, match="must be an mpi4py intra-communicator"):
        pario.Loader(path, 4, share_batch=3 if last else world)


def test_groups_of_unequal_sizes(world: Any, path: str) -> None:
    if world.size < 3:
        pytest.skip("two groups of unequal sizes need three ranks")
    share = world.Split(int(world.rank == 0), world.rank)
    with pytest.raises(OptionError, match="unequal sizes"):
        pario.Loader(path, 4, share_batch=share)
    share.Free()


def test_a_group_with_ranks_outside_of_comm(world: Any, path: str) -> None:
    if world.size < 2:
        pytest.skip("one rank")
    alone = world.Split(world.rank, 0)
    with pytest.raises(OptionError, match="is no rank of comm"):
        pario.Loader(path, 4, comm=alone, share_batch=world)
    with pytest.raises(OptionError, match=r"comm this process alone"):
        pario.Loader(path, 4, comm="self", share_batch=world)
    with pario.Loader(path, 4, comm="self", share_batch=alone) as loader:
        assert sum(len(batch.ids) for batch in loader) == N
    alone.Free()


def through(loader: pario.Loader) -> None:
    """Two epochs: the second begins when all have met, if one of them had no failure to tell."""
    with loader:
        for _ in range(2):
            list(loader)


def test_a_failure_of_one_rank_reaches_its_group(world: Any, path: str) -> None:
    last = world.rank == world.size - 1

    def breaks(value: bytes) -> np.ndarray:
        if last:
            raise ZeroDivisionError("mine")
        return np.zeros(1)

    share = groups(world, world.size)
    with pytest.raises(ParioError):
        through(pario.Loader(path, 16, breaks, share_batch=share))
    share.Free()
