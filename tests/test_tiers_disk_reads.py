"""Which blocks are read for which extents, and what of them is right."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, chunk_of

from pario.records import EXTENT
from pario.tiers import disk_reads
from pario.tiers.disk import DiskTier
from pario.tiers.disk_reads import Found, batches_of
from pario.tiers.grid import BLOCK_BYTES


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [BLOCK_BYTES, 3 * BLOCK_BYTES, 4 << 20])
def test_each_extent_is_in_one_batch_and_no_block_is_read_twice_in_it(
    seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_reads, "BATCH_BYTES", most)
    random = np.random.default_rng(seed)
    n = 200
    offsets = random.integers(0, 60 * BLOCK_BYTES, n)
    nbytes = np.where(random.random(n) < 0.9, random.integers(1, 5000, n), random.integers(1, 3 * BLOCK_BYTES, n))
    wanted = np.flatnonzero(random.random(n) < 0.8)
    batches = batches_of(offsets, nbytes, wanted)
    assert sorted(np.concatenate([batch.members for batch in batches]).tolist()) == wanted.tolist()
    for batch in batches:
        blocks = [
            np.arange(begin // BLOCK_BYTES, (begin + size) // BLOCK_BYTES)
            for begin, size in zip(batch.begins.tolist(), batch.sizes.tolist(), strict=True)
        ]
        memory = np.concatenate(blocks)  # the block of the file at each block of the memory
        assert len(memory) * BLOCK_BYTES == batch.nbytes
        assert (np.diff(memory) > 0).all(), "ascending, none twice"
        assert all(after[0] > before[-1] + 1 for before, after in pairwise(blocks))
        for k, start in zip(batch.members.tolist(), batch.starts.tolist(), strict=True):
            first, last = start // BLOCK_BYTES, (start + nbytes[k] - 1) // BLOCK_BYTES
            assert memory[first] * BLOCK_BYTES + start % BLOCK_BYTES == offsets[k]
            assert memory[last] - memory[first] == last - first, "its blocks lie in a row"
        longest = int(nbytes[batch.members].max()) + 2 * BLOCK_BYTES
        assert batch.nbytes <= most + longest, "a batch is no longer than it has to be"


def test_no_extents_are_no_batch() -> None:
    empty = np.empty(0, np.int64)
    assert batches_of(empty, empty, empty) == []


def test_an_extent_is_right_if_all_its_blocks_are() -> None:
    found = Found(np.array([True, False, True, True]), np.array([7]), [])
    starts = np.array([0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES])
    nbytes = np.array([BLOCK_BYTES, 2, 1, 2, 2 * BLOCK_BYTES, 1])
    assert found.has(starts, nbytes).tolist() == [True, False, False, False, True, True]


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
    """A tier with all chunks, of which the page cache has nothing."""
    tier = DiskTier(os.fspath(tmp_path), bytes(32), GRID, 1 << 30, floor=0.0)
    for chunk in range(GRID.chunks):
        assert tier.put(chunk, chunk_of(chunk))

    def nothing(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", nothing)
    return tier


def read_all(tier: DiskTier) -> None:
    random = np.random.default_rng(5)
    offsets = random.integers(0, GRID.file_bytes, 300)
    extents = np.empty(300, EXTENT)
    extents["offset"] = offsets
    extents["nbytes"] = np.minimum(random.integers(0, 9000, 300), GRID.file_bytes - offsets)
    starts = np.cumsum(extents["nbytes"]) - extents["nbytes"]
    out = np.zeros(int(extents["nbytes"].sum()), np.uint8)
    assert tier.read_many(extents, out, starts).all()
    expected = [DATA[a : a + n] for a, n in zip(extents["offset"].tolist(), extents["nbytes"].tolist(), strict=True)]
    assert (out == np.concatenate(expected)).all()


def test_long_runs_are_read_past_the_page_cache(cold: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cold._files
    assert files is not None
    asked: set[int] = set()
    reads = disk_reads.read_spans

    def noted(fd: int, *arguments: object) -> object:
        asked.add(fd)
        return reads(fd, *arguments)

    monkeypatch.setattr(disk_reads, "read_spans", noted)
    read_all(cold)
    assert asked == ({files.direct} if files.direct >= 0 else {files.data})
    asked.clear()
    short = np.array([(5, 100)], EXTENT)
    assert cold.read_many(short, np.empty(100, np.uint8), np.zeros(1, np.int64)).all()
    assert asked == {files.data}, "a block that others need, too"


def test_a_file_system_that_takes_the_flag_but_no_reads(cold: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cold._files
    assert files is not None
    files.direct = os.dup(files.data) if files.direct < 0 else files.direct
    direct, reads = files.direct, disk_reads.read_spans

    def refuses(fd: int, *arguments: object) -> object:
        return (0, errno.EINVAL, 0) if fd == direct else reads(fd, *arguments)

    monkeypatch.setattr(disk_reads, "read_spans", refuses)
    read_all(cold)
    assert cold.counts.errors == 0
    assert files.direct == -1


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_a_run_that_fails_is_missing_and_the_others_come(
    cold: DiskTier, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_reads, "_RUNS", 2)
    reads, broken = disk_reads.read_spans, 2 * bad * BLOCK_BYTES

    def fails(fd: int, offsets: np.ndarray, sizes: np.ndarray, address: int, starts: np.ndarray, end: int) -> object:
        if broken not in offsets:
            return reads(fd, offsets, sizes, address, starts, end)
        k = offsets.tolist().index(broken)
        reads(fd, offsets[:k], sizes[:k], address, starts[:k], end)
        return k, errno.EIO, 0

    monkeypatch.setattr(disk_reads, "read_spans", fails)
    extents = np.array([(2 * k * BLOCK_BYTES + 7, 100) for k in range(CHUNKS - 1)], EXTENT)
    out = np.zeros((len(extents), 100), np.uint8)
    right = cold.read_many(extents, out.reshape(-1), np.arange(len(extents)) * 100)
    assert right.tolist() == [k != bad for k in range(len(extents))]
    for k in np.flatnonzero(right).tolist():
        assert (out[k] == DATA[2 * k * BLOCK_BYTES + 7 :][:100]).all()
    assert (cold.counts.errors, cold.counts.damaged) == (int(not right.all()), 0)
