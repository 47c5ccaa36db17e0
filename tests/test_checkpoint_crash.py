"""Kills, damage and failing stores: what a restart finds is always a complete checkpoint, and the newest one."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_job import tree_of
from checkpoints import equal, rich_tree

import pario
from pario.checkpoint import store, writing
from pario.checkpoint.finding import problems
from pario.checkpoint.store import sweep

HERE = Path(__file__).resolve().parent


def checkpointer(folder: Path, **options: Any) -> pario.Checkpointer:
    return pario.Checkpointer("self", slow=folder / "slow", **options)


def killed(folder: Path, after_s: float, ranks: int, victims: list[int], options: dict[str, Any]) -> dict[str, int]:
    """What a job had said before these ranks of it were killed: {"fast": step, "slow": step}."""
    launch = [str(Path(sys.executable).parent / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    job = subprocess.Popen(
        [*launch, sys.executable, str(HERE / "checkpoint_job.py"), str(folder), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline().startswith(b"begin")
        time.sleep(after_s)
        for rank in victims:
            with suppress(ProcessLookupError):
                os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)
        said, _ = job.communicate(timeout=60)  # the launcher ends the other ranks
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    words = [line.split() for line in said.decode().splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[0] in ("fast", "slow")}


def check_restart(folder: Path, said: dict[str, int], *, with_fast: bool) -> None:
    fast = folder / "fast" if with_fast else None
    with checkpointer(folder, fast=fast) as ckpt:
        latest = ckpt.latest()
        known = max(said.values(), default=-1) if with_fast else said.get("slow", -1)
        assert (latest if latest is not None else -1) >= known
        if latest is not None:
            assert equal(tree_of(latest), ckpt.restore())
        sweep(ckpt._world, ckpt.slow, ckpt.fast)  # as the first save does
        assert ckpt._claim.take() is None
        assert [name for name in os.listdir(folder / "slow") if name.startswith(".")] == [".job"]
    assert not [name for name in os.listdir(folder / "slow") if name.startswith(".")]


def kill_and_restart(folder: Path, moments: int, seed: int, ranks: int = 1) -> None:
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [{}, {"incremental": True}, {"compress": "zstd"}]
    for k in range(moments):
        victims = [[rank] for rank in range(ranks)] + [list(range(ranks))]
        said = killed(folder, rng.random() * 0.25, ranks, rng.choice(victims), kinds[k % len(kinds)])
        check_restart(folder, said, with_fast=True)
        check_restart(folder, said, with_fast=False)


def test_killed_at_a_moment(tmp_path: Path) -> None:
    kill_and_restart(tmp_path, 2, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_many_moments(tmp_path: Path, ranks: int) -> None:
    """docs/checkpoints.md: PARIO_KILLS=100, for 200 in all, takes ten minutes."""
    kill_and_restart(tmp_path, int(os.environ.get("PARIO_KILLS", "20")), seed=1 + ranks, ranks=ranks)


# -- power loss: only what was synced, and any part of what came later, is there ---------------------------------------


class Log:
    """Every change of the store's folder, in order, by the calls that pario makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, Any]] = []
        self._fds: dict[int, str] = {}
        for name in ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "pwrite", "ftruncate"):
            monkeypatch.setattr(store.os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            done = real(*arguments, **more)
            first = arguments[0]
            if name == "open":
                if arguments[1] & os.O_CREAT:
                    self.made.append(("create", str(first)))
                self._fds[done] = str(first)
            elif name == "pwrite":
                self.made.append(("write", (self._fds[first], bytes(arguments[1][:done]), arguments[2])))
            elif name == "ftruncate":
                self.made.append(("size", (self._fds[first], arguments[1])))
            elif "dir_fd" in more:
                self.made.append((name, (os.path.join(self._fds[more["dir_fd"]], arguments[0]),)))
            else:
                self.made.append((name, tuple(map(str, arguments))))
            return done

        return call


def replay(log: list[tuple[str, Any]], source: str, target: str) -> None:
    """The first calls of a log, in another folder."""
    there = lambda path: path.replace(source, target, 1)  # noqa: E731
    for name, what in log:
        if name == "create":
            open(there(what), "xb").close()
        elif name == "write":
            with open(there(what[0]), "r+b") as file:
                file.seek(what[2])
                file.write(what[1])
        elif name == "size":
            os.truncate(there(what[0]), what[1])
        else:
            getattr(os, name)(*map(there, what))


@pytest.mark.parametrize("options", [{}, {"incremental": True}, {"incremental": True, "compress": "zstd"}], ids=str)
def test_every_prefix_of_the_writes_leaves_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    kept = np.random.default_rng(0).random(200_000)
    trees = [{"step": k, "a": np.full(200_000, k), "b": [np.full(7, k)], "kept": kept} for k in range(4)]
    complete: list[tuple[int, int]] = []  # (calls made, step that is complete then)
    with monkeypatch.context() as patch:
        log = Log(patch)
        with checkpointer(here, keep=2, **options) as ckpt:
            begin = len(log.made)
            for k, tree in enumerate(trees):
                handle = ckpt.save(k, tree)
                handle.wait()
                complete.append((len(log.made), k))
                ckpt._until(handle._attempt.drained.is_set)
    assert len(log.made) - begin > 30
    for cut in range(begin, len(log.made) + 1):
        target = tmp_path / f"cut{cut}"
        target.mkdir()
        replay(log.made[:cut], str(here), str(target))
        expected = max((step for calls, step in complete if calls <= cut), default=-1)
        with checkpointer(target) as ckpt:
            latest = ckpt.latest()
            assert (-1 if latest is None else latest) in (expected, expected + 1)
            if latest is not None:
                assert equal(trees[latest], ckpt.restore())
        shutil.rmtree(target)


def test_data_is_synced_before_the_manifest_and_the_manifest_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    real_sync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def sync(fd: int) -> None:
        calls.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        real_sync(fd)

    def rename(a: str, b: str) -> None:
        calls.append(("rename", os.path.basename(b)))
        real_rename(a, b)

    def replace(a: str, b: str) -> None:
        calls.append(("rename", os.path.basename(b)))
        real_replace(a, b)

    with checkpointer(tmp_path) as ckpt:
        monkeypatch.setattr(store.os, "fsync", sync)
        monkeypatch.setattr(store.os, "rename", rename)
        monkeypatch.setattr(store.os, "replace", replace)
        ckpt.save(0, {"a": np.zeros(5)}).wait()
    names = [f"{what} {name.split('-0000')[0]}" for what, name in calls]
    order = ["sync node", "rename node", "rename manifest.json", "sync .attempt-step", "rename step", "sync slow"]
    at = -1
    for each in order:
        at = names.index(each, at + 1)


def test_a_checkpoint_is_deleted_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Durably: otherwise a loss of power may leave a checkpoint under its name, and without some of its files."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "data").touch()
    calls: list[str] = []
    for name in ("rename", "fsync", "unlink", "rmdir"):
        real = getattr(os, name)
        monkeypatch.setattr(store.os, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k)))
    store.discard(str(tmp_path / "step"))
    assert calls == ["rename", "fsync", "unlink", "rmdir"]
    assert not list(tmp_path.iterdir())


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, byte: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def flips(folder: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    """Bytes of all files of a checkpoint, the small files as often as the large one."""
    rng = random.Random(5)
    files = sorted(folder.iterdir())
    for k in range(count):
        path = files[k % len(files)]
        yield path, rng.randrange(path.stat().st_size), rng.randrange(8)


def find_flips(tmp_path: Path, count: int) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, rich_tree()).wait()
        ckpt.save(2, rich_tree() | {"big": np.random.default_rng(0).random(200_000)}).wait()
    (newest,) = (tmp_path / "slow").glob("step-000000000002-*")
    assert problems(str(newest)) == []
    for path, byte, bit in flips(newest, count):
        flip(path, byte, bit)
        assert problems(str(newest)), (path.name, byte, bit)
        flip(path, byte, bit)
    assert problems(str(newest)) == []


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    find_flips(tmp_path, 60)


