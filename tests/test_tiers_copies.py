"""What lies below a tier's folder: listed, verified, removed. The oracle is what the test put there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tiers import CHUNKS, DATA, GRID, chunk_of

from pario.tiers.copies import Copy, copies_below, remove, verify
from pario.tiers.disk import DiskTier
from pario.tiers.disk_files import FILES, root_of

ROOM = 1 << 30


def made(folder: Path, identity: int, *chunks: int) -> DiskTier:
    tier = DiskTier(os.fspath(folder), bytes([identity]) * 32, GRID, ROOM, floor=0.0, path=f"/data/{identity}.lmdb")
    for chunk in chunks:
        assert tier.put(chunk, chunk_of(chunk))
    return tier


def found(folder: Path) -> list[Copy]:
    return copies_below(os.fspath(folder))


def test_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    assert found(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()


def test_what_is_there(tmp_path: Path) -> None:
    made(tmp_path, 1, 0, CHUNKS - 1).close()
    time.sleep(0.02)
    tier = made(tmp_path, 2)
    second, first = found(tmp_path)
    assert (first.path, second.path) == ("/data/1.lmdb", "/data/2.lmdb")
    assert first.identity == (b"\1" * 32).hex()
    assert first.grid == GRID
    assert first.held_bytes == GRID.chunk_bytes + 1234
    assert first.disk_bytes >= first.held_bytes
    assert (first.in_use, second.in_use) == (False, True)
    assert second.held_bytes == 0
    assert first.days < 0.1
    tier.close()
    assert not any(copy.in_use for copy in found(tmp_path))


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    made(tmp_path, 1, 0).close()
    root = Path(root_of(os.fspath(tmp_path)))
    (root / "notes").mkdir()
    (root / ("ab" * 32)).mkdir(mode=0o700)
    (root / ("cd" * 32)).mkdir(mode=0o700)
    for name in FILES:
        (root / ("cd" * 32) / name).write_bytes(b"not a copy")
    (copy,) = found(tmp_path)
    assert remove(copy)
    assert sorted(os.listdir(root)) == sorted(["ab" * 32, "cd" * 32, "notes", "quota"])


def test_a_map_of_another_dataset(tmp_path: Path) -> None:
    made(tmp_path, 1, 0).close()
    root = Path(root_of(os.fspath(tmp_path)))
    (root / (b"\1" * 32).hex()).rename(root / (b"\3" * 32).hex())
    assert found(tmp_path) == []


def test_damage(tmp_path: Path) -> None:
    made(tmp_path, 1, *range(CHUNKS)).close()
    (copy,) = found(tmp_path)
    assert verify(copy) == (CHUNKS, 0)
    data = Path(root_of(os.fspath(tmp_path)), copy.identity, "data")
    with open(data, "r+b") as file:
        for chunk in (1, 3):
            file.seek(chunk * GRID.chunk_bytes + 777)
            file.write(bytes([DATA[chunk * GRID.chunk_bytes + 777] ^ 1]))
    assert verify(copy) == (CHUNKS - 2, 2)
    assert verify(copy) == (CHUNKS - 2, 0), "they are absent now"
    again = made(tmp_path, 1, 1, 3)
    assert all(again.read(GRID.span(chunk)[0], np.empty(GRID.span(chunk)[1], np.uint8)) for chunk in range(CHUNKS))
    again.close()


def test_a_copy_in_use_is_not_removed(tmp_path: Path) -> None:
    tier = made(tmp_path, 1, 0)
    (copy,) = found(tmp_path)
    assert not remove(copy)
    assert tier.read(0, np.empty(10, np.uint8))
    tier.close()
    assert remove(copy)
    assert found(tmp_path) == []
    tier = made(tmp_path, 1, 0)
    assert len(found(tmp_path)) == 1
    tier.close()


def test_removing_while_jobs_begin(tmp_path: Path) -> None:
    """Whoever opens a copy has one that nobody removes, and finds in it what it puts there."""
    stop = threading.Event()
    removed: list[bool] = []

    def clean() -> None:
        while not stop.is_set():
            removed.extend(remove(copy) for copy in found(tmp_path))

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for _ in range(60):
            tier = made(tmp_path, 1, 0)
            assert len(found(tmp_path)) == 1
            time.sleep(0.001)
            other = made(tmp_path, 1)
            assert other.read(0, np.empty(10, np.uint8)), "the same copy"
            other.close()
            tier.close()
    finally:
        stop.set()
        cleaner.join()
    assert any(removed)


@pytest.mark.parametrize("what", ["link", "others"])
def test_folders_that_are_not_safe(tmp_path: Path, what: str) -> None:
    made(tmp_path, 1, 0).close()
    root = Path(root_of(os.fspath(tmp_path)))
    if what == "others":
        root.chmod(0o777)
    else:
        root.rename(tmp_path / "elsewhere")
        tmp_path.chmod(0o777)
        root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"may write|link|write"):
        found(tmp_path)
