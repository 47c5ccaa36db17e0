"""Checkpoints of several ranks and nodes: shards, what is alike, errors that reach all ranks, other parts restored."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from leftovers import open_things

import pario
from pario.checkpoint import store, writing
from pario.checkpoint.tree import Leaves

pytestmark = pytest.mark.mpi

SHAPE = (1201, 300)  # f8: each rank's part is a dataset of its own on up to two ranks


@pytest.fixture(scope="module")
def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def folder(world, tmp_path_factory):
    made = str(tmp_path_factory.mktemp("ckpt")) if world.rank == 0 else None
    yield Path(world.bcast(made))
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(made)


def whole():
    return np.random.default_rng(7).random(SHAPE)


def tree_of(rank, ranks):
    rng = np.random.default_rng(0)
    first, last = SHAPE[0] * rank // ranks, SHAPE[0] * (rank + 1) // ranks
    return {
        "w": rng.random((700, 400)),
        "small": [rng.random(10 * k) for k in range(30)],
        "rows": pario.Shard(whole()[first:last], SHAPE, (first, 0)),
        "little": pario.Shard(np.array([rank]), (ranks,), (rank,)),
        "mine": f"rank {rank}",
    }


@pytest.mark.parametrize("options", [{}, {"incremental": True, "compress": "zstd"}, {"incremental": True}], ids=str)
@pytest.mark.parametrize("fast", [False, True])
def test_what_was_saved_comes_back_on_every_rank(world, folder, fast, options):
    tree = tree_of(world.rank, world.size)
    fast = folder / "fast" if fast else None
    with pario.Checkpointer(world, slow=folder / "slow", fast=fast, **options) as ckpt:
        assert ckpt.latest() is None
        for step in (3, 4):
            ckpt.save(step, tree).wait()
        assert ckpt.latest() == 4
        got = ckpt.restore()
        assert np.array_equal(got["w"], tree["w"])
        assert all(map(np.array_equal, got["small"], tree["small"]))
        assert np.array_equal(got["rows"], whole())
        assert got["little"].tolist() == list(range(world.size))
        assert got["mine"] == "rank 0"
        part = pario.Shard(np.empty((11, 7)), SHAPE, (13 * world.rank, 290))
        got = ckpt.restore(3, like={"rows": part, "mine": ""})
        assert np.array_equal(got["rows"], whole()[13 * world.rank : 13 * world.rank + 11, 290:297])
    if world.rank == 0:
        there = sorted(os.listdir(folder / "slow"))
        assert [name.rsplit("-", 1)[0] for name in there] == ["step-000000000003", "step-000000000004"]
        alone = pario.Checkpointer("self", slow=folder / "slow")
        assert np.array_equal(alone.restore(4)["rows"], whole())
        alone.close()


def test_another_tree_on_one_rank_is_refused_on_all(world, folder):
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        others = [{"a": np.zeros(3)}, {"a": np.zeros(2, "f4")}] if world.size > 1 else []
        for wrong in (*others, {"a": object()}):
            with pytest.raises(pario.ParioError):
                ckpt.save(0, wrong if world.rank == world.size - 1 else {"a": np.zeros(2, "i8")})
        if world.size > 1:
            with pytest.raises(pario.OptionError, match="step differs"):
                ckpt.save(world.rank, {"a": np.zeros(2)})
        ckpt.save(1, {"a": np.zeros(2)}).wait()
        assert ckpt.latest() == 1


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("who", [0, -1])
def test_a_failure_in_the_background_reaches_all_ranks(world, folder, monkeypatch, fast, who):
    """One rank's writes fail: the next call raises everywhere, the last good one stays, and saving goes on."""
    tree = tree_of(world.rank, world.size)
    with pario.Checkpointer(world, slow=folder / "slow", fast=folder / "fast" if fast else None, timeout_s=20) as ckpt:
        ckpt.save(1, tree).wait()
        if world.rank == who % world.size:

            def fail(*_):
                raise OSError(5, "Input/output error")

            monkeypatch.setattr(writing.Writer, "write", fail)
        handle = ckpt.save(2, tree)
        with pytest.raises(pario.CheckpointError, match=r"Input/output|given it up"):
            handle.wait()
        monkeypatch.undo()
        assert ckpt.latest() == 1
        ckpt.save(3, tree)
    assert not list((folder / "slow").glob(".attempt-*"))  # also where another node found out later
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        assert np.array_equal(ckpt.restore()["rows"], whole())
        assert ckpt.latest() == 3


@pytest.mark.parametrize("fast", [False, True])
def test_a_copy_that_fails_on_one_rank_fails_on_all_and_is_forgotten(world, folder, monkeypatch, fast):
    class Leaf(Leaves):
        def copy(self, leaf, target, run):
            if fails and world.rank == world.size - 1:
                raise TypeError("its memory is gone")
            super().copy(leaf, target, run)

    monkeypatch.setattr(pario.Checkpointer, "leaves", Leaf())
    fails = False
    tree = {"mine": pario.Shard(np.full(9, world.rank, np.int32), (9 * world.size,), (9 * world.rank,))}
    tree["mine"].array = tree["mine"].array.view(np.recarray)  # what is no plain array is copied by `Leaves`
    with pario.Checkpointer(world, slow=folder / "slow", fast=folder / "fast" if fast else None) as ckpt:
        for step, fails in enumerate([False, True, True, False]):
            began = time.monotonic()
            if fails:
                with pytest.raises((TypeError, pario.PeerError, pario.CheckpointError)) as caught:
                    ckpt.save(step, tree)
                assert isinstance(caught.value, TypeError) == (world.rank == world.size - 1)
            else:
                saved = ckpt.save(step, tree)
            assert time.monotonic() - began < 20
        saved.wait()
        assert ckpt.latest() is not None
        assert ckpt.restore()["mine"].tolist() == np.repeat(np.arange(world.size), 9).tolist()
        ckpt.close()
    there = sorted(name.name[:17] for name in (folder / "slow").glob("step-*"))
    assert there == ["step-000000000000", "step-000000000003"]


