"""The tier on disk beside a plain file: whatever is put, lost, damaged or refused, a read gives right bytes or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from errno import EIO, ENOSPC
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tiers import CHUNKS, DATA, GRID, chunk_of, read

from pario.errors import OptionError
from pario.kernels.private import UnsafeError
from pario.tiers import disk, disk_files
from pario.tiers.disk import DiskTier
from pario.tiers.grid import BLOCK_BYTES, Grid

DATASET = bytes(range(32))
ROOM = 1 << 30


def folder_of(root: Path, dataset: bytes = DATASET) -> Path:
    return root / f"pario-{os.geteuid()}" / dataset.hex()


def opened(root: Path, quota: int = ROOM, dataset: bytes = DATASET, grid: Grid = GRID) -> DiskTier:
    return DiskTier(os.fspath(root), dataset, grid, quota, floor=0.0)


def is_right(tier: DiskTier, chunk: int) -> bool:
    offset, nbytes = GRID.span(chunk)
    found = read(tier, offset, nbytes)
    assert found is None or found == chunk_of(chunk).tobytes()
    return found is not None


class TierBesideAFile(RuleBasedStateMachine):
    """Any order of what processes and the storage do to a tier. A handle stands for a process."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="pario-tier-"))
        self.tiers = [opened(self.root), opened(self.root)]
        self.sound = [False] * CHUNKS  # put by somebody, and nothing was done to it since

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.root)

    @initialize(chunk=st.integers(0, CHUNKS - 1))
    def begin(self, chunk: int) -> None:
        self.put(0, chunk)

    @rule(who=st.integers(0, 1), chunk=st.integers(0, CHUNKS - 1))
    def put(self, who: int, chunk: int) -> None:
        assert self.tiers[who].put(chunk, chunk_of(chunk))
        # What was damaged before counts as there until somebody reads it.
        self.sound[chunk] = self.sound[chunk] or is_right(self.tiers[who], chunk)

    @rule(who=st.integers(0, 1), at=st.floats(0, 1), size=st.floats(0, 1))
    def read(self, who: int, at: float, size: float) -> None:
        offset = int(at * GRID.file_bytes)
        nbytes = int(size * (GRID.file_bytes - offset))
        found = read(self.tiers[who], offset, nbytes)
        assert found is None or found == DATA[offset : offset + nbytes].tobytes()
        if nbytes and all(self.sound[c] for c in GRID.chunks_at(np.array([offset]), np.array([nbytes]))):
            assert found is not None

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        self.tiers[who].close()
        assert read(self.tiers[who], 0, 10) is None
        assert not self.tiers[who].put(0, chunk_of(0))
        self.tiers[who] = opened(self.root)

    @rule(name=st.sampled_from(["data", "map"]), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, name: str, at: float, bit: int) -> None:
        path = folder_of(self.root) / name
        offset = int(at * path.stat().st_size)
        with open(path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            if not byte:  # cut off
                return
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1 << bit]))
        if name == "data":
            self.sound[offset // GRID.chunk_bytes] = False
        else:  # a sum, a state, or the head: then the next process makes a new map
            self.sound = [False] * CHUNKS
            self.delivers_nothing_wrong()
            for who in range(2):  # what they remember would hide what was lost
                self.restart(who)

    @rule(share=st.floats(0, 1))
    def cut_off(self, share: float) -> None:
        path = folder_of(self.root) / "data"
        os.truncate(path, int(share * path.stat().st_size))
        self.sound = [False] * CHUNKS

    @invariant()
    def delivers_nothing_wrong(self) -> None:
        for tier in self.tiers:
            for chunk in range(CHUNKS):
                assert is_right(tier, chunk) or not self.sound[chunk]


TestTierBesideAFile = TierBesideAFile.TestCase
TestTierBesideAFile.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_what_is_put_is_there_for_all(tmp_path: Path) -> None:
    tier, other = opened(tmp_path), opened(tmp_path)
    assert not tier.held().any()
    for chunk in (1, CHUNKS - 1):
        assert tier.put(chunk, chunk_of(chunk))
    assert tier.held().tolist() == other.held().tolist() == [False, True, False, False, True]
    later = opened(tmp_path)
    for each in (tier, other, later):
        assert [is_right(each, chunk) for chunk in range(CHUNKS)] == [False, True, False, False, True]
    assert (tier.counts.puts, tier.counts.put_bytes) == (2, GRID.chunk_bytes + 1234)
    assert (other.counts.reads, other.counts.damaged) == (2, 0)


def test_a_small_read_is_verified_by_its_blocks(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.put(2, chunk_of(2))
    begin, _ = GRID.span(2)
    with open(folder_of(tmp_path) / "data", "r+b") as file:
        file.seek(begin + BLOCK_BYTES + 17)
        file.write(bytes([DATA[begin + BLOCK_BYTES + 17] ^ 1]))
    assert read(tier, begin + 100, 3000) == DATA[begin + 100 : begin + 3100].tobytes(), "of the other block"
    assert read(tier, begin + BLOCK_BYTES + 4000, 10) is None
    assert tier.counts.damaged == 1
    assert not tier.held()[2]
    assert tier.put(2, chunk_of(2))
    assert is_right(tier, 2)


def test_another_state_of_the_file_is_another_dataset(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path, dataset=bytes(32))
    assert one.put(0, chunk_of(0))
    assert not is_right(other, 0)
    grown = Grid(GRID.file_bytes + 1, GRID.chunk_bytes)
    assert read(opened(tmp_path, grid=grown), 0, 10) is None, "a map of another grid is none"


def test_the_quota_is_one_for_all_datasets_and_processes(tmp_path: Path) -> None:
    room = 4 * GRID.chunk_bytes + (64 << 10)  # of it the maps take some pages
    one, other = opened(tmp_path, room), opened(tmp_path, room, bytes(32))
    taken = [one.put(0, chunk_of(0)), other.put(1, chunk_of(1)), one.put(1, chunk_of(1)), other.put(2, chunk_of(2))]
    assert taken == [True] * 4
    assert not one.put(2, chunk_of(2))
    assert not other.put(0, chunk_of(0))
    assert (one.counts.refused, other.counts.refused) == (1, 1)
    used = sum(512 * path.stat().st_blocks for path in tmp_path.rglob("*") if path.is_file())
    assert used <= room
    assert is_right(one, 0)
    with pytest.raises(OptionError, match="does not hold one chunk"):
        opened(tmp_path, GRID.chunk_bytes - 1)


def test_some_of_the_disk_stays_free(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"leave 0 bytes, [0-9,]+ are wanted"):
        DiskTier(os.fspath(tmp_path), DATASET, GRID, ROOM, floor=1.0)
    opened(tmp_path)  # makes the map
    tier = DiskTier(os.fspath(tmp_path), DATASET, GRID, ROOM, floor=1.0)
    assert not tier.put(0, chunk_of(0))
    assert tier.counts.refused == 1


@pytest.mark.parametrize(("available", "taken"), [(6, True), (4, False)])
def test_what_is_kept_for_root_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, taken: bool
) -> None:
    """100 of 300 blocks are ours, taken or available, and 5 of these must stay free."""
    answer = (ROOM, ROOM, 300, 200 + available, available, 0, 0, 0, 0, 255)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(answer))
    if taken:
        assert DiskTier(os.fspath(tmp_path), DATASET, GRID, ROOM).put(0, chunk_of(0))
    else:
        with pytest.raises(OSError, match="leave 0 bytes"):
            DiskTier(os.fspath(tmp_path), DATASET, GRID, ROOM)


