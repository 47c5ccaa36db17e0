"""Partner copies of checkpoints: what a job finds when a node was lost before the drain, and what copies never do."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import pario
from pario.checkpoint import store
from pario.checkpoint.partner import Offers
from pario.checkpoint.writing import DrainThread
from pario.comm.world import get_world

pytestmark = pytest.mark.mpi


class Job(NamedTuple):
    """comm : of all ranks; node, nodes, leads : as MPI shows them; folder : in which every node has a fast tier"""

    comm: Any
    node: int
    nodes: int
    leads: bool
    folder: Path

    @property
    def fast(self) -> Path:
        return self.folder / f"fast-{self.node}"

    def checkpointer(self, **options: Any) -> pario.Checkpointer:
        return pario.Checkpointer(self.comm, slow=self.folder / "slow", fast=self.fast, **options)

    def alone(self, who: bool, do: Callable[[], Any]) -> None:
        """Something that one rank does while all others wait."""
        self.comm.Barrier()
        if who:
            do()
        self.comm.Barrier()


@pytest.fixture
def any_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    made = comm.bcast(str(tmp_path_factory.mktemp("partner")) if comm.rank == 0 else None)
    with get_world(comm) as world:
        yield Job(comm, world.node, world.nodes, world.is_leader, Path(made))
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(made)


@pytest.fixture
def job(any_job: Job) -> Job:
    """Of several nodes."""
    if any_job.nodes == 1:
        pytest.skip("needs a second node, which keeps the copies")
    return any_job


def tree_of(rank: int, ranks: int, step: int) -> dict[str, Any]:
    """A shard of every rank, so that no node's part is empty, and what is alike."""
    rng = np.random.default_rng(1000 * step + rank)
    return {
        "shard": pario.Shard(rng.random((1, 200_000)), (ranks, 200_000), (rank, 0)),
        "kept": np.random.default_rng(5).random(400_000),
        "small": [np.full(9, step)],
    }


def is_tree_of(ranks: int, step: int, got: dict[str, Any]) -> bool:
    rows = [tree_of(rank, ranks, step) for rank in range(ranks)]
    same = all(np.array_equal(got["shard"][rank], row["shard"].array[0]) for rank, row in enumerate(rows))
    return same and np.array_equal(got["kept"], rows[0]["kept"]) and got["small"][0].tolist() == [step] * 9


def copy_before_draining(patch: pytest.MonkeyPatch, drained: float = math.inf) -> None:
    """A drain begins when the attempt to copy is over. Only the first `drained` checkpoints get to the slow store."""
    real = DrainThread._copy

    def later(self: DrainThread, attempt: Any, folder: str) -> None:
        if attempt.number <= drained:
            attempt.copied.wait(60)
            real(self, attempt, folder)
            return
        while not self._stopped:
            time.sleep(0.01)
        raise OSError(errno.EIO, "the job was killed")

    patch.setattr(DrainThread, "_copy", later)


def save_undrained(
    job: Job, monkeypatch: pytest.MonkeyPatch, steps: list[int], more: np.ndarray | None = None, drained: int = 0,
    **options: Any,
) -> None:  # fmt: skip
    """A job that ends when the copies stand and the slow store has nothing, or only the first `drained` checkpoints.
    more : of this rank, the same each time"""
    with monkeypatch.context() as patch:
        copy_before_draining(patch, drained)
        ckpt = job.checkpointer(partner=True, pending=len(steps) + 1, **options)
        for step in steps:
            tree = tree_of(job.comm.rank, job.comm.size, step)
            if more is not None:
                tree["more"] = pario.Shard(more[None], (job.comm.size, more.size), (job.comm.rank, 0))
            handle = ckpt.save(step, tree)
            handle.wait("partner")
            if handle._attempt.number <= drained:
                handle.wait()
        ckpt._end(None)


def copies(job: Job) -> list[Path]:
    return sorted(job.fast.glob("*/step-*.copy"))


