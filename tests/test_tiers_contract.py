"""What every tier promises (pario/tiers/base.py), through two handles as two processes have them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, chunk_of, read

from pario.tiers.base import AnyTier
from pario.tiers.disk import DiskTier
from pario.tiers.memory import MemoryTier

ROOM = 1 << 30


@pytest.fixture(params=["disk", "memory"])
def handles(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[AnyTier, AnyTier]]:
    """The first of them may put chunks."""
    first: AnyTier
    second: AnyTier
    if request.param == "disk":
        first, second = (DiskTier(os.fspath(tmp_path), bytes(32), GRID, ROOM, floor=0.0) for _ in range(2))
    else:
        first = made = MemoryTier.made(GRID, ROOM)
        second = MemoryTier(GRID, os.dup(made.fd))
    yield first, second
    first.close()
    second.close()


def test_what_is_put_is_there_for_all(handles: tuple[AnyTier, AnyTier]) -> None:
    first, second = handles
    assert read(second, 0, 10) is None
    for chunk in (1, 2, CHUNKS - 1):
        assert first.put(chunk, chunk_of(chunk))
        assert first.put(chunk, chunk_of(chunk))
    assert first.held().tolist() == second.held().tolist() == [False, True, True, False, True]
    assert first.counts.put_bytes == 2 * GRID.chunk_bytes + 1234
    begin = GRID.chunk_bytes
    for each in handles:
        assert read(each, begin, 2 * GRID.chunk_bytes) == DATA[begin : 3 * begin].tobytes(), "over two chunks"
        assert read(each, begin + 5, GRID.chunk_bytes) == DATA[begin + 5 : 2 * begin + 5].tobytes()
        assert read(each, begin - 1, 2) is None, "one of two chunks"
        assert read(each, 2 * begin, GRID.file_bytes - 2 * begin) is None, "all but one"


def test_the_bounds_of_the_file(handles: tuple[AnyTier, AnyTier]) -> None:
    tier, _ = handles
    for chunk in range(CHUNKS):
        assert tier.put(chunk, chunk_of(chunk))
    assert read(tier, 0, GRID.file_bytes) == DATA.tobytes()
    assert read(tier, GRID.file_bytes, 0) == b""
    for offset, nbytes in ((-1, 2), (GRID.file_bytes, 1), (0, GRID.file_bytes + 1)):
        with pytest.raises(IndexError):
            read(tier, offset, nbytes)
    with pytest.raises(IndexError):
        tier.put(CHUNKS, chunk_of(0))
    for wrong in (chunk_of(0)[:-1], chunk_of(0).astype(np.int8), chunk_of(0).reshape(2, -1)):
        with pytest.raises(ValueError, match="chunk 1"):
            tier.put(1, wrong)


def test_a_handle_that_is_closed(handles: tuple[AnyTier, AnyTier]) -> None:
    first, second = handles
    assert first.put(0, chunk_of(0))
    first.close()
    first.close()
    assert read(first, 0, 10) is None
    assert not first.put(1, chunk_of(1))
    assert read(second, 0, GRID.chunk_bytes) in (chunk_of(0).tobytes(), None), "memory goes with the one that fills it"


def test_nothing_is_announced_before_it_is_there(
    handles: tuple[AnyTier, AnyTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks while a chunk is being written gets nothing, from either handle."""
    first, second = handles
    found: list[object] = []
    pwrite = os.pwrite

    def ask() -> None:
        found.extend([read(second, 5, 100), read(first, 5, 100), first.lend(5, 100), second.held()[0] or None])

    def asked_meanwhile(fd: int, data: memoryview, offset: int) -> int:
        ask()
        return pwrite(fd, data[:50_000], offset)

    monkeypatch.setattr(os, "pwrite", asked_meanwhile)
    assert first.put(0, chunk_of(0))
    assert len(found) >= 3 * 4, "it was written in parts"
    assert found == [None] * len(found)
    for each in handles:
        assert read(each, 0, GRID.chunk_bytes) == chunk_of(0).tobytes()