@pytest.mark.full
def test_a_thousand_flipped_bits_are_found(tmp_path: Path) -> None:
    find_flips(tmp_path, 1000)


def test_the_older_one_is_restored_when_the_newest_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"a": np.arange(400_000.0), "b": [np.arange(9)]}
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree).wait()
        ckpt.save(2, tree).wait()
        (newest,) = (tmp_path / "slow").glob("step-000000000002-*")
        for name in ("node-00000.h5", "node-00000.json", "manifest.json"):
            flip(newest / name, (newest / name).stat().st_size // 2, 3)
            assert equal(tree, ckpt.restore())
            assert "step 2 on the slow tier is damaged" in caplog.text
            assert "restored step 1" in caplog.text
            with pytest.raises(pario.CorruptedError):
                ckpt.restore(2)
            flip(newest / name, (newest / name).stat().st_size // 2, 3)
            caplog.clear()
        os.truncate(newest / "node-00000.h5", 100)
        assert equal(tree, ckpt.restore())
        (newest / "node-00000.h5").unlink()
        assert equal(tree, ckpt.restore())
        (newest / "node-00000.h5").symlink_to("/etc/passwd")
        assert equal(tree, ckpt.restore())
        assert ckpt.restore(1, like={"b": [np.empty(9, int)]})["b"][0].tolist() == list(range(9))


# -- stores that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["write", "sync", "__init__"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_failing_store_is_reported_once_and_the_last_good_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str, fast: bool
) -> None:
    tree = {"a": np.arange(200_000.0)}
    with checkpointer(tmp_path, fast=tmp_path / "fast" if fast else None) as ckpt:
        ckpt.save(1, tree).wait()

        def fail(*_: Any, **__: Any) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(writing.Writer, call, fail)
            handle = ckpt.save(2, tree)
            ckpt._until(handle._attempt.drained.is_set)
        with pytest.raises(pario.CheckpointError, match=f"{os.strerror(number)}|has no room"):
            ckpt.save(3, tree)
        assert ckpt.latest() == 1
        assert equal(tree, ckpt.restore())
        ckpt.save(4, tree).wait()
        assert ckpt.latest() == 4
    assert not [name for name in os.listdir(tmp_path / "slow") if name.startswith(".")]


@pytest.mark.parametrize("full", ["wait", "slow"])
def test_a_full_fast_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    """Room for one: "wait" goes on when the one before is drained, "slow" does not use the fast tier meanwhile."""
    tree = {"a": np.arange(300_000.0)}
    real = store.reserve

    def reserve(fd: int, size: int, path: str) -> None:
        if "/fast/" in path and sum(1 for _ in (tmp_path / "fast").glob("*/*/*.h5")) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size, path)

    monkeypatch.setattr(store, "reserve", reserve)
    with checkpointer(tmp_path, fast=tmp_path / "fast", full=full, rate=24e6, keep=None) as ckpt:
        for step in range(3):
            ckpt.save(step, tree)
    said = "waits for earlier checkpoints" if full == "wait" else "straight to"
    assert said in caplog.text
    with checkpointer(tmp_path) as ckpt:
        for step in range(3):
            assert equal(tree, ckpt.restore(step))


