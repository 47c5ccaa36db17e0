"""Jobs whose tier lies on a device that stalls, fails, fills up or vanishes: every record is right, the job goes on,
and no rank waits for ten seconds.

As tests/test_loader_devices.py, which has more cases, with several ranks and devices that are more than functions: a
FUSE mount (benchmarks/stores/latency.py), and an ext4 in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest
from failing import running
from launch import run_job
from required import skip_or_fail

import pario
from benchmarks.stores.latency import LatencyStore

pytestmark = pytest.mark.skipif(
    os.environ.get("PARIO_REQUIRE_SYSTEM") != "1",
    reason="mounts file systems: set PARIO_REQUIRE_SYSTEM=1 and be root",
)

MiB = 1 << 20
N, SIZE = 1000, 20_000

#: Two ranks; says how long any of them waited for a batch.
SCRIPT = """
import json, os, sys, time, numpy as np, pario
job = json.loads(sys.argv[1])
tiers = [pario.Tier(where, quota, force=True) for where, quota in job["tiers"]]
options = pario.Options(tiers=tiers, slot_bytes=1 << 20, block_bytes=256 << 10, mix_blocks=4)
with pario.Loader(job["path"], 10, pario.decode.Raw(shape=(20_000,)), shuffle="block", options=options) as loader:
    longest = 0.0
    for epoch in range(3):
        seen, before = [], time.monotonic()
        for batch in loader:
            longest = max(longest, time.monotonic() - before)
            for k, i in enumerate(batch.ids.tolist()):
                assert batch["data"][k].tobytes() == np.random.default_rng(i).bytes(20_000)
            seen += batch.ids.tolist()
            if loader.world.rank == 0 and epoch == job["epoch"] and batch.step == 5:
                open(f"{job['signs']}/now", "w").close()
                while not os.path.exists(f"{job['signs']}/done"):
                    time.sleep(0.01)
            time.sleep(0.002)
            before = time.monotonic()
        assert sorted(sum(loader.world.allgather(seen), [])) == list(range(job["records"]))
    everyone = loader.world.allgather(longest)
    if loader.world.rank == 0:
        print("JOB " + json.dumps({"longest": max(everyone), "tier": loader.stats()["tiers"][-1]}), flush=True)
        open(f"{job['signs']}/over", "w").close()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = os.fspath(tmp_path_factory.mktemp("store") / "x.lmdb")
    with lmdb.open(where, map_size=1 << 28) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, np.random.default_rng(i).bytes(SIZE))
    with pario.Reader(where):
        pass  # saves the index
    return where


def run(
    path: str,
    signs: Path,
    folder: str,
    harm: Callable[[], None],
    *,
    when: str,
    after: Callable[[], None] = lambda: None,
    memory: int = 0,
) -> dict:
    """What the job said. harm : done while the ranks work; after : when they have all records"""

    def meanwhile(pid: int) -> None:
        end = time.monotonic() + 60
        for sign, act in (("now", harm), ("over", after)):
            while not (signs / sign).exists() and running(pid) and time.monotonic() < end:
                time.sleep(0.01)
            act()
            (signs / "done").touch()

    tiers = [*([["memory", memory]] if memory else []), [folder, "1 GiB"]]
    job = {"path": path, "signs": str(signs), "tiers": tiers, "records": N, "epoch": 0 if when == "filling" else 1}
    done = run_job(2, ["-c", SCRIPT, json.dumps(job)], limit_s=90, meanwhile=meanwhile)
    assert done.status == 0, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("JOB ")]
    said = json.loads(line[4:])
    print(f"the longest wait: {said['longest']:.2f} s; {said['tier']}")
    assert said["longest"] < 10 * done.slowness
    return said["tier"]


@pytest.fixture
def fuse(tmp_path: Path, slow: Callable[..., LatencyStore]) -> LatencyStore:
    (tmp_path / "device").mkdir(mode=0o700)
    return slow(tmp_path / "device", read_s=0.0, metadata_s=0.0, bytes_per_s=None, cache_s=0.0, writable=True)


@pytest.mark.parametrize(("when", "memory"), [("filling", 8 * MiB), ("full", 0)], ids=["filling", "full"])
def test_a_device_that_stalls(path: str, tmp_path: Path, fuse: LatencyStore, when: str, memory: int) -> None:
    """For a minute, if nobody ended that: the kernel keeps processes in their calls until then."""
    tier = run(path, tmp_path, fuse.folder, lambda: fuse.stall(60), when=when, after=fuse.heal, memory=memory)
    assert tier["errors"] > 0


def test_a_device_that_cannot_be_read(path: str, tmp_path: Path, fuse: LatencyStore) -> None:
    assert run(path, tmp_path, fuse.folder, fuse.refuse_reads, when="full")["errors"] > 0


def test_a_device_that_cannot_be_written(path: str, tmp_path: Path, fuse: LatencyStore) -> None:
    tier = run(path, tmp_path, fuse.folder, fuse.refuse_writes, when="filling")
    assert tier["errors"] + tier["refused"] > 0
    assert tier["reads"] > 0, "what it has is read"


def test_a_device_that_is_gone(path: str, tmp_path: Path, fuse: LatencyStore) -> None:
    """As if it was pulled out: every call of its files fails."""
    assert run(path, tmp_path, fuse.folder, lambda: os.kill(fuse.pid, 9), when="filling")["errors"] > 0


@contextmanager
def ext4(folder: Path, nbytes: int) -> Iterator[str]:
    image, where = folder / "image", folder / "ext4"
    where.mkdir()
    with open(image, "wb") as file:
        os.truncate(file.fileno(), nbytes)
    for command in (["mkfs.ext4", "-q", "-m", "0", image], ["mount", "-o", "loop", image, where]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            skip_or_fail(f"no file system of our own: {made.stderr}")
    try:
        yield os.fspath(where)
    finally:
        if os.path.ismount(where):
            subprocess.run(["umount", "--lazy", where], check=True)


def test_a_file_system_that_is_unmounted(path: str, tmp_path: Path) -> None:
    """What is open stays; nothing is found by its name any more."""
    with ext4(tmp_path, 64 * MiB) as where:

        def unmount() -> None:
            subprocess.run(["umount", "--lazy", where], check=True)

        assert run(path, tmp_path, where, unmount, when="filling")["reads"] > 0


def test_a_disk_that_others_fill(path: str, tmp_path: Path) -> None:
    def fill() -> None:
        disk = os.statvfs(where)
        with open(f"{where}/others", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - MiB)

    with ext4(tmp_path, 64 * MiB) as where:
        tier = run(path, tmp_path, where, fill, when="filling")
        assert tier["refused"] + tier["errors"] > 0
        assert tier["reads"] > 0
