"""What `doctor` says on mounts that only root can make: each in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from required import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dataset(tmp_path) -> Path:
    with lmdb.open(str(tmp_path / "x.lmdb"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(1000):
            txn.put(b"%06d" % i, b"v" * 3000)
    return tmp_path / "x.lmdb"


def doctor(*args: object, mounts: str = "true", **env: str) -> tuple[int, dict]:
    """(exit status, report) of one process after the shell commands `mounts`, which nobody else sees."""
    words = shlex.join([sys.executable, "-m", "pario", "doctor", "--json", *map(str, args)])
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mounts} || exit 77; exec {words}"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    if "unshare failed" in done.stderr or done.returncode == 77:
        skip_or_fail(f"nothing can be mounted: {done.stderr}")
    return done.returncode, json.loads(done.stdout)


def test_a_dataset_that_nobody_may_write_beside(dataset) -> None:
    place = shlex.quote(str(dataset))
    status, report = doctor(
        dataset,
        mounts=f"mount --bind {place} {place} && mount -o remount,bind,ro {place}",
        XDG_CACHE_HOME=f"{dataset}/cache",
    )
    assert status == 1
    assert report["nodes"][0]["dataset"]["readonly"] is True
    assert any("no index is saved, and none can be" in text for text in report["advice"])


def test_a_cache_of_kernels_in_memory(tmp_path) -> None:
    """It is the node's own."""
    place = shlex.quote(str(tmp_path))
    _, report = doctor(mounts=f"mount -t tmpfs own {place}", PARIO_NUMBA_CACHE=str(tmp_path / "kernels"))
    assert report["nodes"][0]["kernels"]["file_system"] == "tmpfs"
    assert not any("PARIO_NUMBA_CACHE" in text for text in report["advice"])


def test_a_slow_store_is_hardly_touched(dataset, slow) -> None:
    """FUSE is named; the store is asked for the meta pages, not for records."""
    store = slow(dataset.parent)
    status, report = doctor(Path(store.folder) / dataset.name)
    facts = report["nodes"][0]["dataset"]
    assert (facts["kind"], facts["records"]) == ("FUSE", 1000)
    assert status == bool(report["advice"])
    assert facts["readonly"]
    assert 0 < store.total("bytes") < 100_000


def test_a_cache_of_kernels_that_all_nodes_see(tmp_path, slow) -> None:
    (tmp_path / "home").mkdir()
    store = slow(tmp_path, writable=True, read_s=0.001, metadata_s=0.001)
    status, report = doctor(PARIO_NUMBA_CACHE=f"{store.folder}/home/kernels")
    assert status == 1
    (text,) = [text for text in report["advice"] if "PARIO_NUMBA_CACHE" in text]
    assert "which all nodes write at once" in text
