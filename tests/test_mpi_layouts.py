"""Datasets as projects publish them, on several ranks: the lines of docs/your-dataset.md give every sample once and
right, in every order, in as many batches on every rank. test_layouts.py does the same in one process."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import LAYOUTS

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.usefixtures("through_the_ring"),
    pytest.mark.filterwarnings(r"ignore:Pickle\(allow_pickle=True\)"),
]

SHUFFLES = [False, "global", "block"]
#: samples of two records, and several files; the others run with `-m full`
QUICK = [("str", "global"), ("oc20", "block")]


@pytest.fixture(scope="module")
def world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def folder(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(world.bcast(str(tmp_path_factory.mktemp("layouts")) if world.rank == 0 else None))


@pytest.mark.parametrize(
    ("name", "shuffle"),
    [
        pytest.param(name, shuffle, marks=() if (name, shuffle) in QUICK else pytest.mark.full)
        for name in LAYOUTS
        for shuffle in SHUFFLES
    ],
)
def test_every_sample_once_and_right(
    world: Any, folder: Path, name: str, shuffle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, mine = LAYOUTS[name], folder / name
    if world.rank == 0 and not mine.exists():
        mine.mkdir()
        layouts.write(layout, mine)
    world.Barrier()
    right = layouts.truth(layout, mine)
    monkeypatch.chdir(mine)
    with layouts.load(layout, shuffle) as loader:
        assert len(loader) == -(-layout.samples // (7 * world.size))
        batches = [layouts.check(batch, right) for batch in loader]
    everyones = world.allgather(batches)
    assert len({len(theirs) for theirs in everyones}) == 1
    assert sorted(chain.from_iterable(chain.from_iterable(everyones))) == sorted(right)
