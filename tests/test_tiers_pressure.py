"""The memory tier gives back what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from tiers import CHUNKS, GRID, chunk_of, read

from pario.kernels.fill import STOPPED
from pario.tiers.memory import MemoryTier
from pario.tiers.pressure import PressureWatch

GB = 10**9
CHUNK = GRID.chunk_bytes


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[total, available] bytes, as the machine says."""
    found = [24 * GB, 12 * GB]
    monkeypatch.setattr("pario.machine.MemoryGauge", lambda: SimpleNamespace(read=lambda: tuple(found)))
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
    monkeypatch.setattr("pario.tiers.pressure._EVERY_S", 1000.0)
    monkeypatch.setattr("pario.tiers.pressure._LEAST_S", 1000.0)
    made = PressureWatch(tier)
    yield made
    made.close()


def test_with_enough_nothing_happens(tier: MemoryTier, watch: PressureWatch) -> None:
    assert watch.look() == 0
    assert tier.held().all()


def test_what_is_missing_is_given_back_and_taken_again_when_others_leave_it(
    tier: MemoryTier, watch: PressureWatch, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    memory[:] = 20 * GB, 0
    watch.look()
    assert not tier.held().any()
    assert tier.held_bytes == 0
    assert read(tier, 0, 10) is None
    memory[1] = 3 * GB // 2  # more than the margin, and less than twice
    assert watch.look() == 0
    assert not tier.put(0, chunk_of(0)), "the next allocation would only ask for it again"
    memory[1] = 12 * GB
    assert watch.look() == 0
    assert tier.put(0, chunk_of(0))
    assert tier.budget == tier.wanted
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
    monkeypatch.setattr("pario.tiers.pressure._EVERY_S", 0.01)
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


# -- before it grows -------------------------------------------------------------------------------------------------


@pytest.fixture
def growing(memory: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTier]:
    """An empty tier that is watched, of a machine that keeps 2 chunks available."""
    for name in ("_EVERY_S", "_LEAST_S"):
        monkeypatch.setattr(f"pario.tiers.pressure.{name}", 1000.0)
    memory[:] = 20 * CHUNK, 20 * CHUNK
    made = MemoryTier.made(GRID, 1 << 30)
    watch = PressureWatch(made)
    yield made
    watch.close()
    made.close()


def test_it_takes_no_more_than_others_leave(
    growing: MemoryTier, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    memory[1] = 6 * CHUNK
    assert growing.put(0, chunk_of(0))
    memory[1] = 2 * CHUNK  # another program is faster than the next look
    assert growing.put(1, chunk_of(1)), "half of what was there was promised"
    assert not growing.put(2, chunk_of(2))
    assert growing.is_full
    assert growing.held().tolist() == [True, True, False, False, False], "nothing need be given back"
    assert growing.put(1, chunk_of(1)), "it is here"
    memory[1] = 20 * CHUNK
    assert not growing.put(2, chunk_of(2)), "it stays as it is until the next look"
    assert len([line for line in caplog.messages if "takes no more" in line]) == 1


def test_it_gives_back_when_it_asks_too_late(growing: MemoryTier, memory: list[int]) -> None:
    memory[1] = 6 * CHUNK
    assert growing.put(0, chunk_of(0))
    assert growing.put(1, chunk_of(1))
    memory[1] = CHUNK
    assert not growing.put(2, chunk_of(2))
    assert not growing.held().any()


def test_what_was_promised_is_not_promised_again(growing: MemoryTier, memory: list[int]) -> None:
    memory[1] = 6 * CHUNK
    assert growing.reserve(5) == 2, "half of what is beyond the margin"
    assert growing.reserve(5) == 1, "4 chunks are left, one beyond the margin and a bit"
    assert growing.held_bytes == growing.promised * CHUNK == 3 * CHUNK
    assert growing.reserve(5) == 0
    memory[1] = 3 * CHUNK  # they are written
    assert growing.reserve(5) == 0
    assert growing.held_bytes == 3 * CHUNK, "and nothing of that is given back"
    assert not growing.states.words[2][STOPPED]
    growing.settle(3, 3, 3 * CHUNK)
    assert not growing.promised
    assert growing.is_full


def test_with_enough_it_asks_rarely(growing: MemoryTier, memory: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    memory[:] = 24 * GB, 12 * GB
    asked: list[int] = []
    admit = growing.admit
    growing.admit = lambda chunks: (asked.append(memory[1]), admit(chunks))[1]  # type: ignore[func-returns-value]
    assert growing.put(0, chunk_of(0))
    memory[1] = 0
    for chunk in range(1, CHUNKS):
        assert growing.put(chunk, chunk_of(chunk)), "5 GB were promised"
    assert len(asked) == CHUNKS


def test_the_less_there_is_the_more_often_it_looks(memory: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody takes all of it in between, at 3 GB/s."""
    looks: list[float] = []

    def read() -> tuple[int, int]:
        looks.append(time.monotonic())
        return memory[0], memory[1]

    monkeypatch.setattr("pario.machine.MemoryGauge", lambda: SimpleNamespace(read=read))
    tier = MemoryTier.made(GRID, 1 << 30)
    watch = PressureWatch(tier)
    time.sleep(0.5)
    assert not looks, "an empty tier has nothing to give"
    memory[:] = GB, 240 * 10**6  # which lasts 80 ms
    assert tier.put(0, chunk_of(0))
    time.sleep(1.0)
    seen, looks[:] = len(looks), []
    memory[:] = 24 * GB, 12 * GB
    time.sleep(1.0)
    watch.close()
    assert seen > 20, "every 10 ms; on a slow machine less often"
    assert len(looks) < 10
    tier.close()
