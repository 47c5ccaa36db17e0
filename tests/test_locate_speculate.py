"""Records before there is an index: guesses, what they cost, what they leave behind. The oracle is py-lmdb's cursor."""

from __future__ import annotations

import glob
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from datasets import Made, truth_of

import pario
from pario.checkpoint import VERSION
from pario.comm.world import Solo
from pario.errors import CorruptedError, DatabaseError, SnapshotError, StateError
from pario.fetch.base import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.format.layout import MDB_DUPSORT
from pario.locate import index as index_module
from pario.locate import speculate
from pario.locate.index import open_index
from pario.locate.snapshot import read_snapshot
from pario.locate.speculate import Fetched, Spare, may_grow
from pario.plan.coalesce import Reads
from pario.records import EXTENT

SLOTS = pario.Options(slot_bytes=1 << 20, slots=4)
pytestmark = pytest.mark.usefixtures("through_the_ring")

N = 6000


def write(place: Path, values: Iterable[bytes], commit_every: int = 1 << 30, order: Iterable[int] | None = None) -> str:
    """Keys of eight digits; a commit after every so many records, or one at the end."""
    kept = list(values)
    numbers = list(order) if order is not None else list(range(len(kept)))
    with lmdb.open(str(place), map_size=1 << 28, sync=False) as env:
        for start in range(0, len(numbers), commit_every):
            with env.begin(write=True) as txn:
                for i in numbers[start : start + commit_every]:
                    txn.put(b"%08d" % i, kept[i])
    return str(place)


def noise(seed: int, sizes: Iterable[int]) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(size)) for size in sizes]


