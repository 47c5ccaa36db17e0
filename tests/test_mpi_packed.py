"""Packed databases on several ranks and nodes: every recipe, tiers and peers, shared batches. The oracle is what was
written."""

from __future__ import annotations

import os
from itertools import chain, pairwise
from pathlib import Path

import pytest
from packed_sets import pack_copy, values_like_text

import pario
from pario.errors import CorruptedError, OptionError, PeerError
from pario.options import RECIPES

pytestmark = pytest.mark.mpi

N = 400
VALUES = values_like_text(N, seed=3)
MiB = 1 << 20


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module", params=[(), (9, 1, 60)], ids=["alone", "blocks"])
def path(request, world, tmp_path_factory):
    place = None
    if world.rank == 0:
        items = [(b"%06d" % i, value) for i, value in enumerate(VALUES)]
        folder = tmp_path_factory.mktemp("packed")
        place = os.fspath(pack_copy(folder / "p", items, dictionary=True, counts=request.param))
    return world.bcast(place)


def options(**more):
    return pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=16 << 10, mix_blocks=4, **more)


def epoch(loader):
    """Record ids of all ranks, content checked."""
    seen = []
    for batch in loader:
        ends = batch["offsets"].tolist()
        values = [batch["data"][a:b].tobytes() for a, b in pairwise(ends)]
        assert values == [VALUES[i] for i in batch.ids.tolist()]
        seen += batch.ids.tolist()
    return list(chain.from_iterable(loader.world.allgather(seen)))


@pytest.mark.full
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe_unpacks(path, recipe):
    with pario.Reader(path, save_index=False) as reader:
        has_blocks = reader.packing.counts is not None
    if has_blocks and RECIPES[recipe].source == "per_rank":
        with pytest.raises(OptionError, match=r"py-lmdb.*blocks.*Use another one"):
            pario.Loader(path, 16, recipe=recipe)
        return
    for shuffle in (False, "global"):
        more = {"recipe": recipe, "shuffle": shuffle, "save_index": False, "options": options()}
        with pario.Loader(path, 16, **more) as loader:
            assert loader.records == N
            assert sorted(epoch(loader)) == list(range(N))


def test_tiers_and_peers_hold_packed_bytes(path):
    with pario.Reader(path) as reader:
        nbytes = reader.index.file_bytes
        assert reader.packing is not None  # on all ranks
        has_blocks = reader.packing.counts is not None
    with pario.Loader(path, 16, shuffle="global", options=options(tiers=(pario.Tier("memory", 4 * MiB),))) as loader:
        for _ in range(2):
            assert sorted(epoch(loader)) == list(range(N))
        report = loader.report(all_ranks=True)
        assert report.total["unpacked_bytes"] == 2 * sum(map(len, VALUES))
        # In a random order each record takes its whole block.
        assert (report.total["packed_bytes"] < report.total["unpacked_bytes"]) != has_blocks
        assert report.total["bytes_read"] <= 2 * nbytes
        assert "unpacked" in str(report)


def test_ranks_that_share_batches_get_the_same(path, world):
    group = world.Split(world.rank // 2 if world.size % 2 == 0 else world.rank)
    with pario.Loader(path, 16, shuffle="global", share_batch=group, save_index=False, options=options()) as loader:
        seen = sorted(epoch(loader))
        assert seen == sorted([*range(N)] * group.size)
    group.Free()


def test_a_damaged_entry_is_an_error_on_all_ranks(path, world):
    bad = None
    if world.rank == 0:
        file = Path(path) / "data.mdb"
        data = file.read_bytes()
        at = data.index(b"PARIOPK") + 300
        bad = f"{path}-damaged.mdb"
        Path(bad).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    bad = world.bcast(bad)
    with pytest.raises((CorruptedError, PeerError)) as caught:
        pario.Loader(bad, 8, save_index=False)
    assert "reserved entry" in str(caught.value)
