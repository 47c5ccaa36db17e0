"""The memory tier gives back what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tiers import CHUNKS, GRID, chunk_of, read

from pario.stage.memory import MemoryTier
from pario.stage.pressure import PressureWatch

GB = 10**9
CHUNK = GRID.chunk_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[total, available] bytes, as the machine says."""
    found = [24 * GB, 12 * GB]
    monkeypatch.setattr("pario.machine.memory", lambda **_: tuple(found))
    return found


@pytest.fixture
def tier(memory: list[int]) -> Iterator[MemoryTier]:
    made = MemoryTier.made(GRID, 1 << 30)
    for chunk in range(CHUNKS):
        made.put(chunk, chunk_of(chunk))
    yield made
    made.close()


@pytest.fixture
def watch(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[PressureWatch]:
    """Looks when the test says so."""
    monkeypatch.setattr("pario.stage.pressure._EVERY_S", 1000.0)
    made = PressureWatch(tier)
    yield made
    made.close()


def test_with_enough_nothing_happens(tier: MemoryTier, watch: PressureWatch) -> None:
    assert watch.look() == 0
    assert tier.held().all()


def test_what_is_missing_is_given_back_and_not_taken_again(
    tier: MemoryTier, watch: PressureWatch, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    memory[:] = 20 * GB, 0
    watch.look()
    assert not tier.held().any()
    assert tier.held_bytes == 0
    assert read(tier, 0, 10) is None
    memory[1] = 12 * GB
    assert not tier.put(0, chunk_of(0)), "the next allocation would only ask for it again"
    assert watch.look() == 0
    assert len([line for line in caplog.messages if "memory is short" in line]) == 1


def test_a_small_machine_keeps_a_tenth(tier: MemoryTier, watch: PressureWatch, memory: list[int]) -> None:
    memory[:] = 100 * CHUNK, 10 * CHUNK
    assert watch.look() == 0
    memory[1] = 18 * CHUNK - 1  # more than a tenth
    assert watch.look() == 0
    memory[:] = 20 * CHUNK, 2 * CHUNK - 1  # a tenth is 2; twice that is wanted
    assert 2 * CHUNK < watch.look() <= 4 * CHUNK
    assert 0 < tier.held().sum() < CHUNKS
    assert tier.held()[0], "the chunks at the file's end go first"


def test_it_looks_by_itself_until_it_is_closed(
    tier: MemoryTier, memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pario.stage.pressure._EVERY_S", 0.01)
    watch = PressureWatch(tier)
    memory[:] = 20 * GB, 0
    end = time.monotonic() + 10
    while tier.held().any() and time.monotonic() < end:
        time.sleep(0.01)
    assert not tier.held().any()
    watch.close()
    while any(thread.name == "pario-memory" for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.name == "pario-memory" for thread in threading.enumerate())


def test_memory_that_is_given_back_is_free(tier: MemoryTier) -> None:
    before = tier.held_bytes
    assert tier.shrink(1) == 1234, "the last chunk"
    assert tier.shrink(CHUNK + 1) == 2 * CHUNK
    assert tier.held_bytes == before - 1234 - 2 * CHUNK
    assert tier.shrink(1 << 40) == before - 1234 - 2 * CHUNK
    assert np.count_nonzero(tier.held()) == 0
