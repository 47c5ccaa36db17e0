"""On several ranks: what is delivered never depends on the knobs, which change at random while epochs run, on each rank
in another way."""

from itertools import pairwise

import lmdb
import numpy as np
import pytest
from restless_knobs import restless

import pario

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

N = 311


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def value(i):
    return np.random.default_rng(i).integers(0, 256, 10 + (i * 37) % 6000, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    place = None
    if world.rank == 0:
        place = str(tmp_path_factory.mktemp("set") / "x.lmdb")
        with lmdb.open(place, map_size=1 << 26) as env, env.begin(write=True) as txn:
            for i in np.random.default_rng(0).permutation(N).tolist():
                txn.put(b"%06d" % i, value(i))
    return world.bcast(place)


@pytest.mark.parametrize(
    "shuffle", [pytest.param(False, marks=pytest.mark.full), "global", pytest.param("block", marks=pytest.mark.full)]
)
def test_bytes_and_order_are_the_plain_ones(world, path, shuffle, monkeypatch):
    small = {"slot_bytes": 64 << 10, "slots": 4, "block_bytes": 16 << 10, "mix_blocks": 4}
    with pario.Loader(path, 5, shuffle=shuffle, comm=world, options=pario.Options(inflight=4, **small)) as loader:
        plain = [[batch.ids.tolist() for batch in loader] for _ in range(2)]
    said = restless(monkeypatch, world.rank + 1)
    with pario.Loader(path, 5, shuffle=shuffle, comm=world, options=pario.Options(**small)) as loader:
        for order in plain:
            seen = []
            for batch in loader:
                data, offsets = batch["data"].tobytes(), batch["offsets"].tolist()
                found = [data[first:stop] for first, stop in pairwise(offsets)]
                assert found == [value(i) for i in batch.ids.tolist()]
                seen.append(batch.ids.tolist())
            assert seen == order
    assert any(world.allgather(len(set(said["inflight"])) > 2))
