"""Copies of files of this node into memory: every byte, no more than there is room for, and errors that say where."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from tiers import has_large_pages

from benchmarks.cache import drop_file
from pario.errors import ReadError, SnapshotError
from pario.fetch.joined import bases_of
from pario.fetch.posix import PosixFetcher
from pario.fetch.snapshot import read_snapshot
from pario.kernels.fill import BYTES, CHUNK_US, DONE, READS, THREADS
from pario.stats.rank import RankStats
from pario.tiers.grid import Grid
from pario.tiers.local_fill import LocalFill
from pario.tiers.memory import MemoryTier

MiB = 1 << 20


def write(path: Path, records: int) -> str:
    with lmdb.open(str(path), subdir=False, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(records):
            txn.put(b"%06d" % i, np.random.default_rng(i).bytes(9000))
    return str(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Two LMDBs of a few chunks each, neither of them a multiple of a chunk."""
    return [write(tmp_path / "a.lmdb", 400), write(tmp_path / "b.lmdb", 250)]


class Filling:
    """Files, the tier over all of them, and what a fill of it says."""

    def __init__(self, paths: list[str], budget: int = 1 << 30, chunk_bytes: int = MiB) -> None:
        self.fetchers = [PosixFetcher(path) for path in paths]
        self.snapshots = [read_snapshot(fetcher) for fetcher in self.fetchers]
        self.bases = bases_of([snapshot.file_bytes for snapshot in self.snapshots])
        self.nbytes = int(self.bases[-1]) + self.snapshots[-1].file_bytes
        self.tier = MemoryTier.made(Grid(self.nbytes, chunk_bytes), budget)
        self.errors: list[BaseException] = []
        self.counted: list[tuple[Any, ...]] = []

    def fill(self, chunks: Any = None) -> LocalFill:
        used = np.arange(self.tier.grid.chunks)
        order = map(np.atleast_1d, [used] if chunks is None else chunks)
        files = list(zip(self.fetchers, self.snapshots, self.bases.tolist(), strict=True))
        counts, failed = (RankStats(), lambda *each: self.counted.append(each)), self.errors.append
        return LocalFill(files, self.tier, order, used, threads=2, counts=counts, failed=failed)

    def filled(self, chunks: Any = None) -> LocalFill:
        made = self.fill(chunks)
        made._leader.join(150)  # the kernel may have to be compiled
        assert made.cancel(0)
        return made

    def right(self, chunk: int) -> bool:
        first, nbytes = self.tier.grid.span(chunk)
        number = int(np.searchsorted(self.bases, first, side="right")) - 1
        at = first - int(self.bases[number])
        nbytes = min(nbytes, self.snapshots[number].file_bytes - at)
        with open(self.fetchers[number].path, "rb") as file:
            file.seek(at)
            return file.read(nbytes) == self.tier.view[first : first + nbytes].tobytes()

    def close(self) -> None:
        self.tier.close()
        for fetcher in self.fetchers:
            fetcher.close()


@pytest.fixture
def filling() -> Iterator[Callable[..., Filling]]:
    with ExitStack() as stack:

        def get(*given: Any) -> Filling:
            made = Filling(*given)
            stack.callback(made.close)
            return made

        yield get


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("files", [1, 2])
def test_every_byte_of_every_chunk(
    filling: Any, paths: list[str], files: int, cold: bool, large: bool
) -> None:
    """Out of the page cache, and past it, into large pages at once or into small ones; descriptors are given back."""
    made = filling(paths[:files], 1 << 30, MiB)
    if not large:  # as on an older system
        made.tier.large = np.zeros(0, np.int64)
    assert (len(made.tier.large) > 0) == (large and has_large_pages())
    if cold:
        for path in paths:
            drop_file(path)
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    made.filled()
    assert not made.errors
    assert made.tier.held().all()
    assert all(made.right(chunk) for chunk in range(made.tier.grid.chunks))
    assert made.tier.counts.puts == made.tier.grid.chunks
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_an_older_fill_is_at_is_left_to_it(filling: Any, paths: list[str]) -> None:
    """It may be written to memory that others read already."""
    made = filling(paths[:1])
    _, coming, _ = made.tier.states.words
    coming[1] = 1
    made.filled()
    assert made.tier.held().tolist() == [chunk != 1 for chunk in range(made.tier.grid.chunks)]
    assert coming[1] == 1
    assert made.tier.held_bytes == sum(made.tier.grid.span(c)[1] for c in np.flatnonzero(made.tier.held()).tolist())


