"""Reads through tiers. The oracle is the file as the test wrote it, and a store that counts what it was asked for."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, brought

from pario.errors import ReadError, SnapshotError
from pario.fetch.pool import ReadPool
from pario.fetch.posix import PosixFetcher
from pario.records import EXTENT
from pario.stats.rank import RankStats
from pario.tiers import disk as disk_module
from pario.tiers.base import AnyTier
from pario.tiers.disk import DiskTier
from pario.tiers.fill import Filler
from pario.tiers.grid import Grid
from pario.tiers.memory import MemoryTier
from pario.tiers.staged import StagedFetcher
from pario.tune.knobs import Knob

CHUNK = GRID.chunk_bytes


class CountingStore(PosixFetcher):
    """Notes every read; `before` is called with the first offset of each call."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen: list[tuple[int, int]] = []
        self.counted = (0, 0)
        self.before: Callable[[int], None] = lambda offset: None

    def count(self, reads: int, nbytes: int) -> None:
        self.counted = self.counted[0] + reads, self.counted[1] + nbytes

    def read(self, reads: np.ndarray, out: np.ndarray, starts: np.ndarray) -> None:
        self.before(int(reads["offset"][0]))
        self.seen += reads.tolist()
        super().read(reads, out, starts)


@pytest.fixture(autouse=True)
def snapshot_checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the snapshot was checked; these files are no LMDBs."""
    checks: list[int] = []
    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", lambda *_: checks.append(1))
    return checks


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    DATA.tofile(tmp_path / "data.mdb")
    return CountingStore(str(tmp_path / "data.mdb"))


def staged(store: CountingStore, *tiers: AnyTier) -> StagedFetcher:
    snapshots: list[Any] = [SimpleNamespace(page_size=0, stamp=b"")]
    return StagedFetcher(store, snapshots, tiers, grid=tiers[0].grid, read_bytes=1 << 20, count=store.count)


def filled(fetcher: StagedFetcher, chunks: list[int], inflight: int | Knob, errors: list[BaseException]) -> Filler:
    """A filler of the fetcher's first tier."""
    stats, memory = RankStats(), fetcher.tiers[0]
    assert isinstance(memory, MemoryTier)
    pool = ReadPool(fetcher, inflight)
    return Filler(pool, fetcher, memory, iter(chunks), stats=stats, failed=errors.append)


def get(fetcher: StagedFetcher, *ranges: tuple[int, int]) -> list[bytes]:
    reads = np.array(list(ranges), EXTENT)
    starts = np.cumsum([0, *reads["nbytes"]])
    out = np.full(int(starts[-1]), 0xEE, np.uint8)
    fetcher.read(reads, out, starts[:-1])
    return [out[a:b].tobytes() for a, b in pairwise(starts)]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def right(*ranges: tuple[int, int]) -> list[bytes]:
    return [DATA[offset : offset + nbytes].tobytes() for offset, nbytes in ranges]


def disk(folder: Path, quota: int = 1 << 30) -> DiskTier:
    return DiskTier(str(folder), bytes(32), GRID, quota, floor=0.0)


def test_each_byte_leaves_the_store_once(store: CountingStore, snapshot_checks: list[int]) -> None:
    fetcher = staged(store, MemoryTier.made(GRID, 1 << 30))
    rng = np.random.default_rng(0)
    for _ in range(300):
        offset = int(rng.integers(0, GRID.file_bytes))
        nbytes = int(rng.integers(1, min(3 * CHUNK, GRID.file_bytes - offset) + 1))
        assert get(fetcher, (offset, nbytes)) == right((offset, nbytes))
    assert sorted(store.seen) == [GRID.span(chunk) for chunk in range(CHUNKS)]
    assert store.counted == (2 * CHUNKS, GRID.file_bytes), "looks at the meta page count, too"
    assert len(snapshot_checks) == CHUNKS, "bytes from the tier were compared with the snapshot when they came"