def flip(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("options", [{}, {"incremental": True}], ids=str)
def test_any_one_node_may_be_lost_before_the_drain(
    job: Job, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    save_undrained(job, monkeypatch, [1, 2], **options)
    for lost in range(job.nodes):
        also = (lost + 2) % job.nodes if job.nodes > 3 else lost  # no neighbour
        mine, away = job.leads and job.node in (lost, also), job.folder / f"lost-{job.node}"
        job.alone(mine, lambda: job.fast.rename(away))  # noqa: B023
        with job.checkpointer(partner=True) as ckpt:
            assert ckpt.latest() == 2
            assert is_tree_of(job.comm.size, 2, ckpt.restore())
            assert is_tree_of(job.comm.size, 1, ckpt.restore(1))
        others = job.comm.Split(job.node in (lost, also))
        if job.node not in (lost, also):  # without a new node in its place
            with pario.Checkpointer(others, slow=job.folder / "slow", fast=job.fast) as ckpt:
                assert is_tree_of(job.comm.size, 2, ckpt.restore())
        others.Free()
        job.alone(mine, lambda: (shutil.rmtree(job.fast), away.rename(job.fast)))  # noqa: B023


def test_a_job_goes_on_after_the_loss(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored from a copy, the next job saves, drains and deletes as ever."""
    save_undrained(job, monkeypatch, [1, 2])
    job.alone(job.leads and job.node == 1, lambda: shutil.rmtree(job.fast))
    with job.checkpointer(partner=True) as ckpt:
        assert is_tree_of(job.comm.size, 2, ckpt.restore())
        for step in (3, 4, 5):
            ckpt.save(step, tree_of(job.comm.rank, job.comm.size, step)).wait()
            assert is_tree_of(job.comm.size, step, ckpt.restore())
    for tier in (job.fast, job.folder / "slow"):
        assert not list(tier.rglob(".attempt*"))
    assert len({path.name.split(".")[0] for path in job.fast.glob("*/*")}) <= 2  # steps 4 and 5


def test_a_damaged_copy_is_found_and_an_older_one_taken(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_undrained(job, monkeypatch, [1, 2])
    job.alone(job.leads and job.node == 0, lambda: shutil.rmtree(job.fast))
    keeper = job.leads and job.node == 1
    for name in ("node-00000.h5", "node-00000.json"):
        job.alone(keeper, lambda: flip(copies(job)[-1] / name))  # noqa: B023
        with job.checkpointer() as ckpt:
            caplog.clear()
            assert is_tree_of(job.comm.size, 1, ckpt.restore())
            assert "step 2 on the fast tier with partner copies of node 0 is damaged" in caplog.text
            with pytest.raises(pario.ParioError):
                ckpt.restore(2)
        job.alone(keeper, lambda: flip(copies(job)[-1] / name))  # noqa: B023


def test_a_copy_stands_in_for_a_damaged_part(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_undrained(job, monkeypatch, [1])
    job.alone(job.leads, lambda: flip(next(copies(job)[0].glob("*.h5"))))
    with job.checkpointer() as ckpt:  # nobody needs the copies
        assert is_tree_of(job.comm.size, 1, ckpt.restore())
        assert "damaged" not in caplog.text
    job.alone(job.leads, lambda: flip(next(copies(job)[0].glob("*.h5"))))
    job.alone(job.leads and job.node == 1, lambda: flip(next(job.fast.glob("*/*of*[0-9]")) / "node-00001.h5"))
    with job.checkpointer() as ckpt:
        assert is_tree_of(job.comm.size, 1, ckpt.restore())


def test_without_copies_the_loss_of_a_node_is_told(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with job.checkpointer() as ckpt:
        ckpt.save(1, tree_of(job.comm.rank, job.comm.size, 1)).wait()
    save_undrained(job, monkeypatch, [2])
    job.alone(job.leads, lambda: [shutil.rmtree(path) for path in copies(job)])
    job.alone(job.leads and job.node == 1, lambda: shutil.rmtree(job.fast))
    with job.checkpointer() as ckpt:
        caplog.clear()
        assert ckpt.latest() == 1
        assert is_tree_of(job.comm.size, 1, ckpt.restore())
    said = [line for line in caplog.messages if "step 2" in line]
    assert len(said) == (job.comm.rank == 0)
    assert all("node 1 are on no fast tier" in line and "step 1 is the newest" in line for line in said)


def test_copies_link_what_has_not_changed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not written again is not sent again, though the checkpoint that had it is drained and deleted."""
    sent = []
    real = Offers._read

    def read(self: Offers, *arguments: Any) -> Any:
        sent.append(arguments[-1])
        return real(self, *arguments)

    monkeypatch.setattr(Offers, "_read", read)
    more = np.random.default_rng(job.comm.rank).random(3_000_000)
    save_undrained(job, monkeypatch, [1, 2], more, drained=1, incremental=True)
    if job.leads:
        assert len(list(copies(job)[-1].glob("*.from-*.h5"))) == 1
        files = {path.stat().st_ino: path.stat().st_size for path in job.fast.glob("*/*[0-9]/*.h5")}
        assert sum(sent) == sum(files.values())
    with job.checkpointer() as ckpt:
        assert is_tree_of(job.comm.size, 2, ckpt.restore())


def test_no_room_for_a_copy_is_said_once_and_saving_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One node has none. `wait("partner")` then waits for the slow store."""
    real = store.reserve

    def reserve(fd: int, size: int, path: str) -> None:
        if ".copy" in path and job.node == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size, path)

    monkeypatch.setattr(store, "reserve", reserve)
    copy_before_draining(monkeypatch)
    with job.checkpointer(partner=True, keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, tree_of(job.comm.rank, job.comm.size, step)).wait("partner")
            assert list((job.folder / "slow").glob(f"step-{step:012d}-*"))
    said = [line for line in caplog.messages if "has no room for it" in line]
    assert len(said) == (job.leads and job.node == 1)
    assert job.node != 1 or not copies(job)
    assert not list(job.fast.rglob(".attempt*"))
    monkeypatch.undo()
    with job.checkpointer() as ckpt:
        assert all(is_tree_of(job.comm.size, step, ckpt.restore(step)) for step in (1, 2, 3))


@pytest.mark.parametrize("how", ["dies", "damages"])
def test_a_partner_that_fails_in_the_middle_of_a_copy_harms_nobody(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    real = Offers._read
    asked = []

    def fails(self: Offers, *arguments: Any) -> Any:
        asked.append(1)
        reply = real(self, *arguments)
        if how == "dies" and len(asked) > 1:
            raise OSError(errno.EIO, "Input/output error")
        if how == "damages" and len(asked) == 2:  # before the message gets its checksum
            reply.parts[0].view[len(reply.parts[0].view) // 2] ^= 8
        return reply

    copy_before_draining(monkeypatch)
    with job.checkpointer(partner=True, keep=None) as ckpt:
        monkeypatch.setattr(Offers, "_read", fails)
        for step in (1, 2) if how == "dies" else (1,):
            ckpt.save(step, tree_of(job.comm.rank, job.comm.size, step)).wait("partner")
            assert ckpt.latest() == step
        assert not copies(job)
        monkeypatch.undo()
        ckpt.save(3, tree_of(job.comm.rank, job.comm.size, 3)).wait("partner")
        assert copies(job)
        assert is_tree_of(job.comm.size, 3, ckpt.restore())
    said = [line for line in caplog.messages if "keeps no copy" in line]
    assert len(said) == job.leads
    assert all(("block" in line and "damaged" in line) == (how == "damages") for line in said)
    assert not list(job.fast.rglob(".attempt*"))


def test_where_copies_make_no_sense(any_job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """On one node the script runs, with a warning; without fast tiers of their own it is refused, on all ranks."""
    job = any_job
    with pytest.raises(pario.ParioError, match="fast"):
        pario.Checkpointer(job.comm, slow=job.folder / "slow", partner=True)
    with job.checkpointer() as ckpt:
        handle = ckpt.save(0, {"a": np.ones(3)})
        with pytest.raises(pario.OptionError, match="partner=True"):
            handle.wait("partner")
    if job.nodes > 1:
        with pytest.raises(pario.ParioError, match="in common"):
            pario.Checkpointer(job.comm, slow=job.folder / "slow", fast=job.folder / "one", partner=True)
        assert not os.listdir(next((job.folder / "one").iterdir()))
        with job.checkpointer(partner=True) as ckpt:  # most nodes have nothing to write
            ckpt.save(1, {"a": np.ones(3)}).wait("partner")
            assert ckpt.restore()["a"].tolist() == [1, 1, 1]
        return
    with caplog.at_level(logging.WARNING), job.checkpointer(partner=True) as ckpt:
        assert ("only one node" in caplog.text) == (job.comm.rank == 0)
        ckpt.save(1, {"a": np.ones(3)}).wait("partner")
        assert list((job.folder / "slow").glob("step-000000000001-*"))
