"""How long a checkpoint takes, and when the next one must begin, with clocks of the tests' own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pario
from pario.checkpoint import checkpointer
from pario.checkpoint.attempts import Budget
from pario.comm.launcher import job_end


class Saved:
    """What Budget looks at."""

    def __init__(self, number: int, began: float, **durable_at: float) -> None:
        self.number, self.began, self.durable_at = number, began, durable_at
        self.error: Exception | None = None

    def over(self, tier: str) -> threading.Event:
        event = threading.Event()
        if tier in self.durable_at:
            event.set()
        return event


def needed(budget: Budget, attempts: list[Saved], tier: Any, now: float) -> float:
    return budget.seconds(attempts, tier, now)  # type: ignore[arg-type]


def test_nothing_is_known_before_one_is_durable() -> None:
    budget = Budget()
    assert needed(budget, [], "slow", 5.0) == 0.0
    # one that is under way takes at least as long as it is under way
    assert needed(budget, [Saved(1, 0.0)], "slow", 4.0) == pytest.approx(1.5 * 2 * 4 - 4)


def test_the_longest_of_the_last_five_counts() -> None:
    budget = Budget()
    for number, took in enumerate([9.0, 1.0, 2.0, 4.0, 1.0], 1):
        budget.learn([Saved(number, 100.0 * number, fast=100.0 * number + 0.5, slow=100.0 * number + took)])
    assert needed(budget, [], "slow", 1e3) == pytest.approx(1.5 * 9)
    assert needed(budget, [], "fast", 1e3) == pytest.approx(1.5 * 0.5)
    budget.learn([Saved(6, 600.0, slow=601.0)])
    assert needed(budget, [], "slow", 1e3) == pytest.approx(1.5 * 4)


def test_a_checkpoint_that_waited_for_the_one_before_did_not_take_that_time() -> None:
    budget = Budget()
    budget.learn([Saved(1, 0.0, slow=10.0), Saved(2, 1.0, slow=20.0)])
    assert needed(budget, [], "slow", 30.0) == pytest.approx(15.0)


def test_what_is_under_way_comes_first_and_what_has_failed_does_not() -> None:
    budget = Budget()
    budget.learn([Saved(1, 0.0, slow=10.0)])
    under_way = [Saved(2, 50.0), Saved(3, 52.0)]
    assert needed(budget, under_way, "slow", 54.0) == pytest.approx(1.5 * 30 - 4)
    for each in under_way:
        each.error = ValueError()
    assert needed(budget, under_way, "slow", 54.0) == pytest.approx(15.0)


def test_the_longest_step_of_the_last_ten_counts() -> None:
    budget = Budget()
    moments = [0.0, 7.0, *(8.0 + k for k in range(12))]
    steps = [budget.step(moment) for moment in moments]
    assert steps[:4] == [0.0, 7.0, 7.0, 7.0]
    assert steps[-1] == 1.0


def test_a_checkpointer_measures_and_says_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of 10 MB/s behind a fast one."""
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    tree = np.zeros(300_000)
    with pario.Checkpointer("self", slow=tmp_path / "slow", fast=tmp_path / "fast", rate=10e6) as ckpt:
        assert ckpt.seconds_needed() == 0.0
        assert not ckpt.must_save()
        assert ckpt.must_save(time.time() + 9)
        assert not ckpt.must_save(time.time() + 9, margin_s=0)
        began = time.monotonic()
        ckpt.save(0, tree).wait()
        took = time.monotonic() - began
        slow, fast = ckpt.seconds_needed(), ckpt.seconds_needed("fast")
        assert 0 < fast < slow <= 1.5 * took
        ckpt.save(1, tree)
        assert ckpt.seconds_needed() > slow  # that one first
        with pytest.raises(pario.OptionError, match="medium"):
            ckpt.seconds_needed("medium")  # type: ignore[arg-type]
        now = time.time()
        monkeypatch.setattr(checkpointer.time, "time", lambda: now)
        need = ckpt.seconds_needed()
        assert ckpt.must_save(now + need / 2, margin_s=0)
        assert not ckpt.must_save(now + 1000, margin_s=0)
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + need / 2))
        assert ckpt.must_save(margin_s=0)
    with pytest.raises(pario.ClosedError):
        ckpt.must_save()


@pytest.mark.parametrize(("said", "end"), [("1700000000", 1.7e9), ("soon", None), ("", None)])
def test_the_end_is_what_the_scheduler_says(monkeypatch: pytest.MonkeyPatch, said: str, end: float | None) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", said)
    assert job_end() == end


LESSON = Path(__file__).parents[1] / "examples" / "train_requeue.py"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lmdb, datum = pytest.importorskip("lmdb"), pytest.importorskip("pario.demo.train_digits").datum
    folder = tmp_path_factory.mktemp("digits") / "made.lmdb"
    rng = np.random.default_rng(0)
    with lmdb.open(str(folder), map_size=1 << 24) as env, env.begin(write=True) as put:
        for k in range(64):
            put.put(b"%08d" % k, datum(rng.integers(0, 255, 64), k % 10))
    return folder


def test_the_lesson_saves_before_the_time_limit_and_asks_to_be_requeued(tmp_path: Path, digits: Path) -> None:
    def piece(*more: str) -> str:
        words = ["--data", str(digits), "--run", str(tmp_path), "--epochs", "2", "--batch-size", "8", *more]
        done = subprocess.run([sys.executable, str(LESSON), *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # 16 steps; the end is so near that one is made.
    said = piece("--end", str(time.time() + 5))
    assert "the time limit is near: saved in epoch 0 after 8 records" in said
    assert (tmp_path / "requeue").exists()
    (tmp_path / "requeue").unlink()
    said = piece("--end", str(time.time() + 3600))
    assert "going on in epoch 0, 7 steps left" in said
    assert said.endswith("done\n")
    assert not (tmp_path / "requeue").exists()
    (manifest,) = (tmp_path / "checkpoints").glob("step-000000000016-*/manifest.json")
    assert json.loads(manifest.read_text())["body"]["step"] == 16
