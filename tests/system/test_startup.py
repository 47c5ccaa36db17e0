"""Start-up at scale: what a job asks of the store before its first batch, however many ranks a node has."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import Job, run_job

import pario
from benchmarks.stores.latency import METADATA, LatencyStore

RECORDS = 100

#: Every rank sees its own node's mount under the same path, as real nodes do: a mount namespace for each.
NODE = """
import ctypes, json, os, resource, sys, time
nodes, here, *mounts = json.loads(sys.argv[1])
rank = int(os.environ["PMI_RANK"])
libc = ctypes.CDLL(None, use_errno=True)
def must(status):
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
must(libc.unshare(0x00020000))  # CLONE_NEWNS
must(libc.mount(b"none", b"/", None, 16384 | 262144, None))  # MS_REC | MS_PRIVATE: nobody else sees the next one
must(libc.mount(mounts[rank % nodes].encode(), here.encode(), None, 4096, None))  # MS_BIND
"""


def job(
    tmp_path: Path,
    script: str,
    ranks: int,
    nodes: int,
    stores: list[LatencyStore],
    *,
    more: Sequence[str] = (),
    limit_s: float = 120,
) -> Job:
    here = tmp_path / "here"
    here.mkdir(exist_ok=True)
    what = json.dumps([nodes, str(here), *(store.folder for store in stores)])
    env = {"MPIR_CVAR_NUM_CLIQUES": str(nodes), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_job(ranks, ["-c", NODE + script, what, *more], limit_s=limit_s, env=env)
    assert done.status == 0, done.output
    return done


def write(path: Path, *, plain: bool, saved: bool) -> None:
    """An LMDB as a directory or as a single file, with or without a side-car."""
    with lmdb.open(os.fspath(path), subdir=not plain, lock=False, map_size=1 << 24) as env, env.begin(write=True) as t:
        for i in range(RECORDS):
            t.put(b"%04d" % i, bytes([i]) * 6000)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all four: a directory or a plain file, with a side-car or without."""
    folder = tmp_path_factory.mktemp("sets")
    for plain in (False, True):
        for saved in (False, True):
            write(folder / f"{'plain' if plain else 'dir'}-{'saved' if saved else 'fresh'}", plain=plain, saved=saved)
    return folder


FIRST_BATCH = """
import pario
for name in NAMES:
    with pario.Loader(f"{here}/{name}", 1) as loader:
        assert loader.world.nodes == nodes, loader.world
        assert loader.world.node == rank % nodes or loader.world.size == 1, loader.world
        assert sum(1 for _ in loader) == -(-100 // loader.world.size)
"""


def operations(store: LatencyStore, name: str) -> dict[str, dict[str, int]]:
    """What reached the store for one data set: path -> operations."""
    return {path: of for path, of in store.counts().items() if path.startswith(f"/{name}")}


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (2, 1), (8, 1), (4, 2), (8, 4)])
def test_at_most_four_metadata_operations_per_node(
    ranks: int, nodes: int, sets: Path, tmp_path: Path, slow: Callable[..., LatencyStore]
) -> None:
    """FUSE asks twice for an open: to look the name up, then to open it; other file systems do it at once."""
    source = tmp_path / "sets"
    shutil.copytree(sets, source, copy_function=shutil.copy2)
    for name in os.listdir(source):
        if name.endswith("saved"):
            with pario.Reader(source / name):
                pass
    # A node's kernel remembers what it looked up for as long as nobody changes it.
    stores = [slow(source, read_s=0.005, metadata_s=0.002, cache_s=60) for _ in range(nodes)]
    names = sorted(name for name in os.listdir(source) if name.split("-")[0] in ("dir", "plain") and "." not in name)
    done = job(tmp_path, f"NAMES = {names}\n" + FIRST_BATCH, ranks, nodes, stores)
    for name in names:
        for node, store in enumerate(stores):
            found = operations(store, name)
            folder = found.pop(f"/{name}", {}) if name.startswith("dir") else {}
            metadata = {path: {op: n for op, n in of.items() if op in METADATA} for path, of in found.items()}
            explain = f"{name}, node {node}: {folder} {metadata}\n{done.output}"
            # The directory itself is on the way of every look at what is in it; the node's kernel asks for it once.
            assert folder.get("getattr", 0) <= 1, explain
            assert set(folder) <= {"getattr"}, explain
            assert sum(sum(of.values()) for of in metadata.values()) <= 4, explain
            assert not any(of.get("readdir") for of in metadata.values()), explain
            data = found[f"/{name}/data.mdb" if name.startswith("dir") else f"/{name}"]
            assert data["open"] == 1, explain
            if name.endswith("saved"):
                # Once to know the file, and on node 0 to name its copy; with the chunk, which is the whole file; and to
                # look whether a writer overtook that. Another node may have brought the chunk.
                assert data["head"] in ((2, 4) if node == 0 else (1, 3)), explain
    # In all, directories included, no more than four per node as soon as there are two nodes.
    total = sum(store.total(*METADATA) for store in stores)
    assert total <= 4 * nodes * len(names) + (nodes == 1) * len(names)
    print(f"{ranks} ranks, {nodes} nodes: {total / nodes / len(names):.2f} metadata operations per node and start")