MAKERS: dict[str, Callable[[Path], str]] = {
    "one commit": lambda place: write(place, noise(0, [3000] * N)),
    "commits": lambda place: write(place, noise(1, [3000] * N), 1000),
    "two pages": lambda place: write(place, noise(2, [6000] * N), 1000),
    "varying": lambda place: write(place, noise(3, np.random.default_rng(3).integers(2500, 12_000, N)), 700),
    "in leaves": lambda place: write(place, noise(4, np.random.default_rng(4).integers(100, 1900, 2 * N)), 1000),
    "any order": lambda place: write(
        place, noise(5, [3000] * N), 1000, np.random.default_rng(5).permutation(N).tolist()
    ),
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = MAKERS[name](tmp_path_factory.mktemp("sets") / "x.lmdb")
        forget(made[name])
        return made[name]

    return get


def forget(path: str) -> None:
    for place in glob.glob(f"{path}/*.pario.h5"):
        os.unlink(place)


def sidecars(path: str) -> list[str]:
    return glob.glob(f"{path}/*.pario.h5")


def page_bytes(path: str) -> int:
    """Of the pages that hold anything of the database."""
    with lmdb.open(path, readonly=True, lock=False) as env:
        stat = env.stat()
    return (stat["overflow_pages"] + stat["leaf_pages"] + stat["branch_pages"]) * stat["psize"]


class Counting(PosixFetcher):
    """Counts what reaches the file."""

    bytes_read = 0

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        Counting.bytes_read += int(reads["nbytes"].sum())
        super().read(reads, out, starts)

    def pread(self, offset: int, nbytes: int) -> bytes:
        data = super().pread(offset, nbytes)
        Counting.bytes_read += len(data)
        return data


@pytest.mark.parametrize("recipe", ["auto", "dm", "lmm"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_an_epoch_reads_little_more_than_the_data(
    sets: Callable[[str], str], name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sets(name)
    if recipe != "lmm":  # which reads by a fetcher of its own
        monkeypatch.setattr("pario.reader._FETCHERS", {"auto": Counting, "posix": Counting})
    Counting.bytes_read = 0
    expected = [value for _, value in truth_of(path)]
    with pario.Loader(path, 256, recipe=recipe, options=SLOTS) as loader:
        assert loader.index.growth is not None
        at = 0
        early: dict[str, Any] = {}
        for batch in loader:
            assert batch.ids.tolist() == list(range(at, at + len(batch.ids)))
            offsets = batch["offsets"]
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][offsets[k] : offsets[k + 1]].tobytes() == expected[i], f"record {i}"
            at += len(batch.ids)
            if batch.step == 1:
                early = loader.stats()
        assert at == len(expected)
        stats = loader.stats()
        snapshots = stats["reads"] * 2 * 4096  # at most one look at the meta pages per read
        if recipe != "lmm":
            assert stats["bytes_read"] <= Counting.bytes_read <= stats["bytes_read"] + snapshots + (1 << 20)
        assert stats["bytes_read"] <= 1.05 * page_bytes(path)
        if recipe == "lmm":
            assert stats["guessed"] == 0
        elif name in ("one commit", "commits", "two pages"):
            assert stats["guessed"] > 0.6 * page_bytes(path) / 4096
            # A commit moves a leaf and leaves pages free: a value or two may stand elsewhere.
            assert stats["missed"] - early["missed"] <= (0 if name == "one commit" else 8)
        assert stats["extra"] <= 0.04 * page_bytes(path) / 4096


def test_the_first_batch_comes_before_the_index(sets: Callable[[str], str]) -> None:
    path = sets("one commit")
    Counting.bytes_read = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pario.reader._FETCHERS", {"auto": Counting})
        options = pario.Options(slot_bytes=128 << 10, slots=2)
        with pario.Loader(path, 16, options=options) as loader:
            opened = Counting.bytes_read
            batches = iter(loader)
            next(batches)
            growth = loader.index.growth
            assert growth.frontier()[0] < len(growth.leaves) // 2
            # Meta and branch pages, the first leaf and the last one, the first record and the last one.
            assert opened <= 64 << 10
            # Two slots, a third of a leaf's records each.
            assert Counting.bytes_read <= opened + (1 << 20)
            assert not sidecars(path)


def test_what_is_left_behind(sets: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    path = sets("commits")
    with pario.Loader(path, 100, options=SLOTS) as loader:
        for batch in loader:
            if batch.step == 20:
                break
        assert not sidecars(path), "an epoch that was broken off"
        for _ in loader:
            pass
        assert len(sidecars(path)) == 1
        at = os.stat(sidecars(path)[0]).st_mtime_ns
        for _ in loader:
            pass
        assert os.stat(sidecars(path)[0]).st_mtime_ns == at
    with pario.Loader(path, 100) as loader:
        assert loader.index.growth is None
    forget(path)
    with pario.Loader(path, 100, options=SLOTS, save_index=False) as loader:
        for _ in loader:
            pass
        keys = [key for key, _ in truth_of(path)]
        assert loader.keys(range(N)) == keys
        assert not sidecars(path)


def test_the_second_epoch_guesses_nothing(sets: Callable[[str], str]) -> None:
    path = sets("commits")
    with pario.Loader(path, 100, options=SLOTS, save_index=False) as loader:
        for _ in loader:
            pass
        first = loader.stats()
        for _ in loader:
            pass
        second = loader.stats()
        assert second["guessed"] == first["guessed"] > 0
        assert second["bytes_read"] - first["bytes_read"] <= 1.01 * page_bytes(path)


def test_a_state_of_an_unfinished_first_epoch(sets: Callable[[str], str]) -> None:
    path = sets("varying")

    def ids(loader: pario.Loader) -> list[int]:
        return [i for batch in loader for i in batch.ids.tolist()]

    with pario.Loader(path, 64, options=SLOTS) as loader:
        for batch in loader:
            if batch.step == 30:
                break
        state = loader.state_dict()
    assert not sidecars(path)
    for _ in range(2):  # without the index, then with the one that the rest of the epoch left behind
        with pario.Loader(path, 50, options=SLOTS) as loader:
            loader.load_state_dict(state)
            assert ids(loader) == list(range(31 * 64, N))
        assert len(sidecars(path)) == 1
    with pytest.raises(StateError, match=f"version 1, expected {VERSION}"):
        loader.load_state_dict({**state, "version": 1})
    other = write(Path(path).parent / "other.lmdb", noise(99, [3000] * N))
    with pario.Loader(other, 50) as loader, pytest.raises(StateError, match="fingerprint"):
        loader.load_state_dict(state)


def damaged(path: str, place: Path, offset: int, data: bytes) -> str:
    place.mkdir()
    raw = bytearray(Path(path, "data.mdb").read_bytes())
    raw[offset : offset + len(data)] = data
    (place / "data.mdb").write_bytes(raw)
    return str(place)


def entries_at(path: str) -> int:
    """Byte of the file where the newest meta page says how many records there are."""
    raw = Path(path, "data.mdb").read_bytes()
    with lmdb.open(path, readonly=True, lock=False) as env:
        n = env.stat()["entries"]
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", raw, page * 4096 + 16 + 128)[0])
    at = newest * 4096 + 16 + 24 + 48 + 32  # header, fields before the databases, the list of free pages, fields
    assert struct.unpack_from("<Q", raw, at) == (n,)
    return at


@pytest.mark.parametrize("own_rows", ["never", "always"])
@pytest.mark.parametrize("entries", [N - 1, N + 1, 1 << 40, 3])
def test_a_wrong_number_of_records(
    sets: Callable[[str], str], tmp_path: Path, entries: int, own_rows: str
) -> None:
    path = sets("one commit")
    wrong = damaged(path, tmp_path / "x.lmdb", entries_at(path), struct.pack("<Q", entries))
    with pytest.raises(CorruptedError, match="records") as caught:  # noqa: PT012, SIM117
        with pario.Loader(wrong, 100, options=replace(SLOTS, own_rows=own_rows)) as loader:
            for _ in loader:
                pass
    assert caught.value.path == f"{wrong}/data.mdb"
    assert not sidecars(wrong)


@pytest.mark.parametrize("part", [0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off(sets: Callable[[str], str], tmp_path: Path, part: float) -> None:
    path = sets("one commit")
    place = tmp_path / "x.lmdb"
    place.mkdir()
    raw = Path(path, "data.mdb").read_bytes()
    (place / "data.mdb").write_bytes(raw[: int(len(raw) * part)])
    with pytest.raises((CorruptedError, SnapshotError)):  # noqa: PT012, SIM117
        with pario.Loader(str(place), 100, options=SLOTS) as loader:
            for _ in loader:
                pass


def test_a_leaf_of_another_place(sets: Callable[[str], str], tmp_path: Path) -> None:
    """Two leaves exchanged: intact pages, wrong order."""
    path = sets("commits")
    with pario.Loader(path, 100, save_index=False) as loader:
        size, leaves = 4096, loader.index.growth.leaves[[20, 21]].tolist()
    raw = Path(path, "data.mdb").read_bytes()
    first, second = (raw[p * size : (p + 1) * size] for p in leaves)
    place = damaged(path, tmp_path / "x.lmdb", leaves[0] * size, first[:16] + second[16:])
    with open(f"{place}/data.mdb", "r+b") as file:
        file.seek(leaves[1] * size)
        file.write(second[:16] + first[16:])
    with pytest.raises(CorruptedError, match="do not ascend"):  # noqa: PT012, SIM117
        with pario.Loader(place, 100, options=SLOTS) as loader:
            for _ in loader:
                pass


def test_a_writer_overtakes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", noise(7, [3000] * N), 1000)
    with pytest.raises(SnapshotError):  # noqa: PT012, SIM117
        with pario.Loader(path, 20, options=pario.Options(slot_bytes=64 << 10, slots=2)) as loader:
            for batch in loader:
                if batch.step == 3:
                    with lmdb.open(path, map_size=1 << 28) as env:
                        for i in range(4):
                            with env.begin(write=True) as txn:
                                txn.put(b"%08d" % (5000 + i), b"new" * 1000)
    assert not sidecars(path)


def test_named_databases_among_the_records(tmp_path: Path) -> None:
    path = str(tmp_path / "x.lmdb")
    with lmdb.open(path, map_size=1 << 27, max_dbs=2) as env:
        with env.begin(write=True) as txn:
            for i in range(4000):
                txn.put(b"%08d" % i, b"v" * 3000)
        env.open_db(b"00002000-here")
    with pytest.raises(DatabaseError, match="00002000-here"):  # noqa: PT012, SIM117
        with pario.Loader(path, 100, options=SLOTS) as loader:
            for _ in loader:
                pass


def test_what_is_walked_first(sets: Callable[[str], str], dataset: Callable[[str], Made]) -> None:
    with pario.Loader(sets("commits"), 10, shuffle="global", save_index=False) as loader:
        assert loader.index.growth is None
    with pario.Loader(dataset("one_giant").path, 10, save_index=False) as loader:  # three leaves
        assert loader.index.growth is None
    many = dataset("dupsort")
    with pario.Loader(many.path, 10, db=many.db, save_index=False) as loader:
        assert loader.index.growth is None
    with pario.Reader(sets("commits"), save_index=False) as reader:
        assert reader.index.growth is None
        snapshot, record = reader.snapshot, reader.snapshot.main
    assert may_grow(snapshot, record, readers=1)
    most = int(speculate.MOST_REPEATED * (snapshot.last_pgno + 1) / record.md_leaf_pages) + 1
    assert may_grow(snapshot, record, readers=most)
    assert not may_grow(snapshot, record, readers=most + 1)
    assert not may_grow(snapshot, record._replace(md_flags=MDB_DUPSORT), readers=1)


def test_any_record_at_any_time(sets: Callable[[str], str]) -> None:
    path = sets("varying")
    truth = truth_of(path)
    pool = ReadPool(PosixFetcher(f"{path}/data.mdb"), 2)
    snapshot = read_snapshot(pool.fetcher)
    index = open_index(f"{path}/data.mdb", pool, snapshot, Solo(), save=False, grow=lambda: pool)
    assert index.growth is not None
    assert index.keys([0, N - 1]) == [truth[0][0], truth[-1][0]]
    raw = Path(path, "data.mdb").read_bytes()
    for ids in ([N - 1, 0], [300, 4], [2000], [1999, 2001, 2001]):
        places = index.places(np.array(ids)).tolist()
        assert [raw[offset : offset + nbytes] for offset, nbytes in places] == [truth[i][1] for i in ids]
        assert index.keys(ids) == [truth[i][0] for i in ids]
    assert not index.growth.is_complete
    whole = open_index(f"{path}/data.mdb", pool, snapshot, Solo(), save=False)
    assert index.mean_bytes > whole.mean_bytes
    np.testing.assert_array_equal(index.extents, whole.extents)
    assert index.growth.is_complete
    assert (index.content_id, index.mean_bytes) == (whole.content_id, whole.mean_bytes)
    assert not index.extents.flags.writeable
    index.close()
    pool.close()
    pool.fetcher.close()


def test_records_that_do_not_fit_into_the_ring(tmp_path: Path) -> None:
    """Their rank reads them itself: counted, and checked like all others."""
    values = noise(7, [3000] * 2000 + [300_000] * 60 + [3000] * 1000)
    path = write(tmp_path / "giants", values)
    with pario.Loader(path, 32, save_index=False) as loader:
        for batch in loader:
            data, offsets = batch["data"], batch["offsets"]
            for k, i in enumerate(batch.ids.tolist()):
                assert data[offsets[k] : offsets[k + 1]].tobytes() == values[i]
        stats = loader.stats()
        assert stats["spilled"] > 0
        assert stats["bytes_read"] >= sum(map(len, values))
        offset = int(loader.index.extents["offset"][2040])
    with open(f"{path}/data.mdb", "r+b") as file:
        file.seek(offset - 16)
        file.write(b"\xff" * 16)
    with pytest.raises(CorruptedError, match="record 2040"), pario.Loader(path, 32, save_index=False) as loader:
        list(loader)


def test_an_index_that_cannot_be_saved(
    sets: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = sets("commits")
    monkeypatch.setattr(index_module, "_places", lambda *_: iter(["/proc/no/such/place.h5"]))
    with pario.Loader(path, 100, options=SLOTS) as loader:
        for _ in loader:
            pass
        assert "cannot be saved" in caplog.text
        assert loader.keys([5, 4000]) == [b"%08d" % 5, b"%08d" % 4000]
        assert sum(len(batch.ids) for batch in loader) == N


def test_what_is_there() -> None:
    snapshot = _Small()
    reads = Reads(
        np.array([(100, 50), (150, 50), (300, 100)], EXTENT), np.array([0, 50, 112]), np.empty(0, np.int64), 212
    )
    found = Fetched(np.zeros(212, np.uint8), reads, snapshot)  # type: ignore[arg-type]
    offsets, nbytes = np.array([100, 140, 99, 190, 200, 300, 370]), np.array([100, 20, 5, 11, 1, 80, 30])
    # The file ends at byte 380.
    assert found.places(offsets, nbytes).tolist() == [0, 40, -1, -1, -1, 112, -1]
    nothing = Fetched(np.zeros(0, np.uint8), Reads(reads.reads[:0], reads.starts[:0], reads.starts[:0], 0), snapshot)  # type: ignore[arg-type]
    assert nothing.places(offsets, nbytes).tolist() == [-1] * 7


def test_spare_pages() -> None:
    spare = Spare(_Small())  # type: ignore[arg-type]
    data = np.arange(256, dtype=np.uint8)
    spare.keep(np.array([7, 8, 20]), data, np.array([0, 64, 128]))
    assert spare.holds(np.array([7 * 64, 9 * 64, 20 * 64 + 63])).tolist() == [True, False, True]
    assert spare.get(7 * 64 + 10, 100).tolist() == list(range(10, 110))  # type: ignore[union-attr]
    assert spare.get(8 * 64 + 10, 100) is None
    for pgno in range(100, 100 + (speculate._SPARE_BYTES // 64)):
        spare.keep(np.array([pgno]), data, np.array([0]))
    assert spare.get(7 * 64, 1) is None


class _Small:
    page_size, file_bytes = 64, 380