@pytest.mark.parametrize("direct", [True, False])
def test_small_chunks_in_any_order(filling: Any, paths: list[str], direct: bool, monkeypatch: Any) -> None:
    """Neighbours are one read, as far as they are neighbours; also where no read passes the page cache."""
    if not direct:
        monkeypatch.setattr("pario.tiers.local_fill.open_files", lambda: 0)
    made = filling(paths, 1 << 30, 64 << 10)
    for path in paths:
        drop_file(path)
    firsts = np.arange(made.tier.grid.chunks) * (64 << 10)
    file = np.searchsorted(made.bases, firsts, side="right") - 1
    ends = made.bases + [snapshot.file_bytes for snapshot in made.snapshots]
    groups = np.array_split(np.flatnonzero(firsts < ends[file]), 20)  # there are none between the files
    order = np.concatenate([groups[k] for k in np.random.default_rng(5).permutation(20)]).tolist()
    made.filled(order)
    assert not made.errors
    assert np.flatnonzero(made.tier.held()).tolist() == sorted(order)
    assert all(made.right(chunk) for chunk in order)
    assert not made.tier.states.words[1].any(), "none is under way"


def test_no_more_than_there_is_room_for(filling: Any, paths: list[str]) -> None:
    """In the order that is given."""
    made = filling(paths, 3 * MiB)
    order = np.random.default_rng(3).permutation(made.tier.grid.chunks).tolist()
    made.filled(order)
    held = np.flatnonzero(made.tier.held()).tolist()
    assert held == sorted(order[: len(held)])
    assert 1 <= len(held) <= 3
    assert made.tier.held_bytes == sum(made.tier.grid.span(chunk)[1] for chunk in held)
    assert not made.tier.held().all()
    assert all(made.right(chunk) for chunk in held)
    assert not made.errors
    assert made.tier.states.left() == 0, "nobody waits for the rest"


def test_it_ends_when_memory_is_given_back(filling: Any, paths: list[str]) -> None:
    """Though it was promised more; the next one takes what there is room for."""
    made = filling(paths)
    made.tier.put(0, np.zeros(MiB, np.uint8))
    promised = made.tier.reserve
    made.tier.reserve = lambda n: (promised(n), made.tier.shrink(1))[0]
    fill = made.filled()
    assert not made.errors
    assert made.tier.held_bytes <= fill._words[THREADS] * MiB, "each thread waits with a read"
    assert not made.tier.promised
    made.tier.reserve = promised
    made.tier.shrink(1 << 40)
    made.tier.grow(3 * MiB)
    made.filled()
    assert made.tier.held().sum() == 3 < made.tier.grid.chunks
    assert not made.tier.promised


def test_a_look_between_what_the_kernel_counts_loses_nothing(filling: Any, paths: list[str]) -> None:
    made = filling(paths)
    fill = made.filled()
    before = made.tier.held_bytes, made.tier.promised
    fill._words[DONE] += 1
    fill._tell()
    fill._words[[BYTES, READS]] += MiB, 1
    fill._tell()
    assert (made.tier.held_bytes, made.tier.promised + 1) == before
    assert sum(nbytes for _, nbytes in made.counted) == made.nbytes + MiB


