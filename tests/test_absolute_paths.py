"""Names mean the same after the script has gone to another folder, where a file of the same name lies."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lmdb
import pytest

import pario
import pario.lmdb
from pario.machine import absolute

N = 40


def write(folder: Path, text: str) -> None:
    """One LMDB as a file, whose values say in which folder it lies."""
    folder.mkdir()
    with lmdb.open(str(folder / "a.lmdb"), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%03d" % i, b"%s %03d" % (text.encode(), i))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the folder of this process, another one)"""
    write(tmp_path / "here", "here")
    write(tmp_path / "there", "else")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


HERE = [b"here %03d" % i for i in range(N)]


def test_absolute(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert absolute("a.lmdb") == absolute("./a.lmdb") == str(folders[0] / "a.lmdb")
    assert absolute("/a/../b") == "/a/../b"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert (absolute("a.lmdb"), absolute("/a")) == ("a.lmdb", "/a")


@pytest.mark.parametrize("given", ["a.lmdb", "./a.lmdb", "*.lmdb", ["a.lmdb"], "../here/a.lmdb"])
def test_a_loader(folders: tuple[Path, Path], given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = pario.Options(metrics_file="m.prom")
    with pario.Loader(given, 8, lambda value: value, comm="self", options=options) as loader:
        monkeypatch.chdir(folders[1])
        for _ in range(2):
            assert [value for batch in loader for value in batch["data"]] == HERE
    assert (folders[0] / "m.prom").exists()
    assert sorted(os.listdir(folders[1])) == ["a.lmdb"]


def test_an_environment(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    env = pario.lmdb.open("a.lmdb", subdir=False, readonly=True, lock=False)
    assert env.path() == "a.lmdb"
    monkeypatch.chdir(folders[1])
    copy = pickle.loads(pickle.dumps(env))
    for one in (env, copy, pickle.loads(pickle.dumps(copy))):
        with one.begin() as txn:
            assert [bytes(value) for _, value in txn.cursor()] == HERE


@pytest.mark.parametrize("fo", ["a.lmdb", "file://a.lmdb", None])
def test_a_file_system(folders: tuple[Path, Path], fo: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    given = {} if fo is None else {"fo": fo}
    fs, name = fsspec.filesystem("pario", **given), "003" if fo else "a.lmdb/003"
    assert fs.cat_file(name) == b"here 003"
    before = pickle.dumps(fs)
    monkeypatch.chdir(folders[1])
    # By a name that begins at this folder, the other file; by what was made in the first one, the first file.
    assert fsspec.filesystem("pario", **given).cat_file(name) == b"else 003"
    for one in (fs, pickle.loads(before), pickle.loads(pickle.dumps(fs))):
        assert one.cat_file(name) == (b"here 003" if fo else b"else 003")