def test_where_the_fast_tier_never_has_room_the_slow_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = store.reserve

    def reserve(fd: int, size: int, path: str) -> None:
        if "/fast/" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size, path)

    with checkpointer(tmp_path, fast=tmp_path / "fast") as ckpt:
        monkeypatch.setattr(store, "reserve", reserve)
        ckpt.save(0, [np.zeros(9)]).wait()
    assert "straight to" in caplog.text
    with checkpointer(tmp_path) as ckpt:
        assert equal([np.zeros(9)], ckpt.restore())


@pytest.mark.parametrize("keep", [pytest.param(1, marks=pytest.mark.full), 2])
def test_jobs_that_are_killed_before_their_drain_leave_a_tier_that_serves(tmp_path: Path, keep: int) -> None:
    """Each restores, saves to the fast tier, which has room for four, and is killed; none loses what was there."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"

    def job(step: int, ends: str) -> None:
        code = f"""
import os, sys
import numpy as np, pario
from pario.checkpoint import store
real = store.reserve
def reserve(fd, size, path):
    if "/fast/" in path and len([each for each in os.listdir({str(fast)!r} + "/" + os.listdir({str(fast)!r})[0])]) > 4:
        raise OSError(28, "No space left on device")
    real(fd, size, path)
store.reserve = reserve
rate = 1e5 if {ends!r} == "kill" else None
ckpt = pario.Checkpointer("self", slow={str(slow)!r}, fast={str(fast)!r}, keep={keep}, rate=rate)
if {step}:
    assert ckpt.restore()["a"][0] == {step} - 1
