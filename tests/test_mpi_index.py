"""The index, made by several ranks: the same on every number of ranks, and errors that everybody hears."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmdb_cases import CASES, FORMATS, NotingFetcher, make, opened, oracle

MPI = pytest.importorskip("mpi4py.MPI")

import pario  # noqa: E402
from pario.comm.farewell import is_known  # noqa: E402
from pario.comm.world import World, get_world  # noqa: E402
from pario.dataset import reader as reader_room  # noqa: E402
from pario.errors import (  # noqa: E402
    CorruptedError,
    DatabaseError,
    EmptyError,
    MissingError,
    ParioError,
    PeerError,
    SnapshotError,
)
from pario.fetch.pool import ReadPool  # noqa: E402
from pario.fetch.snapshot import read_snapshot  # noqa: E402
from pario.format.meta import Snapshot  # noqa: E402
from pario.locate import open as open_module  # noqa: E402
from pario.locate.base import Index  # noqa: E402
from pario.locate.database import Database  # noqa: E402
from pario.locate.open import open_index  # noqa: E402
from pario.locate.sidecar import sidecar_places  # noqa: E402
from pario.locate.walk import build  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.fixture(params=[pytest.param("self", marks=pytest.mark.full), "world"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with get_world(MPI.COMM_SELF if request.param == "self" else MPI.COMM_WORLD) as found:
        assert isinstance(found, World)
        yield found


@pytest.fixture
def place(world: World) -> Iterator[Path]:
    """A directory of this communicator."""
    path = world.bcast(tempfile.mkdtemp(prefix="pario-test-") if world.rank == 0 else None)
    yield Path(path)
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path)


class Opened:
    """A data file on this rank, and the snapshot that rank 0 read."""

    def __init__(self, world: World, path: str) -> None:
        self.world, self.path = world, path
        self.fetcher = NotingFetcher(path)
        self.pool = ReadPool(self.fetcher, 2)
        self.snapshot = world.bcast(read_snapshot(self.pool.fetcher) if world.rank == 0 else None)

    def index(self, db: bytes | None = None, save: bool = True) -> Index:
        return open_index(self.database(db), self.pool, self.world, save=save)

    def database(self, db: bytes | None = None) -> Database:
        return Database(self.path, self.snapshot, db)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self.pool.fetcher.close()


def made(world: World, place: Path, name: str, version: int) -> tuple[str, bytes | None]:
    """Rank 0 writes the file."""
    return world.bcast(make(place, name, version) if world.rank == 0 else None)


#: every kind of file in both data formats; by default in one of them
FILES = [
    pytest.param(name, version, marks=[pytest.mark.full] * (number % 2 != FORMATS.index(version)))
    for number, name in enumerate(CASES)
    for version in FORMATS
]


@pytest.mark.parametrize(("name", "version"), FILES)
def test_every_record_on_every_rank(world: World, place: Path, name: str, version: int) -> None:
    path, db = made(world, place, name, version)
    expected = oracle(path, db)
    with Opened(world, path) as file:
        fresh = file.index(db)
        loaded = file.index(db)
        raw = Path(path).read_bytes()
        for index in (fresh, loaded):
            assert [raw[o : o + n] for o, n in index.extents.tolist()] == [value for _, value in expected]
            assert index.keys(np.arange(index.n)) == [key for key, _ in expected]
            order = np.arange(index.n) if index.by_offset is None else index.by_offset
            np.testing.assert_array_equal(order, np.argsort(index.extents["offset"], kind="stable"))
            index.close()
        assert (fresh.bytes_read > 0, loaded.bytes_read) == (True, 0)
        assert fresh.sidecar == loaded.sidecar == next(sidecar_places(path, db))
        ids = {(index.database.fingerprint, index.content_id) for index in (fresh, loaded)}
        assert len(set(map(str, world.allgather(ids)))) == len(ids) == 1
        world.barrier()  # everybody has looked before rank 0 clears up


@pytest.mark.parametrize("name", ["caffe", "duplicates"])
def test_pages_are_read_once_by_all_together(world: World, place: Path, name: str) -> None:
    path, db = made(world, place, name, 1)
    with Opened(world, path) as file:
        found = build(file.pool, file.database(db), world)
        pages = [page for theirs in world.allgather(file.fetcher.pages) for page in theirs]
        assert len(set(pages)) == len(pages) > 10
        assert found.bytes_read == len(pages) * 4096
        assert (found.extents is not None) == (world.rank == 0)


def test_keys_in_memory(world: World, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not saved: the keys are shared. And where other nodes cannot see the side-car, too."""
    path, db = made(world, place, "dupfixed_3", 1)
    expected = [key for key, _ in oracle(path, db)]
    with Opened(world, path) as file:
        index = file.index(db, save=False)
        assert index.sidecar is None
        assert index.keys(np.arange(index.n)) == expected
        saved = file.index(db)
        monkeypatch.setattr(open_module, "same_sidecar", lambda place, mark: False)
        unseen = file.index(db)
        assert unseen.bytes_read == 0
        for other in (saved, unseen):
            assert other.keys(np.arange(other.n)) == expected
            other.close()
        world.barrier()


