"""The slow store itself: what it delivers, counts, and does when it is told to misbehave."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.stores.latency import METADATA, LatencyStore

READ_S = 0.02


@pytest.fixture
def content() -> bytes:
    return os.urandom(3 << 20)


@pytest.fixture
def store(tmp_path: Path, content: bytes, slow: Callable[..., LatencyStore]) -> LatencyStore:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.mdb").write_bytes(content)
    return slow(tmp_path, read_s=READ_S, metadata_s=0.002, bytes_per_s=50_000_000)


@pytest.fixture
def file(store: LatencyStore) -> Iterator[int]:
    fd = os.open(f"{store.folder}/set/data.mdb", os.O_RDONLY)
    yield fd
    os.close(fd)


def test_it_counts_and_delivers(store: LatencyStore, file: int, content: bytes) -> None:
    assert store.counts() == {"/set": {"getattr": 1}, "/set/data.mdb": {"getattr": 1, "open": 1}}
    assert os.pread(file, 5000, 12345) == content[12345:17345]
    seen = {"getattr": 1, "open": 1, "read": 1, "bytes": 5000, "head": 0, "most": 1}
    assert store.counts()["/set/data.mdb"] == seen
    assert os.listdir(f"{store.folder}/set") == ["data.mdb"]
    assert store.total(*METADATA) == 4
    store.reset()
    assert store.counts() == {}


def test_reads_are_slow_and_share_the_bandwidth(store: LatencyStore, file: int, content: bytes) -> None:
    begin = time.monotonic()
    assert os.pread(file, 1, 7) == content[7:8]
    assert time.monotonic() - begin >= READ_S
    got: dict[int, bytes] = {}

    def read(i: int) -> None:
        got[i] = os.pread(file, 1 << 18, i << 18)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    assert b"".join(got[i] for i in range(12)) == content
    assert seconds >= len(content) / 50_000_000
    assert seconds < 12 * READ_S + len(content) / 50_000_000  # the latencies overlap


def test_it_misbehaves_when_told(store: LatencyStore, file: int, content: bytes) -> None:
    store.stall(0.5)
    begin = time.monotonic()
    assert os.pread(file, 10, 0) == content[:10]
    assert time.monotonic() - begin >= 0.4
    store.refuse_reads(from_byte=4096)
    assert os.pread(file, 4096, 0) == content[:4096]
    with pytest.raises(OSError) as caught:
        os.pread(file, 4097, 0)
    assert caught.value.errno == errno.EIO
    store.heal()
    store.shorten_reads(100)
    assert os.pread(file, 4096, 8192) == content[8192:8292]
    store.shorten_reads(0)
    assert os.pread(file, 4096, 8192) == b""
    store.heal()
    assert os.pread(file, 4096, 8192) == content[8192 : 8192 + 4096]
    store.refuse_reads(only="/other")
    assert os.pread(file, 1, 0) == content[:1]


def test_writes_pass_only_when_asked(tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    (tmp_path / "a").write_text("a")
    closed, open_ = slow(tmp_path, read_s=0.0), slow(tmp_path, read_s=0.0, writable=True)
    with pytest.raises(OSError) as caught:
        Path(closed.folder, "b").write_text("b")
    assert caught.value.errno == errno.EROFS
    Path(open_.folder, "b").write_text("b")
    os.replace(f"{open_.folder}/b", f"{open_.folder}/c")
    assert (tmp_path / "c").read_text() == "b"
    assert open_.counts()["/b"]["create"] == 1


def test_nothing_is_left_of_a_killed_user(tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    slow(tmp_path)  # skips where there is no FUSE
    script = (
        "import os, signal, sys\n"
        "from benchmarks.stores.latency import latency_store\n"
        "with latency_store(sys.argv[1]) as store:\n"
        "    print(store.folder, store.pid, flush=True)\n"
        "    store.stall(100)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parent.parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    folder, pid = ended.stdout.split()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() or folder in Path("/proc/mounts").read_text():
        assert time.monotonic() < end, "the daemon outlived its user"
        time.sleep(0.05)
    os.rmdir(folder)


def test_it_changes_while_it_runs(store: LatencyStore, file: int, content: bytes) -> None:
    def seconds(reads: int, nbytes: int) -> float:
        threads = [threading.Thread(target=os.pread, args=(file, nbytes, i * nbytes)) for i in range(reads)]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begin

    store.change(read_s=0.1)
    assert seconds(1, 4096) >= 0.1
    assert 0.1 <= seconds(8, 4096) < 0.4  # they overlap
    store.change(read_s=0.0, bytes_per_s=5_000_000)
    assert seconds(2, 1 << 19) >= (1 << 20) / 5e6
    store.change(bytes_per_s=0)
    assert seconds(2, 1 << 19) < (1 << 20) / 5e6
    store.change(read_s=0.05, serial=True)
    assert seconds(4, 4096) >= 4 * 0.05  # one after the other
    store.change(serial=False)
    assert seconds(4, 4096) < 4 * 0.05
    assert os.pread(file, 5000, 12345) == content[12345:17345]
