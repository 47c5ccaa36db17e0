"""Checkpoints of one process: what comes back, what is seen of one that is not complete, what plain h5py reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checkpoints import equal, rich_tree
from control_plane import until

import pario
from pario.checkpoint import checkpointer as room
from pario.checkpoint.store import Claim
from pario.checkpoint.tree import Bits

BIG = 300_000  # f8: 2.4 MB, a dataset of its own


def checkpointer(folder: Path, *, fast: bool = False, **options: Any) -> pario.Checkpointer:
    return pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast" if fast else None, **options)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def fast_of(folder: Path) -> Path:
    """This run's folder on the fast tier."""
    (found,) = (folder / "fast").iterdir()
    return found


@pytest.mark.parametrize("fast", [False, True])
def test_a_tree_comes_back_bit_by_bit(tmp_path: Path, fast: bool) -> None:
    tree = rich_tree()
    with checkpointer(tmp_path, fast=fast, version="mine 7") as ckpt:
        assert ckpt.latest() is None
        ckpt.save(5, tree).wait()
        assert ckpt.latest() == 5
        assert equal(tree, ckpt.restore())
    with checkpointer(tmp_path) as ckpt:  # the slow store has it all
        assert equal(tree, ckpt.restore(5))
    body = json.loads(next((tmp_path / "slow").glob("step-*/manifest.json")).read_text())["body"]
    assert (body["version"], body["ranks"], body["step"], body["pario"]) == ("mine 7", 1, 5, pario.__version__)


@pytest.mark.parametrize("root", [np.arange(3), 7, [], "text", np.float64(2), None])
def test_any_value_may_be_the_root(tmp_path: Path, root: Any) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(0, root)
        ckpt.close()
    with checkpointer(tmp_path) as ckpt:
        assert equal(root, ckpt.restore())


def test_changes_after_save_are_not_saved(tmp_path: Path) -> None:
    with checkpointer(tmp_path, rate=20e6) as ckpt:
        array, small = np.arange(BIG, dtype=float), np.zeros(5)
        for step in range(3):
            array[:], small[:] = step, 2 * step
            ckpt.save(step, {"a": array, "b": [small]})
        array[:] = 77
        ckpt.close()
    with checkpointer(tmp_path) as ckpt:
        for step in range(3):
            assert equal({"a": np.full(BIG, float(step)), "b": [np.full(5, 2.0 * step)]}, ckpt.restore(step))


def test_keep_deletes_what_was_saved_earlier_whatever_the_step(tmp_path: Path) -> None:
    with checkpointer(tmp_path, fast=True, keep=2) as ckpt:
        for step in (10, 20, 30, 40, 5):
            ckpt.save(step, [np.arange(step)]).wait()
        assert ckpt.latest() == 5
    assert [int(name.split("-")[1]) for name in names(tmp_path / "slow")] == [5, 40]
    assert all(name.startswith("step-") for name in names(fast_of(tmp_path)))


def test_fields_in_another_order_than_in_memory_are_refused(tmp_path: Path) -> None:
    records = np.zeros(3, [("a", "<i4"), ("b", "<f8")])
    with checkpointer(tmp_path) as ckpt:
        with pytest.raises(pario.errors.OptionError, match="dtype"):
            ckpt.save(1, {"x": records[["b", "a"]]})
        ckpt.save(1, {"x": records}).wait()


@pytest.mark.parametrize("fast", [False, True])
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path, fast: bool) -> None:
    with checkpointer(tmp_path, fast=fast, keep=2) as ckpt:
        ckpt.save(1, {"s": "first"}).wait()
        for step in (2, 3):
            with pytest.raises(pario.CheckpointError, match=r"11,000,0\d\d values; .*np.frombuffer"):
                ckpt.save(step, {"s": "," * 11_000_000}).wait()
        assert ckpt.restore() == {"s": "first"}
    with checkpointer(tmp_path, fast=fast) as ckpt:
        assert ckpt.restore() == {"s": "first"}


def test_what_is_not_committed_is_not_seen_and_swept(tmp_path: Path) -> None:
    with checkpointer(tmp_path, fast=True) as ckpt:
        ckpt.save(1, {"a": np.ones(3)}).wait()
    (whole,) = (tmp_path / "slow").iterdir()
    shutil.copytree(whole, tmp_path / "slow" / (".attempt-" + whole.name.replace("0001-", "0002-")))
    (tmp_path / "slow" / "step-000000000009-zz").mkdir()
    (part,) = fast_of(tmp_path).iterdir()
    # one node of two: the other's part was never committed
    shutil.copytree(part, part.parent / part.name.replace("0001-", "0003-").replace("of00001", "of00002"))
    with checkpointer(tmp_path, fast=True) as ckpt:
        assert ckpt.latest() == 1
        assert equal({"a": np.ones(3)}, ckpt.restore())
        # Who only reads deletes nothing: the attempt may be that of a job that is running.
        assert list((tmp_path / "slow").glob(".attempt-*"))
        ckpt.save(4, {"a": np.ones(3)})
    assert not list((tmp_path / "slow").glob(".attempt-*"))


