"""Decoders on several ranks: bad records under every policy, arrays of unequal sizes, and chance."""

import json

import cv2
import lmdb
import numpy as np
import pytest
from made_records import arrays, made

import pario
from pario.decode import Draw, Function, Image, Json
from pario.errors import DecodeError, OptionError, PeerError

pytestmark = [pytest.mark.mpi]

N = 211
BAD = {7, 8, 9, 50, 123, 124, 199}
FULL = pytest.mark.full
POLICIES = [
    ("skip", "global"),
    ("substitute", "block"),
    *(pytest.param(*each, marks=FULL) for each in (("skip", False), ("skip", "block"), ("substitute", "global"))),
]


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def path(world, tmp_path_factory):
    """Rank 0 writes JSON, of which a few records are cut off; every rank gets the path."""
    name = None
    if world.rank == 0:
        name = str(tmp_path_factory.mktemp("set") / "x.lmdb")
        with lmdb.open(name, map_size=1 << 24) as env, env.begin(write=True) as txn:
            for i in range(N):
                text = json.dumps({"n": i, "x": list(range(i % 5))}).encode()
                txn.put(b"%06d" % i, text[:-1] if i in BAD else text)
    return world.bcast(name)


def decoder():
    return Json({"n": "int64", "x": "int32"}, ragged={"x": "flat"})


@pytest.mark.parametrize(("policy", "shuffle"), POLICIES)
def test_batches_are_as_many_on_every_rank(world, path, policy, shuffle):
    with pario.Loader(path, 8, decoder(), shuffle=shuffle, seed=2, on_error=policy, comm=world) as loader:
        for _ in range(2):
            ids, sizes, skipped = [], [], 0
            for batch in loader:
                ids += batch.ids.tolist()
                sizes.append(len(batch.ids))
                skipped += batch.skipped
                assert batch["n"].tolist() == batch.ids.tolist()
                cuts = batch["x_offsets"]
                for k, i in enumerate(batch.ids.tolist()):
                    assert batch["x"][cuts[k] : cuts[k + 1]].tolist() == list(range(i % 5))
            everyone = world.allgather((ids, sizes, skipped))
            assert len({len(sizes) for _, sizes, _ in everyone}) == 1
            every = [i for ids, _, _ in everyone for i in ids]
            assert sum(skipped for *_, skipped in everyone) == len(BAD)
            if policy == "skip":
                assert sorted(every) == [i for i in range(N) if i not in BAD]
            else:
                assert len(every) == N
                assert set(every) == set(range(N)) - BAD


def test_too_many_bad_records_stop_all(world, path):
    options = pario.Options(max_bad=1)
    with pytest.raises((DecodeError, PeerError), match="more than max_bad=1 records"):  # noqa: PT012, SIM117
        with pario.Loader(path, 8, decoder(), on_error="skip", options=options, comm=world) as loader:
            for _ in range(100):
                for _batch in loader:
                    pass
    world.Barrier()


def draw(value, id, key, rng):
    return {"id": id, "key": key, "draw": rng.random()}


def test_chance_is_the_same_on_any_number_of_ranks(world, path):
    with pario.Loader(path, 8, draw, shuffle="global", seed=9, comm=world) as loader:
        state, drawn = None, {}
        for batch in loader:
            rows = zip(batch["key"], batch["draw"].tolist(), strict=True)
            drawn |= dict(zip(batch["id"].tolist(), rows, strict=True))
            if batch.step == 3:
                state = loader.state_dict()
    whole: dict = {}
    for part in world.allgather(drawn):
        whole |= part
    assert sorted(whole) == list(range(N))
    for i, (key, number) in whole.items():
        assert key == b"%06d" % i
        assert number == np.random.default_rng([9, 0, i]).random()
    with pario.Loader(path, 8, draw, shuffle="global", seed=9, comm=world) as loader:
        loader.load_state_dict(state)
        again = {i: x for batch in loader for i, x in zip(batch["id"].tolist(), batch["draw"].tolist(), strict=True)}
    assert 0 < len(again) < len(drawn)
    assert all(whole[i][1] == x for i, x in again.items())


@pytest.fixture(scope="module")
def pictures(world, tmp_path_factory):
    """Path of an LMDB of 50 PNGs, and their bytes; on every rank."""
    name, files = None, None
    if world.rank == 0:
        rng = np.random.default_rng(1)
        files = [cv2.imencode(".png", rng.integers(0, 256, (9 + i, 30, 3), np.uint8))[1].tobytes() for i in range(50)]
        name = str(tmp_path_factory.mktemp("pictures") / "x.lmdb")
        with lmdb.open(name, map_size=1 << 24) as env, env.begin(write=True) as txn:
            for i, file in enumerate(files):
                txn.put(b"%06d" % i, file)
    return world.bcast((name, files))


def test_windows_flips_and_jitter_are_those_of_one_process(world, pictures):
    path, files = pictures
    alone = Image((8, 7), crop="random", flip=True, jitter=(0.5, 0.5, 0.5), layout="CHW")
    records = made(files)
    with pario.Loader(path, 4, alone, shuffle="global", seed=5, comm=world) as loader:
        for epoch in range(2):
            right = arrays(alone, records)
            assert alone.decode(records, right, Draw(5, epoch)) == []
            seen = []
            for batch in loader:
                np.testing.assert_array_equal(batch["data"], right["data"][batch.ids])
                seen += batch.ids.tolist()
            assert sorted(i for ids in world.allgather(seen) for i in ids) == list(range(50))


@pytest.mark.parametrize("ragged", [None, "flat", "pad"])
def test_what_only_some_records_have(world, path, ragged):
    """Which records these are rank 0 finds out: all ranks have its dtype."""
    lacks = Json(["n", "energy"], optional=["energy"], ragged=ragged and {"energy": ragged})
    with pytest.raises((OptionError, PeerError)) as caught:
        pario.Loader(path, 8, lacks, comm=world, on_error="skip")
    assert isinstance(caught.value, PeerError if world.rank else OptionError)

    def decode(value):
        number = json.loads(value)["n"]
        return {"n": number, "energy": [number / 2] if number in (150, 151, 210) else None}

    some = Function(decode, optional=["energy"], ragged=ragged and {"energy": ragged})
    with pario.Loader(path, 8, some, comm=world, on_error="skip", shuffle="global") as loader:
        there = {}
        for batch in loader:
            assert batch["energy"].dtype == np.float64
            assert batch["energy_there"].dtype == bool
            rows = batch["energy"][batch["energy_there"]] if ragged != "flat" else batch["energy"]
            if rows.size:
                there.update(zip(batch["n"][batch["energy_there"]].tolist(), rows.ravel().tolist(), strict=True))
    found = {}
    for part in world.allgather(there):
        found.update(part)
    assert found == {150: 75.0, 151: 75.5, 210: 105.0}
