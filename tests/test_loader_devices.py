"""A Loader whose tier lies on a device that fails in the middle of a job: every record is right, and little time is
lost. (The same on real devices: tests/system/test_tier_devices.py.)"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from errno import EIO, ENODEV, ENOSPC
from functools import cache
from pathlib import Path

import lmdb
import numpy as np
import pytest
from devices import Device

import pario
from pario.tiers import disk

N, SIZE, BATCH = 1000, 5000, 20


@cache
def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = str(tmp_path_factory.mktemp("store") / "x.lmdb")
    with lmdb.open(where, map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    with pario.Reader(where):
        pass  # saves the index
    return where


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(disk, "_STALL_S", 0.5)
    made = Device(folder, monkeypatch)
    yield made
    made.answer()


def stall(device: Device, folder: Path) -> None:
    device.stall()


def refuse(number: int, *calls: str) -> Callable[[Device, Path], None]:
    def harm(device: Device, folder: Path) -> None:
        device.errors.update(dict.fromkeys(calls, number))

    return harm


def remove(device: Device, folder: Path) -> None:
    shutil.rmtree(folder)


HARMS = {
    "it stalls": stall,
    "reads fail": refuse(EIO, "preadv"),
    "writes fail": refuse(EIO, "pwrite"),
    "it is full": refuse(ENOSPC, "posix_fallocate"),
    "it is full when it writes": refuse(ENOSPC, "pwrite"),
    "everything fails": refuse(ENODEV, "all"),
    "the folder is removed": remove,
}


@pytest.mark.parametrize("where", ["the disk alone", "behind memory", "behind some memory"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("when", ["while it fills", "when it is full"])
def test_the_job_goes_on(path: str, folder: Path, device: Device, harm: str, where: str, when: str) -> None:
    tiers = [pario.Tier(os.fspath(folder), "1 GiB")]
    if where != "the disk alone":
        tiers.insert(0, pario.Tier("memory", "64 MiB" if where == "behind memory" else "2 MiB"))
    options = pario.Options(tiers=tuple(tiers), slot_bytes=128 << 10, block_bytes=64 << 10, mix_blocks=4)
    with pario.Loader(path, BATCH, pario.decode.Raw(shape=(SIZE,)), shuffle="block", options=options) as loader:
        longest = 0.0
        for epoch in range(3):
            seen: list[int] = []
            before = time.monotonic()
            for batch in loader:
                longest = max(longest, time.monotonic() - before)
                for k, i in enumerate(batch.ids.tolist()):
                    assert batch["data"][k].tobytes() == value(i)
                    seen.append(i)
                if epoch == (when == "when it is full") and batch.step == 5:
                    HARMS[harm](device, folder)
                before = time.monotonic()
            assert sorted(seen) == list(range(N))
        assert longest < 5, "ten times what a tier that does not answer is waited for"
        if where == "the disk alone" and harm in ("it stalls", "reads fail", "everything fails"):
            assert loader.stats()["tiers"][0]["errors"] > 0
    if harm == "it stalls":
        device.answer()
