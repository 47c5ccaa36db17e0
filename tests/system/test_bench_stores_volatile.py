"""The store that loses power keeps what was synced; and checkpoints on it outlive that at every moment."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_job
import numpy as np
import pytest
from checkpoints import equal
from launch import run_job
from volatile import DAEMON

import pario
from benchmarks.stores.latency import LatencyStore
from pario.checkpoint import layout, store
from pario.checkpoint.finding import problems
from pario.errors import ReadError

Slow = Callable[..., LatencyStore]
KINDS: list[dict[str, Any]] = [
    *({}, {"incremental": True}, {"compress": "zstd"}),
    {"incremental": True, "compress": "zstd"},
]


@pytest.fixture
def volatile(tmp_path: Path, slow: Slow) -> LatencyStore:
    (tmp_path / "source").mkdir()
    return slow(tmp_path / "source", read_s=0, metadata_s=0, bytes_per_s=None, cache_s=0, writable=True, daemon=DAEMON)


def write(path: str, data: bytes, *, sync: bool = False) -> None:
    with open(path, "wb", buffering=0) as file:
        file.write(data)
        if sync:
            os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def found(folder: Path) -> dict[str, bytes | None]:
    """path -> content; None: a folder"""
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def some_changes(at: str) -> None:
    write(f"{at}/synced", b"old", sync=True)
    write(f"{at}/empty", b"never synced")
    write(f"{at}/moved", b"moved", sync=True)
    write(f"{at}/twice", b"two names", sync=True)
    os.mkdir(f"{at}/folder")
    os.mkdir(f"{at}/nothing")
    write(f"{at}/folder/inside", b"inside", sync=True)
    sync_folder(f"{at}/folder")
    write(f"{at}/nothing/inside", b"inside", sync=True)
    os.link(f"{at}/twice", f"{at}/again")
    sync_folder(at)
    with open(f"{at}/synced", "r+b", buffering=0) as file:
        file.write(b"new")
        file.truncate(1)
    os.rename(f"{at}/moved", f"{at}/elsewhere")
    os.unlink(f"{at}/again")
    write(f"{at}/late", b"late", sync=True)


SYNCED = {
    **{"synced": b"old", "empty": b"", "moved": b"moved", "twice": b"two names", "again": b"two names"},
    **{"folder": None, "folder/inside": b"inside", "nothing": None},
}


def test_only_what_was_synced_is_left(tmp_path: Path, volatile: LatencyStore) -> None:
    at, source = volatile.folder, tmp_path / "source"
    some_changes(at)
    assert found(source)["elsewhere"] == b"moved"
    volatile.lose_power()
    assert found(source) == SYNCED
    assert os.path.samefile(source / "twice", source / "again")
    for call in (lambda: os.listdir(at), lambda: os.mkdir(f"{at}/x"), lambda: open(f"{at}/synced").close()):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            call()
    volatile.power_on()
    assert found(Path(at)) == SYNCED
    write(f"{at}/again", b"both", sync=True)
    volatile.lose_power()
    assert found(source) == SYNCED | {"twice": b"both", "again": b"both"}


def test_a_part_of_the_rest_may_be_left_too(tmp_path: Path, volatile: LatencyStore) -> None:
    seen = []
    for seed in range(30):
        some_changes(volatile.folder)
        volatile.lose_power(seed=seed)
        left = found(tmp_path / "source")
        assert ("moved" in left) != ("elsewhere" in left)  # a rename is whole
        assert left["synced"] in (b"old", b"new", b"o", b"n")
        assert left["twice"] == b"two names"
        seen.append((left["synced"], "late" in left, "again" in left, "moved" in left, "nothing/inside" in left))
        shutil.rmtree(tmp_path / "source")
        (tmp_path / "source").mkdir()
        volatile.power_on()
    assert len(set(seen)) > 15
    assert len({synced for synced, *_ in seen}) == 4


def test_power_is_lost_at_a_change(tmp_path: Path, volatile: LatencyStore) -> None:
    volatile.lose_power(after=3)
    os.mkdir(f"{volatile.folder}/a")
    os.mkdir(f"{volatile.folder}/b")
    sync_folder(volatile.folder)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        os.mkdir(f"{volatile.folder}/c")
    assert found(tmp_path / "source") == {"a": None, "b": None}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def tree_of(step: int) -> dict[str, object]:
    rng = np.random.default_rng(step)
    kept = np.random.default_rng(0).random(20_000)
    return {"step": step, "large": rng.random(20_000), "small": [rng.random(k) for k in range(20)], "kept": kept}


def job(folder: str, options: dict[str, Any], said: dict[str, int]) -> None:
    """Goes on from the newest one, saves four more; `said`: the newest that it was told to be durable, per tier."""
    with pario.Checkpointer("self", slow=f"{folder}/slow", fast=f"{folder}/fast", keep=2, **options) as ckpt:
        latest = ckpt.latest()
        if latest is not None:
            assert equal(tree_of(latest), ckpt.restore())
        first = 0 if latest is None else latest + 1
        for step in range(first, first + 4):
            handle = ckpt.save(step, tree_of(step))
            handle.wait("fast")
            said["fast"] = step
            if step % 2:
                handle.wait()
                said["slow"] = step


def newest(slow: Path, fast: Path | None, tree: Callable[[int], dict[str, object]] = tree_of) -> int:
    """The newest complete one, which is restored; -1: none. No other one is damaged."""
    with pario.Checkpointer("self", slow=slow, fast=fast) as ckpt:
        latest = ckpt.latest()
        if latest is not None:
            assert equal(tree(latest), ckpt.restore())
    for path in slow.glob("step-*"):
        assert problems(str(path)) == []
    return -1 if latest is None else latest


def check(folder: Path, said: dict[str, int]) -> None:
    assert newest(folder / "slow", folder / "fast") >= max(said.values(), default=-1)
    assert newest(folder / "slow", None) >= said.get("slow", -1)


def lose_and_restart(volatile: LatencyStore, moments: int, options: dict[str, Any]) -> int:
    """Number of moments at which the job was under way."""
    rng, said, met = random.Random(5), dict[str, int](), 0
    for k in range(moments):
        volatile.lose_power(after=rng.randrange(1, 200), seed=None if k % 2 else k)
        try:
            job(volatile.folder, options, said)
        except (pario.CheckpointError, ReadError):  # of a save, or of the list of what is there
            met += 1
        volatile.lose_power()
        volatile.power_on()
        check(Path(volatile.folder), said)
    return met


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "LEAST_BLOCK", 64 << 10)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_checkpoint_outlives_a_loss_of_power(volatile: LatencyStore, options: dict[str, Any]) -> None:
    """docs/checkpoints.md: PARIO_KILLS=100, for 400 moments in all."""
    moments = int(os.environ.get("PARIO_KILLS", "10"))
    assert lose_and_restart(volatile, moments, options) > moments // 2


@pytest.mark.parametrize("options", KINDS[1::2], ids=str)
def test_two_nodes_outlive_that_of_their_store(tmp_path: Path, volatile: LatencyStore, options: dict[str, Any]) -> None:
    """Each writes its own file; rank 0 commits them. The fast tier keeps its power, and does not count."""
    (tmp_path / "slow").symlink_to(volatile.folder)
    script, said = str(Path(__file__).resolve().parent.parent / "checkpoint_job.py"), dict[str, int]()
    for k in range(max(2, int(os.environ.get("PARIO_KILLS", "10")) // 5)):
        volatile.lose_power(after=random.Random(k).randrange(50, 400), seed=None if k % 2 else k)
        done = run_job(2, [script, str(tmp_path), json.dumps(options)], limit_s=100, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
        assert done.status not in (0, None), done.output
        assert "CheckpointError" in done.output
        told = [int(line.split()[1]) for line in done.output.splitlines() if line.startswith("slow ")]
        said["slow"] = max([said.get("slow", -1), *told])
        shutil.rmtree(tmp_path / "fast")
        assert newest(tmp_path / "source", None, checkpoint_job.tree_of) >= said["slow"]
        volatile.power_on()
    assert said["slow"] > 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("call", ["sync_path", "Writer.sync"])
def test_it_would_not_without_its_syncs(volatile: LatencyStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    owner, _, name = call.rpartition(".")
    monkeypatch.setattr(getattr(store, owner) if owner else store, name, lambda *_: None)
    with pytest.raises((AssertionError, pario.CorruptedError, pario.MissingError)):
        lose_and_restart(volatile, 10, {})
