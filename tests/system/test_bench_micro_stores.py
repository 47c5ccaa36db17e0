"""The instruments on stores whose limits are known, because they are emulated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.micro import limits
from benchmarks.micro.__main__ import main
from benchmarks.micro.checkpoint import Training, run_way
from benchmarks.micro.items import FileItems
from benchmarks.micro.threads import Sweep, sweep
from benchmarks.stores.latency import LatencyStore

NUMBER, NBYTES = 48, 8192


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for k in range(NUMBER):
        (folder / f"{k:03d}").write_bytes(os.urandom(NBYTES))
    return folder


def test_a_store_with_latency_is_named_one(files: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(files, read_s=0.06, metadata_s=0.0, bytes_per_s=None)
    items = FileItems(store.folder)
    store.reset()
    rows = sweep([items], Sweep(threads=(1, 4), rounds=1, seconds=10.0, orders=(True,)))
    found = limits.find(rows, None)
    assert 3.0 <= found.rate / found.alone <= 4.4
    assert (found.limit, found.knee) == ("latency", 4)
    assert 0.06 <= found.latency <= 0.12
    # Each run reads each file once, with one request.
    assert store.total("read") == 2 * NUMBER
    assert store.total("bytes") == 2 * NUMBER * NBYTES


def test_a_store_of_little_bandwidth_queues(files: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(files, read_s=0.001, metadata_s=0.0, bytes_per_s=NBYTES * 25)
    for _ in range(3):  # one thread does not always get its share of a busy machine
        rows = sweep([FileItems(store.folder)], Sweep(threads=(1, 8), rounds=1, seconds=10.0, orders=(True,)))
        found = limits.find(rows, None)
        if found.knee == 1:
            break
    assert (found.limit, found.knee) == ("queue", 1)
    assert found.rate == pytest.approx(NBYTES * 25, rel=0.1)


def test_fio_names_the_device(files: Path, slow: Callable[..., LatencyStore], capsys: pytest.CaptureFixture) -> None:
    store = slow(files, read_s=0.001, metadata_s=0.0, bytes_per_s=NBYTES * 50)
    given = ("--threads", "1,4", "--rounds", "1", "--seconds", "1", "--order", "shuffled", "--json")
    assert main(["threads", store.folder, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    if found["no_ceiling"]:
        pytest.skip(found["no_ceiling"])
    assert found["ceiling"]["sequential"] == pytest.approx(NBYTES * 50, rel=0.25)
    assert found["findings"][0]["limit"] == "device"


def test_writes_are_as_slow_as_asked_for(tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(tmp_path, read_s=0.0, metadata_s=0.0, bytes_per_s=None, writable=True)
    for rate in (0.0, 4e6):
        store.change(written_per_s=rate)
        begin = time.monotonic()
        Path(store.folder, "file").write_bytes(b"x" * 2_000_000)
        took = time.monotonic() - begin
        assert took >= 0.45 if rate else took < 0.45


def test_a_burst_buffer_hides_a_slow_store(tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    for name in ("slow", "fast"):
        (tmp_path / name).mkdir()
    store = slow(tmp_path / "slow", read_s=0.001, metadata_s=0.001, bytes_per_s=None, writable=True)
    store.change(written_per_s=10e6)
    what = Training(nbytes=2_000_000, arrays=4, checkpoints=2, every=5, step_s=0.01)
    direct, burst = (run_way(way, what, store.folder, str(tmp_path / "fast")) for way in ("direct", "burst buffer"))
    assert direct["stall"] >= 0.2
    assert burst["stall"] < direct["stall"] / 4
    assert direct["total"] > 2 * burst["total"]
    assert burst["durable"] >= 2 * 2_000_000 / 10e6
    assert list((tmp_path / "slow").iterdir()) == list((tmp_path / "fast").iterdir()) == []
