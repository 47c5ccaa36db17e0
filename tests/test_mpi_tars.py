"""Tars on several ranks: the same batches for every number of ranks, resuming on others, and errors that all raise."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tars import content, shards, write_tar

import pario
from pario.decode import Text
from pario.errors import FileError, ParioError, PeerError

pytestmark = pytest.mark.mpi

FIELDS = {"jpg": ("{}.jpg", None), "cls": ("{}.cls", Text())}
EACH = 48


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def folder(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = world.bcast(tmp_path_factory.mktemp("tars") if world.rank == 0 else None)
    if world.rank == 0:
        shards(folder / "set", 3, EACH)
        whole = (folder / "set" / "shard-001.tar").read_bytes()
        (folder / "cut.tar").write_bytes(whole[:20_000])
        write_tar(folder / "changes.tar", [(f"{i:03d}", content(str(i), 5000)) for i in range(100)])
    world.barrier()
    return Path(folder)


def take(loader: pario.Loader, steps: int | None = None) -> list[list[int]]:
    """Per step the samples of all ranks, sorted; the values of this one are right."""
    mine = []
    for _, batch in zip(range(1 << 30 if steps is None else steps), loader, strict=False):
        for number, jpg, label in zip(batch.ids.tolist(), batch["jpg"], batch["cls"], strict=True):
            assert jpg == content(f"{number}", 300 + number % 50)
            assert label == str(number % 10)
        mine.append(batch.ids.tolist())
    everyones = loader.world.allgather(mine)
    assert len({len(theirs) for theirs in everyones}) == 1
    return [sorted(chain.from_iterable(step)) for step in zip(*everyones, strict=True)]


def test_the_order_is_that_of_one_rank(world: Any, folder: Path) -> None:
    """Global batches, whatever number of ranks shares them; and the rest of an epoch from a state of another job."""
    pattern, batch = f"{folder}/set/shard-{{000..002}}.tar", max(1, 48 // world.size)
    given: dict[str, Any] = {"shuffle": "global", "seed": 2, "fields": FIELDS}
    for _ in range(2):  # with the index made by all ranks, and loaded
        with pario.Loader(pattern, batch, **given) as loader:
            steps = take(loader)
            again = take(loader)
        assert sorted(chain.from_iterable(steps)) == list(range(3 * EACH))
        assert again != steps
        with pario.Loader(pattern, batch * world.size, comm="self", **given) as alone:
            assert take(alone) == steps
            state = alone.state_dict()
    with pario.Loader(pattern, batch, **given) as loader:
        loader.load_state_dict(state)
        assert take(loader, 1) == again[:1]
        state = loader.state_dict()
    with pario.Loader(pattern, batch * world.size, comm="self", **given) as alone:
        alone.load_state_dict(state)
        assert take(alone) == again[1:]


def test_all_ranks_raise(world: Any, folder: Path) -> None:
    paths = [folder / "set" / "shard-000.tar", folder / "cut.tar", folder / "set" / "shard-002.tar"]
    with pytest.raises(ParioError) as caught:
        pario.Loader(paths, 4)
    assert isinstance(caught.value, (FileError, PeerError))
    assert "cut.tar" in str(caught.value)
    assert "behind the end of the file" in str(caught.value)


def test_a_tar_that_changes(world: Any, folder: Path) -> None:
    path = folder / "changes.tar"
    options = pario.Options(tiers=(), slot_bytes=1 << 16, slots=2)  # not all of it is read at once
    with pario.Loader(path, 2, shuffle="global", options=options) as loader:
        next(iter(loader))
        world.barrier()
        if world.rank == 0:
            with path.open("r+b") as file:  # in its place: cut first, it could be read while it is shorter
                file.write(bytes(path.stat().st_size))
        world.barrier()
        with pytest.raises(ParioError, match="was changed while it was read"):
            for _ in loader:
                pass
