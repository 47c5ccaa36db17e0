"""Incremental and compressed checkpoints: what comes back, what is linked, and that deletions lose nothing in use."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checkpoints import equal, rich_tree

import pario
from pario.checkpoint import finding, store, varying
from pario.checkpoint.finding import described, problems
from pario.cli import main

KINDS = [{"incremental": True}, {"compress": "zstd:3"}, {"incremental": True, "compress": "lz4"}]
BIG = 300_000  # f8: 2.4 MB, a dataset of its own


def checkpointer(folder: Path, *, fast: bool = False, **options: Any) -> pario.Checkpointer:
    return pario.Checkpointer("self", slow=folder / "slow", fast=folder / "fast" if fast else None, **options)


def big_tree() -> dict[str, Any]:
    """8 MB that stay as they are, 2.4 MB that change, and small ones."""
    rng = np.random.default_rng(1)
    return rich_tree() | {"kept": rng.random(800_000), "also": [rng.random((300, 600))], "hot": np.zeros(BIG)}


def change(tree: dict[str, Any], step: int) -> None:
    tree["hot"][:] = step
    tree["model"]["b"][:] = step


def step_folder(folder: Path, step: int, tier: str = "slow") -> Path:
    (found,) = (folder / tier).rglob(f"step-{step:012d}-*")
    return found


def own_bytes(folder: Path) -> int:
    return (folder / "node-00000.h5").stat().st_size


def taken(folder: Path) -> list[Path]:
    return sorted(folder.glob("node-00000.from-*.h5"))


def disk_bytes(folder: Path) -> int:
    """Of everything below, each file once."""
    return sum({each.stat().st_ino: each.stat().st_size for each in folder.rglob("*.h5")}.values())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_trees_come_back_whatever_is_deleted(tmp_path: Path, fast: bool, options: dict[str, Any]) -> None:
    tree = big_tree()
    with checkpointer(tmp_path, fast=fast, keep=2, **options) as ckpt:
        for step in range(5):
            change(tree, step)
            ckpt.save(step, tree).wait()
            assert equal(tree, ckpt.restore())
        assert ckpt.restore(3)["hot"][0] == 3
    shutil.rmtree(step_folder(tmp_path, 3))
    shutil.rmtree(tmp_path / "fast", ignore_errors=True)
    left = step_folder(tmp_path, 4)
    assert problems(str(left)) == []
    assert bool(taken(left)) == bool(options.get("incremental"))
    with checkpointer(tmp_path) as ckpt:
        assert equal(tree, ckpt.restore())
        part = ckpt.restore(like={"kept": pario.Shard(np.empty(7), (800_000,), (500_000,))})
        assert np.array_equal(part["kept"], tree["kept"][500_000:500_007])


@pytest.mark.parametrize("codec", ["raw", "lz4hc:4", "deflate:1", "blosc2", "brotli:1", "lzma:0"])
def test_every_codec(tmp_path: Path, codec: str) -> None:
    pytest.importorskip({"lz4hc": "lz4"}.get(codec.split(":")[0], "h5py"))
    tree = {"zeros": np.zeros(BIG), "noise": np.random.default_rng(0).bytes(70_000), "small": [np.arange(9.0)] * 50}
    tree["random"] = np.random.default_rng(0).random(BIG)
    with checkpointer(tmp_path, compress=codec) as ckpt:
        ckpt.save(1, tree).wait()
        assert equal(tree, ckpt.restore())
    assert (own_bytes(step_folder(tmp_path, 1)) < 3_000_000) == (codec != "raw")


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    tree = big_tree()
    with checkpointer(tmp_path, fast=True, incremental=True, keep=None) as ckpt:
        for step, value in enumerate([0, 1, 1, 2]):  # nothing changes from the second to the third
            change(tree, value)
            ckpt.save(step, tree).wait()
    first, second, third, fourth = (step_folder(tmp_path, step) for step in range(4))
    assert own_bytes(first) > 12_000_000
    assert taken(first) == []
    assert len(taken(second)) == 1
    assert taken(second)[0].samefile(first / "node-00000.h5")
    assert own_bytes(second) < 3_000_000
    assert [path.samefile(first / "node-00000.h5") for path in taken(third)].count(True) == 1
    assert own_bytes(third) < 100_000
    assert {path.samefile(first / "node-00000.h5") for path in taken(fourth)} == {True}
    # what the drain has linked is one file on the slow tier, too
    assert disk_bytes(tmp_path / "slow") < 20_000_000
    fast = {path.name: path for path in (tmp_path / "fast").rglob("*.h5")}
    assert len(fast) == 2


def test_plain_h5py_follows_the_links(tmp_path: Path) -> None:
    tree = big_tree()
    with checkpointer(tmp_path, incremental=True, keep=1) as ckpt:
        for step in range(3):
            change(tree, step)
            ckpt.save(step, tree).wait()
        tree["hot"][:] = 9
        ckpt.save(9, tree)  # the small ones are unchanged now
    with h5py.File(step_folder(tmp_path, 9) / "node-00000.h5") as file:
        assert np.array_equal(file["arrays/kept"][:], tree["kept"])
        assert np.array_equal(file["arrays/also/[0]"][:], tree["also"][0])
        assert np.array_equal(file["arrays/hot"][:], tree["hot"])
        index = file["packed_index"][:]
        row = index[index["path"] == b"model/b"][0]
        data = file["packed"][row["offset"] : row["offset"] + row["nbytes"]]
        assert data.view("i2").tolist() == [2] * 10


def test_what_plain_h5py_sees_of_a_compressed_one(tmp_path: Path) -> None:
    with checkpointer(tmp_path, compress="zstd:3") as ckpt:
        ckpt.save(1, {"a": np.zeros(BIG)})
    with h5py.File(step_folder(tmp_path, 1) / "node-00000.h5") as file:
        assert list(file) == ["blocks"]
        assert file.attrs["codec"] == "zstd:3"
        assert file["blocks"].dtype == np.uint8


def test_a_file_of_which_less_than_half_is_used_is_not_taken_over(tmp_path: Path) -> None:
    """Arrays that are frozen one after another: the disk holds at most twice what the checkpoints have."""
    arrays = [np.random.default_rng(k).random(BIG) for k in range(8)]
    with checkpointer(tmp_path, incremental=True, keep=2) as ckpt:
        for step in range(9):
            for array in arrays[step:]:
                array += 1
            ckpt.save(step, arrays).wait()
            assert equal(arrays, ckpt.restore())
            whole = 8 * 8 * BIG + 1_000_000
            assert disk_bytes(tmp_path / "slow") < 4 * whole
            assert sum(path.stat().st_size for path in step_folder(tmp_path, step).glob("*.h5")) < 2 * whole
    assert taken(step_folder(tmp_path, 8))


def test_another_tree_is_written_as_a_whole(tmp_path: Path) -> None:
    tree = {"a": np.random.default_rng(0).random(BIG)}
    with checkpointer(tmp_path, incremental=True) as ckpt:
        ckpt.save(1, tree).wait()
        tree |= {"b": np.ones(BIG)}
        ckpt.save(2, tree).wait()
        assert taken(step_folder(tmp_path, 2)) == []
        ckpt.save(3, tree).wait()
        assert taken(step_folder(tmp_path, 3))
        assert equal(tree, ckpt.restore())


@pytest.mark.parametrize("fast", [False, True])
def test_a_store_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    tree = big_tree()
    with checkpointer(tmp_path, fast=fast, incremental=True) as ckpt:
        ckpt.save(0, tree).wait()
        monkeypatch.setattr(varying.os, "link", refuse)
        ckpt.save(1, tree).wait()
        assert own_bytes(step_folder(tmp_path, 1)) > 12_000_000
        monkeypatch.undo()
        monkeypatch.setattr(finding.os, "link", refuse)  # the same module: of the slow tier's folder only, if fast
    shutil.rmtree(tmp_path / "fast", ignore_errors=True)
    with checkpointer(tmp_path) as ckpt:
        assert equal(tree, ckpt.restore())


def test_the_drain_copies_what_the_slow_tier_does_not_have(tmp_path: Path) -> None:
    tree = big_tree()
    with checkpointer(tmp_path, fast=True, incremental=True) as ckpt:
        ckpt.save(0, tree).wait()
        change(tree, 1)
        shutil.rmtree(step_folder(tmp_path, 0))
        ckpt.save(1, tree).wait()
        left = step_folder(tmp_path, 1)
        (other,) = taken(left)
        assert other.stat().st_nlink == 1
        assert problems(str(left)) == []
        ckpt.save(2, tree).wait()
        assert any(path.samefile(other) for path in taken(step_folder(tmp_path, 2)))
    shutil.rmtree(tmp_path / "fast")
    with checkpointer(tmp_path) as ckpt:
        assert equal(tree, ckpt.restore())


def test_a_full_fast_tier_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was to be linked there is linked on the slow tier, or copied."""
    real = store.reserve

    def reserve(fd: int, size: int, path: str) -> None:
        if "/fast/" in path and "step-000000000000" not in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size, path)

    monkeypatch.setattr(store, "reserve", reserve)
    tree = big_tree()
    with checkpointer(tmp_path, fast=True, incremental=True, full="slow") as ckpt:
        ckpt.save(0, tree).wait()
        change(tree, 1)
        ckpt.save(1, tree).wait()
        assert own_bytes(step_folder(tmp_path, 1)) < 3_000_000
        assert problems(str(step_folder(tmp_path, 1))) == []
        change(tree, 2)
        ckpt.save(2, tree).wait()
    shutil.rmtree(step_folder(tmp_path, 0))
    with checkpointer(tmp_path) as ckpt:
        assert equal(tree, ckpt.restore())


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_flipped_bits_are_found(tmp_path: Path, options: dict[str, Any]) -> None:
    find_flips(tmp_path, options, 40)


