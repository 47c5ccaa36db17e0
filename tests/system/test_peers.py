"""Four nodes and one store that counts every operation. What a published prototype of such tiers got wrong
(DistMonarch) is asked for here and in tests/test_tiers_peers.py: copies announced too early or to nobody, a store that
is opened and asked for attributes on behalf of others' copies, fixed ports, a connection and an allocation per read,
one attempt and no checksum, the first node that serves everything."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lmdb
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import run_job

import pario
from benchmarks.stores.latency import METADATA, LatencyStore, latency_store

N, SIZE, NODES = 3000, 4000, 4

SCRIPT = """
import os, sys, time, numpy as np, pario
path, epochs, quota, shuffle, folder, signs = sys.argv[1:]
def sign(world, said, wanted):
    world.barrier()
    if signs and world.rank == 0:
        open(f"{signs}/{said}", "w").close()
        while not os.path.exists(f"{signs}/{wanted}"):
            time.sleep(0.01)
    world.barrier()
def value(i):
    return np.random.default_rng(i).integers(0, 256, 4000, dtype=np.uint8)
os.environ["NODE"] = os.environ["PMI_RANK"]
where = f"{folder}/$NODE" if folder else "memory"
options = pario.Options(tiers=(pario.Tier(where, int(quota)),), slot_bytes=1 << 20, block_bytes=256 << 10, mix_blocks=4)
with pario.Loader(path, 16, pario.decode.Raw(shape=(4000,)), shuffle=shuffle, options=options) as loader:
    for _ in range(int(epochs)):
        seen = []
        for batch in loader:
            for k, i in enumerate(batch.ids.tolist()):
                assert np.array_equal(batch["data"][k], value(i))
            seen += batch.ids.tolist()
        everyone = loader.world.allgather(seen)
        assert sorted(sum(everyone, [])) == list(range(3000))
        if loader.epoch == 1:
            sign(loader.world, "placed", "counted")
    sign(loader.world, "done", "end")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data") / "x.lmdb"
    with lmdb.open(os.fspath(place), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in np.random.default_rng(0).permutation(N).tolist():
            txn.put(b"%06d" % i, np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8).tobytes())
    with pario.Reader(place):
        pass  # saves the index
    return place


def operations(store: LatencyStore) -> dict[str, int]:
    """Of the data file."""
    counts = store.counts(reset=True).get("/data.mdb", {})
    return {name: counts.get(name, 0) for name in (*METADATA, "read", "bytes")}


@pytest.mark.parametrize(
    ("shuffle", "part", "disk"), [("global", 1.3, False), ("block", 0.4, False), ("global", 0.4, True)], ids=str
)
def test_later_epochs_ask_the_store_for_nothing(
    data: Path, tmp_path: Path, shuffle: str, part: float, disk: bool
) -> None:
    """Neither for bytes, nor to open a file, nor for its attributes."""
    size = (data / "data.mdb").stat().st_size
    counted: list[dict[str, int]] = []

    with latency_store(data, read_s=0.001, metadata_s=0.0, bytes_per_s=None, cache_s=0.0) as store:

        def count(pid: int) -> None:
            for said, answer in (("placed", "counted"), ("done", "end")):
                end = time.monotonic() + 100
                while not (tmp_path / said).exists():
                    if time.monotonic() > end or not os.path.exists(f"/proc/{pid}"):
                        return
                    time.sleep(0.01)
                counted.append(operations(store))
                (tmp_path / answer).touch()

        folder = str(tmp_path / "disk") if disk else ""
        arguments = [store.folder, "3", str(int(part * size)), shuffle, folder, str(tmp_path)]
        env = {"MPIR_CVAR_NUM_CLIQUES": str(NODES)}
        done = run_job(NODES, ["-c", SCRIPT, *arguments], limit_s=120, env=env, meanwhile=count)
    assert done.status == 0, done.output
    assert "does not answer" not in done.output
    first, later = counted
    assert first["open"] <= NODES, "each node opens the file once, and looks at nothing on behalf of others"
    assert sum(first[name] for name in METADATA) <= 4 * NODES
    assert first["bytes"] <= 1.02 * size + 64 * 8192
    assert set(later.values()) == {0}, later


def test_the_next_job_on_the_same_disks(data: Path, tmp_path: Path) -> None:
    """Also if it has its nodes in another order."""
    size = (data / "data.mdb").stat().st_size
    with latency_store(data, read_s=0.001, metadata_s=0.0, bytes_per_s=None) as store:
        turned = SCRIPT.replace('os.environ["PMI_RANK"]', 'str(3 - int(os.environ["PMI_RANK"]))')
        for job, script in enumerate((SCRIPT, SCRIPT, turned)):
            arguments = [store.folder, "1", str(int(0.4 * size)), "global", str(tmp_path / "disk"), ""]
            done = run_job(NODES, ["-c", script, *arguments], limit_s=120, env={"MPIR_CVAR_NUM_CLIQUES": str(NODES)})
            assert done.status == 0, done.output
            read = operations(store)["bytes"]
            # Later: meta pages, and a sample of leaf pages.
            assert read <= (1.02 * size if job == 0 else 0) + 64 * 8192
