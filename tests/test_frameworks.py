"""Training in PyTorch's DDP, Lightning, Accelerate, Hugging Face's Trainer, DeepSpeed, Ray, JAX and TensorFlow: every
record once per epoch, in pario's order, also after resuming on another number of ranks. The oracle is the order of a
plain loader in this process.

They need all of these, and run by `-m frameworks`: .ci/run makes an environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import frameworks_job
import frameworks_set
import lmdb
import numpy as np
import pytest
from launch import POLITE, run_job, segments, sweep
from required import framework

import pario
import pario.lmdb

pytestmark = pytest.mark.frameworks

JOB = str(Path(__file__).with_name("frameworks_job.py"))
ROOT = str(Path(__file__).parents[1])
N, BATCH = 101, frameworks_job.BATCH
#: steps on 2 ranks until the job is stopped: an epoch of 7 and four batches, after which 3 ranks take another number
STOP = 11

FRAMEWORKS = ["ddp", "lightning", "accelerate", "jax", "tensorflow"]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for name in ("torch", "lightning", "accelerate", "transformers", "deepspeed", "ray", "jax", "tensorflow"):
        framework(name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("data") / "set.lmdb")
    with lmdb.open(path, map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%05d" % i, np.array([i / N, 1, 2, 3, i], np.float32).tobytes())
    return path


@pytest.fixture(scope="module")
def orders(data: str) -> list[list[int]]:
    """The record ids of each epoch, in order."""
    with pario.Loader(data, BATCH, shuffle="global", seed=frameworks_job.SEED) as loader:
        return [[i for batch in loader for i in batch.ids.tolist()] for _ in range(frameworks_job.EPOCHS)]


class Notes:
    """What the ranks of a job noted: `train[epoch]` the records of each step on all ranks, `validate[epoch]` all
    records."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.train: dict[int, list[list[int]]] = {}
        self.validate: dict[int, list[int]] = {}
        for rank in range(ranks):
            file = folder / f"notes-{rank}.jsonl"
            step: dict[int, int] = {}
            for line in file.read_text().splitlines() if file.exists() else ():
                what, epoch, ids = json.loads(line)
                if what == "validate":
                    self.validate.setdefault(epoch, []).extend(ids)
                    continue
                steps, k = self.train.setdefault(epoch, []), step.get(epoch, 0)
                if k == len(steps):
                    assert rank == 0, f"rank {rank} got more batches of epoch {epoch} than rank 0"
                    steps.append([])
                steps[k] += ids
                step[epoch] = k + 1
            if rank:
                assert step == {epoch: len(steps) for epoch, steps in self.train.items()}, "as many on every rank"


def run(name: str, ranks: int, data: str, folder: Path, *options: str) -> Notes:
    folder.mkdir(exist_ok=True)
    for old in folder.glob("notes-*"):
        old.unlink()
    done = run_job(ranks, [JOB, name, data, str(folder), *options], limit_s=200, env={"PYTHONPATH": ROOT})
    assert done.status == 0, done.output
    return Notes(folder, ranks)


def check(steps: list[list[int]], expected: list[int], ranks: int) -> None:
    """Step after step the records of the order, and all of them."""
    at = 0
    for step in steps:
        wanted = expected[at : at + BATCH * ranks]
        assert sorted(step) == sorted(wanted)
        at += len(wanted)
    assert at == len(expected), f"{len(expected) - at} records never came"


