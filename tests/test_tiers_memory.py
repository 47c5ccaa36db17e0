"""The memory tier: shared between processes, within its budget, and no zeros for what was given back."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, chunk_of, has_large_pages, read

from pario.errors import OptionError, ParioError
from pario.kernels.large import LARGE_BYTES, enlarge
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
    return MemoryTier(GRID, os.dup(tier.fd))


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
tier = MemoryTier(Grid(int(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3]))
out = np.empty(1000, np.uint8)
assert tier.read(70, out)
os.write(1, out.tobytes())
"""


def test_another_process_reads_it(tier: MemoryTier) -> None:
    tier.put(0, chunk_of(0))
    arguments = [str(GRID.file_bytes), str(GRID.chunk_bytes), str(tier.fd)]
    command = [sys.executable, "-c", _READS, *arguments]
    found = subprocess.run(command, pass_fds=(tier.fd,), capture_output=True, timeout=60, check=True)
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
    fd = tier.fd
    for chunk in range(CHUNKS):
        tier.put(chunk, chunk_of(chunk))
    full = os.fstat(fd).st_blocks
    for chunk in range(CHUNKS):
        tier.give_back(chunk)
        tier.give_back(chunk)
    assert 512 * os.fstat(fd).st_blocks == mmap.PAGESIZE < 512 * full, "the states"
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
    for nbytes in 0, 1 << 30:
        with pytest.raises(PermissionError):
            os.ftruncate(tier.fd, nbytes)


def test_memory_that_is_not_sealed_is_refused(tier: MemoryTier) -> None:
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), os.fstat(tier.fd).st_size)
        with pytest.raises(ParioError, match="no sealed memory"):
            MemoryTier(GRID, file.fileno())
    with pytest.raises(ParioError, match="no sealed memory"):
        MemoryTier(Grid(GRID.file_bytes + 4096, GRID.chunk_bytes), tier.fd)


