"""The memory tier: shared between processes, within its budget, and no zeros for what was given back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from pario.errors import OptionError, ParioError
from pario.stage import memory
from pario.stage.grid import BLOCK_BYTES, Grid
from pario.stage.memory import MemoryTier

CHUNKS = 4
GRID = Grid((CHUNKS - 1) * 2 * BLOCK_BYTES + 1234, 2 * BLOCK_BYTES)
DATA = np.random.default_rng(0).integers(1, 256, GRID.file_bytes, dtype=np.uint8)


def chunk_of(chunk: int) -> np.ndarray:
    offset, nbytes = GRID.span(chunk)
    return DATA[offset : offset + nbytes]


def read(tier: MemoryTier, offset: int, nbytes: int) -> bytes | None:
    out = np.full(nbytes, 0xAA, dtype=np.uint8)
    return out.tobytes() if tier.read(offset, out) else None


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier.made(GRID, 1 << 30)
    yield made
    made.close()


def attached(tier: MemoryTier) -> MemoryTier:
    data, states = tier.files
    return MemoryTier(GRID, (os.dup(data), os.dup(states)))


def test_what_is_put_is_there_for_all(tier: MemoryTier) -> None:
    other = attached(tier)
    assert read(other, 0, 10) is None
    for chunk in (1, 2, 3):
        assert tier.put(chunk, chunk_of(chunk))
        assert tier.put(chunk, chunk_of(chunk))
    assert tier.held().tolist() == other.held().tolist() == [False, True, True, True]
    begin = GRID.chunk_bytes
    for each in (tier, other):
        assert read(each, begin, GRID.file_bytes - begin) == DATA[begin:].tobytes()
        assert read(each, begin + 5, GRID.chunk_bytes) == DATA[begin + 5 : begin + 5 + GRID.chunk_bytes].tobytes()
        assert read(each, begin - 1, 2) is None
        assert read(each, GRID.file_bytes, 0) == b""
    assert tier.held_bytes == GRID.file_bytes - GRID.chunk_bytes == tier.counts.put_bytes
    assert not other.put(0, chunk_of(0)), "only who made it has a budget"
    tier.close()
    assert read(tier, begin, 1) is None
    assert not tier.put(0, chunk_of(0))
    assert read(other, begin, 1) is not None


_READS = """
import os, sys
import numpy as np
from pario.stage.grid import Grid
from pario.stage.memory import MemoryTier
tier = MemoryTier(Grid(int(sys.argv[1]), int(sys.argv[2])), (int(sys.argv[3]), int(sys.argv[4])))
out = np.empty(1000, np.uint8)
assert tier.read(70, out)
os.write(1, out.tobytes())
"""


def test_another_process_reads_it(tier: MemoryTier) -> None:
    tier.put(0, chunk_of(0))
    arguments = [str(GRID.file_bytes), str(GRID.chunk_bytes), *map(str, tier.files)]
    command = [sys.executable, "-c", _READS, *arguments]
    found = subprocess.run(command, pass_fds=tier.files, capture_output=True, timeout=60, check=True)
    assert found.stdout == DATA[70:1070].tobytes()


def test_the_budget_holds(tier: MemoryTier) -> None:
    small = MemoryTier.made(GRID, 2 * GRID.chunk_bytes)
    assert [small.put(chunk, chunk_of(chunk)) for chunk in range(CHUNKS)] == [True, True, False, False]
    assert small.counts.refused == 2
    small.give_back(0)
    assert small.put(3, chunk_of(3))
    assert small.held_bytes == GRID.chunk_bytes + 1234
    small.close()
    with pytest.raises(OptionError, match="does not hold one chunk"):
        MemoryTier.made(GRID, GRID.chunk_bytes - 1)


def test_what_is_given_back_takes_no_memory(tier: MemoryTier) -> None:
    fd = tier.files[0]
    for chunk in range(CHUNKS):
        tier.put(chunk, chunk_of(chunk))
    full = os.fstat(fd).st_blocks
    for chunk in range(CHUNKS):
        tier.give_back(chunk)
        tier.give_back(chunk)
    assert os.fstat(fd).st_blocks == 0 < full
    assert read(tier, 0, 10) is None
    assert tier.put(1, chunk_of(1))
    assert read(tier, GRID.chunk_bytes, 10) == DATA[GRID.chunk_bytes :][:10].tobytes()


@pytest.mark.parametrize("again", [False, True])
def test_what_is_given_back_while_it_is_copied_is_not_delivered(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    tier.put(0, chunk_of(0))
    other = attached(tier)
    fence = memory.full_fence

    def meanwhile() -> None:
        monkeypatch.setattr(memory, "full_fence", fence)
        tier.give_back(0)
        if again:  # the generation tells it from the one before
            tier.put(0, chunk_of(0))

    monkeypatch.setattr(memory, "full_fence", meanwhile)
    assert read(other, 0, 100) is None
    assert (read(other, 0, 100) is not None) == again


def test_nobody_can_shrink_it(tier: MemoryTier) -> None:
    for fd in tier.files:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1 << 30)


def test_memory_that_is_not_sealed_is_refused(tier: MemoryTier) -> None:
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as states:
        os.ftruncate(file.fileno(), GRID.file_bytes)
        os.ftruncate(states.fileno(), 8 * CHUNKS)
        with pytest.raises(ParioError, match="no sealed memory"):
            MemoryTier(GRID, (file.fileno(), states.fileno()))
    with pytest.raises(ParioError, match="no sealed memory"):
        MemoryTier(Grid(GRID.file_bytes + 1, GRID.chunk_bytes), tier.files)