def test_another_run_with_the_same_fast_folder_has_nothing_to_do_with_it(tmp_path: Path) -> None:
    with pario.Checkpointer("self", slow=tmp_path / "one", fast=tmp_path / "fast") as ckpt:
        ckpt.save(7, {"a": np.ones(3)})
    with pario.Checkpointer("self", slow=tmp_path / "two", fast=tmp_path / "fast") as ckpt:
        assert ckpt.latest() is None
        ckpt.save(9, {"a": np.zeros(3)})
    shutil.rmtree(tmp_path / "one")
    with pario.Checkpointer("self", slow=tmp_path / "one", fast=tmp_path / "fast") as ckpt:
        assert ckpt.latest() == 7


def test_an_attempt_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    with checkpointer(tmp_path) as ckpt:
        (tmp_path / "slow" / ".attempt-step-000000000001-0123456789abcdef").symlink_to(tmp_path / "mine")
        ckpt.save(1, {"a": np.ones(3)})
    assert names(tmp_path / "mine") == ["thesis"]


def test_the_first_tier_is_the_slow_one_where_there_is_no_other(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": np.ones(3)}).wait("fast")
        assert [name.split("-")[1] for name in names(tmp_path / "slow") if name.startswith("step-")] == ["000000000001"]


def test_exit_0_is_no_failure(tmp_path: Path) -> None:
    def script() -> None:
        with checkpointer(tmp_path, rate=100e6) as ckpt:
            ckpt.save(1, {"a": np.ones(BIG)})
            sys.exit(0)

    with pytest.raises(SystemExit):
        script()
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.latest() == 1


def test_the_fast_tier_alone_is_enough_and_so_is_the_slow_one(tmp_path: Path) -> None:
    tree = rich_tree()
    with checkpointer(tmp_path, fast=True) as ckpt:
        ckpt.save(1, tree)
    shutil.move(tmp_path / "slow", tmp_path / "elsewhere")
    with checkpointer(tmp_path, fast=True) as ckpt:
        assert equal(tree, ckpt.restore())
    shutil.rmtree(tmp_path / "fast")
    shutil.rmtree(tmp_path / "slow")
    shutil.move(tmp_path / "elsewhere", tmp_path / "slow")
    with checkpointer(tmp_path, fast=True) as ckpt:
        assert equal(tree, ckpt.restore())


def test_like_asks_for_a_part(tmp_path: Path) -> None:
    whole = np.arange(600_000.0).reshape(1000, 20, 30)
    with checkpointer(tmp_path) as ckpt:
        tree = {"a": pario.Shard(whole, whole.shape, (0, 0, 0)), "b": [np.ones(3), "x"], "c": {"d": np.zeros(2)}}
        ckpt.save(0, tree).wait()
        like = {
            "b": (np.empty(3), None),
            "a": pario.Shard(np.empty((7, 3, 30)), whole.shape, (990, 17, 0)),
        }
        assert equal({"b": (np.ones(3), "x"), "a": whole[990:997, 17:].copy()}, ckpt.restore(like=like))
        for wrong, why in (
            ({"e": 1}, "no 'e'"),
            ({"b": [1]}, "1 items"),
            ({"b": [np.ones(4), "x"]}, r"\[4\]"),
            ({"b": [np.ones(3, "i8"), "x"]}, "<i8"),
            ({"a": pario.Shard(np.empty((7, 3, 31)), whole.shape, (0, 0, 0))}, "does not lie"),
            ({"a": pario.Shard(np.empty((7, 3, 30)), (1000, 20, 31), (0, 0, 0))}, "31"),
            ({"c": [1]}, "1 items at 'c', and the checkpoint a dict"),
        ):
            with pytest.raises(pario.StateError, match=why):
                ckpt.restore(like=wrong)
        with pytest.raises(pario.MissingError, match="step 4"):
            ckpt.restore(4)


@pytest.mark.parametrize("like", [((2, 1 << 20), (3, 0)), ((12, 100), (0, 7))], ids=["rows", "columns"])
def test_a_part_is_restored_without_what_it_does_not_need(tmp_path: Path, like: tuple[Any, Any]) -> None:
    """A damaged block elsewhere in the same array is not read."""
    shape, offset = like
    whole = np.random.default_rng(0).integers(0, 255, (24, 1 << 20), np.uint8)
    tree = {"a": whole if shape[0] < 12 else np.ascontiguousarray(whole[:, : 1 << 18])}
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, tree).wait()
        (path,) = (tmp_path / "slow").glob("*/*.h5")
        with h5py.File(path) as file:
            end = file["arrays/a"].id.get_offset() + tree["a"].nbytes
        with path.open("r+b") as raw:
            raw.seek(end - 1)
            raw.write(bytes([tree["a"][-1, -1] ^ 1]))
        part = pario.Shard(np.empty(shape, np.uint8), tree["a"].shape, offset)
        got = ckpt.restore(1, like={"a": part})["a"]
        rows, columns = (slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        assert np.array_equal(got, tree["a"][rows, columns])
        with pytest.raises(pario.ChecksumError):
            ckpt.restore(1)


def test_plain_h5py_reads_it(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": {"w": np.arange(BIG, dtype=np.float32).reshape(-1, 2)}}
    tree["model"]["b"] = np.arange(6, dtype="u2").reshape(2, 3)
    tree["model"]["bf"] = Bits(np.arange(2 * BIG, dtype="u4").astype("u2"), "bfloat16")
    tree["model"]["sh"] = pario.Shard(np.ones((512, 300)), (512, 300), (0, 0))
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(3, tree)
    with h5py.File(next((tmp_path / "slow").glob("*/*.h5"))) as file:
        assert np.array_equal(file["arrays/model/w"][:], tree["model"]["w"])
        assert file["arrays/model/w"].dtype == np.float32
        assert np.array_equal(file["arrays/model/bf"][:], tree["model"]["bf"].array)
        assert file["arrays/model/bf"].attrs["dtype"] == "bfloat16"
        assert file["arrays/model/sh@0,0"].attrs["global_shape"].tolist() == [512, 300]
        # as docs/checkpoints.md says
        index = file["packed_index"][:]
        row = index[index["path"] == b"model/b"][0]
        data = file["packed"][row["offset"] : row["offset"] + row["nbytes"]]
        array = data.view(row["dtype"].decode()).reshape(json.loads(row["shape"]))
        assert np.array_equal(array, tree["model"]["b"])


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ({"a": object()}, "builtins.object"),
        ({"a": np.array([None])}, "Python objects"),
        ({"a": [np.ma.array([1, 2], mask=[0, 1])]}, r"a/\[0\].*MaskedArray.*mask"),
        ({"a": np.ones(2).view(type("Metres", (np.ndarray,), {}))}, "Metres"),
        ({1.5: 1}, "1.5"),
        ([pario.Shard(np.ones(3), (4,), (2,))], "reaches out"),
        ([pario.Shard(np.ones(3), (4,), (0,))], "hold 3 elements"),
        ([pario.Shard(np.ones(3), (4, 1), (0,))], "axes"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, tree: Any, why: str) -> None:
    with checkpointer(tmp_path) as ckpt:
        with pytest.raises(pario.OptionError, match=why):
            ckpt.save(0, tree)
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(pario.OptionError, match="contain itself"):
            ckpt.save(0, loop)
        with pytest.raises(pario.OptionError, match="step"):
            ckpt.save(-1, [])
        ckpt.save(0, [1])
        ckpt.close()
        with pytest.raises(pario.ClosedError):
            ckpt.save(1, [])
    assert len(names(tmp_path / "slow")) == 1


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"rate": 0}, {"full": "no"}, {"pending": 0}, {"timeout_s": 0}], ids=lambda o: next(iter(o))
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(pario.OptionError, match=next(iter(options))):
        checkpointer(tmp_path, **options)