def test_closing_waits_with_the_descriptor_for_a_write(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number would otherwise be that of another file when the write begins."""
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
        os.fstat(tier.fd)
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


LARGE = Grid(5 * LARGE_BYTES - 1234, 1 << 20)
BYTES = np.random.default_rng(8).integers(256, size=LARGE.file_bytes, dtype=np.uint8)


def part(chunk: int) -> np.ndarray:
    return chunk_of(chunk, BYTES, LARGE)


def make_all_large(tier: MemoryTier) -> None:
    """Also where that takes so long that the tier does without."""
    for page in range(len(tier.large)):
        tier.large[page] = 0
        enlarge(tier.pages, tier.large, page * LARGE_BYTES, 1)


def half_full() -> MemoryTier:
    """Every second chunk is there, and all pages are large."""
    made = MemoryTier.made(LARGE, LARGE.file_bytes)
    make_all_large(made)
    for chunk in range(0, LARGE.chunks, 2):
        made.put(chunk, part(chunk))
    return made


def held_by_system(tier: MemoryTier) -> int:
    """Bytes of data and of states, which are less than a page."""
    return os.fstat(tier.fd).st_blocks * 512


@pytest.mark.parametrize("large", [True, False], ids=["large pages", "small pages"])
def test_memory_in_large_pages_is_like_any_other(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes to others, what is given back is the system's again, and others keep their bytes."""
    if not large:  # as an older system does
        monkeypatch.setattr("pario.tiers.memory.enlarge", lambda *_: False)
    made = MemoryTier.made(LARGE, LARGE.file_bytes)
    make_all_large(made)
    other = MemoryTier(LARGE, os.dup(made.fd))
    order = np.random.default_rng(3).permutation(LARGE.chunks).tolist()
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda chunk: made.put(chunk, part(chunk)), order))
    if large and has_large_pages():
        with open("/proc/self/smaps_rollup") as file:
            assert int(re.findall(r"ShmemPmdMapped: +(\d+)", file.read())[0]) << 10 >= 4 * LARGE_BYTES
    assert np.array_equal(other.view, BYTES)
    assert np.array_equal(other.kernel_view, BYTES)
    gone = order[: LARGE.chunks // 2]
    for chunk in gone:
        made.give_back(chunk)
    assert held_by_system(made) < made.held_bytes + 2 * mmap.PAGESIZE  # the last chunk is shorter
    for chunk in range(LARGE.chunks):
        offset, nbytes = LARGE.span(chunk)
        seen = other.view[offset : offset + nbytes]
        assert not seen.any() if chunk in gone else np.array_equal(seen, part(chunk))
    for chunk in gone:
        assert made.put(chunk, part(chunk))
    assert np.array_equal(other.view, BYTES)
    fd = os.dup(made.fd)
    made.close()
    assert os.fstat(fd).st_blocks * 512 <= mmap.PAGESIZE  # the states
    os.close(fd)
    other.close()


@pytest.mark.parametrize("grid", [Grid(5 << 20, 64 << 10), Grid(1 << 20, 1 << 20)], ids=["chunks", "file"])
def test_no_large_page_holds_more_than_the_file_or_what_nobody_reads(grid: Grid) -> None:
    made = MemoryTier.made(grid, 1 << 30)
    assert len(made.large) == 0
    made.close()


def test_a_tier_for_a_part_of_the_file_has_small_pages() -> None:
    """A large page for one chunk would be more than its budget."""
    made = MemoryTier.made(LARGE, LARGE.file_bytes // 2)
    for chunk in range(0, LARGE.chunks, 3):
        made.put(chunk, part(chunk))
    assert 0 < made.held_bytes <= held_by_system(made) < made.held_bytes + 2 * mmap.PAGESIZE
    made.close()


def test_no_byte_is_lost_while_pages_grow() -> None:
    """Pages that hold bytes already become a part of the large one."""
    made = MemoryTier.made(LARGE, LARGE.file_bytes)
    asked = len(made.large)
    for chunk in range(LARGE.chunks):
        made.large[1:] = 3 if chunk % 2 == 0 else 0  # the first half of each is written to small pages
        made.put(chunk, part(chunk))
    assert asked == (5 if has_large_pages() else 0)
    assert np.array_equal(made.view, BYTES)
    made.close()


def test_all_memory_that_chunks_do_not_need_is_given_back_under_pressure() -> None:
    """A large page takes what lies beside its chunk along."""
    made = half_full()
    assert made.shrink(3 * LARGE.chunk_bytes) == 3 * LARGE.chunk_bytes
    assert made.held().tolist() == [chunk in (0, 2) for chunk in range(LARGE.chunks)]
    assert held_by_system(made) <= 2 * LARGE_BYTES + mmap.PAGESIZE
    for chunk in 0, 2:
        offset, nbytes = LARGE.span(chunk)
        assert np.array_equal(made.view[offset : offset + nbytes], part(chunk))
    assert made.shrink(1 << 40) == 2 * LARGE.chunk_bytes
    assert held_by_system(made) <= mmap.PAGESIZE
    made.grow(1 << 40)
    for chunk in range(LARGE.chunks):
        assert made.put(chunk, part(chunk))
    assert np.array_equal(made.view, BYTES)
    made.close()


def test_large_pages_that_somebody_is_about_to_write_to_stay() -> None:
    made = half_full()
    full = held_by_system(made)
    made.states.words[1][3] = 1  # of a fill, which has room for it
    made._busy.add(5)  # of another thread's `put`
    made.shrink(1 << 40)
    assert not made.held().any()
    grown = LARGE.chunk_bytes if len(made.large) else 0
    assert held_by_system(made) <= full - 5 * LARGE.chunk_bytes
    assert 2 * grown <= held_by_system(made) <= 2 * grown + mmap.PAGESIZE
    made._busy.clear()
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