@pytest.mark.full
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_thousand_flipped_bits_are_found(tmp_path: Path, options: dict[str, Any]) -> None:
    find_flips(tmp_path, options, 1000)


def find_flips(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    """In everything that the newest checkpoint uses: its own files, and its blocks in older ones."""
    tree = rich_tree() | {"kept": np.random.default_rng(1).random(BIG), "hot": np.zeros(BIG // 2)}
    with checkpointer(tmp_path, **options) as ckpt:
        for step in range(2):
            change(tree, step)
            ckpt.save(step, tree).wait()
    newest = step_folder(tmp_path, 1)
    _, (part,) = described(str(newest))
    spans = [(path, 0, path.stat().st_size) for path in newest.iterdir() if path not in taken(newest)]
    blocks = part.stored
    spans += [(newest / part.files[each.file][0], each.offset, each.nbytes) for each in blocks if each.file]
    assert len(spans) > 3 or "incremental" not in options
    rng = random.Random(5)
    for k in range(count):
        path, begin, nbytes = spans[k % len(spans)]
        byte, bit = begin + rng.randrange(nbytes), rng.randrange(8)
        flip(path, byte, bit)
        assert problems(str(newest)), (path.name, byte, bit)
        flip(path, byte, bit)
    assert problems(str(newest)) == []
    flip(newest / "node-00000.h5", own_bytes(newest) // 2, 1)
    with checkpointer(tmp_path) as ckpt, pytest.raises(pario.CorruptedError):
        ckpt.restore(1)


def flip(path: Path, byte: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ (1 << bit)]))


def test_damage_in_a_file_that_two_use_is_damage_of_both(tmp_path: Path) -> None:
    tree = {"a": np.random.default_rng(1).random(BIG)}
    with checkpointer(tmp_path, incremental=True) as ckpt:
        for step in range(3):
            ckpt.save(step, tree).wait()
        flip(step_folder(tmp_path, 0) / "node-00000.h5", 1_000_000, 1)
        with pytest.raises(pario.ChecksumError):
            ckpt.restore()
        (other,) = taken(step_folder(tmp_path, 2))
        other.unlink()
        with pytest.raises(pario.MissingError):
            ckpt.restore(2)


def test_the_commands_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {"a": np.zeros(BIG), "b": np.arange(5)}
    with checkpointer(tmp_path, incremental=True, compress="zstd") as ckpt:
        for step in range(3):
            ckpt.save(step, tree)
    slow = str(tmp_path / "slow")
    assert main(["checkpoint", "prune", slow, "--keep", "1", "--yes"]) == 0
    assert main(["checkpoint", "verify", slow]) == 0
    assert "as it was written" in capsys.readouterr().out
    assert main(["checkpoint", "restore-to-npz", slow, str(tmp_path / "x.npz")]) == 0
    with np.load(tmp_path / "x.npz") as saved:
        assert np.array_equal(saved["b"], tree["b"])


@pytest.mark.parametrize(("codec", "why"), [("zap", "zap"), ("zstd:99", "99"), (7, "compress")])
def test_codecs_are_checked(tmp_path: Path, codec: Any, why: str) -> None:
    with pytest.raises(pario.OptionError, match=why):
        checkpointer(tmp_path, compress=codec)


def test_staging_memory_stays_clean(tmp_path: Path) -> None:
    """A codec packs in place; between small arrays that are copied over it nothing of that may stay."""
    tree = {"small": [np.zeros(k) for k in range(1, 200)], "big": np.zeros(BIG)}
    with checkpointer(tmp_path, incremental=True, compress="zstd", keep=None) as ckpt:
        for step in range(3):
            ckpt.save(step, tree).wait()
    for step in (1, 2):
        _, (part,) = described(str(step_folder(tmp_path, step)))
        assert {each.file for each in part.stored if each.coded} == {1}