@pytest.mark.parametrize("tier", ["slow", "fast"])
def test_a_tier_that_is_a_file_is_refused_at_once(tmp_path: Path, tier: str) -> None:
    (tmp_path / tier).write_text("mine")
    with pytest.raises(pario.CheckpointError, match="Not a directory"):
        checkpointer(tmp_path, fast=True)
    assert (tmp_path / tier).read_text() == "mine"


def test_a_second_save_uses_the_same_memory_and_ends_its_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with checkpointer(tmp_path, fast=True) as ckpt:
        tree = {"a": np.zeros(BIG), "b": [np.zeros(3)] * 10}
        ckpt.save(0, tree).wait()
        memory = ckpt._staging.memory
        ckpt.save(1, tree).wait("fast")
        assert ckpt._staging.memory is memory
        ckpt.save(2, {"a": np.zeros(BIG + 1)}).wait()
        assert equal({"a": np.zeros(BIG + 1)}, ckpt.restore())
    until(lambda: threading.active_count() <= before)  # their work is done: `close` tells them to end, and goes on


def test_the_rate_limits_the_drain_and_not_the_fast_tier(tmp_path: Path) -> None:
    with checkpointer(tmp_path, fast=True, rate=10e6) as ckpt:
        handle = ckpt.save(0, np.zeros(BIG))  # 2.4 MB: 0.24 s
        handle.wait("fast")
        assert not handle.done
        with pytest.raises(TimeoutError):
            handle.wait(timeout_s=0.02)
        assert ckpt.latest() == 0
        handle.wait()
        assert handle.done