@pytest.mark.parametrize("errno", [ENOSPC, EIO])
def test_a_disk_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errno: int) -> None:
    """A full disk is normal. One that fails is left alone for a while, and then asked again."""
    tier = opened(tmp_path)
    tier.put(1, chunk_of(1))

    def refuse(*_: object) -> None:
        raise OSError(errno, os.strerror(errno))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        for _ in range(5):
            assert not tier.put(0, chunk_of(0))
    if errno == ENOSPC:
        assert (tier.counts.refused, tier.counts.errors) == (5, 0)
    else:
        assert (tier.counts.refused, tier.counts.errors) == (0, 3), "it was asked no more after the third time"
        assert tier.is_full
        assert is_right(tier, 1), "reading goes on: the disk may have become read-only"
        assert not tier.put(0, chunk_of(0)), "and that does not make it a disk that can be written"
        assert tier.counts.errors == 3
        later = time.monotonic() + 60
        monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: later))
    assert is_right(tier, 1)
    assert tier.put(0, chunk_of(0))


def test_one_process_at_a_time_puts_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = opened(tmp_path), opened(tmp_path)
    meanwhile: list[bool] = []
    write = disk.write_all

    def slow(fd: int, data: np.ndarray, offset: int) -> None:
        monkeypatch.setattr(disk, "write_all", write)
        meanwhile.extend([tier.put(0, chunk_of(0)), other.put(0, chunk_of(0)), other.put(1, chunk_of(1))])
        write(fd, data, offset)

    monkeypatch.setattr(disk, "write_all", slow)
    assert tier.put(0, chunk_of(0))
    assert meanwhile == [False, False, True]
    assert is_right(other, 0)


_DIES = """
import os, sys
import numpy as np
from pario.tiers import disk
from pario.tiers.grid import Grid

def die(fd, data, offset):
    os.pwrite(fd, memoryview(data)[: len(data) // 2], offset)
    os.kill(os.getpid(), 9)

folder, file_bytes, chunk_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
tier = disk.DiskTier(folder, bytes(range(32)), Grid(file_bytes, chunk_bytes), 1 << 30, floor=0.0)
disk.write_all = die
tier.put(1, np.full(chunk_bytes, 7, np.uint8))
"""


def test_who_dies_while_it_puts_leaves_no_chunk_and_no_lock(tmp_path: Path) -> None:
    arguments = [os.fspath(tmp_path), str(GRID.file_bytes), str(GRID.chunk_bytes)]
    done = subprocess.run([sys.executable, "-c", _DIES, *arguments], timeout=60, check=False)
    assert done.returncode == -9
    tier = opened(tmp_path)
    assert not is_right(tier, 1)
    assert tier.put(1, chunk_of(1))
    assert is_right(tier, 1)


def test_whoever_was_stopped_holding_a_lock_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opened(tmp_path)
    monkeypatch.setattr(disk_files, "_LOCK_S", 0.05)
    with open(tmp_path / f"pario-{os.geteuid()}" / "quota") as file:
        disk_files.fcntl.flock(file, disk_files.fcntl.LOCK_EX)
        assert not tier.put(0, chunk_of(0))
    assert tier.counts.errors == 1
    assert tier.put(0, chunk_of(0))


def test_nobody_else_may_have_a_hand_in_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    tier = opened(tmp_path)
    tier.put(0, chunk_of(0))
    assert {path.stat().st_mode & 0o077 for path in (folder, folder.parent, *folder.iterdir())} == {0}
    folder.chmod(0o777)
    with pytest.raises(UnsafeError, match="others may write"):
        opened(tmp_path)
    folder.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    (folder / "data").rename(elsewhere)
    (folder / "data").symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"symbolic link|levels"):
        opened(tmp_path)
    (folder / "data").unlink()
    (folder / "data").hardlink_to(elsewhere)
    with pytest.raises(UnsafeError, match="second name"):
        opened(tmp_path)