def test_without_room_just_what_was_asked_for(store: CountingStore) -> None:
    memory = MemoryTier.made(GRID, CHUNK)
    fetcher = staged(store, memory)
    get(fetcher, (2 * CHUNK + 5, 7))  # takes the room
    store.seen.clear()
    ranges = [(5, 10), (CHUNK - 3, 6), (2 * CHUNK - 4, CHUNK + 8), (2 * CHUNK, CHUNK), (GRID.file_bytes - 9, 9)]
    assert get(fetcher, *ranges) == right(*ranges)
    missing = [(5, 10), (CHUNK - 3, 6), (2 * CHUNK - 4, 4), (3 * CHUNK, 4), (GRID.file_bytes - 9, 9)]
    assert store.seen == missing, "neighbours in two chunks are one read"
    get(fetcher, (2 * CHUNK + 5, 7), (5, 10), (2 * CHUNK, 1))
    assert fetcher.missed(3) == 1
    get(fetcher, (2 * CHUNK + 5, 7))
    assert fetcher.missed(1) == 0


def test_a_further_tier_serves_the_nearer_one(store: CountingStore, tmp_path: Path) -> None:
    lasting = disk(tmp_path)
    get(staged(store, lasting), (0, GRID.file_bytes))
    store.seen.clear()
    memory = MemoryTier.made(GRID, 1 << 30)
    fetcher = staged(store, memory, disk(tmp_path))
    assert get(fetcher, (3, GRID.file_bytes - 3)) == right((3, GRID.file_bytes - 3))
    assert memory.held().all()
    assert store.seen == []


def test_reads_are_long_once_the_tiers_hold_the_file(store: CountingStore, tmp_path: Path) -> None:
    """Until then a longer one would bring several chunks, one after the other."""
    fetcher = staged(store, MemoryTier.made(GRID, CHUNK), disk(tmp_path / "copies"))
    assert fetcher.long_bytes == 0
    for chunk in range(CHUNKS - 1):
        get(fetcher, GRID.span(chunk))
    assert fetcher.long_bytes == 0, "one of so few is a large part"
    get(fetcher, GRID.span(CHUNKS - 1))
    assert fetcher.long_bytes > 1 << 20


def test_both_tiers_keep_what_the_store_gave(store: CountingStore, tmp_path: Path) -> None:
    memory, lasting = MemoryTier.made(GRID, 2 * CHUNK), disk(tmp_path)
    fetcher = staged(store, memory, lasting)
    for _ in range(2):
        assert get(fetcher, (0, GRID.file_bytes)) == right((0, GRID.file_bytes))
    assert memory.held().sum() == 2
    assert lasting.held().all()
    assert sum(nbytes for _, nbytes in store.seen) == GRID.file_bytes


@pytest.mark.parametrize("memory", [False, True])
def test_jobs_that_share_a_disk_read_each_chunk_once(store: CountingStore, tmp_path: Path, memory: bool) -> None:
    """At the same time, too: whoever comes second waits for the first one."""
    store.before = lambda offset: time.sleep(0.02)
    right_ones: list[bool] = []

    def read(seed: int) -> None:
        tiers: list[AnyTier] = [MemoryTier.made(GRID, 1 << 30)] if memory else []
        fetcher = staged(store, *tiers, disk(tmp_path))
        for chunk in np.random.default_rng(seed).permutation(CHUNKS).tolist():
            asked = GRID.span(chunk)
            right_ones.append(get(fetcher, asked) == right(asked))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert right_ones == [True] * 4 * CHUNKS
    assert sum(nbytes for _, nbytes in store.seen) == GRID.file_bytes


