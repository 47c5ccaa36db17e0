"""A tier whose disk stops answering: nobody waits for long, and what comes back late does no harm."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from errno import EIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from devices import Device
from tiers import CHUNKS, DATA, GRID, chunk_of, read

from pario.records import EXTENT
from pario.tiers import disk, disk_reads
from pario.tiers.disk import DiskTier
from pario.tiers.grid import BLOCK_BYTES
from pario.tiers.patience import StalledError

CHUNK = GRID.chunk_bytes
LIMIT_S = 0.3


def opened(folder: Path) -> DiskTier:
    return DiskTier(os.fspath(folder), bytes(32), GRID, 1 << 30, floor=0.0)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(disk, "_STALL_S", LIMIT_S)
    monkeypatch.setattr(disk, "_REST_S", 0.0)
    made = Device(tmp_path, monkeypatch)
    yield made
    made.answer()


@pytest.fixture
def tier(tmp_path: Path, device: Device) -> Iterator[DiskTier]:
    """Chunks 0 and 1 are here."""
    before = opened(tmp_path)
    for chunk in (0, 1):
        assert before.put(chunk, chunk_of(chunk))
    before.close()
    made = opened(tmp_path)
    yield made
    device.answer()
    made.close()


def answers_again(tier: DiskTier, device: Device) -> None:
    device.answer()
    end = time.monotonic() + 20
    while tier.is_full and time.monotonic() < end:
        time.sleep(0.005)
    assert not tier.is_full


CALLS: dict[str, Callable[[DiskTier], object]] = {
    "read": lambda tier: tier.read(0, np.empty(CHUNK, np.uint8)),
    "read_many": lambda tier: tier.read_many(
        np.array([(5, 9)] * 50, EXTENT), np.empty(450, np.uint8), np.arange(50) * 9
    ).any(),
    "lend": lambda tier: tier.lend(7, 100),
    "put": lambda tier: tier.put(2, chunk_of(2)),
    "has": lambda tier: tier.has(0),
    "held": lambda tier: tier.held().any(),
    "room": lambda tier: tier.room(),
}


@pytest.mark.parametrize("call", CALLS)
def test_nobody_waits_for_long(tier: DiskTier, device: Device, call: str, caplog: pytest.LogCaptureFixture) -> None:
    assert CALLS[call](tier)
    tier.close()
    tier = opened(Path(tier.name))
    device.stall()
    begin = time.monotonic()
    assert not CALLS[call](tier)
    first = time.monotonic() - begin
    assert 0.5 * LIMIT_S < first < 10 * LIMIT_S
    assert tier.counts.errors == 1
    assert tier.is_full
    device.asked.clear()
    for each in CALLS.values():
        assert not each(tier)
    with tier.bringing(3):
        pass
    assert device.asked == [], "it is left alone until what it was asked comes back"
    assert caplog.text.count("does not answer") == 1
    answers_again(tier, device)
    for each in CALLS.values():
        assert each(tier)
    assert read(tier, 0, CHUNK) == DATA[:CHUNK].tobytes()


def test_it_is_left_alone_for_a_while_after_it_has_come_back(
    tier: DiskTier, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_REST_S", 30.0)
    device.stall()
    assert not tier.has(0)
    device.answer()
    end = time.monotonic() + 20
    while tier._patience.has_left_calls and time.monotonic() < end:
        time.sleep(0.005)
    assert not tier.has(0)
    later = time.monotonic() + 60
    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: later))
    assert tier.has(0)


def test_a_late_read_writes_into_nobodys_memory(tier: DiskTier, device: Device) -> None:
    """Whoever gave up has read the store meanwhile, and may have handed the memory out."""
    out = np.empty(3 * CHUNK // 2, np.uint8)
    device.stall()
    assert not tier.read(0, out[:CHUNK])
    out[:] = 0x55
    assert not tier.read_many(np.array([(0, CHUNK)], EXTENT), out, np.zeros(1, np.int64))
    answers_again(tier, device)
    assert (out == 0x55).all()
    assert tier.counts.reads == 0


def test_a_late_write_writes_what_it_was_given(tier: DiskTier, device: Device, tmp_path: Path) -> None:
    """The caller's memory holds the next chunk by then."""
    device.stall()
    memory = chunk_of(2).copy()
    assert not tier.put(2, memory)
    memory[:] = 0x55
    answers_again(tier, device)
    assert read(opened(tmp_path), *GRID.span(2)) in (chunk_of(2).tobytes(), None)
    assert tier.put(2, chunk_of(2))
    assert read(opened(tmp_path), *GRID.span(2)) == chunk_of(2).tobytes()


