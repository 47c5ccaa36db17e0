"""Checksums on several ranks: made and compared together, on every way of reading; and what all ranks are told."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from flips import Flipped, all_found, checksums, flip, written
from xxhash import xxh3_64_intdigest

import pario
from pario.decode import Datum
from pario.errors import ChecksumError, MissingError, PeerError
from pario.locate.sums import open_sums
from pario.options import read_tiers

pytestmark = pytest.mark.mpi

SMALL = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 32 << 10, "mix_blocks": 4}
WAYS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "tier that gets nothing": ("straight", Datum(), {"options": pario.Options(**SMALL), "shuffle": "global"}),
    "tier by default": ("straight", Datum(), {"options": pario.Options(**SMALL), "shuffle": "global"}),
    "ring": ("packed", None, {"recipe": "ring", "options": pario.Options(**SMALL)}),
    "mixed": ("decoded", Datum(), {"recipe": "ring", "options": pario.Options(**SMALL), "shuffle": "block"}),
    "memory": ("packed", None, {"options": pario.Options(tiers=read_tiers("memory:64MiB"), **SMALL)}),
    "stag": ("packed", None, {"recipe": "stag"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def damaged(world: Any, factory: pytest.TempPathFactory, kind: str, n: int, bad: int) -> Flipped:
    """A set with checksums that all ranks made, and flipped bits."""
    folder = world.bcast(str(factory.mktemp("flipped") / kind) if world.rank == 0 else None)
    values = world.bcast(written(folder, kind, n) if world.rank == 0 else None)
    checksums(folder)
    chosen = sorted((1 + np.random.default_rng(6).permutation(n - 1)[:bad]).tolist())
    return world.bcast(flip(folder, values, chosen) if world.rank == 0 else None)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sets(world: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Flipped]:
    return {kind: damaged(world, tmp_path_factory, kind, 90, 30) for kind in ("packed", "straight", "decoded")}


@pytest.mark.parametrize("way", WAYS)
def test_a_flipped_bit_never_passes(way: str, sets: dict[str, Flipped], request: pytest.FixtureRequest) -> None:
    kind, decoder, how = WAYS[way]
    if "gets nothing" in way:
        request.getfixturevalue("nothing_copied")
    all_found(sets[kind], decoder=decoder, **how)


@pytest.mark.full
@pytest.mark.parametrize("way", ["ring", "memory"])
def test_ten_thousand_flipped_bits(world: Any, way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, decoder, how = WAYS[way]
    flipped = damaged(world, tmp_path_factory, "packed", 10_500, 10_000)
    all_found(flipped, decoder=decoder, **how)


def test_the_ranks_together_find_what_xxhash_finds(sets: dict[str, Flipped]) -> None:
    with pario.Reader(sets["packed"].path, verify=True) as reader:
        assert reader.sums is not None
        assert reader.sums.values.tolist() == [xxh3_64_intdigest(value) for value in sets["packed"].values]


def test_all_ranks_raise(world: Any, sets: dict[str, Flipped]) -> None:
    flipped = sets["decoded"]
    loader = pario.Loader(flipped.path, 7, Datum(), verify=True)
    with pytest.raises((ChecksumError, PeerError)) as caught:  # noqa: PT012 - a rank without bad records hears of it late
        for _ in loader:
            pass
        loader.report(all_ranks=True)
    kinds = world.allgather(type(caught.value).__name__)
    assert "ChecksumError" in kinds
    assert "checksum" in str(caught.value)


def test_all_ranks_hear_that_there_are_none(world: Any, sets: dict[str, Flipped]) -> None:
    sidecar = sets["packed"].file + ".pario.sums"
    if world.rank == 0:
        os.rename(sidecar, sidecar + ".away")
    world.barrier()
    try:
        with pytest.raises(MissingError, match=r"no checksums.*python -m pario data checksum"):
            pario.Loader(sets["packed"].path, 7, verify=True)
    finally:
        world.barrier()
        if world.rank == 0:
            os.rename(sidecar + ".away", sidecar)
        world.barrier()


def test_a_side_car_is_read_once_per_job(sets: dict[str, Flipped], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks neither open nor look for it."""
    asked: list[Any] = []
    from pario.locate import sums

    find = sums.find_sums
    monkeypatch.setattr(sums, "find_sums", lambda *given: (asked.append(given), find(*given))[1])
    with pario.Reader(sets["packed"].path) as reader:
        open_sums(reader.index, reader.file.pool if reader.world.rank == 0 else None, reader.world).close()
        assert len(asked) == (reader.world.rank == 0)