def test_a_control_plane_is_asked_for_what_the_slow_tier_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Gate:
        def take(self, nbytes: int, operations: int) -> None:
            asked.append(nbytes)

    @contextmanager
    def agent() -> Iterator[Gate]:
        yield Gate()

    monkeypatch.setattr(room, "store_agent", agent)
    tree = {"a": np.arange(float(BIG)), "b": np.ones(3)}
    with checkpointer(tmp_path, fast=True) as ckpt:
        ckpt.save(0, tree).wait("fast")
        ckpt.save(1, tree).wait()
        assert 16 * BIG <= sum(asked) < 17 * BIG  # both drains
        asked.clear()
        assert equal(tree, ckpt.restore(1))  # from the fast tier
        assert not asked
    with checkpointer(tmp_path) as ckpt:
        assert equal(tree, ckpt.restore(1))
        assert 8 * BIG <= sum(asked) < 9 * BIG
        asked.clear()
        ckpt.save(2, tree).wait()  # straight to the slow tier
        assert 8 * BIG <= sum(asked) < 9 * BIG


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as ckpt:
        with pytest.raises(pario.MissingError, match="Ask latest"):
            ckpt.restore()
        ckpt.save(4, np.ones(3)).wait()
        with pytest.raises(pario.MissingError, match=r"of step 3.*The newest one is step 4"):
            ckpt.restore(3)
        with pytest.raises(pario.OptionError, match="step must be"):
            ckpt.restore("4")  # type: ignore[arg-type]
        assert ckpt.restore(np.int64(4)) is not None


HOLDS = """
import sys, pario
ckpt = pario.Checkpointer("self", slow=sys.argv[1])
ckpt.save(1, {"a": 1}).wait()
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job that has saved into tmp_path/slow, and goes on."""
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / "slow")]
    env = {**os.environ, "PYTHONPATH": str(Path(pario.__file__).parents[1]), "PARIO_JOB": "the other job"}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_job_in_a_folder_is_told_who_has_it(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with checkpointer(tmp_path) as ckpt:
        assert ckpt.restore() == {"a": 1}, "reading is not saving"
        with pytest.raises(pario.CheckpointError, match=rf"the other job, process {other.pid} on .*, since 20") as told:
            ckpt.save(2, {"a": 2})
        assert "folder of its own" in str(told.value)
        other.kill()  # as a scheduler does before it starts the job again
        other.wait()
        ckpt.save(2, {"a": 2}).wait()
        assert ckpt.restore() == {"a": 2}
    assert not [name for name in names(tmp_path / "slow") if not name.startswith("step-")]


def test_two_checkpointers_of_one_process(tmp_path: Path) -> None:
    with checkpointer(tmp_path) as one, checkpointer(tmp_path) as two:
        one.save(1, {"a": 1}).wait()
        with pytest.raises(pario.CheckpointError, match=f"process {os.getpid()} on"):
            two.save(2, {"a": 2})
        one.close()
        two.save(2, {"a": 2}).wait()


@pytest.mark.parametrize("what", ["a link", "a folder"])
def test_what_is_no_file_of_a_job_keeps_nobody_out(tmp_path: Path, what: str) -> None:
    (tmp_path / "slow").mkdir()
    if what == "a link":
        (tmp_path / "kept").write_text("mine")
        (tmp_path / "slow/.job").symlink_to(tmp_path / "kept")
    else:
        (tmp_path / "slow/.job").mkdir()
    with checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"a": 1}).wait()
        assert ckpt.restore() == {"a": 1}
    assert what == "a folder" or (tmp_path / "kept").read_text() == "mine"


def test_a_script_that_closes_nothing_gives_its_folder_back(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(pario.__file__).parents[1])}
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / "slow")]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    assert not [name for name in names(tmp_path / "slow") if not name.startswith("step-")]


def test_a_forked_process_leaves_its_parent_the_folder(tmp_path: Path) -> None:
    claim = Claim(str(tmp_path))
    assert claim.take() is claim.take() is None
    pid = os.fork()
    if not pid:
        claim.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert names(tmp_path) == [".job"]
    assert f"process {os.getpid()} on" in str(Claim(str(tmp_path)).take())
    claim.close()
    assert names(tmp_path) == []
    assert Claim(str(tmp_path)).take() is None
