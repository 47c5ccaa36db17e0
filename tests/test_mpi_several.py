"""Several LMDBs as one, and mixtures, on several ranks: the same records in the same steps for every number of ranks,
resuming on others, and errors that all ranks raise. The oracle is py-lmdb's cursor."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_sets import SHAPES, Pairs, break_record, paths_in, samples, truth, write

import pario
from pario.errors import CorruptedError, MissingError, OptionError, ParioError, PeerError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]

SMALL = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=32 << 10, mix_blocks=4)
EDGES = np.cumsum([0, *(n + 1 for n, _ in SHAPES)]).tolist()


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


def made(world: Any, factory: pytest.TempPathFactory) -> Path:
    folder = world.bcast(factory.mktemp("several") / "sets" if world.rank == 0 else None)
    if world.rank == 0:
        write(folder)
    world.barrier()
    return Path(folder)


@pytest.fixture(scope="module")
def folder(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(world, tmp_path_factory)


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Pairs:
    return truth(paths_in(folder))


def take(loader: pario.Loader, pairs: Pairs, steps: int | None = None) -> list[list[int]]:
    """Per step the ids of all ranks, sorted; the values of this one are right, and all have equal numbers of steps."""
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
    return [sorted(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]


GIVEN: dict[str, dict[str, Any]] = {
    "in order": {"shuffle": False},
    "block": {"shuffle": "block"},
    "global": {"shuffle": "global"},
    "mixture": {"shuffle": "global", "weights": [0.2, 0.5, 0.3]},
    "mixture in order": {"shuffle": False, "weights": [4, 1, 1]},
}
#: the others run with `-m full`
KINDS = [
    pytest.param(kind, marks=() if kind in ("block", "mixture") else pytest.mark.full, id=kind.replace(" ", "-"))
    for kind in GIVEN
]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_rank(world: Any, folder: Path, pairs: Pairs, kind: str) -> None:
    given = {**GIVEN[kind], "seed": 2, "options": SMALL}
    paths = paths_in(folder)
    with pario.Loader(paths, 4, **given) as loader:
        assert len(loader) == -(-len(samples(pairs)) // (4 * world.size))
        whole = [take(loader, pairs) for _ in range(2)]
        begun = take(loader, pairs, 2)
        state = loader.state_dict()
    if "weights" not in given:
        assert all(sorted(chain.from_iterable(epoch)) == samples(pairs) for epoch in whole)
    assert len({repr(theirs) for theirs in world.allgather(state)}) == 1
    with pario.Loader(paths, 4 * world.size, comm="self", **given) as alone:
        assert [take(alone, pairs) for _ in range(2)] == whole
        third = take(alone, pairs)
    assert third[:2] == begun
    # Going on alone, and on all ranks with another batch size.
    for comm, batch_size in (("self", 5), (None, 3)):
        with pario.Loader(paths, batch_size, comm=comm, **given) as loader:
            loader.load_state_dict(state)
            rest = take(loader, pairs)
        assert sorted(chain(*begun, *rest)) == sorted(chain(*third))


@pytest.mark.parametrize("save_index", [False, True])
def test_any_rank_reads(world: Any, folder: Path, pairs: Pairs, save_index: bool) -> None:
    with pario.Reader(folder, save_index=save_index) as reader:
        ids = np.random.default_rng(world.rank).permutation(len(pairs))
        assert [bytes(record) for record in reader.read(ids)] == [pairs[i][1] for i in ids.tolist()]
        assert reader.keys(ids) == [pairs[i][0] for i in ids.tolist()]
        assert reader.index.files.paths == tuple(paths_in(folder))


def test_ranks_that_name_other_files(world: Any, folder: Path) -> None:
    if world.size == 1:
        pytest.skip("one rank")
    paths = paths_in(folder)
    with pytest.raises(OptionError, match=r"the arguments of rank \d differ"):
        pario.Loader(paths if world.rank else paths[::-1], 4)
    with pytest.raises(OptionError, match=r"the arguments of rank \d differ"):
        pario.Loader(paths, 4, weights=[1, 1, 1 + int(world.rank == 1)])
    with pytest.raises(OptionError if world.rank else PeerError, match="weights must be"):
        pario.Loader(paths, 4, weights=[1, 1, 0 if world.rank else 1])


def test_what_all_raise(world: Any, folder: Path) -> None:
    paths = paths_in(folder)
    for given, kind, message in (
        ([*paths, folder / "gone.lmdb"], MissingError, r"gone\.lmdb"),
        ([*paths, paths[1]], OptionError, "named twice"),
        ([*paths, folder / "metadata.npz"], ParioError, r"metadata\.npz"),
        (folder / "data.%02d.lmdb", MissingError, "no file has a name like this"),
    ):
        with pytest.raises(kind if world.rank == 0 else (kind, PeerError), match=message):
            pario.Loader(given, 4)


def test_damage_names_the_file_on_all_ranks(world: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    paths = paths_in(made(world, tmp_path_factory))
    record = offset = 0
    if world.rank == 0:
        with pario.Reader(paths[1:], comm="self", save_index=False) as reader:
            start = SHAPES[1][0] + 1
            record = start + int(np.flatnonzero(reader.index.extents["nbytes"][start:] > 5000)[0])
        with pario.Reader(paths[2], comm="self", save_index=False) as reader:
            offset = int(reader.index.extents["offset"][record - start])
        break_record(paths[2], offset)
        record += EDGES[1]
    record, offset = world.bcast((record, offset))

    def epoch() -> None:
        with pario.Loader(paths, 4, shuffle="block", options=SMALL) as loader:
            for _ in loader:
                pass

    with pytest.raises((CorruptedError, PeerError), match=r"data\.0002\.lmdb") as caught:
        epoch()
    errors = world.allgather(caught.value)
    found = [error for error in errors if isinstance(error, CorruptedError)]
    assert found
    for error in found:
        assert (error.path, error.record) == (os.fspath(paths[2]), record)
        assert error.page is not None