def test_a_chunk_whose_bytes_are_about_to_go_is_not_copied(filling: Any, paths: list[str]) -> None:
    """Whoever gives it back would take the copy along, and the chunk would be zeros."""
    made = filling(paths)
    made.filled()
    made.tier.states.drop(1)
    made.filled([1])
    assert not made.tier.has(1)
    made.tier.states.dropped(1)
    made.filled([1])
    assert made.tier.has(1)
    assert made.right(1)


def test_what_is_there_is_not_copied_again(filling: Any, paths: list[str]) -> None:
    made = filling(paths)
    made.filled([1, 2])
    before = made.tier.states.generation_of_each(*[np.arange(made.tier.grid.chunks)] * 2)
    made.filled()
    after = made.tier.states.generation_of_each(*[np.arange(made.tier.grid.chunks)] * 2)
    assert (after == before).tolist() == [k in (1, 2) for k in range(len(after))]
    assert made.tier.held_bytes == made.tier.grid.file_bytes
    made.tier.give_back(made.tier.grid.chunks - 1)
    assert made.tier.held_bytes == (made.tier.grid.chunks - 1) * MiB


def test_a_file_that_ends_early_is_named_with_the_place(filling: Any, paths: list[str]) -> None:
    made = filling(paths)
    os.truncate(paths[1], MiB + 7)
    fill = made.filled()
    (error,) = made.errors
    assert fill.error is error
    assert isinstance(error, ReadError)
    assert error.path == paths[1]
    assert MiB <= error.offset < made.snapshots[1].file_bytes
    assert all(made.right(chunk) for chunk in np.flatnonzero(made.tier.held()))


def test_what_a_writer_may_have_overwritten_is_not_filled(filling: Any, paths: list[str]) -> None:
    made = filling(paths[:1])
    with lmdb.open(paths[0], subdir=False, map_size=1 << 26) as env:
        for k in range(3):
            with env.begin(write=True) as txn:
                txn.put(b"%06d" % k, b"new")
    made.filled()
    (error,) = made.errors
    assert isinstance(error, SnapshotError)
    assert not made.tier.held().any()


def test_it_stops_when_it_is_told_to(filling: Any, paths: list[str]) -> None:
    def slowly() -> Iterator[int]:
        for chunk in range(made.tier.grid.chunks):
            time.sleep(0.05)
            yield chunk

    made = filling(paths)
    fill = made.fill(slowly())
    assert fill.cancel(150)
    fill._leader.join(150)
    assert not made.tier.held().all()
    assert fill.cancel(0)
    assert not made.errors
    assert made.tier.held_bytes == int(made.tier.held().sum()) * MiB


def test_it_tells_how_long_the_others_will_take(filling: Any, paths: list[str]) -> None:
    """By what the first ones, for which the tier is asked at once, have cost."""
    made, more = filling(paths, 1 << 30, MiB // 16), threading.Event()

    def chunks() -> Iterator[int]:
        for chunk in range(made.tier.grid.chunks):
            if chunk == 32:
                more.wait(150)
            yield chunk

    states = made.tier.states
    assert states.left_s() == 0
    fill = made.fill(chunks())
    try:
        begin = time.monotonic()
        while (held := int(made.tier.held().sum())) < 32 and time.monotonic() < begin + 150:
            time.sleep(0.01)
        assert held == 32
        assert states.left() == made.tier.grid.chunks - 32
        assert states.left_s() >= states.left() * 1e-6
        assert states.left_s() < states.left() * 10
    finally:
        more.set()
        assert fill.cancel(150)


def test_it_tells_how_long_what_is_being_copied_will_take(filling: Any, paths: list[str]) -> None:
    states = filling(paths, 1 << 30, MiB // 16).tier.states
    _, coming, head = states.words
    head[CHUNK_US] = 2000
    assert states.coming_s() == 0
    coming[[3, 4, 7]] = 1
    assert states.coming_s() == pytest.approx(0.006)
