"""Which checkpoint is the newest, what it goes on from, and what `keep` deletes: scripted histories of jobs in one
folder. The oracle is a model: a list of what was saved, with the chain that each goes on from."""

from __future__ import annotations

import logging
import os
import random
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tars import SAFE

import pario
from pario.checkpoint import finding, restoring
from pario.checkpoint.store import listed
from pario.cli import main

OLD = Path(__file__).parent / "data" / "checkpoints" / "old_ids.tar.gz"

NEW = "restore the newest"
#: jobs one after another; a number saves that step, a negative one restores it, a text damages that step
HISTORIES: dict[str, list[list[Any]]] = {
    "back and on": [[100, 200, 300], [-100, 150]],
    "back in the same job": [[100, 200, -100, 150, 160]],
    "a new run in an old folder": [[2000, 3000], [10, 20, 30, 40]],
    "a new run that is interrupted": [[1000, 2000], [10], [NEW, 20, 30], [NEW, 40]],
    "the same step again": [[100, 200], [-100, 100], [NEW, 100]],
    "two branches": [[100, 200, 300], [-200, 250], [-100, 110], [NEW, 120, 130, 140]],
    "back, and past the abandoned ones": [[100, 200, 300], [-100, 400], [NEW, 500]],
    "straight on": [[100, 200], [NEW, 300], [NEW, 400, 500]],
    "straight on without pario's restore": [[100, 200], [300], [400, 500]],
    "downwards": [[50, 40, 30, 20]],
    "the newest is damaged": [[100, 200, 300], ["300", NEW, 210], [NEW, 220, 230]],
    "back to a branch that was abandoned": [[100, 200], [-100, 150], [-200, 250], [NEW, 260]],
}


class Model:
    """What should be there. order : numbers of what was saved; a chain begins with the newest"""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.saved: list[tuple[int, list[int]]] = []  # step, chain
        self.alive: list[int] = []
        self.damaged: set[int] = set()
        self.chain: list[int] | None = None

    def restore(self, step: int | None) -> int:
        found = max(k for k in self.alive if step in (None, self.saved[k][0]) and k not in self.damaged)
        self.chain = self.saved[found][1]
        return found

    def save(self, step: int) -> set[int]:
        """The steps that are abandoned."""
        newest = max(self.alive, default=None)
        if self.chain is None:
            self.chain = self.saved[newest][1] if newest is not None and self.saved[newest][0] < step else []
        base = self.chain[0] if self.chain else -1
        left = {self.saved[k][0] for k in self.alive if k > base}
        self.chain = [len(self.saved), *self.chain]
        self.alive = [k for k in self.alive if k not in self.chain[self.keep :]] + [len(self.saved)]
        self.saved.append((step, self.chain))
        return left


def damage(folder: Path, step: str) -> None:
    (path,) = folder.glob(f"slow/step-{int(step):012d}-*/node-00000.json")
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("history", HISTORIES)
def test_a_restart_goes_on_from_what_was_saved_last(
    tmp_path: Path, history: str, fast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rng, model = random.Random(history), Model(keep=3)
    where: dict[str, Any] = {"slow": tmp_path / "slow", "fast": tmp_path / "fast" if fast else None}
    for job in HISTORIES[history]:
        model.chain = None
        with pario.Checkpointer("self", keep=model.keep, **where) as ckpt:
            for act in job:
                caplog.clear()
                if isinstance(act, str) and act != NEW:
                    damage(tmp_path, act)
                    model.damaged.add(max(k for k in model.alive if model.saved[k][0] == int(act)))
                    if fast:
                        (name,) = [each for each in (tmp_path / "fast").glob("*/step*") if f"{act}-" in each.name]
                        (name / "manifest.json").write_bytes(b"")
                elif act == NEW or act < 0:
                    step = None if act == NEW else -act
                    assert ckpt.restore(step)["n"] == model.restore(step)
                else:
                    left = model.save(act)
                    ckpt.save(act, {"n": len(model.saved) - 1, "a": np.arange(3)}).wait()
                    for step in left:
                        assert f"{step}" in caplog.text.partition("abandons what was saved after that")[2]
                    assert left or "abandons" not in caplog.text
        for name in os.listdir(tmp_path / "slow"):  # clocks of other nodes
            moment = rng.random() * 1e9
            os.utime(tmp_path / "slow" / name, (moment, moment))
        with pario.Checkpointer("self", **where) as ckpt:
            assert ckpt.latest() == model.saved[-1][0]
            assert ckpt.restore()["n"] == len(model.saved) - 1
        there = sorted(name.step for name in listed(str(tmp_path / "slow")))
        assert there == sorted(model.saved[k][0] for k in model.alive)


def test_list_draws_branches_and_prune_removes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for back, steps in ((None, (100, 200, 300)), (100, (150, 160)), (150, (155,))):
        with pario.Checkpointer("self", slow=tmp_path, keep=None) as ckpt:
            if back is not None:
                ckpt.restore(back)
            for step in steps:
                ckpt.save(step, [step])
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    drawn = [(row[0], int(row[1])) for row in rows if row[0].strip("*|") == ""]
    assert drawn == [("*", 155), ("|*", 160), ("*", 150), ("|*", 300), ("|*", 200), ("*", 100)]
    command = ["checkpoint", "prune", str(tmp_path), "--after"]
    assert main([*command, "150"]) == 0
    assert len(listed(str(tmp_path))) == 6
    assert main([*command, "155", "--yes"]) == 0
    assert [name.step for name in listed(str(tmp_path))] == [100, 150, 155]
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1", "--yes"]) == 0
    assert [name.step for name in listed(str(tmp_path))] == [155]


def test_what_another_job_deletes_while_it_is_restored_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = restoring.open_found

    def late(world: Any, found: finding.Found, *tiers: Any) -> finding.Opened:
        """A job with keep=1 saves once more after the checkpoints were listed."""
        if saver._number < 4:
            saver.save(saver._number + 1, {"n": saver._number + 1}).wait()
            end = time.monotonic() + 60  # what was saved is durable before the one before it is deleted
            while len(listed(str(tmp_path))) > 1 and time.monotonic() < end:
                time.sleep(0.005)
        return real(world, found, *tiers)

    with (
        pario.Checkpointer("self", slow=tmp_path, keep=1) as saver,
        pario.Checkpointer("self", slow=tmp_path) as reader,
    ):
        saver.save(1, {"n": 1}).wait()
        monkeypatch.setattr(restoring, "open_found", late)
        assert reader.restore()["n"] == 4
    assert "damaged" not in caplog.text


def test_checkpoints_of_older_versions_come_first_in_the_order_of_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 300, 100 and 200, written on two ranks by a pario whose names held no order, and manifests no parents."""
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, **SAFE)
    with pario.Checkpointer("self", slow=tmp_path / "old", keep=2) as ckpt, caplog.at_level(logging.WARNING, "pario"):
        assert ckpt.latest() == 300
        for step in (100, 200, 300):
            got = ckpt.restore(step)
            assert (got["step"], got["s"]) == (step, [np.float32(1.5), b"x", None])
            assert np.array_equal(got["w"], np.arange(40.0) * step)
            assert got["rows"].tolist() == [[0, 0, 0], [1, 1, 1]]
        ckpt.restore(200)
        ckpt.save(150, {"step": 150}).wait()
        assert "goes on from step 200 and abandons" in caplog.text
        assert ckpt.latest() == 150
    assert [name.step for name in listed(str(tmp_path / "old"))] == [200, 300, 150]
    assert main(["checkpoint", "verify", str(tmp_path / "old")]) == 0