@pytest.fixture(scope="module")
def stopped(data: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """stopped(framework) -> (folder with the checkpoint of a job of 2 ranks, its notes)."""
    done: dict[str, tuple[Path, Notes]] = {}

    def get(name: str) -> tuple[Path, Notes]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            done[name] = folder, run(name, 2, data, folder, "--stop-after", str(STOP))
        return done[name]

    return get


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_two_epochs_with_validation(name: str, data: str, orders: list[list[int]], tmp_path: Path) -> None:
    notes = run(name, 2, data, tmp_path)
    for epoch in range(frameworks_job.EPOCHS):
        check(notes.train[epoch], orders[epoch], 2)
        assert sorted(notes.validate[epoch]) == list(range(N))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_resumed_within_an_epoch(
    name: str, ranks: int, data: str, orders: list[list[int]], stopped: Any, tmp_path: Path
) -> None:
    folder, before = stopped(name)
    check(before.train[0], orders[0], 2)
    taken = 2 * BATCH * len(before.train[1])
    assert 0 < taken < N
    check(before.train[1], orders[1][:taken], 2)
    copy = shutil.copytree(folder, tmp_path / "copy")
    after = run(name, ranks, data, copy, "--resume")
    assert list(after.train) == [1]
    check(after.train[1], orders[1][taken:], ranks)
    assert sorted(after.validate[1]) == list(range(N))


# -- Lightning's own ways ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ended(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 2 ranks after the first epoch."""
    folder = tmp_path_factory.mktemp("ended")
    run("lightning", 2, data, folder, "--at-epoch-end")
    return folder


@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (3, ()), (1, ("--without-callback",))])
def test_lightning_resumed_after_an_epoch(
    ranks: int, more: tuple[str, ...], data: str, orders: list[list[int]], ended: Path, tmp_path: Path
) -> None:
    """Lightning does not load the loader's state here, but it tells the epoch."""
    after = run("lightning", ranks, data, shutil.copytree(ended, tmp_path / "copy"), "--resume", *more)
    assert list(after.train) == [1]
    check(after.train[1], orders[1], ranks)


def test_lightning_reloads_loaders_without_losing_an_epoch(data: str, orders: list[list[int]], tmp_path: Path) -> None:
    """It makes two iterators for one epoch then."""
    notes = run("lightning", 2, data, tmp_path, "--reload")
    for epoch in range(frameworks_job.EPOCHS):
        check(notes.train[epoch], orders[epoch], 2)


def test_lightning_without_the_callback_is_refused_where_it_would_lose_records(
    data: str, stopped: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(stopped("lightning")[0], tmp_path / "copy")
    done = run_job(
        3,
        [JOB, "lightning", data, str(folder), "--resume", "--without-callback"],
        limit_s=200,
        env={"PYTHONPATH": ROOT},
    )
    assert done.status not in (0, None)
    assert "a state of 2 ranks goes on in the middle of an epoch on 3" in done.output
    assert "pario.adapters.lightning.Resume" in done.output


def test_lightning_overfits_the_same_batches(data: str, orders: list[list[int]], tmp_path: Path) -> None:
    notes = run("lightning", 2, data, tmp_path, "--overfit", "3")
    assert len(notes.train) == frameworks_job.EPOCHS
    for steps in notes.train.values():
        check(steps, orders[0][: 3 * 2 * BATCH], 2)


def test_lightning_without_the_callback_does_not_overfit_other_batches(data: str, tmp_path: Path) -> None:
    words = [JOB, "lightning", data, str(tmp_path), "--overfit", "3", "--without-callback"]
    done = run_job(2, words, limit_s=200, env={"PYTHONPATH": ROOT})
    assert done.status not in (0, None)
    assert "You requested to overfit but enabled train dataloader shuffling" in done.output
    key_order = run("lightning", 2, data, tmp_path, "--overfit", "3", "--without-callback", "--shuffle", "")
    for steps in key_order.train.values():
        check(steps, list(range(3 * 2 * BATCH)), 2)


# -- Hugging Face's Trainer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [3, 7, STOP])
def test_a_trainer_resumes_by_its_own_checkpoint(
    steps: int, data: str, orders: list[list[int]], tmp_path: Path
) -> None:
    """Within the first epoch, after it, and in the second one. Nothing of pario is saved: it counts batches."""
    before = run("transformers", 2, data, tmp_path, "--stop-after", str(steps))
    taken = {epoch: [i for step in done for i in step] for epoch, done in before.train.items()}
    after = run("transformers", 2, data, tmp_path, "--resume")
    for epoch in range(frameworks_job.EPOCHS):
        seen = taken.get(epoch, [])
        assert len(seen) == min(max(steps * 2 * BATCH - epoch * 7 * 2 * BATCH, 0), N)
        check(before.train.get(epoch, []), orders[epoch][: len(seen)], 2)
        check(after.train.get(epoch, []), orders[epoch][len(seen) :], 2)
    assert sorted(after.validate[frameworks_job.EPOCHS]) == list(range(N))


# -- DeepSpeed, Ray Train ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepspeed", "ray"])
def test_two_ranks_resume_by_its_own_checkpoint(
    name: str, data: str, orders: list[list[int]], tmp_path: Path
) -> None:
    """In the second epoch; Ray starts its ranks itself."""

    def done(*options: str) -> Notes:
        if name != "ray":
            return run(name, 2, data, tmp_path, *options)
        for old in tmp_path.glob("notes-*"):
            old.unlink()
        job = alone(sys.executable, JOB, name, data, str(tmp_path), *options)
        assert job.returncode == 0, job.stdout
        return Notes(tmp_path, 2)

    before = done("--stop-after", str(STOP))
    check(before.train[0], orders[0], 2)
    taken = 2 * BATCH * len(before.train[1])
    check(before.train[1], orders[1][:taken], 2)
    after = done("--resume")
    assert list(after.train) == [1]
    check(after.train[1], orders[1][taken:], 2)
    assert sorted(after.validate[1]) == list(range(N))


# -- launchers that are not MPI's --------------------------------------------------------------------------------------

_OWN_PROCESSES = """
import sys
import lightning.pytorch as pl, torch
from pario.adapters.torch import Loader
from frameworks_job import record

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch["x"]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-6)
    def train_dataloader(self):
        return Loader(sys.argv[1], 8, record)

trainer = pl.Trainer(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False)
trainer.fit(Model(), *([Loader(sys.argv[1], 8, record)] if "early" in sys.argv else []))
"""


def alone(*command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **POLITE, "PYTHONPATH": os.pathsep.join([ROOT, str(Path(JOB).parent)])}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # asks nobody, writes nothing into HOME
    before = segments()
    try:
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=200, check=False,
        )  # fmt: skip
    finally:
        sweep(before)  # Lightning kills its processes, and MPI's files stay


