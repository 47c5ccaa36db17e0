"""The contract of an index, for every kind: made by a walk, loaded from a side-car, growing, grown. The oracle is
py-lmdb's cursor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from lmdb_cases import Pairs, oracle

from pario.comm.solo import Solo
from pario.errors import OptionError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.locate.base import Index
from pario.locate.database import Database
from pario.locate.growing import GrowingIndex
from pario.locate.index import content_id_of
from pario.locate.open import open_index
from pario.plan.schedule import Schedule
from pario.stats.rank import RankStats

N = 900
KINDS = ("made", "loaded", "growing", "grown")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pairs]:
    """Values in leaf pages and on overflow pages, keys of different lengths; more leaf pages than an index needs to
    grow."""
    place = tmp_path_factory.mktemp("base")
    rng = np.random.default_rng(3)
    with lmdb.open(os.fspath(place), map_size=1 << 26) as env:
        for part in np.split(np.arange(N), 3):
            with env.begin(write=True) as txn:
                for i in part.tolist():
                    txn.put(b"%06d" % i + b"k" * (i % 7), rng.bytes(int(rng.integers(100, 5000))))
    path = os.fspath(place / "data.mdb")
    return path, oracle(path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def index(kind: str, file: tuple[str, Pairs]) -> Iterator[Index]:
    path, _ = file
    Path(f"{path}.pario.index").unlink(missing_ok=True)
    fetcher = PosixFetcher(path)
    pool = ReadPool(fetcher, 2)
    database = Database(path, read_snapshot(fetcher))
    if kind == "loaded":
        open_index(database, pool, Solo()).close()
    grow: Callable[[], ReadPool] | None = (lambda: pool) if kind.startswith("grow") else None
    one = open_index(database, pool, Solo(), save=kind in ("loaded", "grown"), grow=grow)
    if kind == "grown":
        one.places(np.arange(N))
        one.save()
    yield one
    one.close()
    one.close()
    pool.close()
    fetcher.close()


def test_it_is_of_that_kind(index: Index, kind: str) -> None:
    assert index.is_complete == (kind != "growing")
    assert index.sizes_known == (kind in ("made", "loaded"))
    assert (index.bytes_read == 0) == (kind == "loaded")
    assert (index.sidecar is not None) == (kind in ("loaded", "grown"))
    assert (index.largest_bytes is None) == (kind == "growing")


def test_places_and_keys_in_any_order(index: Index, file: tuple[str, Pairs]) -> None:
    path, pairs = file
    raw = Path(path).read_bytes()
    assert len(index) == index.n == N
    assert index.database.record is not None
    assert index.database.record.md_entries == N
    for ids in ([0, N - 1], [7], [N - 1, 5, 5, 300], []):
        extents = index.places(np.array(ids, np.int64)).tolist()
        assert [raw[offset : offset + nbytes] for offset, nbytes in extents] == [pairs[i][1] for i in ids]
        assert index.keys(ids) == [pairs[i][0] for i in ids]
    for wrong in (-1, N):
        with pytest.raises(OptionError, match=f"0..{N - 1}"):
            index.keys([3, wrong])


def test_places_finds_every_record_that_it_is_asked_for(index: Index) -> None:
    """Also the first one of a leaf page."""
    for i in range(N):
        index.places(np.array([i]))
        if isinstance(index, GrowingIndex):
            assert index.growth.extents["offset"][i] > 0


def test_the_whole(index: Index, file: tuple[str, Pairs]) -> None:
    path, pairs = file
    raw = Path(path).read_bytes()
    estimate = index.mean_bytes
    assert [raw[o : o + n] for o, n in index.extents.tolist()] == [value for _, value in pairs]
    assert index.is_complete
    assert not index.extents.flags.writeable
    order = np.argsort(index.extents["offset"], kind="stable")
    np.testing.assert_array_equal(np.arange(N) if index.by_offset is None else index.by_offset, order)
    assert index.largest_bytes == max(len(value) for _, value in pairs)
    assert index.mean_bytes == pytest.approx(np.mean([len(value) for _, value in pairs]))
    assert estimate >= index.mean_bytes
    assert index.content_id == content_id_of(np.ascontiguousarray(index.extents))


def test_group_bytes(index: Index, kind: str) -> None:
    """Exact: room for the largest group; an estimate: the mean and a quarter more."""
    schedule = Schedule(n=N, batch_size=30, seats=1, start=0, drop_last=False, pools=None, per_group=2, pieces=1)
    given = index.group_bytes(schedule, 1, 1)
    pages = np.sort((index.extents["offset"] % 4096 + index.extents["nbytes"] + 4095) // 4096)[-60:].sum() * 4096
    if index.sizes_known:
        assert pages <= given <= 1.1 * pages
    else:
        assert 60 * index.mean_bytes < given < 2 * pages


def test_the_speculator(index: Index) -> None:
    assert (index.speculator(RankStats(), guess=True) is None) == index.sizes_known


def test_save_and_close(index: Index, kind: str) -> None:
    before = index.sidecar
    index.save()
    assert index.sidecar == before
    index.close()
    index.close()