def test_a_job_that_stops_while_it_brings_a_chunk(
    store: CountingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it for long."""
    monkeypatch.setattr(disk_module, "_BRING_S", 0.3)
    stopped = disk(tmp_path)
    with stopped.bringing(1):
        fetcher = staged(store, disk(tmp_path))
        begin = time.monotonic()
        assert get(fetcher, GRID.span(1)) == right(GRID.span(1))
        assert 0.3 <= time.monotonic() - begin < 5
    assert get(fetcher, GRID.span(1)) == right(GRID.span(1))


def test_damage_on_the_disk_is_fetched_again(store: CountingStore, tmp_path: Path) -> None:
    get(staged(store, disk(tmp_path)), (0, GRID.file_bytes))
    store.seen.clear()
    (file,) = tmp_path.rglob("*/data")
    with open(file, "r+b") as raw:
        raw.seek(CHUNK + 77)
        raw.write(bytes(1))
    again = disk(tmp_path)
    fetcher = staged(store, again)
    assert get(fetcher, (0, GRID.file_bytes)) == right((0, GRID.file_bytes))
    assert again.counts.damaged == 1
    assert store.seen == [(CHUNK, CHUNK)]
    store.seen.clear()
    assert get(staged(store, disk(tmp_path)), (0, GRID.file_bytes)) == right((0, GRID.file_bytes))
    assert store.seen == [], "it was mended"


def test_many_threads_bring_a_chunk_once(store: CountingStore) -> None:
    fetcher = staged(store, MemoryTier.made(GRID, 1 << 30))
    go = threading.Event()
    store.before = lambda offset: (go.wait(10), None)[1]
    found: list[list[bytes]] = []
    threads = [threading.Thread(target=lambda k=k: found.append(get(fetcher, (k, 100)))) for k in range(6)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert sorted(found) == sorted(right((k, 100)) for k in range(6))
    assert store.seen == [(0, CHUNK)]


def test_a_chunk_that_is_taking_the_last_room_is_waited_for(
    store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MemoryTier.made(GRID, CHUNK)
    fetcher = staged(store, memory)
    full, goes_on = threading.Event(), threading.Event()
    write = MemoryTier._write

    def slow(tier: MemoryTier, data: np.ndarray, offset: int) -> bool:
        full.set()
        assert goes_on.wait(20)
        return write(tier, data, offset)

    monkeypatch.setattr(MemoryTier, "_write", slow)
    first = threading.Thread(target=brought, args=(fetcher, 1))
    first.start()
    assert full.wait(20)
    assert memory.is_full
    found: list[bytes] = []
    second = threading.Thread(target=lambda: found.extend(get(fetcher, (CHUNK + 5, 7), (2 * CHUNK, 3))))
    second.start()
    second.join(0.1)
    goes_on.set()
    first.join(20)
    second.join(20)
    assert found == right((CHUNK + 5, 7), (2 * CHUNK, 3))
    assert store.seen == [GRID.span(1), (2 * CHUNK, 3)], "the chunk once, and of the other one what was asked for"


def test_an_error_of_the_store_keeps_nothing(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryTier.made(GRID, 1 << 30)
    fetcher = staged(store, memory)

    def refuse(offset: int) -> None:
        raise ReadError("broken")

    store.before = refuse
    with pytest.raises(ReadError, match="broken"):
        get(fetcher, (0, 10))
    store.before = lambda offset: None

    def overtaken(*_: object) -> None:
        raise SnapshotError("a writer")

    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", overtaken)
    with pytest.raises(SnapshotError):
        get(fetcher, (0, 10))
    assert not memory.held().any()
    assert memory.held_bytes == 0
    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", lambda *_: None)
    assert get(fetcher, (0, 10)) == right((0, 10))


def test_the_filler_brings_chunks_in_order_and_says_when_it_ends(store: CountingStore) -> None:
    memory = MemoryTier.made(GRID, 1 << 30)
    errors: list[BaseException] = []
    filler = filled(staged(store, memory), [3, 1, 0], 1, errors)
    assert memory.states.wait(np.array([0, 1, 3]), lambda: None)
    assert not memory.states.wait(np.array([2]), lambda: None), "nothing is on its way any more"
    first, last = np.array([0, 3]), np.array([1, 3])
    before, given = memory.states.generation(first, last), memory.states.given
    assert before > 0
    assert memory.states.generation(first, last + 1) == -1, "chunk 2 was never brought"
    memory.give_back(1)
    assert memory.states.generation(first, last) == -1
    memory.put(1, DATA[CHUNK : 2 * CHUNK])
    assert memory.states.generation(first, last) > before, "it was not there all the time"
    assert memory.states.given == given + 1
    assert filler.cancel(10)
    assert [offset // CHUNK for offset, _ in store.seen] == [3, 1, 0]
    assert errors == []


def test_nobody_who_reads_waits_for_the_look(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads all chunks while the look that follows the first one is under way; the next look serves the
    others. No chunk is there before its look has ended."""
    looks, goes_on = [0], threading.Semaphore(0)

    def look(*_: object) -> None:
        looks[0] += 1
        assert goes_on.acquire(timeout=20)

    def before(offset: int) -> None:
        if offset:
            until(lambda: looks == [1])

    monkeypatch.setattr("pario.fetch.snapshot.check_snapshot", look)
    store.before = before
    memory = MemoryTier.made(GRID, 1 << 30)
    filler = filled(staged(store, memory), list(range(CHUNKS)), 1, errors := [])
    until(lambda: len(store.seen) == CHUNKS)
    assert looks == [1]
    assert not memory.held().any()
    goes_on.release()
    until(lambda: looks == [2] and bool(memory.held().any()))
    assert memory.held().sum() == 1
    goes_on.release()
    until(lambda: filler.is_over)
    assert memory.held().all()
    assert (looks, errors) == ([2], [])


def test_ctrl_c_leaves_no_chunk_half_brought(store: CountingStore) -> None:
    """The reader of a script is interrupted while the store is asked; the chunk is there later, read once."""
    begun, goes_on, main = threading.Event(), threading.Event(), threading.get_ident()

    def before(offset: int) -> None:
        begun.set()
        assert goes_on.wait(20)

    def interrupt() -> None:
        assert begun.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    store.before = before
    fetcher = staged(store, MemoryTier.made(GRID, 1 << 30))
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        get(fetcher, (5, 7))
    goes_on.set()
    assert get(fetcher, (5, 7)) == right((5, 7))
    assert store.seen == [GRID.span(0)]


def test_nobody_who_reads_waits_for_another_node(store: CountingStore) -> None:
    """Chunks that other nodes are to bring are asked for in threads of their own."""
    answers = threading.Event()

    def read(extents: np.ndarray, out: np.ndarray, starts: np.ndarray, *, keeps: bool) -> np.ndarray:
        assert answers.wait(20)
        return np.zeros(len(extents), bool)

    memory = MemoryTier.made(GRID, 1 << 30)
    fetcher = staged(store, memory)
    peers: Any = SimpleNamespace(read=read, is_responsible=lambda chunk: chunk == CHUNKS - 1)
    fetcher.join(peers, np.ones(CHUNKS, bool))
    filler = filled(fetcher, list(range(CHUNKS)), 1, errors := [])
    until(lambda: memory.has(CHUNKS - 1))
    assert memory.held().sum() == 1
    answers.set()
    until(lambda: filler.is_over)
    assert memory.held().all(), "the store has what they have not"
    assert errors == []


LONG = np.arange(1 << 20, dtype=np.uint32).view(np.uint8)


@pytest.fixture
def long_store(tmp_path: Path) -> CountingStore:
    """256 chunks of 16 KiB in a store that answers each read after 10 ms, however many there are."""
    LONG.tofile(tmp_path / "long.mdb")
    store = CountingStore(str(tmp_path / "long.mdb"))
    store.before = lambda offset: time.sleep(0.01)
    return store


def test_the_filler_finds_its_depth(long_store: CountingStore) -> None:
    grid = Grid(LONG.nbytes, 16384)
    memory, errors, knob = MemoryTier.made(grid, 1 << 30), [], Knob("reads", 1, 64, 2)  # type: ignore[var-annotated]
    chunks = list(range(grid.chunks))[::-1]
    filler = filled(staged(long_store, memory), chunks, knob, errors)
    began, most = time.monotonic(), 0
    while not filler.is_over and time.monotonic() - began < 60:
        most = max(most, knob.value)
        time.sleep(0.005)
    assert filler.cancel(10)
    assert errors == []
    assert most >= 8, "a store that serves any number of reads at once is asked for many"
    assert memory.held().all()
    assert sorted(offset for offset, _ in long_store.seen) == [16384 * k for k in range(grid.chunks)], "each once"
    held = np.zeros(LONG.nbytes, np.uint8)
    assert memory.read(0, held[:16384])
    assert all(memory.read(16384 * k, held[16384 * k : 16384 * (k + 1)]) for k in chunks)
    assert np.array_equal(held, LONG)


@pytest.mark.parametrize("inflight", [3, Knob("reads", 3, 3, 3)])
def test_a_pinned_depth_of_the_filler_stays(long_store: CountingStore, inflight: int | Knob) -> None:
    grid = Grid(LONG.nbytes, 16384)
    memory, errors = MemoryTier.made(grid, 1 << 30), []  # type: ignore[var-annotated]
    lock, now, most = threading.Lock(), 0, 0

    def slow(offset: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    long_store.before = slow
    filler = filled(staged(long_store, memory), list(range(96)), inflight, errors)
    assert memory.states.wait(np.arange(96), lambda: None)
    assert filler.cancel(10)
    assert errors == []
    assert most == 3


def test_what_another_tier_has_says_nothing_about_the_depth(long_store: CountingStore) -> None:
    grid = Grid(LONG.nbytes, 16384)
    near, far, knob = MemoryTier.made(grid, 1 << 30), MemoryTier.made(grid, 1 << 30), Knob("reads", 1, 64, 4)
    for chunk in range(grid.chunks):
        far.put(chunk, LONG[16384 * chunk : 16384 * (chunk + 1)])
    errors: list[BaseException] = []
    filler = filled(staged(long_store, near, far), list(range(grid.chunks)), knob, errors)
    assert near.states.wait(np.arange(grid.chunks), lambda: None)
    assert filler.cancel(10)
    assert (long_store.seen, errors) == ([], [])
    assert knob.setting == (4, "nothing is measured yet")


def test_the_filler_fails_once(store: CountingStore) -> None:
    memory = MemoryTier.made(GRID, 1 << 30)
    errors: list[BaseException] = []

    def refuse(offset: int) -> None:
        raise ReadError("broken")

    store.before = refuse
    filler = filled(staged(store, memory), list(range(CHUNKS)), 3, errors)
    assert not memory.states.wait(np.array([0]), lambda: None)
    assert filler.cancel(10)
    assert errors == [filler.error]
    assert isinstance(filler.error, ReadError)


def test_whoever_waits_is_woken_and_asked(store: CountingStore) -> None:
    memory = MemoryTier.made(GRID, 1 << 30)
    memory.announce(True)

    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    with pytest.raises(StopError):
        memory.states.wait(np.array([0]), stop)
    threading.Timer(0.05, lambda: memory.put(0, DATA[:CHUNK])).start()
    assert memory.states.wait(np.array([0]), lambda: None)


def test_others_are_asked_for_what_was_brought_and_given_back(store: CountingStore) -> None:
    """A node that is to bring a chunk for all asks nobody for it, until it has had it."""
    asked: list[int] = []

    def read(extents: np.ndarray, out: np.ndarray, starts: np.ndarray, *, keeps: bool) -> np.ndarray:
        asked.extend((extents["offset"] // CHUNK).tolist())
        return np.zeros(len(extents), bool)

    memory = MemoryTier.made(GRID, 1 << 30)
    fetcher = staged(store, memory)
    peers: Any = SimpleNamespace(read=read, is_responsible=lambda chunk: True)
    fetcher.join(peers, np.ones(CHUNKS, bool))
    for before in ([], [1]):
        brought(fetcher, 1)
        assert asked == before
        assert memory.has(1)
        memory.give_back(1)
