"""pack and unpack on several ranks: the same file as one process makes; errors reach all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pack_sources import FOLDERS, LMDBS, TARS, lmdb_truth, packed, quiet, tree_truth

from pario.comm.world import World
from pario.errors import CorruptedError, FileError, PeerError
from pario.packing import flow
from pario.packing.pack import PackOptions, pack
from pario.packing.unpack import unpack

pytestmark = pytest.mark.mpi

FULL = pytest.mark.full


@pytest.fixture(scope="module")
def comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def folder(comm: Any, tmp_path: Path) -> Path:
    return comm.bcast(tmp_path)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_CHUNK", 8 << 10)
    monkeypatch.setattr(flow, "_LEAST_CHUNK", 4 << 10)


@pytest.mark.parametrize("kind", ["plain", *(pytest.param(k, marks=FULL) for k in ("all_kinds", "no_record"))])
def test_an_lmdb_comes_back(comm: Any, folder: Path, kind: str) -> None:
    source, middle, back = (str(folder / name) for name in ("source", "packed", "back"))
    if comm.rank == 0:
        LMDBS[kind](source)
        packed([source], str(folder / "alone"))
    comm.Barrier()
    with World(comm) as world:
        pack(world, [source], middle, PackOptions(), quiet())
        unpack(world, middle, back, quiet())
    if comm.rank == 0:
        assert lmdb_truth(middle) == lmdb_truth(str(folder / "alone")), "ranks change no byte of a value"
        assert lmdb_truth(back) == lmdb_truth(source)
        assert not [name for name in os.listdir(folder) if name.endswith(".part")]
    comm.Barrier()


@pytest.mark.full
def test_folders_and_tars_come_back(comm: Any, folder: Path) -> None:
    given = [str(folder / "images"), str(folder / "more.tar")]
    if comm.rank == 0:
        FOLDERS["tree"](given[0])
        TARS["pax"](str(folder / "more"))
    comm.Barrier()
    with World(comm) as world:
        pack(world, given, str(folder / "packed"), PackOptions(), quiet())
        unpack(world, str(folder / "packed"), str(folder / "back"), quiet())
    if comm.rank == 0:
        assert tree_truth(str(folder / "back/images")) == tree_truth(given[0])
        assert (folder / "back/more.tar").read_bytes() == Path(given[1]).read_bytes()
    comm.Barrier()


def test_all_ranks_raise(comm: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot read a file; later it can, and the work goes on."""
    source, target = str(folder / "source"), str(folder / "packed")
    if comm.rank == 0:
        FOLDERS["tree"](source)
    comm.Barrier()
    with monkeypatch.context() as patch:
        if comm.rank == min(1, comm.size - 1):  # of five, the last ones may have nothing to read

            def refused(*_: Any) -> Any:
                raise FileError("cannot read it: Input/output error", path=source)

            patch.setattr("pario.packing.folder.FileItems._content", refused)
        with World(comm) as world, pytest.raises((FileError, PeerError), match="Input/output error"):
            pack(world, [source], target, PackOptions(dictionary="no"), quiet())
    assert not os.path.exists(target)
    with World(comm) as world:
        pack(world, [source], target, PackOptions(dictionary="no"), quiet())
        unpack(world, target, str(folder / "back"), quiet())
    if comm.rank == 0:
        assert tree_truth(str(folder / "back")) == tree_truth(source)
    comm.Barrier()


@pytest.mark.parametrize("about", ["source", "packed.part"])
def test_what_one_rank_finds_wrong_all_throw_away(
    comm: Any, folder: Path, about: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the new file; after any other error of one rank the work is kept."""
    source, part = str(folder / "source"), folder / "packed.part"
    if comm.rank == 0:
        LMDBS["plain"](source)
    comm.Barrier()
    if comm.rank == min(1, comm.size - 1):

        def failing(*_: Any) -> Any:
            raise CorruptedError("made up", path=str(folder / about / "data.mdb"))

        monkeypatch.setattr(flow, "_compare", failing)
    with World(comm) as world, pytest.raises((CorruptedError, PeerError), match="made up") as raised:
        pack(world, [source], str(folder / "packed"), PackOptions(codec="raw"), quiet())
    if about == "packed.part":
        assert raised.type is CorruptedError, "on all ranks"
    comm.Barrier()
    assert part.exists() == (about == "source")
    comm.Barrier()
