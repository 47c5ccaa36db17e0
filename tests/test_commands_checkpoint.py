"""`python -m pario checkpoint ...`, called in this process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import pario
from pario.checkpoint.tree import Bits
from pario.cli import main

TREE = {"model": {"w": np.arange(200_000.0), "b": Bits(np.arange(4, dtype="u2"), "bfloat16")}, "lr": 0.5, "s": "text"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with pario.Checkpointer("self", slow=tmp_path / "slow", keep=None, version="v7") as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, TREE)
    return tmp_path / "slow"


def damage(folder: Path, step: int) -> None:
    (path,) = folder.glob(f"step-{step:012d}-*/node-00000.h5")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_list_and_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "list", str(folder)]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^ *\* +(\d+) ", said, re.MULTILINE) == ["30", "20", "10"]
    assert "v7" in said
    assert "1.6 MB" in said
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("as it was written") == 3
    damage(folder, 20)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "step 20: DAMAGED" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(folder), "--step", "30"]) == 0
    with pytest.raises(pario.MissingError, match=r"step 40.*newest one is step 30"):
        main(["checkpoint", "verify", str(folder), "--step", "40"])


def test_restore_to_npz(folder: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "restore-to-npz", str(folder), str(tmp_path / "x.npz"), "--step", "20"]) == 0
    with np.load(tmp_path / "x.npz") as saved:
        assert sorted(saved) == ["model/b", "model/w", "tree"]
        assert np.array_equal(saved["model/w"], TREE["model"]["w"])
        assert saved["model/b"].tolist() == [0, 1, 2, 3]
        assert "text" in str(saved["tree"])


def test_restore_to_npz_takes_every_name_and_says_where_it_cannot_write(tmp_path: Path) -> None:
    names = ("file", "tree", "allow_pickle", "args", "self")
    with pario.Checkpointer("self", slow=tmp_path / "slow") as ckpt:
        ckpt.save(1, {name: np.full(3, k) for k, name in enumerate(names)})
    command = ["checkpoint", "restore-to-npz", str(tmp_path / "slow")]
    assert main([*command, str(tmp_path / "x.npz")]) == 0
    with np.load(tmp_path / "x.npz") as saved:
        assert [saved[name].tolist() for name in names] == [[k] * 3 for k in range(len(names))]
        assert json.loads(str(saved["tree_"]))
    (tmp_path / "folder").mkdir()
    for name in ("nowhere/x.npz", "folder"):
        with pytest.raises(pario.errors.FileError, match=f"cannot write it: .*{name}"):
            main([*command, str(tmp_path / name)])
    with pytest.raises(pario.MissingError, match="no such folder"):
        main(["checkpoint", "list", str(tmp_path / "nowhere")])
    assert sorted(os.listdir(tmp_path)) == ["folder", "slow", "x.npz"]


def test_prune_keeps_the_newest_that_is_undamaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder, 20)
    damage(folder, 30)
    assert main(["checkpoint", "prune", str(folder), "--keep", "1"]) == 0
    assert "would delete step-000000000020" in capsys.readouterr().out
    assert len(os.listdir(folder)) == 3
    assert main(["checkpoint", "prune", str(folder), "--keep", "1", "--yes"]) == 0
    assert sorted(int(name.split("-")[1]) for name in os.listdir(folder)) == [10, 30]
    damage(folder, 10)
    assert main(["checkpoint", "prune", str(folder), "--keep", "1", "--yes"]) == 1
    assert len(os.listdir(folder)) == 2