def test_all_ranks_hear_the_same_of_the_time_limit(world, folder):
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        ckpt.save(1, tree_of(world.rank, world.size)).wait()
        needed = ckpt.seconds_needed()
        assert needed > 0
        assert set(world.allgather(needed)) == {needed}
        # one rank alone knows of the end
        end = time.time() + 1 if world.rank == world.size - 1 else time.time() + 1e6
        assert ckpt.must_save(end)
        assert not ckpt.must_save(time.time() + 1e6)


def test_nothing_keeps_its_memory(world, folder):
    _, before = open_things()
    tree = tree_of(world.rank, world.size)
    with pario.Checkpointer(world, slow=folder / "slow", fast=folder / "fast") as ckpt:
        ckpt.save(1, tree)
        ckpt.save(2, {**tree, "more": np.ones(3)})
        restored = ckpt.restore()
    assert open_things()[1] <= before
    assert np.array_equal(restored["rows"], whole())


def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(world, folder):
    tree = tree_of(world.rank, world.size)
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        ckpt.save(1, tree).wait()
        ckpt.save(2, tree).wait()
        if world.rank == 0:
            (path,) = (folder / "slow").glob("step-000000000002-*/node-00000.h5")
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 4]))
        world.Barrier()
        with pytest.raises(pario.ParioError, match="checksum"):
            ckpt.restore(2)
        assert np.array_equal(ckpt.restore()["rows"], whole())


def test_another_step_on_one_rank_is_refused_on_all(world, folder):
    tree = tree_of(world.rank, world.size)
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        ckpt.save(1, tree)
        ckpt.save(2, tree).wait()
        if world.size > 1:
            with pytest.raises(pario.ParioError, match="step differs between ranks: 1 and 2"):
                ckpt.restore(1 if world.rank == 0 else 2)
            with pytest.raises(pario.ParioError, match="step differs between ranks"):
                ckpt.restore(None if world.rank == 0 else 2)
        assert np.array_equal(ckpt.restore(1)["rows"], whole())


@pytest.mark.parametrize("alone", ["latest", "restore", "wait", "save", "seconds_needed"])
def test_a_call_that_one_rank_alone_makes_is_refused_on_all(world, folder, alone):
    """`if rank == 0: print(ckpt.latest())`, and then everybody goes on: nobody hangs, whatever the others call."""
    if world.size == 1:
        return
    tree = tree_of(world.rank, world.size)
    ckpt = pario.Checkpointer(world, slow=folder / "slow")
    handle = ckpt.save(1, tree)
    handle.wait()
    calls = {"latest": ckpt.latest, "restore": ckpt.restore, "wait": handle.wait, "seconds_needed": ckpt.seconds_needed}
    calls["save"] = lambda: ckpt.save(2, tree)
    with pytest.raises(pario.CheckpointError, match=r"different methods: rank 0 is .*rank 1 is closing"):
        (calls[alone] if world.rank == 0 else ckpt.close)()
    with pytest.raises(pario.ClosedError):
        ckpt.latest()
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        assert ckpt.latest() == 1


def test_a_rank_that_closes_late_is_named_and_waited_for(world, folder, caplog):
    late = world.size - 1
    with pario.Checkpointer(world, slow=folder / "slow", timeout_s=0.2) as ckpt:
        ckpt.save(1, tree_of(world.rank, world.size)).wait()
        if world.rank == late:
            time.sleep(0.9)
    if world.rank != late:
        assert sum("did not come" in each.message for each in caplog.records) == 1
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        assert ckpt.latest() == 1


def test_a_rank_that_does_not_come_is_named(world, folder):
    """The last rank shares its node with rank 0, or is the only one of its node."""
    if world.size == 1:
        return
    absent = world.size - 1
    ckpt = pario.Checkpointer(world, slow=folder / "slow", timeout_s=0.2)
    if world.rank == absent:
        time.sleep(0.9)
    with pytest.raises(pario.ParioError, match=f"rank {absent} did not come|a rank of another node did not come"):
        ckpt.save(1, tree_of(world.rank, world.size))


def test_a_restore_reads_each_block_once_in_the_job(world, folder, monkeypatch):
    tree = tree_of(world.rank, world.size)
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        ckpt.save(1, tree).wait()
        read = []
        real = store.Reader.read

        def counted(self, block, offset):
            read.append(block.size)
            real(self, block, offset)

        monkeypatch.setattr(store.Reader, "read", counted)
        ckpt.restore()
        size = sum(path.stat().st_size for path in (folder / "slow").glob("*/*.h5"))
        assert sum(world.allgather(sum(read))) <= 1.02 * size


def test_a_folder_that_another_job_has_is_refused_on_all_ranks(world, folder):
    claim = store.Claim(str(folder / "slow"))
    if world.rank == 0:
        (folder / "slow").mkdir()
        assert claim.take() is None
    world.barrier()
    with pario.Checkpointer(world, slow=folder / "slow") as ckpt:
        with pytest.raises(pario.CheckpointError, match="another job saves its checkpoints here"):
            ckpt.save(1, {"a": 1})
        claim.close()
        ckpt.save(1, {"a": 1}).wait()
        assert ckpt.restore() == {"a": 1}
