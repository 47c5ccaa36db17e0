"""The index that grows while records are read: what it knows, what it leaves behind, what damage it meets."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from datasets import Made, truth_of
from grown_sets import SLOTS, N, forget, noise, sidecars, write

import pario
from pario.comm.solo import Solo
from pario.errors import CorruptedError, DatabaseError, SnapshotError, StateError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.resolve import FETCHERS
from pario.fetch.snapshot import read_snapshot
from pario.format.layout import MDB_DUPSORT
from pario.loader.state import VERSION
from pario.locate import sidecar
from pario.locate.database import Database
from pario.locate.growing import MOST_REPEATED, may_grow
from pario.locate.open import open_index

pytestmark = pytest.mark.usefixtures("through_the_ring")


def test_what_is_left_behind(grown_set: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    path = grown_set("commits")
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
        assert loader.index.sizes_known
    forget(path)
    with pario.Loader(path, 100, options=SLOTS, save_index=False) as loader:
        for _ in loader:
            pass
        keys = [key for key, _ in truth_of(path)]
        assert loader.keys(range(N)) == keys
        assert not sidecars(path)


def test_a_state_of_an_unfinished_first_epoch(grown_set: Callable[[str], str]) -> None:
    path = grown_set("varying")

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


@pytest.mark.parametrize("recipe", ["ring", "auto"])
@pytest.mark.parametrize("entries", [N - 1, N + 1, 1 << 40, 3])
def test_a_wrong_number_of_records(grown_set: Callable[[str], str], tmp_path: Path, entries: int, recipe: str) -> None:
    path = grown_set("one commit")
    wrong = damaged(path, tmp_path / "x.lmdb", entries_at(path), struct.pack("<Q", entries))
    with pytest.raises(CorruptedError, match="records") as caught:  # noqa: PT012, SIM117
        with pario.Loader(wrong, 100, recipe=recipe, options=SLOTS) as loader:
            for _ in loader:
                pass
    assert caught.value.path == f"{wrong}/data.mdb"
    assert not sidecars(wrong)


@pytest.mark.parametrize("part", [0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off(grown_set: Callable[[str], str], tmp_path: Path, part: float) -> None:
    path = grown_set("one commit")
    place = tmp_path / "x.lmdb"
    place.mkdir()
    raw = Path(path, "data.mdb").read_bytes()
    (place / "data.mdb").write_bytes(raw[: int(len(raw) * part)])
    with pytest.raises((CorruptedError, SnapshotError)):  # noqa: PT012, SIM117
        with pario.Loader(str(place), 100, options=SLOTS) as loader:
            for _ in loader:
                pass


def test_a_leaf_of_another_place(grown_set: Callable[[str], str], tmp_path: Path) -> None:
    """Two leaves exchanged: intact pages, wrong order."""
    path = grown_set("commits")
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


def test_what_is_walked_first(grown_set: Callable[[str], str], dataset: Callable[[str], Made]) -> None:
    with pario.Loader(grown_set("commits"), 10, shuffle="global", save_index=False) as loader:
        assert loader.index.sizes_known
    with pario.Loader(dataset("one_giant").path, 10, save_index=False) as loader:  # three leaves
        assert loader.index.sizes_known
    many = dataset("dupsort")
    with pario.Loader(many.path, 10, db=many.db, save_index=False) as loader:
        assert loader.index.sizes_known
    with pario.Reader(grown_set("commits"), save_index=False) as reader:
        assert reader.index.sizes_known
        snapshot, record = reader.snapshot, reader.snapshot.main
    assert may_grow(snapshot, record, readers=1)
    most = int(MOST_REPEATED * (snapshot.last_pgno + 1) / record.md_leaf_pages) + 1
    assert may_grow(snapshot, record, readers=most)
    assert not may_grow(snapshot, record, readers=most + 1)
    assert not may_grow(snapshot, record._replace(md_flags=MDB_DUPSORT), readers=1)


class SlowFetcher(PosixFetcher):
    """Of a store that answers after 10 ms."""

    def read(self, reads: np.ndarray, *arguments: Any) -> None:
        time.sleep(0.01 * len(reads))
        super().read(reads, *arguments)

    def pread(self, *arguments: Any) -> bytes:
        time.sleep(0.01)
        return super().pread(*arguments)


def test_what_is_soon_read_does_not_grow(grown_set: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = grown_set("commits")  # 60 leaf pages
    for kind, recipe, local, grows in (
        (PosixFetcher, "auto", True, False),
        (SlowFetcher, "auto", True, True),
        (PosixFetcher, "auto", False, True),  # may be far away
        (PosixFetcher, "dm", True, True),  # is studied as it is
    ):
        monkeypatch.setattr("pario.dataset.file.DataFile.is_local", local)
        monkeypatch.setattr("pario.dataset.reader.SOON_S", 0.02 if kind is SlowFetcher else 60.0)
        monkeypatch.setitem(FETCHERS, "posix", kind)
        with pario.Loader(path, 100, recipe=recipe, save_index=False) as loader:
            assert loader.index.is_complete != grows, (kind, recipe, local)
            assert [i for batch in loader for i in batch.ids.tolist()] == list(range(N))


def test_any_record_at_any_time(grown_set: Callable[[str], str]) -> None:
    path = grown_set("varying")
    truth = truth_of(path)
    pool = ReadPool(PosixFetcher(f"{path}/data.mdb"), 2)
    snapshot = read_snapshot(pool.fetcher)
    index = open_index(Database(f"{path}/data.mdb", snapshot), pool, Solo(), save=False, grow=lambda: pool)
    assert not index.sizes_known
    assert index.keys([0, N - 1]) == [truth[0][0], truth[-1][0]]
    raw = Path(path, "data.mdb").read_bytes()
    for ids in ([N - 1, 0], [300, 4], [2000], [1999, 2001, 2001]):
        places = index.places(np.array(ids)).tolist()
        assert [raw[offset : offset + nbytes] for offset, nbytes in places] == [truth[i][1] for i in ids]
        assert index.keys(ids) == [truth[i][0] for i in ids]
    assert not index.is_complete
    whole = open_index(Database(f"{path}/data.mdb", snapshot), pool, Solo(), save=False)
    assert index.mean_bytes > whole.mean_bytes
    np.testing.assert_array_equal(index.extents, whole.extents)
    assert index.is_complete
    assert (index.content_id, index.mean_bytes) == (whole.content_id, whole.mean_bytes)
    assert not index.extents.flags.writeable
    index.close()
    pool.close()
    pool.fetcher.close()


def test_an_index_that_cannot_be_saved(
    grown_set: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = grown_set("commits")
    monkeypatch.setattr(sidecar, "sidecar_places", lambda *_: iter(["/proc/no/such/place.index"]))
    with pario.Loader(path, 100, options=SLOTS) as loader:
        for _ in loader:
            pass
        assert "cannot be saved" in caplog.text
        assert loader.keys([5, 4000]) == [b"%08d" % 5, b"%08d" % 4000]
        assert sum(len(batch.ids) for batch in loader) == N