def test_who_shares_the_tier_waits_no_longer(tier: DiskTier, device: Device, tmp_path: Path) -> None:
    """For a chunk that another process was bringing when the disk stopped."""
    other = opened(tmp_path)
    with tier.bringing(3):
        device.stall()
        begin = time.monotonic()
        with other.bringing(3):
            assert time.monotonic() - begin < 10 * LIMIT_S
    device.answer()
    other.close()


@pytest.mark.parametrize("threads", [1, 6])
def test_threads_that_read_meanwhile(tier: DiskTier, device: Device, threads: int) -> None:
    """Each of them loses the limit once, all at the same time."""
    device.stall()
    begin = time.monotonic()
    right: list[bool] = []

    def reader(seed: int) -> None:
        for chunk in np.random.default_rng(seed).integers(0, CHUNKS, 50).tolist():
            found = read(tier, *GRID.span(chunk))
            right.append(found in (None, chunk_of(chunk).tobytes()))

    readers = [threading.Thread(target=reader, args=(seed,)) for seed in range(threads)]
    for each in readers:
        each.start()
    for each in readers:
        each.join(60)
    assert right == [True] * 50 * threads
    assert time.monotonic() - begin < 10 * LIMIT_S


def test_closing_waits_for_nothing(tier: DiskTier, device: Device) -> None:
    device.stall()
    assert not tier.has(0)
    begin = time.monotonic()
    tier.close()
    tier.close()
    assert time.monotonic() - begin < 10 * LIMIT_S
    assert read(tier, 0, 10) is None


def test_a_disk_that_does_not_answer_when_it_is_opened(device: Device, tmp_path: Path) -> None:
    device.stall()
    with pytest.raises(StalledError):
        opened(tmp_path)
    device.answer()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not any("pario-" in link for link in map(link_of, os.listdir("/proc/self/fd")) if str(tmp_path) in link):
            return
        time.sleep(0.01)
    raise AssertionError("the files that were opened late are never closed")


def link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_errors_while_it_is_read(tier: DiskTier, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that cannot be read are extents that are not here; three failures in a row, and it rests."""
    assert tier.has(0)
    monkeypatch.setattr(disk, "_REST_S", 30.0)
    out = np.empty(300, np.uint8)
    three = np.array([(0, 100), (1000, 100), (3 * BLOCK_BYTES, 100)], EXTENT)
    starts = np.arange(3) * 100
    assert tier.read_many(three, out, starts).all()
    device.errors["preadv"] = EIO
    device.asked.clear()
    assert not tier.read_many(three, out, starts).any()
    assert tier.counts.errors == len(device.asked) == 2, "neighbours come and fail together"
    assert not tier.read_many(three, out, starts).any()
    device.asked.clear()
    assert not tier.read_many(three, out, starts).any()
    assert device.asked == []


def test_a_copy_that_was_removed_is_not_filled(tier: DiskTier, device: Device, tmp_path: Path) -> None:
    """Nobody would find it again, and its bytes would not count."""
    for name in ("data", "map", "path"):
        for file in tmp_path.rglob(name):
            file.unlink()
    assert not tier.put(2, chunk_of(2))
    assert tier.counts.errors == 1
    assert read(tier, 0, CHUNK) == DATA[:CHUNK].tobytes(), "what is in open files is still there"


def test_nobody_asks_a_disk_for_what_the_page_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    assert tier.put(0, chunk_of(0))
    if not disk_reads.NOW or not reads_now(tmp_path):
        pytest.skip("this file system cannot tell what the page cache has")

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(tier._patience, "call", refuse)
    assert read(tier, 5, 1000) == DATA[5:1005].tobytes()
    assert read(tier, 0, CHUNK) == DATA[:CHUNK].tobytes()


def reads_now(folder: Path) -> bool:
    path = folder / "try"
    path.write_bytes(b"x")
    with open(path, "rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, disk_reads.NOW) == 1
        except OSError:
            return False
