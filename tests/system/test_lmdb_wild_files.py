"""Published LMDBs, read by the loading code of their projects: py-lmdb and pario.lmdb give the same."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import lmdb as real
import pytest
from shared_data import files, need

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lmdb_users import Atom3D, BasicSR, Lsun, Oc20, UniMol, close, outcome

import pario.lmdb as ours

FILES = files("wild", "*")


def shown(path: Path) -> str:
    return path.name or "none"


def both(make: Any) -> list[Any]:
    """outcome() of make(lmdb) for both modules: equal."""
    found = []
    for module in (real, ours):
        dataset = make(module)
        found.append(outcome(dataset))
        close(dataset)
    assert found[0]
    assert found[1] == found[0]
    return found[1]


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_every_call(path: Path) -> None:
    """The whole file forwards, backwards, by its keys, all at once; statistics."""
    need(path)
    seen = []
    for module in (real, ours):
        with (
            module.open(os.fspath(path), subdir=False, readonly=True, lock=False) as env,
            env.begin() as txn,
        ):
            pairs = list(txn.cursor())
            cursor = txn.cursor()
            seen.append(
                [
                    pairs,
                    list(cursor.iterprev()),
                    list(txn.cursor().iternext(values=False)),
                    [txn.get(key) for key, _ in pairs],
                    cursor.getmulti([key for key, _ in pairs]),
                    cursor.getmulti([key for key, _ in reversed(pairs)], values=False),
                    [cursor.set_range(key[:1]) and cursor.item() for key, _ in pairs],
                    txn.stat(),
                    env.stat(),
                    env.flags(),
                    [env.info()[name] for name in ("map_size", "last_pgno", "last_txnid")],
                    env.max_key_size(),
                ]
            )
    assert seen[1] == seen[0]
    assert seen[0][0]


@pytest.mark.parametrize("path", [p for p in FILES if "atom3d" in p.name] or [Path()], ids=shown)
def test_atom3d(path: Path) -> None:
    need(path)
    items = both(lambda module: Atom3D(module, os.fspath(path), subdir=False))
    assert sorted(item["file_path"] for item in items) == [path.name] * 4
    assert all("atoms" in item for item in items)


@pytest.mark.parametrize("path", [p for p in FILES if "matsciml" in p.name] or [Path()], ids=shown)
def test_matsciml(path: Path, tmp_path: Path) -> None:
    """As sharded sets in a folder, and by their keys. The pickles are of their projects' classes: compared as bytes."""
    need(path)
    folder = tmp_path / "set"
    folder.mkdir()
    for shard in range(2):
        shutil.copyfile(path, folder / f"data.{shard:04d}.lmdb")
    items = both(lambda module: Oc20(module, str(folder), loads=bytes))
    assert len(items) % 2 == 0
    keys = [UniMol(module, os.fspath(path))._keys for module in (real, ours)]
    assert keys[1] == keys[0]


@pytest.mark.parametrize("path", [p for p in FILES if "_lq" in p.name or "_gt" in p.name] or [Path()], ids=shown)
def test_basicsr(path: Path, tmp_path: Path) -> None:
    need(path)
    folder = tmp_path / "x.lmdb"
    folder.mkdir()
    shutil.copyfile(path, folder / "data.mdb")
    with real.open(str(folder), readonly=True, lock=False) as env, env.begin() as txn:
        names = [key.decode() for key in txn.cursor().iternext(values=False)]
    (folder / "meta_info.txt").write_text("".join(f"{name}.png (480,500,3) 1\n" for name in names))
    items = both(lambda module: BasicSR(module, str(tmp_path), folders=("x.lmdb",)))
    assert [bytes(item[1][2][:4]) for item in items] == [b"\x89PNG"] * len(names)
    both(lambda module: Lsun(module, str(folder), cache=str(tmp_path / f"keys of {module.__name__}")))
