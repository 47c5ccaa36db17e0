"""What pario says about a slow store, against what the store itself counted."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
from launch import run_job

import pario
from benchmarks.stores.latency import LatencyStore

N = 600
BYTES_PER_S = 10_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 MB in key order, with its index beside it."""
    place = tmp_path_factory.mktemp("set") / "x.lmdb"
    with lmdb.open(str(place), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, bytes([i % 251]) * 5000)
    with pario.Reader(str(place)):
        pass
    return place


def bytes_of(store: LatencyStore) -> int:
    return store.counts()["/data.mdb"]["bytes"]


def test_the_store_is_slow(folder: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(folder, read_s=0.005, bytes_per_s=BYTES_PER_S)
    options = pario.Options(tiers=(), slot_bytes=256 << 10, slots=3, inflight=4)
    with pario.Loader(store.folder, 20, options=options) as loader:
        before, begin = bytes_of(store), time.perf_counter()
        for _batch in loader:
            pass
        seconds = time.perf_counter() - begin
        report = loader.report()
        asked = bytes_of(store) - before
        ring = loader.stats()["slots"] * loader.stats()["slot_bytes"]
    # The snapshot is looked at after each group, with reads of a page or so. What is read ahead of the next epoch may
    # still be under way, and counts when it is there.
    assert report.total["bytes_read"] <= asked <= 1.1 * report.total["bytes_read"] + ring, report
    slow_part = (
        r"the store (?:or the number of reads in flight )?was the slow part: it gave ([\d.]+) MB/s with (?:all )?"
        r"([\d.]+) reads? (?:in flight;|that inflight allows)"
    )
    told = re.match(slow_part, report.sentence)
    assert told is not None, report
    assert 0.9 * (asked - ring) / seconds <= 1e6 * float(told[1]) <= 1.1 * BYTES_PER_S, report
    assert 0.7 <= float(told[2]) <= 4.1
    assert report.ranks[0].lost > 0.4 * report.seconds, report


def test_the_store_is_idle(folder: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(folder, read_s=0.005, bytes_per_s=None)
    options = pario.Options(tiers=(), slot_bytes=256 << 10, slots=3, inflight=4)
    with pario.Loader(store.folder, 20, options=options) as loader:
        for _batch in loader:
            time.sleep(0.05)
        report = loader.report()
    slow_part = r"the consumer's own code was the slow part: .* the store was idle (\d+)% of the time"
    told = re.match(slow_part, report.sentence)
    assert told is not None, report
    assert int(told[1]) >= 50


def test_bytes_of_several_ranks(folder: Path, slow: Callable[..., LatencyStore]) -> None:
    store = slow(folder, read_s=0.005, bytes_per_s=BYTES_PER_S)
    words = ["-m", "pario", "bench", "run", store.folder, "-b", "20", "--report", "--json", "--epochs", "2"]
    ended = run_job(3, words, limit_s=60, env={"MPIR_CVAR_NUM_CLIQUES": "2", "PARIO_TIERS": ""})
    assert ended.status == 0, ended.output
    report = json.loads(ended.output.splitlines()[-1])["report"]
    read = sum(rank["bytes_read"] for rank in report["ranks"])
    assert read == report["total"]["bytes_read"]
    # The report was made while a part of the third epoch was still under way.
    assert read <= bytes_of(store) <= 1.25 * read + N * 5000, report
    assert sum(rank["node_bytes"] for rank in report["ranks"]) == 2 * N * 5000
    assert "slow part" in report["sentence"]
