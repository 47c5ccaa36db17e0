"""Stores that stall, fail or bring too little, and nodes with too little memory: as tests/test_failures.py, as root.

The store is a FUSE mount (benchmarks/stores/latency.py), a small /dev/shm is a tmpfs in a mount namespace of the job's
own, little memory is a control group's limit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from failing import RECORDS, Ended, Table, check, make_set, run
from memory_groups import MemoryGroup
from required import skip_or_fail

from benchmarks.stores.latency import LatencyStore

pytestmark = pytest.mark.skipif(
    os.environ.get("PARIO_REQUIRE_SYSTEM") != "1",
    reason="mounts file systems and sets memory limits: set PARIO_REQUIRE_SYSTEM=1 and be root",
)

table = Table()

EVERYBODY = range(4)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return make_set(tmp_path / "set")


@pytest.fixture
def store(path: str, tmp_path: Path, slow: Callable[..., LatencyStore]) -> LatencyStore:
    return slow(tmp_path / "set", read_s=0.002, metadata_s=0.001, bytes_per_s=None, cache_s=0.0)


def all_right(ended: Ended, epochs: int) -> None:
    assert ended.job.status == 0, ended
    assert sum(ended.of(rank, "end")[0]["records"] for rank in EVERYBODY) == epochs * RECORDS
    assert ended.left == [], ended


# -- the store ---------------------------------------------------------------------------------------------------------


def test_a_store_that_stalls_and_comes_back(store: LatencyStore, tmp_path: Path) -> None:
    """Longer than every limit: nobody is taken for dead."""
    seconds, alive = (30.0, 1.0) if table.file else (6.0, 0.2)

    def harm(*_) -> None:
        store.stall(seconds)

    ended = run(
        f"{store.folder}/x.lmdb",
        tmp_path,
        place="mid-epoch",
        victims=EVERYBODY,
        harm=harm,
        epochs=2,
        pause_s=0.01,
        options={"alive_seconds": alive},
    )
    all_right(ended, 2)
    assert ended.end_s > seconds - 1, ended  # it did stall
    table.row("the store stalls for 30 s", "mid-epoch", "all wait, then every record is right", ended)


def test_ctrl_c_while_the_store_stalls(store: LatencyStore, tmp_path: Path) -> None:
    """Reads that never end keep nobody from saying why. (A process inside of one may live until the store is back: the
    kernel's rule.)"""
    times = []

    def harm(_: int, pids: list[int]) -> None:
        store.stall(14)
        time.sleep(2)
        times.append(time.monotonic())
        os.kill(pids[3], signal.SIGINT)

    ended = run(f"{store.folder}/x.lmdb", tmp_path, place="mid-epoch", victims=EVERYBODY, harm=harm, settle_s=30)
    ended.harm_at = times[0]
    assert ended.job.status not in (0, None), ended
    for rank, error in ended.errors(EVERYBODY).items():
        assert error["kind"] == ("KeyboardInterrupt" if rank == 3 else "PeerError"), ended
        assert error["seconds"] < ended.promised_s, ended
    assert ended.end_s < 14 + ended.promised_s, ended
    assert ended.left == [], ended
    happens = "`KeyboardInterrupt` there, `PeerError` elsewhere; processes inside a read end when the store is back"
    table.row("SIGINT to one rank while the store stalls", "mid-epoch", happens, ended, EVERYBODY)


@pytest.mark.parametrize("when", ["start-up", "mid-epoch"])
def test_a_store_that_refuses_reads(store: LatencyStore, tmp_path: Path, when: str) -> None:
    if when == "start-up":
        store.refuse_reads(only="data.mdb")
        ended = run(f"{store.folder}/x.lmdb", tmp_path, code='note("harm")')
    else:
        ended = run(
            f"{store.folder}/x.lmdb", tmp_path, place=when, victims=EVERYBODY, harm=lambda *_: store.refuse_reads()
        )
    check(ended, dict.fromkeys(EVERYBODY, "ReadError|PeerError"), "Input/output error.*x.lmdb/data.mdb.*offset")
    assert "ReadError" in {error["kind"] for error in ended.errors([0, 1]).values()}
    table.row("the store returns EIO", when, "`ReadError` on a reading rank, `PeerError` elsewhere", ended, EVERYBODY)


def test_a_store_that_brings_less(store: LatencyStore, tmp_path: Path) -> None:
    """Short reads, of metadata too, are no error: what is missing is asked for again."""
    store.shorten_reads(1000)
    ended = run(f"{store.folder}/x.lmdb", tmp_path, epochs=1)
    all_right(ended, 1)
    table.row("the store returns short reads", "always", "every record is right", ended)


def test_a_store_that_brings_nothing(store: LatencyStore, tmp_path: Path) -> None:
    ended = run(
        f"{store.folder}/x.lmdb", tmp_path, place="mid-epoch", victims=EVERYBODY, harm=lambda *_: store.shorten_reads(0)
    )
    check(ended, dict.fromkeys(EVERYBODY, "ReadError|SnapshotError|PeerError"), "ended early|cut off")
    happens = "`ReadError` on a reading rank, `PeerError` elsewhere"
    table.row("the store returns no bytes, as at the end of a file", "mid-epoch", happens, ended, EVERYBODY)


# -- memory ------------------------------------------------------------------------------------------------------------

#: a ring of some 200 MB per node


def small_shm(megabytes: int) -> tuple[str, ...]:
    mount = f'mount -t tmpfs -o size={megabytes}m none /dev/shm && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, "sh")


@pytest.fixture
def _may_mount(path: str) -> None:
    if os.geteuid() != 0:
        skip_or_fail("a /dev/shm of one's own needs root")


@pytest.mark.usefixtures("_may_mount")
def test_a_shm_that_fills_up_later(path: str, tmp_path: Path) -> None:
    """The ring is not there."""
    code = """
right = check
def check(batch):
    right(batch)
    if comm.rank == 2 and batch.step == 3:
        note("harm")
        with open("/dev/shm/filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError:
                note("full")
"""
    ended = run(path, tmp_path, code=code, epochs=1, options={"slots": 100}, prefix=small_shm(64))
    all_right(ended, 1)
    assert ended.of(2, "full")
    table.row("another program fills /dev/shm", "mid-epoch", "every record is right", ended)


def test_a_memory_limit_below_the_ring(path: str, tmp_path: Path, memory_group: Callable[[int], MemoryGroup]) -> None:
    """As a batch system sets it: an error on all ranks instead of the kernel's SIGKILL."""
    code = """
import pario.loader.build
Slots = pario.loader.build.Slots
def noted(*args, **options):
    note("harm")
    return Slots(*args, **options)
pario.loader.build.Slots = noted
"""
    ended = run(path, tmp_path, code=code, options={"slots": 40000}, prefix=memory_group(1500 << 20).prefix)
    check(ended, dict.fromkeys(EVERYBODY, "ParioError|PeerError"), "memory is too small.*--mem")
    table.row("a memory limit below the ring (cgroup)", "start-up", "`ParioError` on all ranks", ended, EVERYBODY)