@pytest.mark.parametrize("when", ["early", "late"])
def test_processes_that_lightning_starts_itself_are_refused(when: str, data: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_OWN_PROCESSES)
    done = alone(sys.executable, str(script), data, when)
    assert done.returncode != 0
    assert "LauncherError" in done.stdout, done.stdout
    assert "start the script by torchrun, mpiexec or srun" in done.stdout, done.stdout


def test_torchrun_gives_every_rank_the_records_that_mpiexec_gives_it(data: str, tmp_path: Path) -> None:
    """Also after an epoch that was interrupted."""
    words = ["--standalone", "--nproc-per-node", "2", JOB, "ddp", data, str(tmp_path)]
    for more in (["--stop-after", str(STOP)], ["--resume"], []):
        for old in tmp_path.glob("notes-*"):
            old.unlink()
        if not more:
            (tmp_path / "ddp.pt").unlink()
        done = alone(sys.executable, "-m", "torch.distributed.run", *words, *more)
        assert done.returncode == 0, done.stdout
        found = [(tmp_path / f"notes-{rank}.jsonl").read_text() for rank in range(2)]
        run("ddp", 2, data, tmp_path / "mpi", *more)
        assert found == [(tmp_path / "mpi" / f"notes-{rank}.jsonl").read_text() for rank in range(2)]


@pytest.mark.parametrize(
    ("workers", "how", "early"),
    [(0, None, False), (2, "fork", False), (3, "fork", True), (2, "spawn", True), (2, "forkserver", False)],
)
def test_a_data_loader_over_announced_records(
    workers: int, how: str | None, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pario.adapters.torch import prefetching

    monkeypatch.setattr("pario.fetch.posix.PosixFetcher.cached_share", lambda *_: 0.5)  # else nothing need be brought
    path = str(tmp_path / "set.lmdb")
    with lmdb.open(path, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(frameworks_set.key(i), frameworks_set.record(i))
    records = frameworks_set.Records(path, N, early=early)
    with pario.lmdb.open(path, readonly=True, lock=False) as env:
        sampler = prefetching(torch.utils.data.RandomSampler(records), env, frameworks_set.key, records=32)
        loader = torch.utils.data.DataLoader(
            records, BATCH, sampler=sampler, num_workers=workers, multiprocessing_context=how, collate_fn=list
        )
        for _ in range(2):
            found = dict(pair for batch in loader for pair in batch)
            assert found == {i: frameworks_set.record(i) for i in range(N)}