def raises(world: World, kind: type[ParioError], file: Opened, db: bytes | None = None) -> list[str]:
    """Every rank must raise, some of them their own error; returns the kinds of all ranks."""
    try:
        file.index(db, save=False)
    except ParioError as e:
        mine = type(e)
        text = str(e)
        known = world.size == 1 or is_known(e)  # else an alarm would reach ranks that are still about to raise it
    else:
        mine, text, known = type(None), "nothing raised", True  # type: ignore[assignment]
    kinds = world.allgather(mine.__name__)
    assert mine in (kind, PeerError), text
    assert known, text
    assert kind.__name__ in kinds
    if mine is PeerError:
        assert kind.__name__ in text
    return kinds


def test_one_damaged_leaf(world: World, place: Path) -> None:
    path, _ = made(world, place, "appended", 1)
    if world.rank == 0:
        raw = bytearray(Path(path).read_bytes())
        header = [int.from_bytes(raw[p * 4096 + 10 : p * 4096 + 12], "little") for p in range(len(raw) // 4096)]
        last = max(p for p, flags in enumerate(header) if flags == 2 and raw[p * 4096] == p % 256)
        raw[last * 4096 : (last + 1) * 4096] = bytes(4096)
        Path(path).write_bytes(raw)
    world.barrier()
    with Opened(world, path) as file:
        kinds = raises(world, CorruptedError, file)
        assert kinds.count("CorruptedError") == 1


def test_a_file_that_was_cut(world: World, place: Path) -> None:
    """In its last value, which only one rank's leaf pages mention."""
    path = os.fspath(place / "data.mdb")
    if world.rank == 0:
        with opened(place, 1) as env, env.begin(write=True) as txn:
            for i in range(300):
                txn.put(b"%04d" % i, b"x" * 5000)
        os.truncate(path, os.path.getsize(path) - 4096)
    world.barrier()
    with Opened(world, path) as file:
        assert raises(world, CorruptedError, file).count("CorruptedError") == 1


def test_databases_and_no_records(world: World, place: Path) -> None:
    if world.rank == 0:
        with opened(place, 1) as env:
            for name in (b"a", b"b", b"c"):
                env.open_db(name)
    world.barrier()
    path = os.fspath(place / "data.mdb")
    with Opened(world, path) as file:
        assert set(raises(world, DatabaseError, file)) == {"DatabaseError"}
        assert set(raises(world, EmptyError, file, b"a")) == {"EmptyError"}
        raises(world, DatabaseError, file, b"x")


def test_overtaken_by_a_writer(world: World, place: Path) -> None:
    path, _ = made(world, place, "appended", 1)
    with Opened(world, path) as file:
        world.barrier()
        if world.rank == 0:
            with opened(os.path.dirname(path), 1) as env:
                for k in range(3):
                    with env.begin(write=True) as txn:
                        txn.put(b"%020d" % k, b"new")
        world.barrier()
        raises(world, SnapshotError, file)


@pytest.mark.parametrize("commits", [1, 2, 9])
def test_a_writer_commits_while_the_nodes_look(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """Between rank 0's look and those of other nodes: all look again, a few times."""
    path, _ = made(world, place, "appended", 1)
    left = list(range(commits))

    def looks(*given: Any, **more: Any) -> Snapshot:
        found = read_snapshot(*given, **more)
        if left and world.rank == 0:
            with opened(os.path.dirname(path), 1) as env, env.begin(write=True) as txn:
                txn.put(b"z%d" % left.pop(), bytes(9000))
        return found

    monkeypatch.setattr(reader_room, "read_snapshot", looks)
    if commits == 9 and world.nodes > 1:
        with pytest.raises(pario.ParioError, match=r"another file than rank 0|grew while it was opened"):
            pario.Reader(path, comm=world.comm, save_index=False)
    else:
        with pario.Reader(path, comm=world.comm, save_index=False) as reader:
            assert len(reader) == len(oracle(path, None)) - int(world.nodes == 1)
            world.barrier()


def test_a_rank_that_sees_a_shorter_file(world: World, place: Path) -> None:
    path, _ = made(world, place, "appended", 1)
    with Opened(world, path) as file:
        if world.rank == world.size - 1:
            file.pool.fetcher.nbytes -= 4096
        raises(world, SnapshotError, file)


def test_more_ranks_than_pages(world: World, place: Path) -> None:
    path, _ = made(world, place, "one_record", 3)
    with Opened(world, path) as file:
        index = file.index()
        assert (index.n, index.extents["nbytes"].tolist(), index.keys([0])) == (1, [0], [b"only"])
        world.barrier()


def test_only_leaders_open_the_file_and_the_others_when_they_read(world: World, place: Path) -> None:
    path, db = made(world, place, "appended", 1)
    expected = [value for _, value in oracle(path, db)]
    with pario.Reader(path, comm=world.comm, db=db) as reader:
        assert (reader.file.opened is not None) == world.is_leader
        assert reader.path == path
        ids = [world.rank, 5, 0]
        assert [bytes(value) for value in reader.read(ids)] == [expected[i] for i in ids]
        assert reader.file.opened is not None
        world.barrier()


@pytest.mark.parametrize("handle", [True, False], ids=["by the leader's handle", "by the path"])
def test_a_rank_that_opens_late_gets_no_other_file(world: World, place: Path, handle: bool) -> None:
    """The leader's file, whatever the path leads to; where its handle cannot be had, an error."""
    path, db = made(world, place, "appended", 1)
    expected = [value for _, value in oracle(path, db)]
    with pario.Reader(path, comm=world.comm, db=db) as reader:
        world.barrier()
        if world.rank == 0:
            Path(f"{path}.new").write_bytes(Path(path).read_bytes()[: 1 << 16])
            os.replace(f"{path}.new", path)
        world.barrier()
        if not handle:
            reader.file._leaders_files = ["/proc/self/fd/nothing"]
        if not world.is_leader and not handle:
            with pytest.raises(SnapshotError, match="replaced after another rank"):
                reader.read([0])
        else:
            assert [bytes(value) for value in reader.read([7, 0])] == [expected[7], expected[0]]
        world.barrier()


def test_a_dataset_that_only_some_nodes_have(world: World, place: Path) -> None:
    path, db = made(world, place, "appended", 1)
    mine = path if world.node == 0 else os.fspath(place / "nowhere" / "data.mdb")
    if world.nodes == 1:
        pario.Reader(mine, comm=world.comm, db=db).close()
        return
    with pytest.raises((MissingError, PeerError), match=r"1 of 2 nodes: node 1 \(.*on rank 0's node there is"):
        pario.Reader(mine, comm=world.comm, db=db)
    with pytest.raises((MissingError, PeerError), match="no such file") as caught:
        pario.Reader(place / "nowhere", comm=world.comm, db=db)
    assert "nodes:" not in str(caught.value)