ckpt.save({step}, {{"a": np.full(100_000, {step}.0)}}).wait("fast")
if {ends!r} == "kill":
    os.kill(os.getpid(), 9)
ckpt.close()
"""
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == (-signal.SIGKILL if ends == "kill" else 0), done.stderr

    for step in range(8):
        job(step, "kill")
    job(8, "close")
    left = [name for folder in fast.iterdir() for name in os.listdir(folder) if not name.startswith(".")]
    assert len(left) <= 2
    with checkpointer(tmp_path, fast=fast) as ckpt:
        assert ckpt.restore()["a"][0] == 8


def test_saves_faster_than_the_drain_wait_and_stay_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"a": np.arange(200_000.0)}  # 1.6 MB: 0.1 s to drain
    most = 0
    with checkpointer(tmp_path, fast=tmp_path / "fast", rate=16e6, pending=2, keep=None) as ckpt:
        for step in range(6):
            ckpt.save(step, tree)
            most = max(most, sum(1 for _ in (tmp_path / "fast").glob("*/*/*.h5")))
        ckpt.close()
    assert most <= 4
    assert len(os.listdir(tmp_path / "slow")) == 6


def test_a_store_that_does_not_answer_holds_nobody_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    real = writing.Writer.write

    def hang(self: store.Writer, data: np.ndarray, offset: int) -> None:
        answers.wait(60)
        real(self, data, offset)

    tree = {"a": np.arange(200_000.0)}
    with checkpointer(tmp_path, timeout_s=0.2) as ckpt:
        ckpt.save(1, tree).wait()
        monkeypatch.setattr(writing.Writer, "write", hang)
        try:
            handle = ckpt.save(2, tree)
            for call in (lambda: ckpt.save(3, tree), lambda: ckpt.save(3, {}), handle.wait, ckpt.restore):
                with pytest.raises(pario.CheckpointError, match="does not answer"):
                    call()
            assert ckpt.latest() == 1
        finally:
            answers.set()
        handle.wait()
        assert ckpt.latest() == 2


def test_a_store_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder vanishes while a checkpoint is drained; with what is on the fast tier the training can go on."""
    tree = {"a": np.arange(300_000.0)}
    with checkpointer(tmp_path, fast=tmp_path / "fast", rate=4e6) as ckpt:
        ckpt.save(1, tree).wait()
        ckpt.save(2, tree).wait("fast")
        (tmp_path / "slow").rename(tmp_path / "away")  # in one step: a drain goes on writing into what is removed
        (tmp_path / "slow").touch()
        with pytest.raises(pario.CheckpointError, match=r"gone|Not a directory"):
            ckpt.save(3, tree).wait()
        (tmp_path / "slow").unlink()
        (tmp_path / "slow").mkdir()
        with suppress(pario.CheckpointError):  # step 3 could not be drained, either, if it came that far
            ckpt.latest()
        ckpt.save(4, tree).wait()
        assert ckpt.latest() == 4
        assert equal(tree, ckpt.restore())


def test_a_store_that_becomes_ten_times_slower_makes_save_wait_no_longer_than_a_drain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain takes 0.1 s, then 1 s: with one under way the next `save` waits for it, and says so."""
    tree = {"a": np.arange(200_000.0)}
    slow = threading.Event()
    real = writing.Writer.write

    def write(self: store.Writer, data: np.ndarray, offset: int) -> None:
        if "/slow/" in self.path and slow.is_set():
            time.sleep(data.size / 1.6e6)
        real(self, data, offset)

    monkeypatch.setattr(writing.Writer, "write", write)
    with checkpointer(tmp_path, fast=tmp_path / "fast", pending=1, timeout_s=5, keep=None) as ckpt:
        ckpt.save(0, tree).wait()
        slow.set()
        first = ckpt.save(1, tree)
        assert not first.done
        second = ckpt.save(2, tree)
        assert first.done
        assert "more slowly than they are made" in caplog.text
        assert not second.done
    with checkpointer(tmp_path) as ckpt:
        assert [equal(tree, ckpt.restore(step)) for step in range(3)] == [True] * 3


def test_a_script_that_fails_leaves_what_was_saved(tmp_path: Path) -> None:
    def script() -> None:
        with checkpointer(tmp_path) as ckpt:
            ckpt.save(7, {"a": np.ones(3)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == 7