def test_a_first_start_that_saves_the_index(sets: Path, tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    """Once per data set, rank 0's node writes besides; the others ask no more than ever."""
    source = tmp_path / "sets"
    shutil.copytree(sets, source, copy_function=shutil.copy2)
    # Two views of one folder: what one node writes, the other's kernel finds, as it had not asked before.
    stores = [slow(source, read_s=0.005, metadata_s=0.002, cache_s=60, writable=True) for _ in range(2)]
    done = job(tmp_path, "NAMES = ['dir-fresh']\n" + FIRST_BATCH, 4, 2, stores)
    assert (source / "dir-fresh" / "data.mdb.pario.index").exists()
    first, second = ({path: of for path, of in store.counts().items() if path != "/"} for store in stores)
    assert sum(n for of in second.values() for op, n in of.items() if op in METADATA) <= 4, f"{second}\n{done.output}"
    to_read = {path: of for path, of in first.items() if path in ("/dir-fresh", "/dir-fresh/data.mdb")}
    assert sum(n for of in to_read.values() for op, n in of.items() if op in METADATA) <= 4, f"{first}\n{done.output}"
    print(f"writing: { ({path: of for path, of in first.items() if path not in to_read}) }")


WAIT = """
import pario
store, out = os.path.join(here, "set"), sys.argv[2]
def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
def measured(what):
    begin, used = time.monotonic(), processor()
    count = what()
    seconds = time.monotonic() - begin
    return count, seconds, (processor() - used) / seconds
# A ring that holds a few steps, so that all wait for the store until the end.
options = pario.Options(tiers=(), slot_bytes=1 << 20, slots=3)
with pario.Loader(store, 4, shuffle="global", options=options) as loader:
    steps = iter(loader)
    next(steps)
    epoch = measured(lambda: sum(1 for _ in steps))
    # And in a collective, for a rank that comes late.
    loader.world.barrier()
    if loader.world.rank == 0:
        time.sleep(3)
    meeting = measured(loader.world.barrier)
    with open(f"{out}/{loader.world.rank}.json", "w") as file:
        json.dump({"epoch": epoch, "meeting": meeting}, file)
"""


def test_32_ranks_that_wait_for_a_slow_store_spin_nowhere(tmp_path: Path, slow: Callable[..., LatencyStore]) -> None:
    ranks, batch, records = 32, 4, 2304
    source, out = tmp_path / "sets", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    with lmdb.open(os.fspath(source / "set"), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(records):
            txn.put(b"%06d" % i, bytes([i % 251]) * 6000)
    with pario.Reader(source / "set"):
        pass
    store = slow(source, read_s=0.02, bytes_per_s=2_000_000)
    done = job(tmp_path, WAIT, ranks, 1, [store], limit_s=240, more=[str(out)])
    said = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert sum(one["epoch"][0] for one in said) == ranks * (records // (ranks * batch) - 1), done.output
    for rank, one in enumerate(said):
        _, seconds, part = one["epoch"]
        assert seconds > 2, f"rank {rank} waited {seconds:.1f} s only: the store was not slow"
        # Rank 0 reads for all, each record by itself: a read has cost it 0.04 to 0.15 ms beside 31 others on two cores.
        reading = 0.2e-3 * records / seconds if rank == 0 else 0.0
        assert part <= 0.05 + reading, f"rank {rank} used {part:.1%} of a processor while it waited for the store"
        _, seconds, part = one["meeting"]
        if rank:  # 0 is the one that comes late
            assert seconds > 1, f"rank {rank} did not wait"
            assert part <= 0.05, f"rank {rank} used {part:.1%} of a processor in a barrier"
    worst = [max(one[what][2] for one in said[1:]) for what in ("epoch", "meeting")]
    print(f"waiting for the store {worst[0]:.2%} of a processor, in a barrier {worst[1]:.2%}")
