"""The memory tier: shared between processes, within its budget, and no zeros for what was given back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, chunk_of, read

from pario import machine
from pario.errors import OptionError, ParioError
from pario.records import EXTENT
from pario.tiers import memory, states
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier.made(GRID, 1 << 30)
    yield made
    made.close()


def attached(tier: MemoryTier) -> MemoryTier:
    data, states = tier.files
    return MemoryTier(GRID, (os.dup(data), os.dup(states)))


def test_only_who_made_it_has_a_budget(tier: MemoryTier) -> None:
    tier.put(1, chunk_of(1))
    other = attached(tier)
    assert tier.held_bytes == GRID.chunk_bytes
    assert not other.put(0, chunk_of(0))


_READS = """
import os, sys
import numpy as np
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
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
    assert [small.put(chunk, chunk_of(chunk)) for chunk in range(CHUNKS)] == [True, True, False, False, False]
    assert small.counts.refused == 3
    small.give_back(0)
    assert small.put(CHUNKS - 1, chunk_of(CHUNKS - 1))
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
    generation_of = states.generation_of
    looks = []

    def meanwhile(*words: np.ndarray) -> int:
        looks.append(generation_of(*words))
        if len(looks) == 1:
            tier.give_back(0)
            if again:  # the generation tells it from the one before
                tier.put(0, chunk_of(0))
        return looks[-1]

    monkeypatch.setattr(states, "generation_of", meanwhile)
    assert read(other, 0, 100) is None
    assert looks == [1, 5 if again else -1]
    assert (read(other, 0, 100) is not None) == again


@pytest.mark.parametrize("again", [False, True])
def test_of_many_extents_none_of_what_is_given_back_meanwhile_is_delivered(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    tier.put(0, chunk_of(0))
    tier.put(1, chunk_of(1))
    other, copy = attached(tier), memory.copy_ranges

    def meanwhile(*words: np.ndarray) -> None:
        copy(*words)
        tier.give_back(0)
        if again:
            tier.put(0, chunk_of(0))

    monkeypatch.setattr(memory, "copy_ranges", meanwhile)
    extents = np.array([(0, 100), (GRID.chunk_bytes, 100)], EXTENT)
    out = np.zeros(200, np.uint8)
    assert other.read_many(extents, out, np.array([0, 100])).tolist() == [False, True]
    assert (out[100:] == chunk_of(1)[:100]).all()


def test_what_two_threads_put_at_the_same_time_counts_once(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    write, said = memory.write_all, []

    def meanwhile(fd: int, data: np.ndarray, offset: int) -> None:
        if not said:
            said.append(True)
            said.append(tier.put(0, chunk_of(0)))  # as another thread would
        write(fd, data, offset)

    monkeypatch.setattr(memory, "write_all", meanwhile)
    assert tier.put(0, chunk_of(0))
    assert said == [True, False]
    assert tier.held_bytes == GRID.chunk_bytes
    assert tier.states.has(0)
    assert tier.counts.puts == 1


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
        MemoryTier(Grid(GRID.file_bytes + 4096, GRID.chunk_bytes), tier.files)


def test_closing_waits_with_the_descriptors_for_a_write(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers would otherwise be those of other files when the write begins."""
    written = []
    pwrite = os.pwrite

    def late(fd: int, data: memoryview, offset: int) -> int:
        tier.close()
        written.append(os.readlink(f"/proc/self/fd/{fd}"))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", late)
    assert not tier.put(0, chunk_of(0))
    assert written == ["/memfd:pario-data (deleted)"]
    assert tier.held_bytes == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(tier.files[0])
    assert not tier.put(1, chunk_of(1))


def test_a_forked_process_closes_its_own_part() -> None:
    tier = MemoryTier.made(GRID, GRID.file_bytes * 2)
    assert tier.put(1, chunk_of(1))
    child = os.fork()
    if not child:
        tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert read(tier, *GRID.span(1)) == chunk_of(1).tobytes()
    tier.close()


def test_what_was_checked_is_forgotten_with_the_state_of_the_memory_and_with_the_index(tier: MemoryTier) -> None:
    one, other = object(), object()
    bits = tier.seen(3, one, 20)
    assert bits.tolist() == [0, 0, 0]
    bits[1] = 5
    assert tier.seen(3, one, 20) is bits
    assert not tier.seen(4, one, 20).any(), "a chunk was given back"
    tier.seen(4, one, 20)[0] = 1
    assert not tier.seen(4, other, 20).any(), "another database has other records"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTier]:
    monkeypatch.setattr(machine, "has_large_pages", lambda: True)
    made = MemoryTier.made(GRID, GRID.file_bytes, alone=True)
    assert made.is_own
    yield made
    made.close()


def test_a_forked_child_finds_nothing_in_its_parents_own_memory(own: MemoryTier) -> None:
    for chunk in range(CHUNKS - 1):
        assert own.put(chunk, chunk_of(chunk))
    child = os.fork()
    if not child:
        os._exit(bool(own.held().any() or own.view[: GRID.chunk_bytes].any()))
    assert own.put(CHUNKS - 1, chunk_of(CHUNKS - 1))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own.held().all()
    assert own.view.tobytes() == DATA.tobytes()


def test_own_memory_is_given_back(own: MemoryTier) -> None:
    own.put(0, chunk_of(0))
    own.put(1, chunk_of(1))
    own.give_back(0)
    assert own.held().tolist()[:2] == [False, True]
    assert not own.view[: GRID.chunk_bytes].any()
    assert own.view[GRID.chunk_bytes : 2 * GRID.chunk_bytes].tobytes() == chunk_of(1).tobytes()
    own.close()
    assert not own.view.any()


@pytest.mark.parametrize("why", ["a budget for half", "no large pages", "an old system", "other readers"])
def test_memory_is_shared_where_own_memory_gains_nothing(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_large_pages", lambda: why != "no large pages")
    if why == "an old system":
        monkeypatch.setattr("pario.tiers.states.WIPE_ON_FORK", 12345)  # EINVAL
    budget = GRID.file_bytes // 2 if why == "a budget for half" else 1 << 30
    made = MemoryTier.made(GRID, budget, alone=why != "other readers")
    assert not made.is_own
    assert made.put(0, chunk_of(0))
    other = attached(made)
    assert other.view[: GRID.chunk_bytes].tobytes() == chunk_of(0).tobytes()
    other.close()
    made.close()


def test_the_number_of_chunks_given_back_grows_between_their_state_and_their_bytes(tier: MemoryTier) -> None:
    """Else what was checked before would be taken for what comes after."""
    tier.put(0, chunk_of(0))
    seen = []
    head_of = tier.states.words[2]

    class Head:
        """Notes the chunk's state when the count grows."""

        def __getitem__(self, at: int) -> int:
            return int(head_of[at])

        def __setitem__(self, at: int, value: int) -> None:
            seen.append((tier.has(0), bytes(tier.view[:4])))
            head_of[at] = value

    tier.states._head = Head()  # type: ignore[assignment]
    before = tier.states.given
    tier.give_back(0)
    assert seen == [(False, chunk_of(0)[:4].tobytes())]
    assert tier.states.given == before + 1
    assert not tier.view[:4].any()
